"""The rows of the dispatch table of logp, ratio_kl and grpo_loss, which share them."""

from rlk_jax.core.devices import hopper_obstacles, is_hopper, is_meant_for_triton, triton_obstacles
from rlk_jax.core.dispatch import Implementation
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
