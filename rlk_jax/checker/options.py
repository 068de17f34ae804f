"""How the commands of the checker read their options."""

import argparse
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from rlk_jax.core.terminal import did_you_mean

DTYPES: dict[str, Any] = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
"""The dtypes of the options and reports, by their short names."""
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The short name of each dtype, by its full name."""


class Unusable(ValueError):
    """The user asked for something that does not exist or cannot run here. Commands print it and exit with 2."""


def chosen(what: str, value: Any, known: Iterable[Any]) -> None:
    """Raise `Unusable` where the value of the argument `what` is none of the known ones."""
    if value not in (known := list(known)):
        hint = did_you_mean(str(value), map(str, known))
        raise Unusable(f"{what}: invalid choice: {value!r} (choose from {', '.join(map(str, known))}){hint}")


def positive(text: str) -> int:
    """The type of options that are whole numbers of at least 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """The type of options that are whole numbers of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def default_device() -> jax.Device:
    """JAX's default device, which may be configured as a device or as the name of a platform."""
    found = jax.config.jax_default_device
    return jax.devices(found)[0] if isinstance(found, str) else found or jax.devices()[0]


def arch_key_of(device: jax.Device) -> str | None:
    """The contract's key of a GPU's architecture ("sm90"), or None for a device that is no NVIDIA GPU."""
    capability = getattr(device, "compute_capability", None)
    return f"sm{capability.replace('.', '')}" if capability else None


def dtype_name(text: str) -> str:
    """The type of options that are dtypes: the short name of one of `DTYPES`, from its short or full name."""
    name = SHORT.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(DTYPES)}, got {text!r}")
    return name
