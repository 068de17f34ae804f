"""The rows of linear_kl's dispatch table: which implementations there are, and what they promise."""

import jax
import jax.numpy as jnp

from rlk_jax.core.dispatch import Implementation, TypicalCall
from rlk_jax.ops.linear_kl.deterministic import DETERMINISTIC
from rlk_jax.ops.linear_kl.reference import REFERENCE
from rlk_jax.ops.linear_kl.xla import XLA

ROWS = (
    Implementation("xla", XLA),
    Implementation("deterministic", DETERMINISTIC, by_name_only="slow: promises bits, not speed", promises_bits=True),
    Implementation("reference", REFERENCE, by_name_only="holds [N, V] logits of both: the gold of the tests"),
)
"""The implementations of linear_kl, fastest first."""

TYPICAL = TypicalCall(
    "bfloat16, D = 2048 and 4096, V = 151936",
    tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((4096, 2048), (151936, 2048), (4096, 4096), (151936, 4096))
    ),
)
