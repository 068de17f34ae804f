"""linear_grpo_loss: a loss of the GRPO family straight from hidden states and the LM head, without the logits."""

import inspect
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from rlk_jax import dispatch, validation
from rlk_jax.grpo.losses import LossOptions, PolicyLoss, check_options, policy_loss
from rlk_jax.linear_logp import CommonOptions, linear_logp
from rlk_jax.linear_logp import describe as describe_linear_logp

_MASKED, _OUT_OF_RANGE = -100, -1


def linear_grpo_loss(
    hidden: Float[Array, "B T D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "B T"],
    old_logps: Float[Array, "B T"],
    ref_logps: Float[Array, "B T"] | None,
    advantages: Num[Array, "B"] | Num[Array, "B T"],
    completion_mask: Num[Array, "B T"] | Bool[Array, "B T"],
    bias: Float[Array, " V"] | None = None,
    *,
    ref_hidden: Float[Array, "B T E"] | None = None,
    ref_weight: Float[Array, "V E"] | Float[Array, "E V"] | None = None,
    rollout_logps: Float[Array, "B T"] | None = None,
    denominator: Float[Array, ""] | float | None = None,
    return_entropy: bool = False,
    options: LossOptions = LossOptions(),
    **head: Unpack[CommonOptions],
) -> PolicyLoss:
    """`rlk_jax.grpo.policy_loss` of the log-probabilities that `linear_logp` computes, in one call.

        logp = linear_logp(hidden, lm_head_weight, target_ids),   loss = policy_loss(logp, old_logps, advantages, …)

    Masked tokens cost no work: they are left out of the products, in the forward and in the backward.

    Args:
      hidden: last hidden states `[B, T, D]` of B sequences of T completion tokens, shifted so that a row predicts its
        target. Masked rows may hold anything, NaN included.
      lm_head_weight, bias: as in `linear_logp`.
      target_ids: `[B, T]`, the tokens taken; at masked tokens they may be anything.
      old_logps: `[B, T]`, their log-probabilities when they were sampled.
      ref_logps: `[B, T]`, those of the reference model; None without one, or beside ref_hidden.
      advantages: of every sequence `[B]` or token `[B, T]`.
      completion_mask: `[B, T]`, bool, integer or float: a token is active where it is not 0.
      ref_hidden, ref_weight: of a frozen reference model, in the place of ref_logps; its head has no bias, and the same
        layout, temperature and softcap.
      rollout_logps, denominator, options: as in `policy_loss`.
      return_entropy: whether the metrics have the mean entropy, which carries no gradient.
      **head: `linear_logp`'s other options but `ignore_index` and `return_lse`: temperature, logit_softcap,
        weight_layout, global_vocab_size, memory_budget, axis_name, implementation and so on.

    Returns:
      `PolicyLoss`: the loss and its metrics, float32 scalars, of which only `loss` carries gradients.

    Raises:
      ValueError: for everything that `linear_logp` and `policy_loss` refuse, a mask of another shape than target_ids,
        `ignore_index`, one of ref_hidden and ref_weight without the other, both beside ref_logps or a bias.

    Gradients flow to hidden, lm_head_weight and bias: those of `linear_logp` followed by `policy_loss`, to the bit.
    Within `memory_budget` the forward keeps exponentials, whose products the backward is spared (docs/linear_logp.md).

    Same bits: what `linear_logp` and `policy_loss` promise.

    Source: DeepSeekMath, arXiv 2402.03300; the losses of docs/losses.md.
    """
    _check(
        lm_head_weight=lm_head_weight,
        target_ids=target_ids,
        bias=bias,
        advantages=advantages,
        completion_mask=completion_mask,
        ref_hidden=ref_hidden,
        ref_weight=ref_weight,
        denominator=denominator,
        options=options,
        head=head,
        old_logps=old_logps,
        ref_logps=ref_logps,
        rollout_logps=rollout_logps,
    )
    mask = validation.active(completion_mask)
    ids = validation.as_int32(target_ids)
    # An id that happens to be the one by which tokens are left out stays a wrong one.
    ids = jnp.where(mask, jnp.where(ids == _MASKED, _OUT_OF_RANGE, ids), _MASKED)
    head["ignore_index"] = _MASKED
    found = linear_logp(
        hidden,
        lm_head_weight,
        ids,
        bias,
        return_lse=True,  # a LinearLogp, also without the entropy
        return_entropy=return_entropy,
        **head,
    )
    if ref_hidden is not None and ref_weight is not None:
        # Of constants: a forward that a backward follows would keep exponentials for it.
        frozen = jax.lax.stop_gradient((ref_hidden, ref_weight))
        ref_logps = linear_logp(*frozen, ids, **head)
    return policy_loss(
        found.logp,
        old_logps,
        advantages,
        completion_mask,
        ref_logps=ref_logps,
        rollout_logps=rollout_logps,
        entropy=found.entropy,
        denominator=denominator,
        options=options,
    )


def _check(
    *,
    lm_head_weight: Any,
    target_ids: Any,
    bias: Any,
    advantages: Any,
    completion_mask: Any,
    ref_hidden: Any,
    ref_weight: Any,
    denominator: Any,
    options: Any,
    head: Any,
    **logps: Any,
) -> None:
    """All static checks that are not `linear_logp`'s; `logps` are per token."""
    check_options(options)
    layout = head.get("weight_layout", "vd")
    reference = {"bias": bias, "mask": completion_mask, "head": lm_head_weight, "layout": layout}
    validation.reference(logps["ref_logps"], ref_hidden, ref_weight, **reference)
    validation.completion_targets(target_ids, completion_mask, head.get("ignore_index"))
    beta = options.beta if ref_hidden is None else 0.0  # the reference's log-probs are yet to come
    validation.policy_loss(logps, completion_mask, denominator, beta=beta, importance_cap=options.importance_cap)
    validation.advantages(advantages, completion_mask)


def describe(*args: Any, **kwargs: Any) -> tuple[dispatch.Problem, str | None]:
    """What `dispatch` sees of the call `linear_grpo_loss(*args, **kwargs)`, and the implementation it names: those of
    `linear_logp`.
    """
    call = inspect.signature(linear_grpo_loss).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    hidden, return_entropy = given.pop("hidden"), given.pop("return_entropy")
    _check(**given)
    of_head = (hidden, given["lm_head_weight"], given["target_ids"], given["bias"])
    options = {"ignore_index": _MASKED, "return_entropy": return_entropy, **given["head"]}
    return describe_linear_logp(*of_head, **options)
