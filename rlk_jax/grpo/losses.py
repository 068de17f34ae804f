"""The GRPO loss on per-token log-probs: pure functions, one per term, arrays in and arrays out.

Shapes: B sequences of T completion tokens, sampled in contiguous groups of `samples_per_prompt`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class GrpoLoss(NamedTuple):
    """What `grpo_loss_from_logps` returns: fp32 scalars, of which only `loss` carries gradients."""

    loss: Float[Array, ""]
    policy_loss: Float[Array, ""]
    kl: Float[Array, ""]
    clip_fraction: Float[Array, ""]


def group_advantages(rewards: Float[Array, "B"], *, samples_per_prompt: int, eps: float = 1e-6) -> Float[Array, "B"]:
    """Rewards normalised within each prompt's group: `A_i = (r_i − mean) / max(std, eps)`.

    `std` is the population one. Rewards are taken relative to their group's first before anything is summed, so a
    large common offset cancels exactly and a group of equal rewards has advantages of exactly 0. fp32, no gradient.

    Raises ValueError for fewer than two samples per prompt, or B not a multiple of it.
    Source: DeepSeekMath, arXiv 2402.03300, eq. 3 and section 4.1.2; std clamped by eps as in RL-Kernel.
    """
    if samples_per_prompt < 2:
        raise ValueError("samples_per_prompt must be at least 2 for group normalization.")
    if rewards.shape[0] % samples_per_prompt:
        raise ValueError("num_sequences (B) must be divisible by samples_per_prompt (n).")
    groups = jax.lax.stop_gradient(rewards).astype(jnp.float32).reshape(-1, samples_per_prompt)
    shifted = groups - groups[:, :1]
    centred = shifted - shifted.mean(axis=1, keepdims=True)
    std = jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True))
    return (centred / jnp.maximum(std, eps)).reshape(-1)


def clipped_surrogate(
    logp: Float[Array, "B T"], old_logps: Float[Array, "B T"], advantages: Float[Array, "B 1"], clip_eps: float
) -> Float[Array, "B T"]:
    """The objective to maximise per token: `min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps)·A)`, `ρ = exp(logp − old)`.

    Source: PPO, arXiv 1707.06347, eq. 7.
    """
    ratio = jnp.exp(logp - old_logps)
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps) * advantages)


def clipped_tokens(
    logp: Float[Array, "B T"], old_logps: Float[Array, "B T"], advantages: Float[Array, "B 1"], clip_eps: float
) -> Bool[Array, "B T"]:
    """Where `clipped_surrogate` is flat: ρ beyond `1 ± clip_eps` on the side that A pushes it to."""
    ratio = jnp.exp(logp - old_logps)
    return ((ratio > 1.0 + clip_eps) & (advantages > 0)) | ((ratio < 1.0 - clip_eps) & (advantages < 0))


def k3_kl(logp: Float[Array, "B T"], ref_logps: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Estimate of KL(policy ‖ reference) per sampled token: `exp(d) − 1 − d`, `d = ref − logp`; never negative.

    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3; DeepSeekMath, arXiv 2402.03300, eq. 4.
    """
    difference = ref_logps - logp
    return jnp.expm1(difference) - difference


def masked_mean(values: Array, mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """`Σ of values where mask / max(count, 1)`: the mean over all active tokens of the batch, 0 when there are none."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def grpo_loss_from_logps(
    logp: Float[Array, "B T"],
    old_logps: Float[Array, "B T"],
    ref_logps: Float[Array, "B T"],
    advantages: Float[Array, "B"],
    completion_mask: Bool[Array, "B T"],
    *,
    clip_eps: float,
    beta: float,
) -> GrpoLoss:
    """`loss = −masked_mean(clipped_surrogate) + beta · masked_mean(k3_kl)`, with its parts as metrics.

    Gradients go to `logp` only. Masked tokens give and receive exactly 0, whatever they hold, NaN included.

    Source: DeepSeekMath, arXiv 2402.03300, eq. 3, with the mean over tokens of the batch instead of over sequences.
    """
    # Masked before exp: a NaN there would come back through the gradient of a later `where` as 0 · NaN.
    logp = jnp.where(completion_mask, logp, 0.0)
    old_logps = jax.lax.stop_gradient(jnp.where(completion_mask, old_logps, 0.0))
    ref_logps = jax.lax.stop_gradient(jnp.where(completion_mask, ref_logps, 0.0))
    token_advantages = jax.lax.stop_gradient(advantages)[:, None]

    policy_loss = -masked_mean(clipped_surrogate(logp, old_logps, token_advantages, clip_eps), completion_mask)
    kl = masked_mean(k3_kl(logp, ref_logps), completion_mask)
    clipped = masked_mean(clipped_tokens(logp, old_logps, token_advantages, clip_eps), completion_mask)
    metrics = jax.lax.stop_gradient((policy_loss, kl, clipped))
    return GrpoLoss(policy_loss + beta * kl, *metrics)
