"""What the commands of the checker share in how they read their options."""

import argparse
from typing import Any

import jax.numpy as jnp

DTYPES: dict[str, Any] = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
_LONG = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def dtype_name(text: str) -> str:
    """The short name of one of `DTYPES`."""
    name = _LONG.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(DTYPES)}, got {text!r}")
    return name
