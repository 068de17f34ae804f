"""Log-probabilities of the LM head for RL post-training: fused, differentiable, with the same bits for every batch."""

from rlk_jax import dispatch, grpo, vocab_parallel
from rlk_jax.core.allowed import padded_allowed_ids
from rlk_jax.core.exports import export_checks
from rlk_jax.core.packages import installed_version as _installed_version
from rlk_jax.core.tokens import LinearLogp, RankedLogp
from rlk_jax.ops import explain, numerics_version
from rlk_jax.ops.attention.api import attention
from rlk_jax.ops.det_gemm.api import det_gemm
from rlk_jax.ops.linear_cross_entropy import linear_cross_entropy
from rlk_jax.ops.linear_grpo_loss import linear_grpo_loss
from rlk_jax.ops.linear_kl.api import linear_kl
from rlk_jax.ops.linear_logp.api import linear_logp
from rlk_jax.ops.linear_logp.options import LowRank
from rlk_jax.ops.logits.api import GrpoLoss, grpo_loss, logp, ratio_kl
from rlk_jax.ops.logits.autodiff import RatioKl

__all__ = [
    "GrpoLoss",
    "LinearLogp",
    "LowRank",
    "RankedLogp",
    "RatioKl",
    "attention",
    "det_gemm",
    "dispatch",
    "explain",
    "export_checks",
    "grpo",
    "grpo_loss",
    "linear_cross_entropy",
    "linear_grpo_loss",
    "linear_kl",
    "linear_logp",
    "logp",
    "numerics_version",
    "padded_allowed_ids",
    "ratio_kl",
    "vocab_parallel",
]

__version__ = _installed_version("rlk-jax") or "unknown: not installed"
"""The version that is installed. A source tree that is on the path alone does not say which one it is."""
