"""The rows of the dispatch table of logp, ratio_kl and grpo_loss, which share them."""

import jax
import jax.numpy as jnp

from rlk_jax.core.devices import hopper_obstacles, is_hopper, is_meant_for_triton, triton_obstacles
from rlk_jax.core.dispatch import CallFacts, Implementation, TypicalCall
from rlk_jax.ops.logits import hopper
from rlk_jax.ops.logits.deterministic import DETERMINISTIC
from rlk_jax.ops.logits.reference import REFERENCE
from rlk_jax.ops.logits.triton import TRITON
from rlk_jax.ops.logits.xla import XLA


def _other_order(facts: CallFacts) -> list[str]:
    """Why an implementation that does not sum as linear_logp does cannot run."""
    reasons = ["has other bits than those of linear_logp, which as_linear_logp asks for"]
    return reasons if facts.config.as_linear_logp else []


def _obstacles_of_rows_in_triton(facts: CallFacts) -> list[str]:
    return triton_obstacles(facts) + _other_order(facts)


ROWS = (
    Implementation("mosaic", hopper.mosaic(), hopper_obstacles, meant_for=is_hopper, promises_bits=True),
    Implementation("triton", TRITON, _obstacles_of_rows_in_triton, meant_for=is_meant_for_triton, promises_bits=True),
    Implementation("xla", XLA, _other_order),
    Implementation("deterministic", DETERMINISTIC, by_name_only="slow: promises bits, not speed", promises_bits=True),
    Implementation("reference", REFERENCE, _other_order, by_name_only="holds float32 logits: the gold of the tests"),
)
"""The implementations of the ops over logits, fastest first."""

_TEXT = "bfloat16, V = 151936"
_LOGITS = jax.ShapeDtypeStruct((8, 512, 151936), jnp.bfloat16)
_IDS, _LOGPS = jax.ShapeDtypeStruct((8, 512), jnp.int32), jax.ShapeDtypeStruct((8, 512), jnp.float32)
_REWARDS = jax.ShapeDtypeStruct((8,), jnp.float32)
TYPICAL = {
    "logp": TypicalCall(_TEXT, (_LOGITS, _IDS)),
    "ratio_kl": TypicalCall(_TEXT, (_LOGITS, _LOGITS, _IDS, _IDS, _LOGPS)),
    "grpo_loss": TypicalCall(_TEXT, (_LOGITS, _LOGITS, _IDS, _LOGPS, _REWARDS, _IDS), {"samples_per_prompt": 8}),
}
