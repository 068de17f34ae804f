"""grpo_loss: the GRPO loss from the logits of two policies and the rewards of whole groups."""

import inspect
from typing import Any, NamedTuple

from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int

from rlk_jax import dispatch, validation
from rlk_jax.grpo.losses import LossOptions, group_advantages, policy_loss
from rlk_jax.ratio_kl import of_actions, problem


class GrpoLoss(NamedTuple):
    """What `grpo_loss` returns: float32 scalars, of which only `loss` carries a gradient."""

    loss: Float32[Array, ""]
    policy_loss: Float32[Array, ""]
    kl: Float32[Array, ""]


def grpo_loss(
    policy_logits: Float[Array, "B T V"],
    ref_logits: Float[Array, "B T V"],
    action_ids: Int[Array, "B T"],
    old_logps: Float[Array, "B T"],
    rewards: Float[Array, "B"] | None,
    completion_mask: Bool[Array, "B T"] | Int[Array, "B T"] | Float[Array, "B T"],
    *,
    advantages: Float[Array, "B"] | Float[Array, "B T"] | None = None,
    samples_per_prompt: int | None = None,
    group_boundaries: Int[ArrayLike, " G+1"] | None = None,
    eps: float = 1e-6,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    beta: float = 0.0,
    temperature: float | Float[ArrayLike, "B T"] = 1.0,
    donate_logits: bool = False,
    validate: bool | None = None,
    implementation: str | None = None,
) -> GrpoLoss:
    """Clipped policy loss with a KL penalty, averaged over all active tokens of the batch.

        loss = policy_loss + beta · kl,   policy_loss = mean of −min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A)
        ρ = exp(logp − old_logps),   kl = mean of exp(d) − 1 − d,   d = ref − logp

    The log-probabilities are `logp`'s, the formulas those of `rlk_jax.grpo.policy_loss`, which has the other losses of
    the family for log-probabilities that are at hand.

    Args:
      policy_logits, ref_logits: `[B, T, V]`, bfloat16, float16 or float32, of B sequences of T completion tokens.
      action_ids: `[B, T]`, the tokens taken; at masked tokens they may be anything.
      old_logps: `[B, T]`, their log-probabilities when they were sampled.
      rewards: `[B]`, normalised within their groups by `rlk_jax.grpo.group_advantages`; None beside `advantages`.
      completion_mask: `[B, T]`, bool, integer or float: a token is active where it is not 0.
      advantages: A itself, of every sequence `[B]` or token `[B, T]`, in the place of rewards.
      samples_per_prompt: sequences of a group, which stand together; or
      group_boundaries: `[G + 1]`, where groups start, from 0 to B. Static, as samples_per_prompt.
      eps: the least standard deviation that rewards are divided by.
      clip_eps, clip_eps_high: the clip range; None is clip_eps above, too.
      beta: weight of the KL.
      temperature, donate_logits, validate: as in `ratio_kl`.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here.

    Returns:
      `GrpoLoss(loss, policy_loss, kl)`; all 0 where no token is active.

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow from `loss` to policy_logits only; at ρ = 1 and on the bounds of the clip range they are those of the
    unclipped objective. Masked tokens are masked before anything is computed of them.

    Same bits (`mosaic`, `triton`, `deterministic`): run to run, and with padding sequences or tokens appended: sums are
    taken in one fixed order.

    Source: DeepSeekMath, arXiv 2402.03300, eq. 3, with the mean over tokens of the batch; RL-Kernel's grpo_loss.
    """
    given = (policy_logits, ref_logits, action_ids, completion_mask, old_logps, temperature)
    inputs, options = validation.ratio_kl(*given, validate=validate)
    validation.require_values(inputs)
    validation.rewards_or_advantages(inputs, rewards, advantages, samples_per_prompt, group_boundaries)
    loss_options = _loss_options(clip_eps, clip_eps_high, beta, eps)
    if rewards is not None:
        advantages = group_advantages(
            rewards, samples_per_prompt=samples_per_prompt, group_boundaries=group_boundaries, eps=eps
        )
    assert advantages is not None
    chosen = dispatch.choose(problem("grpo_loss", inputs, options), implementation)
    taken = of_actions(chosen, inputs, options, donate=donate_logits, validate=validate)
    found = policy_loss(
        taken.logp, taken.old_logps, advantages, taken.mask, ref_logps=taken.ref_logps, options=loss_options
    )
    return GrpoLoss(found.loss, found.policy_loss, found.kl)


def _loss_options(clip_eps: float, clip_eps_high: float | None, beta: float, eps: float) -> LossOptions:
    validation.positive("eps", eps)
    return LossOptions(clip_eps=clip_eps, clip_eps_high=clip_eps_high, beta=beta)


def describe(*args: Any, **kwargs: Any) -> tuple[dispatch.Problem, str | None]:
    """What `dispatch` sees of the call `grpo_loss(*args, **kwargs)`, and the implementation it names."""
    call = inspect.signature(grpo_loss).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    names = ("policy_logits", "ref_logits", "action_ids", "completion_mask", "old_logps", "temperature", "validate")
    inputs, options = validation.ratio_kl(**{name: given[name] for name in names})
    chosen = ("rewards", "advantages", "samples_per_prompt", "group_boundaries")
    validation.rewards_or_advantages(inputs, *(given[name] for name in chosen))
    _loss_options(*(given[name] for name in ("clip_eps", "clip_eps_high", "beta", "eps")))
    return problem("grpo_loss", inputs, options), given["implementation"]
