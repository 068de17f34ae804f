"""Every Python block of README.md and docs/ runs as printed, alone."""

import functools
import pathlib
import re

import pytest

from tests.support.snippets import PAGES, ROOT, owns_its_process, run, snippets_of

SNIPPETS = [pytest.param(page, line, id=f"{page.name}:{line}") for page in PAGES for line in snippets_of(page)]


@pytest.fixture(scope="module")
def found_on(tmp_path_factory):
    """What is wrong with each snippet of a page. Those that need no process of their own share one."""

    @functools.cache
    def found(page: pathlib.Path) -> dict[int, str]:
        snippets = snippets_of(page)
        own = [[line] for line, code in snippets.items() if owns_its_process(code)]
        shared = [line for line, code in snippets.items() if not owns_its_process(code)]
        processes = [*own, shared] if shared else own
        return {k: v for lines in processes for k, v in run(page, lines, tmp_path_factory.mktemp("page")).items()}

    return found


@pytest.mark.parametrize(("page", "line"), SNIPPETS)
def test_snippet_runs(page, line, found_on):
    error = found_on(page)[line]
    assert not error, f"{page.relative_to(ROOT)}, the snippet at line {line}:\n{error}"


@pytest.mark.full
@pytest.mark.parametrize(("page", "line"), SNIPPETS)
def test_snippet_runs_in_a_fresh_interpreter(page, line, tmp_path):
    """In `make test`, test_snippet_runs catches all but a snippet that needs the state in which an earlier one of its
    page left a module.
    """
    error = run(page, [line], tmp_path)[line]
    assert not error, f"{page.relative_to(ROOT)}, the snippet at line {line}:\n{error}"


FAULTY = """
```python
import pathlib
x = 1
pathlib.Path("left").touch()
```

```python
import pathlib
assert not pathlib.Path("left").exists()
print(x)
```

```python
class Later:
    pass
```

```python
raise SystemExit
```

```python
import os
os._exit(3)
```

```python
print("is never reached")
```
"""


def test_a_snippet_has_no_name_and_no_file_of_another(tmp_path):
    """Errors name the page and the line; a process that dies is an error of the snippet in it and of those behind."""
    page = tmp_path / "page.md"
    page.write_text(FAULTY)
    lines = list(snippets_of(page))
    found = run(page, lines, tmp_path)
    assert [bool(found[line]) for line in lines] == [False, True, False, True, True, True]
    assert f'File "{page}", line 11, in <module>' in found[lines[1]] and "name 'x' is not defined" in found[lines[1]]
    assert "SystemExit" in found[lines[3]]
    assert all(found[line].startswith("the process ended with 3 before") for line in lines[4:])


@pytest.mark.parametrize(
    ("code", "owns"),
    [
        ("import jax\nimport jax.numpy as jnp", False),
        ('import jax\njax.config.update("jax_num_cpu_devices", 8)', True),
        ('import os\nos.environ["RLK_STRICT"] = "1"', True),
        ("import torch\nimport torch_bridge", True),
        ("from torch_bridge import linear_logp", True),
    ],
)
def test_what_configures_the_process_owns_it(code, owns):
    assert owns_its_process(code) == owns


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_measured_table_names_a_result_that_exists():
    names = re.findall(r"benchmarks/results/[\w.-]+\.json", (ROOT / "README.md").read_text())
    assert names and all((ROOT / name).exists() for name in names)


def test_docs_benchmarks_names_every_result_once():
    named = re.findall(r"^\| `([\w.-]+)` \|", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json"))
