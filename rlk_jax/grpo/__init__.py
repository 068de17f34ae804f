"""GRPO on per-token log-probs: the losses, and the configurations of `rlk grpo` and `rlk sft`. It imports jax, but not
flax.
"""

from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.sft.config import SftConfig
from rlk_jax.losses import (
    LossOptions,
    PolicyLoss,
    entropy_threshold,
    expand_advantages,
    group_advantages,
    k1_kl,
    k2_kl,
    k3_kl,
    loss_denominator,
    masked_mean,
    policy_loss,
)

__all__ = [
    "GrpoConfig",
    "LossOptions",
    "PolicyLoss",
    "SftConfig",
    "entropy_threshold",
    "expand_advantages",
    "group_advantages",
    "k1_kl",
    "k2_kl",
    "k3_kl",
    "loss_denominator",
    "masked_mean",
    "policy_loss",
]
