"""The rows of linear_logp's dispatch table: how it can run, what keeps each way from running, and what it promises."""

import jax
import jax.numpy as jnp

from rlk_jax.core.devices import (
    hopper_obstacles,
    is_hopper,
    is_meant_for_triton,
    triton_obstacles,
    with_cuda_library,
)
from rlk_jax.core.dispatch import CallFacts, Implementation, TypicalCall
from rlk_jax.core.shard import check_edges
from rlk_jax.core.shard_checks import order_obstacles, shard_obstacles
from rlk_jax.ops.linear_logp import hopper
from rlk_jax.ops.linear_logp.deterministic import DETERMINISTIC
from rlk_jax.ops.linear_logp.options import HeadFunctions
from rlk_jax.ops.linear_logp.reference import REFERENCE
from rlk_jax.ops.linear_logp.sharding.partition import partitioned
from rlk_jax.ops.linear_logp.triton import TRITON
from rlk_jax.ops.linear_logp.xla import XLA


def _operand_obstacles(facts: CallFacts) -> list[str]:
    """Why tensor cores or 16-byte loads cannot take the operands."""
    reasons = []
    hidden, weight = facts.dtypes[:2]
    if hidden != weight or hidden not in ("bfloat16", "float16"):
        reasons.append(f"needs hidden and lm_head_weight both bfloat16 or both float16, not {hidden} and {weight}")
    return reasons + _dim_obstacles(facts)


def _dim_obstacles(facts: CallFacts) -> list[str]:
    return [f"needs a hidden dim that is a multiple of 8, not {facts.dim}"] if facts.dim % 8 else []


def _mosaic_obstacles(facts: CallFacts) -> list[str]:
    """Why Mosaic's kernels cannot run: they take float32 operands too, in two bfloat16 parts each."""
    if "float32" not in facts.dtypes[:2]:
        return hopper_obstacles(facts) + _operand_obstacles(facts)
    reasons = hopper_obstacles(facts) + _dim_obstacles(facts)
    if facts.config.rank:
        reasons.append("takes a low_rank term beside bfloat16 or float16 operands only")
    return reasons


def _cuda_obstacles(facts: CallFacts) -> list[str]:
    return hopper_obstacles(facts) + _operand_obstacles(facts)


def _triton_obstacles(facts: CallFacts) -> list[str]:
    return triton_obstacles(facts) + _operand_obstacles(facts)


ROWS = (
    Implementation(
        "mosaic",
        partitioned(hopper.mosaic(), check_edges),
        _mosaic_obstacles,
        meant_for=is_hopper,
        promises_bits=True,
        skips_padding=True,
    ),
    Implementation(
        "cuda",
        partitioned(hopper.cuda(), check_edges),
        with_cuda_library(_cuda_obstacles),
        by_name_only="mosaic is as fast and needs no compiler",
        promises_bits=True,
        skips_padding=True,
    ),
    # Triton's promise holds by construction: one tile, unsplit chains over K, a cut of the vocabulary that V alone
    # decides, and no atomics.
    Implementation(
        "triton",
        partitioned(TRITON, check_edges),
        _triton_obstacles,
        meant_for=is_meant_for_triton,
        promises_bits=True,
    ),
    Implementation("xla", partitioned(XLA), order_obstacles),
    Implementation(
        "deterministic",
        partitioned(DETERMINISTIC, check_edges),
        by_name_only="slow: promises bits, not speed",
        promises_bits=True,
    ),
    Implementation(
        "reference",
        # XLA lays it out as any other products.
        HeadFunctions(REFERENCE.forward, REFERENCE.gradients, REFERENCE),
        shard_obstacles,
        by_name_only="holds [N, V] logits: the gold of the tests",
    ),
)
"""The implementations of linear_logp, fastest first."""

TYPICAL = TypicalCall(
    "bfloat16, D = 4096, V = 151936",
    (
        jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((151936, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((4096,), jnp.int32),
    ),
)
