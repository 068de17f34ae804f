"""The GRPO family of losses on per-token log-probs: pure functions, arrays in and arrays out.

Shapes: B sequences of T completion tokens; sequences of one prompt stand together. `completion_mask` is any array
whose non-zero tokens are the active ones; all others give and receive exactly 0, whatever they hold, NaN included.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Num

from rlk_jax import validation
from rlk_jax._shard import explicit_spec
from rlk_jax._tree import pairwise_spread, pairwise_sum

LossType = Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo"]
Normaliser = Literal["tokens", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
Std = Literal["population", "sample", "none"]

_NORMALISERS: dict[LossType, Normaliser] = {
    "dapo": "tokens",
    "grpo": "sequence_mean",
    "dr_grpo": "constant",
    "bnpo": "tokens",
    "gspo": "sequence_mean",
    "cispo": "tokens",
    "sapo": "sequence_mean",
}

_CLIPPED: tuple[LossType, ...] = ("dapo", "grpo", "dr_grpo", "bnpo", "gspo")
_USED_BY: dict[str, tuple[LossType, ...]] = {
    "clip_eps": _CLIPPED,
    "clip_eps_high": _CLIPPED,
    "dual_clip": _CLIPPED,
    "cispo_ratio_cap": ("cispo",),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
}
"""The loss types of those options that not all have."""


@dataclass(frozen=True)
class LossOptions:
    """Which loss `policy_loss` computes; docs/losses.md has the formulas and other libraries' names.

    Attributes:
      loss_type: the objective of a token, and the normaliser when `normaliser` is None.
      clip_eps, clip_eps_high: the clip range [1 − clip_eps, 1 + clip_eps_high]; None is clip_eps above, too.
      dual_clip: where the advantage is negative, the ratio counts as at most this; None for no bound.
      cispo_ratio_cap: the largest ratio by which cispo weighs a token, itself and not over 1.
      sapo_temperature_pos, sapo_temperature_neg: of sapo's gate, for positive advantages and for all others.
      beta: weight of the KL to the reference; above 0 it requires `ref_logps`.
      kl_estimator: of that KL, `k1_kl`, `k2_kl` or `k3_kl`.
      importance_cap: truncates the weights exp(old − rollout); given together with `rollout_logps`.
      normaliser: "tokens" (mean over active tokens of the batch), "sequence_mean" (mean over sequences of their mean
        over tokens) or "constant" (sum over tokens / (sequences · max_completion_length)).
      max_completion_length: of the "constant" normaliser.

    Raises ValueError for a value that cannot work, and for one other than its default that the loss type does not use.
    """

    loss_type: LossType = "dapo"
    clip_eps: float = 0.2
    clip_eps_high: float | None = None
    dual_clip: float | None = None
    cispo_ratio_cap: float = 5.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    beta: float = 0.0
    kl_estimator: KlEstimator = "k3"
    importance_cap: float | None = None
    normaliser: Normaliser | None = None
    max_completion_length: int | None = None

    def __post_init__(self) -> None:
        validation.one_of("loss_type", self.loss_type, get_args(LossType))
        validation.one_of("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        validation.one_of("normaliser", self.normaliser, (None, *get_args(Normaliser)))
        for name in ("clip_eps", "clip_eps_high", "beta"):
            if (value := getattr(self, name)) is not None:
                validation.not_negative(name, value)
        for name in ("dual_clip", "cispo_ratio_cap", "sapo_temperature_pos", "sapo_temperature_neg", "importance_cap"):
            if (value := getattr(self, name)) is not None:
                validation.positive(name, value)
        for name, users in _USED_BY.items():
            if self.loss_type not in users:
                validation.unused_option(self.loss_type, name, getattr(self, name), getattr(LossOptions, name))
        validation.dual_clip(self.dual_clip, self.upper_clip)
        validation.constant_length(self.normalised_by, self.max_completion_length)

    @property
    def upper_clip(self) -> float:
        """The end of the clip range."""
        return 1.0 + (self.clip_eps if self.clip_eps_high is None else self.clip_eps_high)

    @property
    def normalised_by(self) -> Normaliser:
        """The normaliser in force."""
        return self.normaliser or _NORMALISERS[self.loss_type]


class PolicyLoss(NamedTuple):
    """What `policy_loss` returns: fp32 scalars, of which only `loss` carries gradients.

    Ratios are those that the loss is made of: one per token, and for gspo its sequence's. Fractions, means and extremes
    are over active tokens, and 0 where there are none.
    """

    loss: Float[Array, ""]
    """policy_loss + beta · kl."""
    policy_loss: Float[Array, ""]
    kl: Float[Array, ""]
    """Normalised as the loss is; 0 without ref_logps."""
    denominator: Float[Array, ""]
    """`loss_denominator` of these arrays, whatever the loss was divided by."""
    clip_fraction: Float[Array, ""]
    """Of tokens at which the objective is cut, by any of the three bounds below."""
    clip_fraction_low: Float[Array, ""]
    clip_fraction_high: Float[Array, ""]
    clip_fraction_dual: Float[Array, ""]
    ratio_mean: Float[Array, ""]
    ratio_min: Float[Array, ""]
    ratio_max: Float[Array, ""]
    entropy: Float[Array, ""] | None
    """Mean; None without entropy."""
    importance_weight_mean: Float[Array, ""] | None
    """None without rollout_logps."""
    importance_capped_fraction: Float[Array, ""] | None


def group_advantages(
    rewards: Num[Array, "B"],
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Any = None,
    eps: float = 1e-6,
    std: Std = "population",
) -> Float[Array, "B"]:
    """Rewards normalised within each prompt's group, fp32 without gradient.

    Groups stand together: all of `samples_per_prompt` sequences, or the g-th from `group_boundaries[g]` up to
    `group_boundaries[g + 1]`, which are static integers.

    | std | A_i, c_i = r_i − mean of the group |
    | --- | --- |
    | "population" | c_i / max(σ, eps), σ² = mean of c² |
    | "sample" | c_i / (s + eps), s² = Σ c² / (size − 1); TRL's with eps=1e-4 |
    | "none" | c_i, as in Dr. GRPO |

    Rewards count as float32, and are taken relative to their group's first before anything is summed, so that a large
    common offset, as far as float32 tells rewards apart beside it, cancels exactly, and a group of equal rewards, or of
    one, has advantages of exactly 0.

    Raises ValueError for both or neither kind of group, groups that do not cover the batch, and boundaries that are
    traced.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    boundaries = validation.groups(rewards, samples_per_prompt, group_boundaries)
    validation.positive("eps", eps)
    validation.one_of("std", std, get_args(Std))
    if isinstance(rewards, np.ndarray | np.generic):
        # JAX would take 64 bits for 32, of which integers wrap.
        rewards = rewards.astype(np.float32)
    return advantages_of(_everywhere(rewards), groups_of(boundaries), eps, std=std)


class Groups(NamedTuple):
    """Where the groups of a batch stand: arrays, so that one program serves groups of other sizes."""

    rows: Any
    """`[groups, largest]`: the sequences of each, any behind them."""
    sizes: Any
    """`[groups, 1]`"""
    slots: Any
    """`[B]`: where in all of `rows` a sequence is."""


def groups_of(boundaries: tuple[int, ...], padded: Callable[[int], int] = lambda n: n) -> Groups:
    """Of the sequences from each boundary to the next, in arrays whose dimensions are `padded`: no bit of an advantage
    depends on that.
    """
    starts, sizes = np.array(boundaries[:-1], np.int32)[:, None], np.diff(boundaries)[:, None]
    count, largest = len(sizes), padded(int(sizes.max(initial=0)))
    places = np.arange(largest, dtype=np.int32)
    used = places < sizes
    slots = (np.arange(count, dtype=np.int32)[:, None] * largest + places)[used]
    more = ((0, padded(count) - count), (0, 0))
    return Groups(
        np.pad(np.where(used, starts + places, 0), more),
        np.pad(sizes.astype(np.int32), more, constant_values=1),
        np.pad(slots, (0, padded(len(slots)) - len(slots))),
    )


@functools.partial(jax.jit, static_argnames="std")
def advantages_of(rewards: Array, groups: Groups, eps: Array, *, std: Std = "population") -> Array:
    """`group_advantages` of groups that have been checked."""
    used = jnp.arange(groups.rows.shape[1]) < groups.sizes
    grouped = jax.lax.stop_gradient(rewards).astype(jnp.float32)[groups.rows]
    shifted = jnp.where(used, grouped - grouped[:, :1], 0.0)
    # XLA multiplies by the reciprocal of a constant that is the same for all groups, and divides by others.
    count, degrees = jax.lax.optimization_barrier(
        (groups.sizes.astype(jnp.float32), jnp.maximum(groups.sizes - 1, 1).astype(jnp.float32))
    )
    mean = pairwise_sum(shifted)[:, None] / count
    centred = jnp.where(used, shifted - mean, 0.0)
    squares = pairwise_sum(centred**2)[:, None]
    if std == "population":
        centred /= jnp.maximum(jnp.sqrt(squares / count), eps)
    elif std == "sample":
        centred /= jnp.sqrt(squares / degrees) + eps
    return centred.reshape(-1)[groups.slots]


def expand_advantages(
    advantages: Num[Array, "B"] | Num[Array, "B T"], completion_mask: Num[Array, "B T"] | Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """The advantage of every token, fp32 without gradient: its sequence's, or its own; exactly 0 where masked.

    Raises ValueError for a mask that is not [B, T], and advantages that are neither [B] nor [B, T].
    """
    validation.advantages(advantages, completion_mask)
    advantages = jnp.asarray(advantages)
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    return _active(jax.lax.stop_gradient(per_token), validation.active(completion_mask))


def k1_kl(logp: Float[Array, "*n"], ref_logps: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Estimate of KL(policy ‖ reference) per sampled token: `logp − ref`. Its gradient is 0 in expectation.

    Source: J. Schulman, "Approximating KL divergence" (2020), as the other two.
    """
    return logp - ref_logps


def k2_kl(logp: Float[Array, "*n"], ref_logps: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Estimate of KL(policy ‖ reference) per sampled token: `(logp − ref)² / 2`; its gradient is that of the KL."""
    return (logp - ref_logps) ** 2 / 2


def k3_kl(logp: Float[Array, "*n"], ref_logps: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Estimate of KL(policy ‖ reference) per sampled token: `exp(d) − 1 − d`, `d = ref − logp`; never negative.

    Source also: DeepSeekMath, arXiv 2402.03300, eq. 4.
    """
    finite, is_infinite = _k3_difference(logp, ref_logps)
    return jnp.where(is_infinite, jnp.inf, jnp.expm1(finite) - finite)


def k3_slope(logp: Array, ref_logps: Array) -> Array:
    """The derivative of `k3_kl` by logp, `1 − exp(d)`; 0 where the estimate is infinite."""
    finite, _ = _k3_difference(logp, ref_logps)
    return -jnp.expm1(finite)


def _k3_difference(logp: Array, ref_logps: Array) -> tuple[Array, Array]:
    """`ref − logp`, 0 in the place of ∞, and where that is: policies that agree differ by 0, even if both say −inf."""
    difference = jnp.where(ref_logps == logp, 0.0, ref_logps - logp)
    is_infinite = difference == jnp.inf
    return jnp.where(is_infinite, 0.0, difference), is_infinite


_KL_ESTIMATORS = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}


def masked_mean(values: Num[Array, "*lead B T"], mask: Num[Array, "B T"] | Bool[Array, "B T"]) -> Float[Array, "*lead"]:
    """`Σ of values where mask / max(count, 1)`: the mean over all active tokens of the batch, 0 when there are none.

    Appended masked rows or columns change none of its bits.
    """
    values, mask = _everywhere((values, validation.active(mask)))
    return _sum(values, mask, "tokens") / jnp.maximum(_count(mask, "tokens"), 1.0)


def check_options(options: object) -> None:
    """Raises ValueError for what are no options of a loss: a dictionary of them, or None."""
    if not isinstance(options, LossOptions):
        raise ValueError(f"options must be LossOptions, got {type(options).__name__}.")


def loss_denominator(
    completion_mask: Num[Array, "B T"] | Bool[Array, "B T"], *, options: LossOptions
) -> Float[Array, ""]:
    """What `policy_loss` divides its sum by: a count, exact up to 2²⁴ and then rounded to fp32.

    | normaliser | count |
    | --- | --- |
    | "tokens" | active tokens |
    | "sequence_mean" | sequences with an active token |
    | "constant" | sequences with an active token · max_completion_length |

    Counts of micro-batches, or of data-parallel ranks, add up to that of the whole batch.
    """
    check_options(options)
    validation.completion_mask(completion_mask)
    count = _count(validation.active(completion_mask), options.normalised_by)
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
    denominator: Float[Array, ""] | float | None = None,
    options: LossOptions = LossOptions(),
) -> PolicyLoss:
    """`loss = Σ(−w·J + beta·KL) / denominator` over active tokens; under "sequence_mean" Σ is of sequences' means.

    J is the objective of `options.loss_type` (docs/losses.md), ρ = exp(logp − old); for the clipped losses

        J = min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A)

    w = min(exp(old − rollout), importance_cap) is a constant, for every active token; 1 without `rollout_logps`.

    `denominator` replaces `loss_denominator(completion_mask, options=options)`. Give the sum of those over
    micro-batches or ranks, and the losses and gradients of the parts add up to the whole batch's. With 1, `loss` is the
    plain sum, to be divided later by the sum of the parts' `denominator`s. 0 counts as 1; a traced one below 0 is NaN.

    All computing is fp32. Gradients go to `logp` only; at ρ = 1 and with ρ exactly on a bound of its range the gradient
    is that of the unclipped objective. A batch with no active token, or none at all, has loss 0 and zero gradients.
    Appended masked rows or columns change no bit of any output.

    Raises ValueError for options that are none, shapes that differ, dtypes other than bf16, fp16 and fp32, beta > 0
    without `ref_logps`, and one of `rollout_logps` and `options.importance_cap` without the other.
    """
    check_options(options)
    tokens = _Tokens(logp, old_logps, ref_logps, rollout_logps, entropy)
    tokens, advantages, completion_mask = _everywhere((tokens, advantages, completion_mask))
    validation.policy_loss(
        tokens._asdict(), completion_mask, denominator, beta=options.beta, importance_cap=options.importance_cap
    )
    validation.advantages(advantages, completion_mask)
    return _policy_loss(tokens, advantages, validation.active(completion_mask), denominator, options)


class _Tokens(NamedTuple):
    """What there is for each token, `[B, T]`."""

    logp: Array
    old_logps: Array
    ref_logps: Array | None
    rollout_logps: Array | None
    entropy: Array | None


@functools.partial(jax.jit, static_argnames="options")
def _policy_loss(
    tokens: _Tokens, advantages: Array, mask: Array, denominator: Array | None, options: LossOptions
) -> PolicyLoss:
    logp, *constants = jax.tree.map(lambda x: _active(x, mask), tokens)
    old_logps, ref_logps, rollout_logps, entropy = jax.lax.stop_gradient(constants)
    advantages = expand_advantages(advantages, mask)

    # One logp each for policy and KL: behind barriers, no product of a gradient is fused into the sum of both.
    logp, logp_of_kl = jax.lax.optimization_barrier(logp), jax.lax.optimization_barrier(logp)
    log_ratio = logp - old_logps
    if options.loss_type == "gspo":
        log_ratio = _active(pairwise_spread(_sequence_means(log_ratio, mask), mask.shape[1]), mask)
    lower, upper = _ratio_range(advantages, options)
    objective = _objective(logp, _cut_ratio(log_ratio, lower, upper), advantages, options)
    weights = is_capped = None
    if options.importance_cap is not None:
        weights = exp(old_logps - rollout_logps)
        is_capped = weights > options.importance_cap
        weights = jnp.minimum(weights, options.importance_cap)
        objective *= weights

    own_denominator = loss_denominator(mask, options=options)
    divisor = own_denominator if denominator is None else jax.lax.stop_gradient(jnp.asarray(denominator, jnp.float32))
    divisor = jnp.where(divisor < 0, jnp.nan, jnp.where(divisor == 0, 1.0, divisor))
    loss = policy = _sum(-objective, mask, options.normalised_by) / divisor
    kl = jnp.zeros((), jnp.float32)
    if ref_logps is not None:
        kl = _sum(_KL_ESTIMATORS[options.kl_estimator](logp_of_kl, ref_logps), mask, options.normalised_by) / divisor
    if options.beta:
        loss = policy + jax.lax.optimization_barrier(options.beta * kl)

    ratio = exp(log_ratio)
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
        "importance_capped_fraction": is_capped,
    }
    metrics = PolicyLoss(
        loss=loss,
        policy_loss=policy,
        kl=kl,
        denominator=own_denominator,
        ratio_min=jnp.where(mask.any(), jnp.min(ratio, where=mask, initial=jnp.inf), 0.0),
        ratio_max=jnp.max(ratio, where=mask, initial=0.0),
        **_masked_means(averaged, mask),
    )
    return jax.lax.stop_gradient(metrics)._replace(loss=loss)


def exp(x: Array) -> Array:
    """exp with the same bits in arrays of every shape: XLA's of a whole vector may differ from that of what is over."""
    blocks = jnp.pad(x.reshape(-1), (0, -x.size % 128)).reshape(-1, 128)
    found = jax.lax.optimization_barrier(jnp.exp(jax.lax.optimization_barrier(blocks)))
    return found.reshape(-1)[: x.size].reshape(x.shape)


def _everywhere[Tree](tree: Tree) -> Tree:
    """The same numbers on every device, where they are cut over Explicit mesh axes: sums have one order, and JAX would
    not choose how they go on.
    """
    return jax.tree.map(lambda x: x if explicit_spec(x) is None else jax.sharding.reshard(x, PartitionSpec()), tree)


def _active(x: Array, mask: Array) -> Array:
    """In fp32, exactly 0 where masked: before any exp, for a NaN would come back through a later `where` as 0 · NaN."""
    return jnp.where(mask, x.astype(jnp.float32), 0.0)


def _masked_means(values: dict[str, Array | None], mask: Array) -> dict[str, Any]:
    """`masked_mean` of all that are there, to the bit, in the few kernels of one."""
    there = {name: x.astype(jnp.float32) for name, x in values.items() if x is not None}
    means = masked_mean(jnp.stack(list(there.values())), mask)
    return dict.fromkeys(values) | dict(zip(there, means, strict=True))


def _sequence_means(values: Array, mask: Array) -> Array:
    """Of each sequence over its active tokens, 0 for one that has none; `[B]`."""
    counts = jnp.sum(mask, axis=1, dtype=jnp.int32).astype(jnp.float32)
    return pairwise_sum(_active(values, mask)) / jnp.maximum(counts, 1.0)


def _sum(values: Array, mask: Array, normaliser: Normaliser) -> Array:
    """What a normaliser divides, summed over tokens and then over sequences in a fixed order."""
    if normaliser == "sequence_mean":
        return pairwise_sum(_sequence_means(values, mask))
    return pairwise_sum(pairwise_sum(_active(values, mask)))


def _count(mask: Array, normaliser: Normaliser) -> Array:
    counted = mask if normaliser == "tokens" else mask.any(axis=1)
    return jnp.sum(counted, dtype=jnp.int32).astype(jnp.float32)


def _ratio_range(advantages: Array, options: LossOptions) -> tuple[Array | float, Array | float]:
    """The ratios between which the objective still follows the ratio."""
    if options.loss_type == "cispo":
        return 0.0, options.cispo_ratio_cap
    if options.loss_type == "sapo":
        return 0.0, float(np.finfo(np.float32).max)  # an infinite ratio would make its flat gate's gradient NaN
    negative = advantages < 0
    dual_clip = jnp.inf if options.dual_clip is None else options.dual_clip
    return jnp.where(negative, 1.0 - options.clip_eps, 0.0), jnp.where(negative, dual_clip, options.upper_clip)


def _cut_ratio(log_ratio: Array, lower: Array | float, upper: Array | float) -> Array:
    """exp(log_ratio) cut to [lower, upper]. Its gradient is exp's inside and on the bounds, and 0 beyond."""
    ratio = jax.lax.stop_gradient(exp(log_ratio))
    beyond = (ratio < lower) | (ratio > upper)
    # The exp under the gradient takes 0 for a cut token, whose own may overflow: 0 · inf.
    return jnp.where(beyond, jnp.clip(ratio, lower, upper), exp(jnp.where(beyond, 0.0, log_ratio)))


def _objective(logp: Array, ratio: Array, advantages: Array, options: LossOptions) -> Array:
    """What a token wants to maximise, of the ratio cut to `_ratio_range`."""
    if options.loss_type == "cispo":
        return jax.lax.stop_gradient(ratio) * advantages * logp
    if options.loss_type == "sapo":
        temperature = jnp.where(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
        return 4.0 / temperature * jax.nn.sigmoid(temperature * (ratio - 1.0)) * advantages
    return ratio * advantages
