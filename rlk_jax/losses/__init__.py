"""The GRPO family of losses on per-token log-probs: pure functions, arrays in and arrays out.

Arrays hold B sequences of T completion tokens; sequences of one prompt stand together. `completion_mask` is any array
whose non-zero tokens are the active ones; all other tokens give and receive exactly 0, whatever they hold, NaN
included.
"""

from rlk_jax.losses.advantages import expand_advantages, group_advantages
from rlk_jax.losses.entropy import entropy_threshold
from rlk_jax.losses.kl import k1_kl, k2_kl, k3_kl
from rlk_jax.losses.masked import masked_mean
from rlk_jax.losses.options import LossOptions
from rlk_jax.losses.policy import PolicyLoss, loss_denominator, policy_loss

__all__ = [
    "LossOptions",
    "PolicyLoss",
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
