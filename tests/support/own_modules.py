"""Modules that a test writes and imports."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def imported_from(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folder, as the current one. What is imported from it within is forgotten afterwards."""
    path = list(sys.path)
    try:
        with contextlib.chdir(folder):
            yield folder
    finally:
        sys.path[:] = path
        files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
        for name, file in files.items():
            if folder in pathlib.Path(file).parents:
                del sys.modules[name]
