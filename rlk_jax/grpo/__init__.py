"""GRPO on per-token log-probs: the losses, and the configuration of `rlk grpo`. Imports jax only; no flax."""

from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.losses import (
    GrpoLoss,
    clipped_surrogate,
    clipped_tokens,
    group_advantages,
    grpo_loss_from_logps,
    k3_kl,
    masked_mean,
)

__all__ = [
    "GrpoConfig",
    "GrpoLoss",
    "clipped_surrogate",
    "clipped_tokens",
    "group_advantages",
    "grpo_loss_from_logps",
    "k3_kl",
    "masked_mean",
]
