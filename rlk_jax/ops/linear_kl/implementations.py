"""The rows of linear_kl's dispatch table: which implementations there are, and what they promise."""

import jax
import jax.numpy as jnp

from rlk_jax.core.devices import hopper_obstacles, is_hopper, triton_obstacles, with_cuda_library
from rlk_jax.core.dispatch import CallFacts, Implementation, TypicalCall
from rlk_jax.core.shard_checks import order_obstacles, shard_obstacles
from rlk_jax.ops.linear_kl import hopper
from rlk_jax.ops.linear_kl.deterministic import DETERMINISTIC
from rlk_jax.ops.linear_kl.reference import REFERENCE
from rlk_jax.ops.linear_kl.triton import TRITON
from rlk_jax.ops.linear_kl.xla import XLA


def _pair_obstacles(facts: CallFacts) -> list[str]:
    """Why tensor cores or 16-byte loads cannot take the operands."""
    reasons = []
    heads = [("hidden and lm_head_weight", facts.dtypes[:2])]
    if facts.config.teacher is not None:
        heads.append(("teacher_hidden and teacher_weight", facts.dtypes[2:4]))
    for names, (hidden, weight) in heads:
        if hidden != weight or hidden not in ("bfloat16", "float16"):
            reasons.append(f"needs {names} both bfloat16 or both float16, not {hidden} and {weight}")
    if facts.dim % 8:
        reasons.append(f"needs a hidden dim that is a multiple of 8, not {facts.dim}")
    return reasons


def _hopper_obstacles(facts: CallFacts) -> list[str]:
    return hopper_obstacles(facts) + _pair_obstacles(facts)


def _triton_obstacles(facts: CallFacts) -> list[str]:
    return triton_obstacles(facts) + _pair_obstacles(facts)


ROWS = (
    Implementation("mosaic", hopper.mosaic(), _hopper_obstacles, meant_for=is_hopper, promises_bits=True),
    Implementation(
        "cuda",
        hopper.cuda(),
        with_cuda_library(_hopper_obstacles),
        by_name_only="mosaic is faster and needs no compiler",
        promises_bits=True,
    ),
    Implementation(
        "triton",
        TRITON,
        _triton_obstacles,
        by_name_only="was slower than xla where both were timed",
        promises_bits=True,
    ),
    Implementation("xla", XLA, order_obstacles),
    Implementation("deterministic", DETERMINISTIC, by_name_only="slow: promises bits, not speed", promises_bits=True),
    Implementation(
        "reference",
        REFERENCE,
        shard_obstacles,
        by_name_only="holds [N, V] logits of both: the gold of the tests",
    ),
)
"""The implementations of linear_kl, fastest first."""

TYPICAL = TypicalCall(
    "bfloat16, D = 2048 and 4096, V = 151936",
    tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((4096, 2048), (151936, 2048), (4096, 4096), (151936, 4096))
    ),
)
