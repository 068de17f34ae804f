"""The rows of the dispatch table of logp, ratio_kl and grpo_loss, which share them."""

import jax
import jax.numpy as jnp

from rlk_jax.core.devices import hopper_obstacles, is_hopper, is_meant_for_triton, triton_obstacles
from rlk_jax.core.dispatch import Implementation, TypicalCall
from rlk_jax.ops.logits import hopper
from rlk_jax.ops.logits.deterministic import DETERMINISTIC
from rlk_jax.ops.logits.reference import REFERENCE
from rlk_jax.ops.logits.triton import TRITON
from rlk_jax.ops.logits.xla import XLA

ROWS = (
    Implementation("mosaic", hopper.mosaic(), hopper_obstacles, meant_for=is_hopper, promises_bits=True),
    Implementation("triton", TRITON, triton_obstacles, meant_for=is_meant_for_triton, promises_bits=True),
    Implementation("xla", XLA),
    Implementation("deterministic", DETERMINISTIC, by_name_only="slow: promises bits, not speed", promises_bits=True),
    Implementation("reference", REFERENCE, by_name_only="holds float32 logits: the gold of the tests"),
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
