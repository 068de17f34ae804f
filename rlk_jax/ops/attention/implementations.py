"""The rows of attention's dispatch table: which implementations there are, and what they promise."""

import jax
import jax.numpy as jnp

from rlk_jax.core.devices import hopper_obstacles, is_hopper
from rlk_jax.core.dispatch import CallFacts, Implementation, TypicalCall
from rlk_jax.ops.attention import hopper
from rlk_jax.ops.attention.deterministic import DETERMINISTIC
from rlk_jax.ops.attention.reference import REFERENCE
from rlk_jax.ops.attention.xla import XLA


def _mosaic_obstacles(facts: CallFacts) -> list[str]:
    reasons = hopper_obstacles(facts)
    for name, columns in (("keys", facts.dim), ("values", facts.config.value_size)):
        if columns % 16 or columns > 256:
            reasons.append(f"needs {name} of a multiple of 16 columns, 256 at most, not {columns}")
    return reasons


ROWS = (
    Implementation("mosaic", hopper.mosaic(), _mosaic_obstacles, meant_for=is_hopper, promises_bits=True),
    Implementation("xla", XLA),
    Implementation("deterministic", DETERMINISTIC, by_name_only="slow: promises bits, not speed", promises_bits=True),
    Implementation("reference", REFERENCE, by_name_only="holds float32 scores: the gold of the tests"),
)
"""The implementations of attention, fastest first."""

TYPICAL = TypicalCall(
    "bfloat16, 4096 tokens, 16 heads over 4 of 128 columns",
    tuple(jax.ShapeDtypeStruct((2, 4096, heads, 128), jnp.bfloat16) for heads in (16, 4, 4)),
)
