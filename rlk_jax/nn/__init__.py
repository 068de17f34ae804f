"""Flax NNX layers on the ops: a model built from them gives a token the same bits alone, in a batch, padded, or decoded
one token at a time through a KV cache. Forward bits are promised. Gradients are JAX's own of the same programs, but for
those of `attention` and `embed`, which keep their bits too, and that of `rms_norm`, which is the definition's.

Three things move bits in an ordinary model, and each has an answer here. A library GEMM picks the order of its sums by
shape; `det_gemm` has one order for all shapes. The order of a reduction follows its length; `ordered_sum` has one order
for all lengths. XLA computes an expression differently in one fusion than in another; `isolated` keeps it out of
fusions.
"""

from rlk_jax.core.packages import require_extra as _require_extra

_require_extra(__name__, ("flax",), extra="grpo")

from rlk_jax.core.transforms import isolated  # noqa: E402
from rlk_jax.nn.embedding import embed  # noqa: E402
from rlk_jax.nn.layers import DetDense, LMHead, attention, det_dot_general  # noqa: E402
from rlk_jax.nn.norm import add_rms_norm, rms_norm  # noqa: E402
from rlk_jax.nn.rotary import Rotation, rotary, rotated, rotation, rotation_by, split_rotary  # noqa: E402
from rlk_jax.nn.rows import BLOCK, ordered_sum, softmax  # noqa: E402

__all__ = [
    "BLOCK",
    "DetDense",
    "LMHead",
    "Rotation",
    "add_rms_norm",
    "attention",
    "det_dot_general",
    "embed",
    "isolated",
    "ordered_sum",
    "rms_norm",
    "rotary",
    "rotated",
    "rotation",
    "rotation_by",
    "softmax",
    "split_rotary",
]
