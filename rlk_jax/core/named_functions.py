"""Functions of users, by name: `module:function`, or `path/to/file.py:function`."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class NamedFunction(NamedTuple):
    """A function, and the module in which its name was found."""

    function: Callable[..., Any]
    module: ModuleType


def named_function(name: str) -> NamedFunction:
    """The function that a name stands for. Its module is a Python file, or on the path or in the current folder.

    Raises ValueError, in one line, where there is no such function.
    """
    module_name, _, attribute = name.rpartition(":")
    try:
        module = _module_of_file(Path(module_name)) if module_name.endswith(".py") else _module_on_path(module_name)
        found = functools.reduce(getattr, attribute.split("."), module)
    except SystemExit:
        raise ValueError(f"cannot load {name!r}: its import exits") from None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load {name!r}: {first_line(error)}") from error
    except Exception as error:
        raise ValueError(f"cannot load {name!r}: {type(error).__name__}: {first_line(error)}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is not callable")
    return NamedFunction(found, module)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip() or f"{type(error).__name__} without a word").splitlines()[0]


def _module_on_path(name: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _module_of_file(path: Path) -> ModuleType:
    """The module that a file holds. It is imported once, under its path, which no other module has for a name."""
    name = str(path.resolve())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, name)
        assert spec is not None and spec.loader is not None  # Python has a loader for each name that ends with .py.
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
