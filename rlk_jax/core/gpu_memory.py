"""How much of a GPU's memory JAX takes, as the environment says it."""

import os
from collections.abc import Mapping

DEFAULT_FRACTION = 0.75
"""The share of a GPU's memory that JAX takes unless it is told otherwise."""
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The variables that name another share. JAX refuses both at once."""
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""The variable that, where it is "false", has JAX take memory as it needs it."""
_OFF = ("0", "false", "False")


def fraction(environment: Mapping[str, str] = os.environ) -> float:
    """The share of a GPU's memory that JAX takes at most. Raises ValueError for what JAX refuses, too."""
    chosen = {name: environment[name] for name in FRACTIONS if environment.get(name)}
    said = " and ".join(f"{name}={value}" for name, value in chosen.items())
    if len(chosen) > 1:
        raise ValueError(f"{said} are both set")
    try:
        return float(next(iter(chosen.values()), DEFAULT_FRACTION))
    except ValueError:
        raise ValueError(f"{said} is not a number") from None


def is_taken_at_start(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether JAX takes this share when its backend starts, from whoever uses the GPU beside it."""
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    return environment.get(PREALLOCATE, "true") not in _OFF and allocator in ("default", "bfc")
