"""Log-probabilities of the LM head for RL post-training: fused, differentiable, with the same bits for every batch."""

from rlk_jax import vocab_parallel
from rlk_jax._problem import LinearLogp
from rlk_jax.det_gemm import det_gemm
from rlk_jax.dispatch import explain, numerics_version
from rlk_jax.linear_logp import linear_logp

__all__ = ["LinearLogp", "det_gemm", "explain", "linear_logp", "numerics_version", "vocab_parallel"]
