"""Functions of users, found by name on the path, in the current folder and in files."""

import sys

import pytest

from rlk_jax.core.named_functions import named_function
from tests.support import own_modules


@pytest.fixture(autouse=True)
def here(tmp_path):
    """An empty current folder; what is imported from it is forgotten afterwards."""
    with own_modules.imported_from(tmp_path):
        yield tmp_path


def test_a_module_of_the_current_folder(here):
    (here / "named_here.py").write_text("class Rules:\n    def one(): return 1")
    function, module = named_function("named_here:Rules.one")
    assert function() == 1 and module is sys.modules["named_here"]


def test_a_file_is_imported_once_under_a_name_of_its_own(here):
    (here / "sub").mkdir()
    path = here / "sub" / "json.py"  # No module of this name is in its way.
    path.write_text("from dataclasses import dataclass\n@dataclass\nclass Rules:\n    x: 'int' = 3\ndef other(): pass")
    function, module = named_function("sub/json.py:Rules")
    assert function().x == 3 and module.__file__ == str(path)
    assert named_function(f"{path}:other").module is module


@pytest.mark.parametrize("name", ["broken", "broken.py"])
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit(0)", "its import exits"),
        ("import nowhere", "No module named 'nowhere'"),
        ("{}['HF_HOME']", "KeyError: 'HF_HOME'"),
        ("raise RuntimeError('boom\\nbang')", "RuntimeError: boom"),
        ("assert False", "AssertionError: AssertionError without a word"),
        ("def f(:", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("f = 3", None),
    ],
)
def test_a_name_that_stands_for_no_function(here, name, code, reason):
    (here / "broken.py").write_text(code)
    with pytest.raises(ValueError, match=":f'") as error:
        named_function(f"{name}:f")
    assert str(error.value) == (f"cannot load '{name}:f': {reason}" if reason else f"'{name}:f' is not callable")


def test_a_file_or_a_name_that_is_not_there(here):
    with pytest.raises(ValueError, match=r"^cannot load 'absent\.py:f': FileNotFoundError: .*absent\.py'$"):
        named_function("absent.py:f")
    (here / "empty.py").touch()
    for module in ("empty", "empty.py"):
        with pytest.raises(ValueError, match=r"^cannot load '.*:f': module '.*' has no attribute 'f'$"):
            named_function(f"{module}:f")
