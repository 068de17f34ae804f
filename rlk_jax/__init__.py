"""Log-probabilities of the LM head for RL post-training: fused, differentiable, with the same bits for every batch."""

from rlk_jax import vocab_parallel
from rlk_jax._problem import LinearLogp
from rlk_jax.det_gemm import det_gemm
from rlk_jax.dispatch import explain, numerics_version
from rlk_jax.grpo_loss import GrpoLoss, grpo_loss
from rlk_jax.linear_grpo_loss import linear_grpo_loss
from rlk_jax.linear_logp import linear_logp
from rlk_jax.logp import logp
from rlk_jax.ratio_kl import RatioKl, ratio_kl

__all__ = [
    "GrpoLoss",
    "LinearLogp",
    "RatioKl",
    "det_gemm",
    "explain",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_logp",
    "logp",
    "numerics_version",
    "ratio_kl",
    "vocab_parallel",
]
