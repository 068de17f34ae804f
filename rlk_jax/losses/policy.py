"""The policy loss of the GRPO family on log-probs: objectives, ratios, clipping, KL and metrics."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

from rlk_jax.core.exports import exportable
from rlk_jax.core.fixed_order import blockwise_exp
from rlk_jax.core.mesh import whole_on_every_device
from rlk_jax.core.tokens import active_mask
from rlk_jax.losses.advantages import expand_advantages
from rlk_jax.losses.bounds import bounded, bounded_operands, log_ratio_of
from rlk_jax.losses.checks import check_advantages, check_completion_mask, check_entropy, check_policy_loss
from rlk_jax.losses.importance import gamma_weights, importance_weights
from rlk_jax.losses.kl import KL_ESTIMATORS, k3_kl
from rlk_jax.losses.masked import (
    active_values,
    masked_count,
    masked_means,
    masked_sum,
    sequence_means,
    spread_to_tokens,
)
from rlk_jax.losses.options import LossOptions, check_loss_options

_FAR = 20.0
"""A log-ratio to the reference from which on k3 is near its exponential."""


@exportable
class PolicyLoss(NamedTuple):
    """What `policy_loss` returns: fp32 scalars, of which only `loss` carries gradients.

    Ratios are those that the loss is computed from: a token's own, or under gspo its sequence's. Fractions, means and
    extremes are over active tokens, and 0 where there are none.
    """

    loss: Float[Array, ""]
    """policy_loss + beta · kl − entropy_coef · entropy_bonus."""
    policy_loss: Float[Array, ""]
    kl: Float[Array, ""]
    """The KL, normalised as the loss is; 0 without ref_logps."""
    denominator: Float[Array, ""]
    """`loss_denominator` of this mask, whatever the loss was divided by."""
    clip_fraction: Float[Array, ""]
    """The fraction of tokens at which the objective is cut, by any of the three bounds below."""
    clip_fraction_low: Float[Array, ""]
    clip_fraction_high: Float[Array, ""]
    clip_fraction_dual: Float[Array, ""]
    ratio_mean: Float[Array, ""]
    ratio_min: Float[Array, ""]
    ratio_max: Float[Array, ""]
    entropy: Float[Array, ""] | None
    """The mean entropy, without a gradient: adding it to a loss changes no step. None where no entropy was given."""
    importance_weight_mean: Float[Array, ""] | None
    """The mean of the importance weights; None without rollout_logps."""
    importance_capped_fraction: Float[Array, ""] | None
    """The fraction of tokens whose importance weight is beyond cap or floor; None without rollout_logps."""
    log_ratio_bounded_fraction: Float[Array, ""] | None
    """The fraction of tokens with a log-ratio beyond options.log_ratio_bound; None without one."""
    entropy_bonus: Float[Array, ""] | None
    """The entropy, normalised as the loss is, of tokens at or above the threshold; None where entropy_coef is 0."""


def loss_denominator(
    completion_mask: Num[Array, "B T"] | Bool[Array, "B T"], *, options: LossOptions
) -> Float[Array, ""]:
    """What `policy_loss` divides its sum by: a count, exact up to 2²⁴ and then rounded to fp32.

    | normaliser | count |
    | --- | --- |
    | "tokens" | active tokens |
    | "sequence_mean", "sequence_sum" | sequences with an active token |
    | "constant" | sequences with an active token · max_completion_length |

    Counts of micro-batches, or of data-parallel ranks, add up to that of the whole batch. Raises ValueError for options
    that are not `LossOptions`, and a mask that is not [B, T].
    """
    check_loss_options(options)
    check_completion_mask(completion_mask)
    count = masked_count(active_mask(completion_mask), options.normalised_by)
    return count if options.max_completion_length is None else count * options.max_completion_length


def policy_loss(
    logp: Float[Array, "B T"],
    old_logps: Float[Array, "B T"],
    advantages: Num[Array, "B"] | Num[Array, "B T"],
    completion_mask: Num[Array, "B T"] | Bool[Array, "B T"],
    *,
    ref_logps: Float[Array, "B T"] | None = None,
    rollout_logps: Float[Array, "B T"] | None = None,
    entropy: Float[Array, "B T"] | None = None,
    entropy_threshold: Float[Array, ""] | float | None = None,
    denominator: Float[Array, ""] | float | None = None,
    options: LossOptions = LossOptions(),
) -> PolicyLoss:
    """`loss = Σ(−w·J + beta·KL − entropy_coef·H) / denominator` over active tokens; under "sequence_mean" Σ runs over
    sequences' means.

    J is the objective of `options.loss_type` (docs/losses.md), ρ = exp(logp − old); for the clipped losses

        J = min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A)

    w = min(exp(old − rollout), importance_cap) is the importance weight of a token, a constant; without `rollout_logps`
    it is 1. The other options named importance_… change it. H is the `entropy` of a token.

    With `options.log_ratio_bound` b, the log-ratios of ρ, w and KL are clamped to [−b, b]. The loss is then finite even
    where a probability is 0 (but for cispo and vespo, whose J is a multiple of logp), and a token on which b does not
    bind keeps the bits of its gradient.

    With `entropy_threshold`, J and H of a token whose entropy is below it count as 0; KL and denominator are those of
    all tokens. `rlk_jax.grpo.entropy_threshold` computes it for a share of the batch's tokens.

    `denominator` replaces `loss_denominator(completion_mask, options=options)`. With the sum of that over all
    micro-batches or ranks, losses and gradients of the parts add up to the whole batch's. With 1, `loss` is the plain
    sum, to be divided later by the sum of the parts' `denominator`s. 0 counts as 1; a traced one below 0 gives NaN.

    All computing is fp32. Gradients go to `logp`, and to `entropy` where options.entropy_coef is above 0. At ρ = 1 and
    with ρ exactly on a bound of its range the gradient is that of the unclipped objective. A batch without active
    tokens, or without tokens, has loss 0 and zero gradients. Appended masked rows or columns change no bit of any
    output.

    Raises ValueError for options that are not `LossOptions`, shapes that differ, dtypes other than bf16, fp16 and fp32,
    a denominator or threshold below 0, beta > 0 without `ref_logps`, an entropy_coef or threshold without `entropy`,
    and one of `rollout_logps` and `options.importance_cap` without the other.
    """
    check_loss_options(options)
    tokens = _PerToken(logp, old_logps, ref_logps, rollout_logps, entropy)
    tokens, advantages, completion_mask = whole_on_every_device((tokens, advantages, completion_mask))
    has_reference = ref_logps is not None
    check_policy_loss(
        tokens._asdict(), completion_mask, denominator, entropy_threshold, options, has_reference=has_reference
    )
    check_entropy(entropy is not None, entropy_threshold, options.entropy_coef)
    check_advantages(advantages, completion_mask)
    return _policy_loss(tokens, advantages, active_mask(completion_mask), denominator, entropy_threshold, options)


class _PerToken(NamedTuple):
    """What a loss knows of each token, `[B, T]`; None for what it was not given."""

    logp: Array
    old_logps: Array
    ref_logps: Array | None
    rollout_logps: Array | None
    entropy: Array | None


@functools.partial(jax.jit, static_argnames="options")
def _policy_loss(
    tokens: _PerToken,
    advantages: Array,
    mask: Array,
    denominator: Array | None,
    threshold: Array | None,
    options: LossOptions,
) -> PolicyLoss:
    """`policy_loss` of arrays that have been checked."""
    logp, *constants, bonus = jax.tree.map(lambda x: active_values(x, mask), tokens)
    old_logps, ref_logps, rollout_logps, entropy = jax.lax.stop_gradient((*constants, bonus))
    advantages = expand_advantages(advantages, mask)

    # Policy and KL each read logp through a barrier, so that XLA fuses no product into the sum of their gradients.
    logp, logp_of_kl = jax.lax.optimization_barrier(logp), jax.lax.optimization_barrier(logp)
    log_ratio = log_ratio_of(logp, old_logps, options.log_ratio_bound)
    if options.loss_type in ("gspo", "luspo"):
        log_ratio = spread_to_tokens(sequence_means(log_ratio, mask), mask)
    log_ratio, is_beyond = bounded(log_ratio, options.log_ratio_bound)
    weights = is_cut = None
    if options.importance_cap is not None:
        weights, is_cut, is_weight_beyond = importance_weights(old_logps, rollout_logps, mask, options)
        is_beyond |= is_weight_beyond
    is_below = None if threshold is None else entropy < threshold
    is_dropped = _dropped(is_below, weights, options)
    lower, upper = _ratio_range(advantages, options)
    kept_logp = _zero_where(is_dropped, logp)
    if options.loss_type == "vespo":
        gamma = gamma_weights(log_ratio, weights, advantages, mask, options)
        objective = jax.lax.stop_gradient(gamma) * advantages * kept_logp
    else:
        ratio_of_objective = _cut_ratio(_zero_where(is_dropped, log_ratio), lower, upper)
        objective = _objective(kept_logp, ratio_of_objective, advantages, options)
        objective = objective if weights is None else objective * weights
    objective, bonus = _zero_where(is_dropped, objective), _zero_where(is_below, bonus)

    own_denominator = loss_denominator(mask, options=options)
    divisor = own_denominator if denominator is None else jax.lax.stop_gradient(jnp.asarray(denominator, jnp.float32))
    divisor = jnp.where(divisor < 0, jnp.nan, jnp.where(divisor == 0, 1.0, divisor))
    loss = policy = masked_sum(-objective, mask, options.normalised_by) / divisor
    kl = jnp.zeros((), jnp.float32)
    if ref_logps is not None:
        policy_logps, ref_logps, is_kl_beyond = bounded_operands(logp_of_kl, ref_logps, options.log_ratio_bound)
        is_beyond |= is_kl_beyond
        token_kl = _kl(policy_logps, ref_logps, log_ratio, options)
        kl = masked_sum(token_kl, mask, options.normalised_by) / divisor
    if options.beta:
        loss = policy + jax.lax.optimization_barrier(options.beta * kl)
    entropy_bonus = None
    if options.entropy_coef:
        entropy_bonus = masked_sum(bonus, mask, options.normalised_by) / divisor
        loss -= jax.lax.optimization_barrier(options.entropy_coef * entropy_bonus)

    ratio = blockwise_exp(log_ratio)
    below, above = (advantages != 0) & (ratio < lower), (advantages != 0) & (ratio > upper)
    dual = above & (advantages < 0) & (options.dual_clip is not None)

    averaged = {
        "clip_fraction": below | above,
        "clip_fraction_low": below,
        "clip_fraction_high": above & ~dual,
        "clip_fraction_dual": dual,
        "ratio_mean": ratio,
        "entropy": entropy,
        "importance_weight_mean": weights,
        "importance_capped_fraction": is_cut,
        "log_ratio_bounded_fraction": None if options.log_ratio_bound is None else is_beyond,
    }
    metrics = PolicyLoss(
        loss=loss,
        policy_loss=policy,
        kl=kl,
        entropy_bonus=entropy_bonus,
        denominator=own_denominator,
        ratio_min=jnp.where(mask.any(), jnp.min(ratio, where=mask, initial=jnp.inf), 0.0),
        ratio_max=jnp.max(ratio, where=mask, initial=0.0),
        **masked_means(averaged, mask),
    )
    return jax.lax.stop_gradient(metrics)._replace(loss=loss)


def _ratio_range(advantages: Array, options: LossOptions) -> tuple[Array | float, Array | float]:
    """The lowest and the highest ratio at which the objective still depends on the ratio."""
    if options.loss_type == "cispo":
        return 0.0, options.cispo_ratio_cap
    if options.loss_type in ("sapo", "vespo"):
        return 0.0, float(np.finfo(np.float32).max)  # an infinite ratio would make sapo's flat gate's gradient NaN
    negative = advantages < 0
    dual_clip = jnp.inf if options.dual_clip is None else options.dual_clip
    return jnp.where(negative, 1.0 - options.clip_eps, 0.0), jnp.where(negative, dual_clip, options.upper_clip)


def _cut_ratio(log_ratio: Array, lower: Array | float, upper: Array | float) -> Array:
    """exp(log_ratio) cut to [lower, upper]. Its gradient is exp's between and on the bounds, and 0 beyond them."""
    ratio = jax.lax.stop_gradient(blockwise_exp(log_ratio))
    beyond = (ratio < lower) | (ratio > upper)
    # A cut token's own log-ratio may overflow, and 0 · inf would be NaN: the exp under the gradient takes 0 there.
    return jnp.where(beyond, jnp.clip(ratio, lower, upper), blockwise_exp(jnp.where(beyond, 0.0, log_ratio)))


def _kl(logp: Array, ref_logps: Array, log_ratio: Array, options: LossOptions) -> Array:
    """The estimate of the KL of each token."""
    if options.kl_estimator == "ratio_k3":
        return _ratio_k3(logp, ref_logps, log_ratio)
    return KL_ESTIMATORS[options.kl_estimator](logp, ref_logps)


def _ratio_k3(logp: Array, ref_logps: Array, log_ratio: Array) -> Array:
    """exp(log_ratio)·k3. A token far below its reference has a ratio near 0 and a k3 near infinity: their product is
    taken in the exponent.
    """
    difference = ref_logps - logp
    is_far = (difference > _FAR) & (difference < jnp.inf)
    near = blockwise_exp(log_ratio) * k3_kl(jnp.where(is_far, ref_logps, logp), ref_logps)
    distance, log_ratio = jnp.where(is_far, difference, 0.0), jnp.where(is_far, log_ratio, 0.0)
    far = blockwise_exp(log_ratio + distance) - blockwise_exp(log_ratio) * (1.0 + distance)
    return jnp.where(is_far, far, near)


def _zero_where(condition: Array | None, x: Array) -> Array:
    """x with 0 where the condition holds; x itself without a condition."""
    return x if condition is None else jnp.where(condition, 0.0, x)


def _dropped(is_below: Array | None, weights: Array | None, options: LossOptions) -> Array | None:
    """Where a token's objective counts as 0 whatever it is, infinite or not; None where that cannot be."""
    is_masked = weights == 0 if weights is not None and options.importance_beyond == "mask" else None
    if options.loss_type == "vespo" or is_masked is None:
        return is_below
    return is_masked if is_below is None else is_below | is_masked


def _objective(logp: Array, ratio: Array, advantages: Array, options: LossOptions) -> Array:
    """What the loss maximises at each token, as a function of the ratio cut to `_ratio_range`."""
    if options.loss_type == "cispo":
        return jax.lax.stop_gradient(ratio) * advantages * logp
    if options.loss_type == "sapo":
        temperature = jnp.where(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
        return 4.0 / temperature * jax.nn.sigmoid(temperature * (ratio - 1.0)) * advantages
    return ratio * advantages
