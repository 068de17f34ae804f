"""How much of a GPU's memory JAX takes, as the environment says it."""

import os
from collections.abc import Mapping

DEFAULT_FRACTION = 0.75
"""The share of a GPU's memory that JAX takes unless it is told otherwise."""
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""The variable that, where it is "false", has JAX take memory as it needs it."""
_OFF = ("0", "false", "False")


def fraction(environment: Mapping[str, str] = os.environ) -> float:
    """The share of a GPU's memory that JAX takes at most."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    return float(next((environment[name] for name in names if environment.get(name)), DEFAULT_FRACTION))


def is_taken_at_start(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether JAX takes this share when its backend starts, from whoever uses the GPU beside it."""
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    return environment.get(PREALLOCATE, "true") not in _OFF and allocator in ("default", "bfc")
