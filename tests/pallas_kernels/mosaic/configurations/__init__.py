"""The shipped configurations of Mosaic's kernels: a module for each kind of kernel, which `every` finds."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pallas_kernels.hopper.tiles import Machine

MACHINE = Machine()


class Configuration(NamedTuple):
    """A program of one kernel with its options, and the operands to compile it with."""

    options: dict[str, Any]
    """Among them the kernel's name."""
    run: Callable[..., Any]
    arguments: dict[str, Any]
    most_spills: int = 0
    """Bytes that the kernel may spill; its module says why."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.options.items() if value not in (None, False))


def every() -> Iterator[Configuration]:
    """The configurations of all modules of this folder."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        yield from importlib.import_module(module.name).configurations()
