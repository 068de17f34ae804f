"""The GRPO losses against independent float64 definitions, and what they promise beyond them."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlk_jax.grpo import (
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
from tests.support import helpers

DEFAULT_NORMALISERS = {
    "dapo": "tokens",
    "grpo": "sequence_mean",
    "dr_grpo": "constant",
    "bnpo": "tokens",
    "gspo": "sequence_mean",
    "luspo": "sequence_sum",
    "cispo": "tokens",
    "sapo": "sequence_mean",
    "vespo": "tokens",
}
CLIPPED = ("dapo", "grpo", "dr_grpo", "bnpo", "gspo", "luspo")
CLIPS = {
    "symmetric": {"clip_eps": 0.2},
    "asymmetric": {"clip_eps": 0.1, "clip_eps_high": 0.28},
    "dual": {"clip_eps": 0.2, "clip_eps_high": 0.3, "dual_clip": 1.6},
}


def options_of(loss_type: str, **changes: Any) -> LossOptions:
    """Options of a loss type, with what it cannot do without."""
    normaliser = changes.get("normaliser") or DEFAULT_NORMALISERS[loss_type]
    length = 16 if normaliser == "constant" else None
    if loss_type == "cispo":
        changes["cispo_ratio_cap"] = 1.3
    return LossOptions(loss_type=loss_type, max_completion_length=length, **changes)


class Tokens(NamedTuple):
    logp: Any
    old: Any
    advantages: Any
    mask: Any
    ref: Any
    rollout: Any
    entropy: Any

    def call(self, options: LossOptions, denominator: Any = None, **changes: Any) -> PolicyLoss:
        tokens = self._replace(**changes)
        return policy_loss(
            *tokens[:4],
            ref_logps=tokens.ref,
            rollout_logps=None if options.importance_cap is None else tokens.rollout,
            entropy=tokens.entropy,
            denominator=denominator,
            options=options,
        )

    def value_and_grad(self, options: LossOptions, denominator: Any = None) -> tuple[PolicyLoss, jax.Array]:
        return _value_and_grad(self.logp, self, denominator, options)

    def rows(self, rows: Any) -> "Tokens":
        return Tokens(*(x[rows] for x in self))

    def padded(self, rows: int, columns: int, fill: float) -> "Tokens":
        def pad(x: np.ndarray, value: Any) -> np.ndarray:
            return np.pad(x, [(0, rows), (0, columns)][: x.ndim], constant_values=value)

        return Tokens(*(pad(x, x.dtype.type(0 if x is self.mask else fill)) for x in self))


def value_and_grad(logp: Any, tokens: Tokens, denominator: Any, options: LossOptions) -> tuple[PolicyLoss, jax.Array]:
    def loss(logp: jax.Array) -> tuple[jax.Array, PolicyLoss]:
        value = tokens.call(options, denominator, logp=logp)
        return value.loss, value

    (_, value), gradient = jax.value_and_grad(loss, has_aux=True)(logp)
    return value, gradient


_value_and_grad = jax.jit(value_and_grad, static_argnames="options")


def make_tokens(seed: int = 0, batch: int = 6, length: int = 5) -> Tokens:
    """Log-probs whose ratios fall on both sides of every clip; the second sequence has no active token."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(batch, length))
    logp, ref, rollout = (old + rng.normal(scale=0.5, size=old.shape) for _ in range(3))
    mask = rng.random(old.shape) < 0.8
    mask[1:2] = False
    advantages = rng.normal(size=batch)
    floats = (logp, old, advantages, ref, rollout, rng.exponential(size=old.shape))
    logp, old, advantages, ref, rollout, entropy = (x.astype(np.float32) for x in floats)
    return Tokens(logp, old, advantages, mask, ref, rollout, entropy)


def one_sign(tokens: Tokens) -> Tokens:
    """Terms that do not cancel: the relative error of their sum is then that of the sum, and not of the batch."""
    return tokens._replace(advantages=-np.abs(tokens.advantages))


def gold_objective(ratio: float, logp: float, a: float, gamma: float, o: LossOptions):
    """(J, dJ/d ratio, dJ/d logp at a fixed ratio, which bound cuts it)."""
    if o.loss_type == "vespo":
        return gamma * a * logp, 0.0, gamma * a, None
    if o.loss_type == "cispo":
        cap = o.cispo_ratio_cap
        return min(ratio, cap) * a * logp, 0.0, min(ratio, cap) * a, "high" if ratio > cap else None
    if o.loss_type == "sapo":
        tau = o.sapo_temperature_pos if a > 0 else o.sapo_temperature_neg
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
        return 4 / tau * gate * a, 4 * gate * (1 - gate) * a, 0.0, None
    low, high = 1 - o.clip_eps, 1 + (o.clip_eps if o.clip_eps_high is None else o.clip_eps_high)
    plain, limited = ratio * a, min(max(ratio, low), high) * a
    j, cut = (plain, None) if plain <= limited else (limited, "low" if ratio < low else "high")
    if o.dual_clip is not None and a < 0 and j < o.dual_clip * a:
        j, cut = o.dual_clip * a, "dual"
    return j, 0.0 if cut else a, 0.0, cut


def gold_gamma(log_w: float, a: float, o: LossOptions) -> float:
    """VESPO's weight of a sequence, whose ratio counts as at least 1e-8 and at most exp 20."""
    log_w = np.clip(log_w, np.log(1e-8), 20)
    k, scale = (o.vespo_k_pos, o.vespo_lambda_pos) if a >= 0 else (o.vespo_k_neg, o.vespo_lambda_neg)
    return np.exp(scale + k * log_w - scale * np.exp(log_w))


def gold_loss(tokens: Tokens, o: LossOptions, threshold: float | None = None):
    """All outputs, and the gradients of loss by logp and entropy by hand, one token at a time, in float64."""
    limit = np.inf if o.log_ratio_bound is None else o.log_ratio_bound
    x, old, r, roll, h = (
        np.asarray(v, np.float64) for v in (tokens.logp, tokens.old, tokens.ref, tokens.rollout, tokens.entropy)
    )
    mask = np.asarray(tokens.mask)
    advantages = np.asarray(tokens.advantages, np.float64)
    normaliser = o.normaliser or DEFAULT_NORMALISERS[o.loss_type]
    lengths, sequences = mask.sum(axis=1), int(mask.any(axis=1).sum())
    denominator = {
        "tokens": mask.sum(),
        "sequence_mean": sequences,
        "sequence_sum": sequences,
        "constant": sequences * 16,
    }[normaliser]
    whole_sequence = o.loss_type in ("gspo", "luspo")
    log_weights = (old - roll) * mask
    if o.importance_level == "sequence":
        log_weights = np.broadcast_to(log_weights.sum(axis=1, keepdims=True), mask.shape)
    weights = np.exp(np.clip(log_weights, -limit, limit)) if o.importance_cap is not None else np.ones(mask.shape)
    cap, floor = o.importance_cap or np.inf, o.importance_floor or 0.0
    is_cut = (weights > cap) | (weights < floor)
    weights = np.where(is_cut, 0 if o.importance_beyond == "mask" else np.clip(weights, floor, cap), weights)

    policy = kl_sum = bonus = 0.0
    gradient, entropy_gradient, ratios, cuts, beyond = np.zeros(x.shape), np.zeros(x.shape), [], [], []
    for b, t in zip(*np.nonzero(mask), strict=True):
        share = 1 / denominator / (lengths[b] if normaliser == "sequence_mean" else 1)
        a = advantages[b] if advantages.ndim == 1 else advantages[b, t]
        here = mask[b] if whole_sequence else np.arange(x.shape[1]) == t
        log_ratio = np.mean((x - old)[b, here])
        by_log_ratio = abs(log_ratio) <= limit
        ratio = np.exp(np.clip(log_ratio, -limit, limit))
        of_sequence = np.clip((x - old)[b], -limit, limit) + np.log(np.maximum(weights[b], 1e-8))
        gamma = gold_gamma(of_sequence[mask[b]].sum(), a, o)
        j, by_ratio, by_logp, cut = gold_objective(ratio, x[b, t], a, gamma, o)
        counts = threshold is None or h[b, t] >= threshold
        factor = share * counts * (1.0 if o.loss_type == "vespo" else weights[b, t])
        policy -= factor * j
        gradient[b, here] -= factor * by_ratio * by_log_ratio * ratio / here.sum()
        gradient[b, t] -= factor * by_logp
        difference = r[b, t] - x[b, t]
        d = np.clip(difference, -limit, limit)
        k3 = np.exp(d) - 1 - d
        value, slope, by_kl_ratio = {
            "k1": (-d, 1.0, 0.0),
            "k2": (d * d / 2, -d, 0.0),
            "k3": (k3, 1 - np.exp(d), 0.0),
            "ratio_k3": (ratio * k3, ratio * (1 - np.exp(d)), ratio * k3),
        }[o.kl_estimator]
        kl_sum += share * value
        gradient[b, t] += share * o.beta * slope * (abs(difference) <= limit)
        gradient[b, here] += share * o.beta * by_kl_ratio * by_log_ratio / here.sum()
        bonus += share * counts * h[b, t]
        entropy_gradient[b, t] -= share * counts * o.entropy_coef
        ratios.append(ratio), cuts.append(cut)
        is_weighted = o.importance_cap is not None
        beyond.append(max(abs(log_ratio), abs(difference), abs(log_weights[b, t]) * is_weighted) > limit)
    fraction = {name: np.mean([cut == name for cut in cuts]) for name in ("low", "high", "dual")}
    return (
        PolicyLoss(
            loss=policy + o.beta * kl_sum - o.entropy_coef * bonus,
            policy_loss=policy,
            kl=kl_sum,
            denominator=denominator,
            clip_fraction=sum(fraction.values()),
            clip_fraction_low=fraction["low"],
            clip_fraction_high=fraction["high"],
            clip_fraction_dual=fraction["dual"],
            ratio_mean=np.mean(ratios),
            ratio_min=np.min(ratios),
            ratio_max=np.max(ratios),
            entropy=np.mean(h[mask]),
            entropy_bonus=bonus if o.entropy_coef else None,
            importance_weight_mean=None if o.importance_cap is None else np.mean(weights[mask]),
            importance_capped_fraction=None if o.importance_cap is None else np.mean(is_cut[mask]),
            log_ratio_bounded_fraction=None if o.log_ratio_bound is None else np.mean(beyond),
        ),
        gradient,
        entropy_gradient,
    )


def assert_equals_gold(tokens: Tokens, options: LossOptions) -> None:
    value, gradient = tokens.value_and_grad(options)
    gold, gold_gradient, _ = gold_loss(tokens, options)
    assert jax.tree.structure(value) == jax.tree.structure(gold)
    for actual, expected in zip(jax.tree.leaves(value), jax.tree.leaves(gold), strict=True):
        chex.assert_type(actual, jnp.float32)
        helpers.assert_within_contract(actual, expected, "grpo_losses", jnp.float32, "forward")
    helpers.assert_within_contract(gradient, gold_gradient, "grpo_losses", jnp.float32, "gradient")


LOSSES = [
    *((name, clip) for name in CLIPPED for clip in CLIPS),
    *((name, "symmetric") for name in ("cispo", "sapo", "vespo")),
]


def is_in_make_test(loss_type, clip, kl):
    """Every loss, clip and KL once: the clipped losses differ in their normalisers, and gspo in its ratio.

    bnpo is not here: in `make test`, tests/losses/test_trl.py::test_loss_gradient_and_metrics_are_those_of_trl catches
    its bugs.
    """
    return (loss_type, clip, kl) in {
        *(("dapo", "symmetric", "k3"), ("gspo", "dual", "k3"), ("grpo", "dual", "k1")),
        *(("dr_grpo", "asymmetric", "k1"), ("cispo", "symmetric", "k3"), ("sapo", "symmetric", "k2")),
        *(("luspo", "dual", "ratio_k3"), ("vespo", "symmetric", "ratio_k3")),
    }


# `is_in_make_test` says what these are enough for.
@helpers.cover(
    "loss_type, clip, kl", [(*loss, kl) for loss in LOSSES for kl in ("k1", "k2", "k3", "ratio_k3")], is_in_make_test
)
def test_loss_gradient_and_metrics_equal_the_definition(loss_type, clip, kl):
    changes = CLIPS[clip] if loss_type in CLIPPED else {}
    options = options_of(loss_type, beta=0.3, kl_estimator=kl, importance_cap=1.2, **changes)
    assert_equals_gold(make_tokens(), options)


# Each normaliser with an objective whose own it is not. dapo with "constant" is dr_grpo, and with "sequence_mean" grpo:
# in `make test`, test_loss_gradient_and_metrics_equal_the_definition has both.
@helpers.cover(
    "loss_type, normaliser",
    itertools.product(["dapo", "gspo", "cispo"], ["tokens", "sequence_mean", "constant"]),
    lambda *x: x in (("gspo", "tokens"), ("cispo", "sequence_mean")),
)
def test_every_normaliser_goes_with_every_objective(loss_type, normaliser):
    options = options_of(loss_type, normaliser=normaliser)
    assert_equals_gold(one_sign(make_tokens(1)), options)


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_advantages_may_differ_from_token_to_token(loss_type):
    tokens = make_tokens(2)
    advantages = np.random.default_rng(3).normal(size=tokens.mask.shape).astype(np.float32)
    options = options_of(loss_type, **CLIPS["dual"])
    assert_equals_gold(tokens._replace(advantages=advantages), options)


WEIGHTS = [
    {"importance_floor": 0.8},
    {"importance_beyond": "mask", "importance_floor": 0.8},
    {"importance_level": "sequence"},
    {"importance_level": "sequence", "importance_beyond": "mask", "importance_floor": 0.5},
]


# A weight is a factor of any J, but for vespo's. In `make test`, each option is there once, and both levels.
@helpers.cover(
    "loss_type, weights",
    [(name, i) for name in ("dapo", "gspo", "vespo") for i in range(len(WEIGHTS)) if name != "vespo" or i < 2],
    lambda name, i: (name, i) in (("dapo", 3), ("gspo", 0), ("vespo", 1)),
)
def test_importance_weights_of_tokens_and_sequences_cut_or_masked(loss_type, weights):
    options = options_of(loss_type, importance_cap=1.2, **WEIGHTS[weights])
    tokens = one_sign(make_tokens(4))
    assert_equals_gold(tokens, options)
    value, *_ = gold_loss(tokens, options)
    assert 0 < value.importance_capped_fraction < 1


@pytest.mark.parametrize("share", [None, 0.3])
def test_an_entropy_bonus_is_differentiated_and_may_be_that_of_the_top_share(share):
    tokens, options = make_tokens(), options_of("gspo", beta=0.3, entropy_coef=0.05)
    threshold = None if share is None else entropy_threshold(tokens.entropy, tokens.mask, top_share=share)

    def loss(logp: Any, entropy: Any) -> tuple[Any, PolicyLoss]:
        value = policy_loss(
            logp, *tokens[1:4], ref_logps=tokens.ref, entropy=entropy, entropy_threshold=threshold, options=options
        )
        return value.loss, value

    (_, value), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(tokens.logp, tokens.entropy)
    gold, *gold_gradients = gold_loss(tokens, options, threshold)
    for actual, expected in zip(jax.tree.leaves(value), jax.tree.leaves(gold), strict=True):
        helpers.assert_within_contract(actual, expected, "grpo_losses", jnp.float32, "forward")
    for actual, expected in zip(gradients, gold_gradients, strict=True):
        helpers.assert_within_contract(actual, expected, "grpo_losses", jnp.float32, "gradient")
    counted = np.asarray(gradients[1]) != 0
    assert np.all(counted == (tokens.mask if share is None else tokens.mask & (tokens.entropy >= threshold)))


def test_the_metric_entropy_has_no_gradient():
    """It is easy to trust: a loss that subtracts it learns nothing from it."""
    tokens = make_tokens()
    gradient = jax.grad(lambda h: tokens.call(options_of("dapo", beta=0.3), entropy=h).entropy)(tokens.entropy)
    assert not np.any(gradient)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_the_threshold_is_the_quantile_of_the_active_tokens(seed, share):
    tokens = make_tokens(seed)
    active = tokens.entropy[tokens.mask]
    found = entropy_threshold(tokens.entropy, tokens.mask, top_share=share)
    expected = np.quantile(active.astype(np.float64), 1 - share)
    helpers.assert_within_contract(found, expected, "grpo_losses", jnp.float32, "forward")
    padded = tokens.padded(3, 2, np.nan)
    helpers.assert_same_bits(entropy_threshold(padded.entropy, padded.mask, top_share=share), found)


@pytest.mark.parametrize("low", [-90.0, -120.0])
def test_k3_under_a_ratio_is_finite_where_k3_alone_is_not(low):
    tokens = one_sign(make_tokens())
    row, column = np.argwhere(tokens.mask)[0]
    tokens.logp[row, column] = low
    options = options_of("dapo", beta=0.3, kl_estimator="ratio_k3")
    value, gradient = tokens.value_and_grad(options)
    gold, gold_gradient, _ = gold_loss(tokens, options)
    for actual, expected in ((value.loss, gold.loss), (value.kl, gold.kl)):
        helpers.assert_within_contract(actual, expected, "grpo_losses", jnp.float32, "forward")
    helpers.assert_within_contract(gradient, gold_gradient, "grpo_losses", jnp.float32, "gradient")


@pytest.mark.parametrize("dropped_by", ["mask", "threshold"])
def test_a_dropped_token_poisons_nothing(dropped_by):
    """Its ratio overflows, and its advantage is negative; the other tokens keep their gradients."""
    tokens = one_sign(make_tokens())
    row, column = np.argwhere(tokens.mask)[0]
    tokens.old[row, column], tokens.entropy[row, column] = -120.0, 0.0
    options = options_of(
        "dapo", **({"importance_cap": 1.2, "importance_beyond": "mask"} if dropped_by == "mask" else {})
    )
    threshold = 1e-6 if dropped_by == "threshold" else None

    def loss(logp: Any) -> Any:
        rollout = None if options.importance_cap is None else tokens.rollout
        given = {"entropy": tokens.entropy, "entropy_threshold": threshold, "rollout_logps": rollout}
        return policy_loss(logp, *tokens[1:4], **given, options=options).loss

    tokens.rollout[row, column] = -1.0  # a weight of exp(−119), far below no floor
    if dropped_by == "mask":
        options = dataclasses.replace(options, importance_floor=0.5)
    value, gradient = jax.value_and_grad(loss)(tokens.logp)
    gold, gold_gradient, _ = gold_loss(tokens, options, threshold)
    helpers.assert_within_contract(value, gold.loss, "grpo_losses", jnp.float32, "forward")
    helpers.assert_within_contract(gradient, gold_gradient, "grpo_losses", jnp.float32, "gradient")
    assert gradient[row, column] == 0


def test_a_token_that_was_impossible_twice_is_no_difference_under_a_bound():
    tokens = make_tokens()
    row, column = np.argwhere(tokens.mask)[0]
    tokens.logp[row, column] = tokens.old[row, column] = tokens.ref[row, column] = -np.inf
    value, gradient = tokens.value_and_grad(options_of("dapo", beta=0.3, log_ratio_bound=20.0))
    assert np.isfinite(value.loss) and np.isfinite(gradient).all() and gradient[row, column] == 0


def test_a_threshold_without_tokens_is_0_and_of_a_nan_is_nan():
    tokens = make_tokens()
    assert entropy_threshold(np.zeros((0, 4), np.float32), np.zeros((0, 4), bool), top_share=0.2) == 0
    assert entropy_threshold(np.zeros((3, 0), np.float32), np.zeros((3, 0), bool), top_share=0.2) == 0
    poisoned = np.where(np.arange(30).reshape(6, 5) == np.argmax(tokens.mask), np.nan, tokens.entropy)
    assert np.isnan(entropy_threshold(poisoned.astype(np.float32), tokens.mask, top_share=0.2))


def test_a_threshold_of_the_whole_batch_serves_its_parts():
    tokens, options = make_tokens(), options_of("dapo", beta=0.3, entropy_coef=0.05)
    threshold = entropy_threshold(tokens.entropy, tokens.mask, top_share=0.4)
    denominator = loss_denominator(tokens.mask, options=options)
    parts = [
        policy_loss(
            *part[:4],
            ref_logps=part.ref,
            entropy=part.entropy,
            entropy_threshold=threshold,
            denominator=denominator,
            options=options,
        ).loss
        for part in (tokens.rows(slice(0, 2)), tokens.rows(slice(2, 6)))
    ]
    gold, *_ = gold_loss(tokens, options, float(threshold))
    helpers.assert_within_contract(sum(parts), gold.loss, "grpo_losses", jnp.float32, "forward")
    nothing = np.zeros_like(tokens.mask)
    assert entropy_threshold(tokens.entropy, nothing, top_share=0.4) == 0


def test_an_entropy_that_does_not_fit_the_mask_raises():
    tokens = make_tokens()
    with pytest.raises(ValueError, match=r"entropy shape \(5,\) does not match completion_mask shape \(6, 5\)"):
        entropy_threshold(tokens.entropy[0], tokens.mask, top_share=0.2)
    with pytest.raises(ValueError, match="entropy must be bfloat16, float16 or float32, got int32"):
        entropy_threshold(tokens.entropy.astype(np.int32), tokens.mask, top_share=0.2)


@pytest.mark.parametrize("share", [0, -0.1, 1.5, float("nan")])
def test_a_share_that_is_none_raises(share):
    tokens = make_tokens()
    with pytest.raises(ValueError, match="top_share must be"):
        entropy_threshold(tokens.entropy, tokens.mask, top_share=share)


BOUND = 0.4
"""A bound of log-ratios that some tokens meet, and others do not."""


# sapo has the ratio of dapo, which is bounded before the two differ: in `make test`, the case of dapo catches its bugs.
@helpers.cover(
    "loss_type, kl",
    [("dapo", "k3"), ("gspo", "k2"), ("cispo", "k1"), ("sapo", "k3"), ("luspo", "ratio_k3"), ("vespo", "k3")],
    lambda name, kl: name != "sapo",
)
def test_a_bound_of_log_ratios_is_a_constant_beyond_it(loss_type, kl):
    options = options_of(loss_type, beta=0.3, kl_estimator=kl, importance_cap=1.2, log_ratio_bound=BOUND)
    assert_equals_gold(make_tokens(), options)


# The ratio of a loss and its KL are bounded apart from each other.
@helpers.cover(
    "bad, loss_type, kl",
    itertools.product([-120.0, -np.inf], ["dapo", "gspo", "sapo"], ["k1", "k2", "k3"]),
    lambda bad, *loss_and_kl: loss_and_kl in (("dapo", "k3"), ("gspo", "k1"), ("sapo", "k2")),
)
def test_one_impossible_token_ends_no_run_that_has_a_bound(loss_type, kl, bad):
    """Without a bound its KL, or its sequence's, is infinite; with one, the other tokens keep their bits.

    In `make test`, every loss and every KL is there once: a loss whose ratio is not bounded, or a KL that is not, is
    caught whatever it goes with.
    """
    shared = {"beta": 0.3, "kl_estimator": kl, "importance_cap": 1.2}  # Other tests have these programs.
    tokens, options = make_tokens(), options_of(loss_type, log_ratio_bound=20.0, **shared)
    row, column = np.argwhere(tokens.mask)[0]
    logp = tokens.logp.copy()
    logp[row, column] = bad
    value, gradient = tokens._replace(logp=logp).value_and_grad(options)
    assert all(np.isfinite(x) for x in jax.tree.leaves(value)) and np.isfinite(gradient).all()
    assert value.log_ratio_bounded_fraction > 0 and gradient[row, column] == 0
    unbounded = options_of(loss_type, **shared)
    others = np.arange(len(tokens.mask)) != row
    helpers.assert_same_bits(
        np.asarray(gradient)[others], np.asarray(tokens._replace(logp=logp).value_and_grad(unbounded)[1])[others]
    )


def test_a_bound_that_does_not_bind_changes_no_bit():
    for loss_type, kl in (("dapo", "k3"), ("gspo", "k1")):
        options = options_of(loss_type, beta=0.3, importance_cap=1.2, kl_estimator=kl)
        bounded = dataclasses.replace(options, log_ratio_bound=20.0)
        (value, gradient), (same, same_gradient) = (make_tokens().value_and_grad(x) for x in (options, bounded))
        assert same.log_ratio_bounded_fraction == 0
        helpers.assert_same_bits(same._replace(log_ratio_bounded_fraction=None), value)
        helpers.assert_same_bits(same_gradient, gradient)


def test_the_data_meets_every_bound():
    options = options_of("dapo", beta=0.3, importance_cap=1.2, **CLIPS["dual"])
    bounded, *_ = gold_loss(make_tokens(), dataclasses.replace(options, log_ratio_bound=BOUND))
    assert 0 < bounded.log_ratio_bounded_fraction < 1
    value, *_ = gold_loss(make_tokens(), options)
    assert min(value.clip_fraction_low, value.clip_fraction_high, value.clip_fraction_dual) > 0
    assert 0 < value.importance_capped_fraction < 1


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31))
def test_random_batches_equal_the_definition(seed):
    options = options_of("dapo", beta=0.3, importance_cap=1.2)
    tokens = make_tokens(seed)
    _, gradient = tokens.value_and_grad(options)
    _, gold, _ = gold_loss(tokens, options)
    helpers.assert_within_contract(gradient, gold, "grpo_losses", jnp.float32, "gradient")


# A token's own share is that of any loss with its normaliser. In `make test`,
# test_data_parallel_ranks_share_a_denominator has the shares of dapo.
@helpers.cover(
    "loss_type, normaliser",
    [*(("dapo", x) for x in ("tokens", "sequence_mean", "constant")), ("gspo", None)],
    lambda loss_type, normaliser: loss_type == "gspo",
)
def test_sums_and_denominators_of_unequal_micro_batches_give_the_whole_loss(loss_type, normaliser):
    """The parts have one shape, so that one program serves both, and unequal denominators."""
    tokens = one_sign(make_tokens(4, batch=8))
    options = options_of(loss_type, normaliser=normaliser, beta=0.3)
    parts = [tokens.rows(slice(4)), tokens.rows(slice(4, 8))]
    total = loss_denominator(tokens.mask, options=options)
    sums = [part.value_and_grad(options, np.float32(1)) for part in parts]
    assert sum(value.denominator for value, _ in sums) == total
    assert sums[0][0].denominator != sums[1][0].denominator
    shares = [part.value_and_grad(options, total) for part in parts]
    whole, gradient = tokens.value_and_grad(options)
    for found, divisor in ((sums, total), (shares, 1)):
        loss = sum(value.loss for value, _ in found) / divisor
        helpers.assert_within_contract(loss, whole.loss, "grpo_losses", jnp.float32, "forward")
        together = np.concatenate([gradient for _, gradient in found]) / divisor
        helpers.assert_within_contract(together, gradient, "grpo_losses", jnp.float32, "gradient")


def test_a_mean_of_micro_batch_means_is_another_loss():
    """What the denominators are for."""
    tokens = make_tokens(4, batch=8)
    means = [tokens.rows(rows).call(LossOptions()).loss for rows in (slice(4), slice(4, 8))]
    assert abs(sum(means) / 2 - tokens.call(LossOptions()).loss) > 0.01


def test_data_parallel_ranks_share_a_denominator():
    tokens = one_sign(make_tokens(5, batch=8))
    options = options_of("dapo", beta=0.3)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    def whole_loss(logp: jax.Array, tokens: Tokens) -> jax.Array:
        denominator = jax.lax.psum(loss_denominator(tokens.mask, options=options), "data")
        return jax.lax.psum(tokens.call(options, denominator, logp=logp).loss, "data")

    loss, gradient = jax.jit(jax.value_and_grad(whole_loss))(tokens.logp, tokens)
    expected, expected_gradient = tokens.value_and_grad(options)
    helpers.assert_within_contract(loss, expected.loss, "grpo_losses", jnp.float32, "forward")
    helpers.assert_within_contract(gradient, expected_gradient, "grpo_losses", jnp.float32, "gradient")


def test_vmap_is_one_loss_for_each_element():
    tokens, options = [one_sign(make_tokens(seed)) for seed in (0, 1)], options_of("gspo", beta=0.3)
    together = jax.vmap(lambda t: t.call(options))(jax.tree.map(lambda *x: np.stack(x), *tokens))
    for i, alone in enumerate(tokens):
        for actual, expected in zip(together, alone.call(options), strict=True):
            if expected is not None:
                helpers.assert_within_contract(actual[i], expected, "grpo_losses", jnp.float32, "forward")


# Objectives are elementwise. In `make test`, dapo catches bits that padding changes in sums over tokens, and gspo those
# in means of sequences.
@helpers.cover(
    "loss_type, jitted, seed, cap",
    [
        (*x, *y)
        for x in [
            *((name, "jitted") for name in DEFAULT_NORMALISERS),
            *(("dapo", "not jitted"), ("gspo", "not jitted")),
        ]
        for y in ((6, 1.2), (0, None))
    ],
    lambda *x: x in (("gspo", "jitted", 6, 1.2), ("dapo", "not jitted", 6, 1.2)),
)
def test_padding_changes_no_bit_of_outputs_and_gradients(loss_type, jitted, seed, cap):
    run = _value_and_grad if jitted == "jitted" else value_and_grad
    options = options_of(loss_type, beta=0.07, importance_cap=cap)
    tokens = make_tokens(seed, batch=5, length=6)
    expected, gradient = run(tokens.logp, tokens, None, options)
    for rows, columns in ((0, 1), (11, 27)):
        padded = tokens.padded(rows, columns, np.nan)
        actual, wide = run(padded.logp, padded, None, options)
        helpers.assert_same_bits(actual, expected)
        helpers.assert_same_bits(wide[:5, :6], gradient)
        assert np.count_nonzero(wide) == np.count_nonzero(gradient)


# What a masked token holds is replaced before any loss sees it.
@helpers.cover(
    "loss_type, poison",
    itertools.product(["dapo", "gspo", "cispo", "sapo"], [np.nan, np.inf, -np.inf, 1e30]),
    lambda loss_type, poison: loss_type == "gspo" or (np.isnan(poison) and loss_type == "dapo"),
)
def test_masked_tokens_leak_nothing(loss_type, poison):
    tokens = make_tokens(7)
    options = options_of(loss_type, beta=0.3, importance_cap=1.2)
    advantages = np.repeat(tokens.advantages[:, None], tokens.mask.shape[1], axis=1)
    clean = tokens._replace(advantages=advantages)
    poisoned = Tokens(*(x if x is tokens.mask else np.where(tokens.mask, x, np.float32(poison)) for x in clean))
    actual, expected = poisoned.value_and_grad(options), clean.value_and_grad(options)
    chex.assert_tree_all_finite(actual)
    helpers.assert_same_bits(actual, expected)
    assert not np.any(np.asarray(actual[1])[~tokens.mask])


# Each normaliser, each shape.
@helpers.cover(
    "shape, loss_type",
    itertools.product([(6, 5), (6, 0), (0, 5), (0, 0)], DEFAULT_NORMALISERS),
    lambda *x: x in (((6, 5), "dapo"), ((6, 0), "gspo"), ((0, 5), "dr_grpo"), ((0, 0), "sapo")),
)
def test_a_batch_without_active_tokens_is_zero_with_zero_gradient(loss_type, shape):
    full = make_tokens()
    tokens = Tokens(*(x[: shape[0], : shape[1]] if x.ndim == 2 else x[: shape[0]] for x in full))
    tokens = tokens._replace(mask=np.zeros(shape, bool))
    options = options_of(loss_type, beta=0.3, importance_cap=1.2, log_ratio_bound=BOUND, entropy_coef=0.1)
    value, gradient = tokens.value_and_grad(options)
    for x in value:
        helpers.assert_same_bits(x, np.float32(0))
    helpers.assert_same_bits(gradient, np.zeros(shape, np.float32))


def test_only_logp_gets_a_gradient_and_only_through_loss():
    tokens, options = make_tokens(), options_of("gspo", beta=0.3, importance_cap=1.2, log_ratio_bound=BOUND)
    others = {name: x for name, x in tokens._asdict().items() if name not in ("logp", "mask")}

    @jax.jit
    def gradients(logp, others):
        by_others = jax.grad(lambda x: tokens.call(options, **x).loss)(others)
        return by_others, jax.grad(lambda x: sum(jax.tree.leaves(tokens.call(options, logp=x)[1:])))(logp)

    found = gradients(tokens.logp, others)
    chex.assert_trees_all_equal(found, jax.tree.map(np.zeros_like, (others, tokens.logp)))


def one_token(log_ratio: float, advantage: float, options: LossOptions) -> tuple[jax.Array, jax.Array]:
    """Loss and its gradient."""
    token = np.full((1, 1), log_ratio, np.float32)
    return jax.value_and_grad(
        lambda x: policy_loss(
            x, np.zeros_like(token), np.array([advantage], np.float32), token == token, options=options
        ).loss.squeeze()
    )(token)


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_exactly_on_a_bound_has_the_whole_unclipped_gradient(loss_type, advantage):
    log_ratios = {"low": np.float32(-0.25), "high": np.float32(0.25), "dual": np.float32(1.0)}
    ratio = {name: float(jnp.exp(x)) for name, x in log_ratios.items()}
    options = LossOptions(
        loss_type=loss_type, clip_eps=1 - ratio["low"], clip_eps_high=ratio["high"] - 1, dual_clip=ratio["dual"]
    )
    for name in ("low", "high") if advantage > 0 else log_ratios:
        _, gradient = one_token(log_ratios[name], advantage, options)
        assert gradient == -advantage * np.float32(ratio[name]), name
    beyond = np.nextafter(log_ratios["high" if advantage > 0 else "low"], np.float32(advantage * 9))
    for _ in range(4):  # exp may round a few neighbours to the bound itself
        beyond = np.nextafter(beyond, np.float32(advantage * 9))
    assert one_token(beyond, advantage, options)[1] == 0


# The clipped losses share their objective: in `make test`, gspo catches bugs of it.
@helpers.cover(
    "advantage, loss_type",
    itertools.product([1.0, -1.0], DEFAULT_NORMALISERS),
    lambda advantage, loss_type: loss_type in ("gspo", "cispo", "sapo"),
)
def test_at_ratio_one_the_gradient_is_the_advantage(loss_type, advantage):
    changes = {"normaliser": "tokens"}
    if loss_type in CLIPPED:
        changes |= {"clip_eps": 0.0}  # one is a tie of both bounds, too
    _, gradient = one_token(0.0, advantage, LossOptions(loss_type=loss_type, **changes))
    assert gradient == -advantage


@pytest.mark.parametrize("loss_type", ["dapo", "gspo", "cispo", "sapo"])
def test_a_cut_token_whose_ratio_overflows_stays_finite(loss_type):
    value, gradient = one_token(1000.0, 1.0, LossOptions(loss_type=loss_type, normaliser="tokens"))
    assert np.isfinite(value)
    assert gradient == (-5.0 if loss_type == "cispo" else 0.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.full)])
def test_16_bit_log_probs_are_computed_in_float32(dtype):
    """In `make test`, the case of bfloat16 catches a loss that is not computed in float32."""
    tokens = make_tokens()
    options = options_of("dapo", beta=0.3, importance_cap=1.2)
    narrow = Tokens(*(x if x is tokens.mask else jnp.asarray(x, dtype) for x in tokens))
    wide = Tokens(*(x if x is narrow.mask else x.astype(jnp.float32) for x in narrow))
    (value, gradient), (expected, wide_gradient) = narrow.value_and_grad(options), wide.value_and_grad(options)
    helpers.assert_same_bits(value, expected)
    assert gradient.dtype == dtype
    helpers.assert_same_bits(gradient, wide_gradient.astype(dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_non_zero_mask_values_are_active(dtype):
    tokens, options = make_tokens(), options_of("dapo", beta=0.3)
    helpers.assert_same_bits(
        tokens.call(
            options, mask=tokens.mask.astype(dtype) * dtype(3) / dtype(2) if dtype is np.float32 else tokens.mask * 3
        ),
        tokens.call(options),
    )


@pytest.mark.parametrize("unit", [np.int64(2**32), np.float64(1e-60)])
def test_64_bits_of_a_mask_are_not_cut(unit):
    tokens, options = make_tokens(), options_of("dapo", beta=0.3)
    helpers.assert_same_bits(tokens.call(options, mask=tokens.mask * unit), tokens.call(options))
    helpers.assert_same_bits(loss_denominator(tokens.mask * unit, options=options), np.float32(tokens.mask.sum()))
    helpers.assert_same_bits(masked_mean(tokens.logp, tokens.mask * unit), masked_mean(tokens.logp, tokens.mask))


def test_a_loss_without_reference_has_no_kl():
    tokens = make_tokens()
    value = policy_loss(*tokens[:4])
    assert value.kl == 0
    assert value.loss == value.policy_loss
    with_reference = policy_loss(*tokens[:4], ref_logps=tokens.ref)  # reported, and no part of the loss
    assert with_reference.kl > 0
    assert with_reference.loss == value.loss


class TermVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_terms_equal_the_definition(self):
        tokens = make_tokens(2)
        x, r = np.asarray(tokens.logp, np.float64), np.asarray(tokens.ref, np.float64)
        for function, arguments, gold in (
            (k1_kl, (tokens.logp, tokens.ref), x - r),
            (k2_kl, (tokens.logp, tokens.ref), (x - r) ** 2 / 2),
            (k3_kl, (tokens.logp, tokens.ref), np.exp(r - x) - 1 - (r - x)),
            (masked_mean, (tokens.logp, tokens.mask), x[tokens.mask].mean()),
        ):
            value = self.variant(function)(*arguments)
            chex.assert_type(value, jnp.float32)
            helpers.assert_within_contract(value, gold, "grpo_losses", jnp.float32, "forward")

    @chex.variants(with_jit=True, without_jit=True)
    def test_advantages_equal_the_definition(self):
        rewards = np.random.default_rng(1).normal(size=24).astype(np.float32)
        for std in ("population", "sample", "none"):
            eps = 1e-4 if std == "sample" else 1e-6
            function = self.variant(
                lambda x, std=std, eps=eps: group_advantages(x, samples_per_prompt=6, eps=eps, std=std)
            )
            gold = gold_advantages(rewards, range(0, 25, 6), eps, std)
            helpers.assert_within_contract(function(rewards), gold, "grpo_losses", jnp.float32, "forward")


def gold_advantages(rewards: np.ndarray, boundaries: Any, eps: float = 1e-6, std: str = "population") -> np.ndarray:
    """The definition, one group at a time, in float64."""
    advantages = []
    for start, end in itertools.pairwise(boundaries):
        group = np.asarray(rewards[start:end], np.float64)
        scale = {
            "population": max(group.std(), eps),
            "sample": (group.std(ddof=1) if len(group) > 1 else 0.0) + eps,
            "none": 1.0,
        }[std]
        advantages.append((group - group.mean()) / scale)
    return np.concatenate(advantages)


def test_k3_is_never_negative_and_zero_for_equal_policies():
    tokens = make_tokens(3)
    assert np.all(np.asarray(k3_kl(tokens.logp, tokens.ref)) >= 0)
    assert not np.any(k3_kl(tokens.logp, tokens.logp))


@pytest.mark.parametrize("active", [True, 2, 0.5])
def test_masked_mean_counts_tokens_not_sequences(active):
    mask = jnp.array([[active, active], [active, 0]], dtype=type(active))
    assert masked_mean(jnp.array([[1.0, 2.0], [6.0, jnp.nan]]), mask) == 3


def test_expanded_advantages_are_zero_where_masked():
    mask = np.array([[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(expand_advantages(np.array([2, 3]), mask), [[2, 2, 0], [0, 0, 0]])
    per_token = np.array([[1.0, 2.0, np.nan], [np.inf, 4.0, 5.0]], np.float32)
    np.testing.assert_array_equal(expand_advantages(per_token, mask), [[1, 2, 0], [0, 0, 0]])
    assert not np.any(jax.grad(lambda x: expand_advantages(x, mask).sum())(per_token))


@settings(max_examples=50)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=8, max_size=8),
    samples=st.sampled_from([2, 4, 8]),
    offset=st.sampled_from([0.0, 1e4, -1e4]),
)
def test_advantages_have_no_cancellation(rewards, samples, offset):
    rewards = (np.array(rewards, np.float32) + np.float32(offset)).astype(np.float32)
    gold = gold_advantages(rewards, range(0, 9, samples))
    advantages = group_advantages(rewards, samples_per_prompt=samples)
    helpers.assert_within_contract(advantages, gold, "grpo_losses", jnp.float32, "forward")


def test_explicit_mesh_axes():
    """Sums over an axis that is cut have the bits of one device; what is no sum stays cut."""
    mesh = jax.make_mesh((4,), ("data",))
    rewards, mask = np.arange(8, dtype=np.float32) ** 1.5, np.arange(24).reshape(8, 3) % 5 > 0

    def values(rewards, mask):
        advantages = group_advantages(rewards, samples_per_prompt=4)
        return advantages, masked_mean(mask * 0.1, mask), expand_advantages(advantages, mask)

    expected = jax.jit(values)(rewards, mask)
    laid = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        found = jax.jit(values)(jax.device_put(rewards, laid), jax.device_put(mask, laid))
    helpers.assert_same_bits(found, expected)
    assert found[2].sharding.is_equivalent_to(laid, 2)


@given(reward=st.floats(-1e6, 1e6, width=32), samples=st.sampled_from([2, 7, 16]))
@settings(max_examples=50)
def test_constant_group_is_exactly_zero(reward, samples):
    assert not np.any(group_advantages(np.full(2 * samples, reward, np.float32), samples_per_prompt=samples))


MAKERS_OF_BOUNDARIES = {"list": list, "tuple": tuple, "numpy": np.array, "jax": jnp.array}


# Boundaries are made a tuple first.
@helpers.cover(
    "maker, std",
    itertools.product(MAKERS_OF_BOUNDARIES, ["population", "sample", "none"]),
    lambda *x: x in (("list", "population"), ("tuple", "none"), ("numpy", "sample"), ("jax", "population")),
)
def test_groups_of_unequal_sizes(maker, std):
    rewards = np.array([1, 3, 10, 20, 30, 7], np.float32)
    boundaries = [0, 2, 5, 6]
    advantages = group_advantages(rewards, group_boundaries=MAKERS_OF_BOUNDARIES[maker](boundaries), std=std)
    gold = gold_advantages(rewards, boundaries, std=std)
    helpers.assert_within_contract(advantages, gold, "grpo_losses", jnp.float32, "forward")
    helpers.assert_same_bits(advantages[5], np.float32(0))  # a group of one


# All three kinds of std use the same sums. In `make test`, sizes 5 and 9 catch other bits, below and above a vector.
@helpers.cover(
    "std, size",
    itertools.product(["population", "sample", "none"], [2, 3, 5, 8, 9]),
    lambda *x: x in (("population", 5), ("sample", 9)),
)
def test_a_group_keeps_its_bits_beside_others(size, std):
    rewards = np.random.default_rng(8).normal(size=(20, size)).astype(np.float32)
    whole = group_advantages(rewards.reshape(-1), samples_per_prompt=size, std=std).reshape(rewards.shape)
    for group, expected in zip(rewards, whole, strict=True):
        helpers.assert_same_bits(group_advantages(group, samples_per_prompt=size, std=std), expected)
        others = np.concatenate([group, np.full(11, np.nan, np.float32)])
        beside = group_advantages(others, group_boundaries=(0, size, size + 11), std=std)
        helpers.assert_same_bits(beside[:size], expected)


def test_advantages_take_no_gradient_and_any_real_rewards():
    rewards = np.array([1, 0, 1, 1], np.int32)
    advantages = group_advantages(rewards, samples_per_prompt=2)
    helpers.assert_same_bits(advantages, group_advantages(rewards.astype(np.float32), samples_per_prompt=2))
    gradient = jax.grad(lambda x: group_advantages(x, samples_per_prompt=2)[0])(rewards.astype(np.float32))
    assert not np.any(gradient)
    assert group_advantages(np.zeros(0, np.float32), samples_per_prompt=4).shape == (0,)
    # These have 64 bits, which JAX would wrap.
    wide = group_advantages(np.array([2**32, 0], np.int64), samples_per_prompt=2)
    helpers.assert_same_bits(wide, group_advantages(np.array([2.0**32, 0]), samples_per_prompt=2))
    assert wide.tolist() == [1, -1]


START_END = "group_boundaries must start at 0 and end at num_sequences."
ONE_D = r"group_boundaries must be a 1D tensor of length num_groups \+ 1\."


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (4, {}, "Provide exactly one of samples_per_prompt or group_boundaries."),
        (4, {"samples_per_prompt": 2, "group_boundaries": [0, 4]}, "Provide exactly one of samples_per_prompt or"),
        (4, {"samples_per_prompt": 1}, "samples_per_prompt must be at least 2 for group normalization."),
        (4, {"samples_per_prompt": 2.0}, "samples_per_prompt must be an integer, got float."),
        (5, {"samples_per_prompt": 2}, r"num_sequences \(B\) must be divisible by samples_per_prompt \(n\)."),
        (4, {"group_boundaries": [[0, 4]]}, ONE_D),
        (4, {"group_boundaries": [0]}, ONE_D),
        (4, {"group_boundaries": []}, ONE_D),
        (4, {"group_boundaries": [0.0, 4.0]}, "group_boundaries must be integers, got float64"),
        (4, {"group_boundaries": [2, 4, 6]}, START_END),
        (4, {"group_boundaries": [0, 2]}, START_END),
        (4, {"group_boundaries": [0, 2, 2, 4]}, "each group must contain at least one sequence."),
        (4, {"group_boundaries": [0, 3, 2, 4]}, "each group must contain at least one sequence."),
        (4, {"samples_per_prompt": 2, "eps": 0.0}, "eps must be a positive finite number, got 0.0"),
        (4, {"samples_per_prompt": 2, "std": "batch"}, "std must be one of .* got 'batch'"),
    ],
)
def test_bad_groups_raise(count, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(jnp.zeros(count), **options)


def test_traced_boundaries_raise():
    with pytest.raises(ValueError, match="group_boundaries must be static"):
        jax.jit(lambda r, b: group_advantages(r, group_boundaries=b))(jnp.zeros(4), jnp.array([0, 2, 4]))
    with pytest.raises(ValueError, match="group_boundaries must be static"):
        jax.jit(lambda r, b: group_advantages(r, group_boundaries=[0, b, 4]))(jnp.zeros(4), 2)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0, 2.0], "rewards must be a JAX or NumPy array, got builtins.list"),
        (np.zeros((2, 2)), r"rewards must be 1D \[num_sequences\], got shape \(2, 2\)"),
        (np.zeros(4, np.complex64), "rewards must be bool or real numbers, got complex64"),
    ],
)
def test_bad_rewards_raise(rewards, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, samples_per_prompt=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of .* got 'ppo'"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of .* got 'k4'"),
        ({"normaliser": "batch"}, "normaliser must be one of .* got 'batch'"),
        ({"clip_eps": -0.1}, "clip_eps must be 0 or a positive finite number, got -0.1"),
        ({"clip_eps_high": np.inf}, "clip_eps_high must be 0 or a positive finite number, got inf"),
        ({"beta": np.nan}, "beta must be 0 or a positive finite number, got nan"),
        ({"dual_clip": "3"}, "dual_clip must be a positive finite number, got '3'"),
        ({"dual_clip": 1.2}, "dual_clip must be above the clip range, which ends at 1.2, got 1.2"),
        ({"loss_type": "sapo", "dual_clip": 3.0}, "dual_clip has no meaning for loss_type='sapo'"),
        ({"loss_type": "cispo", "clip_eps_high": 0.3}, "clip_eps_high has no meaning for loss_type='cispo'"),
        ({"loss_type": "cispo", "clip_eps": 0.1}, "clip_eps has no meaning for loss_type='cispo'"),
        ({"loss_type": "gspo", "cispo_ratio_cap": 4.0}, "cispo_ratio_cap has no meaning for loss_type='gspo'"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos has no meaning for loss_type='dapo'"),
        ({"loss_type": "grpo", "sapo_temperature_neg": 1.0}, "sapo_temperature_neg has no meaning"),
        ({"cispo_ratio_cap": 0}, "cispo_ratio_cap must be a positive finite number, got 0"),
        ({"sapo_temperature_pos": -1.0}, "sapo_temperature_pos must be a positive finite number"),
        ({"sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be a positive finite number"),
        ({"log_ratio_bound": 0}, "log_ratio_bound must be a positive finite number, got 0"),
        ({"log_ratio_bound": 81.0}, "log_ratio_bound must be at most 80, whose exp is still finite, got 81.0"),
        ({"importance_cap": 1e60}, "importance_cap must be a positive finite number"),
        ({"importance_floor": 0.5}, "importance_floor has no meaning without importance_cap"),
        ({"importance_level": "sequence"}, "importance_level has no meaning without importance_cap"),
        ({"importance_beyond": "mask"}, "importance_beyond has no meaning without importance_cap"),
        (
            {"importance_cap": 2.0, "importance_floor": 2.0},
            "importance_floor must be below importance_cap=2.0, got 2.0",
        ),
        ({"importance_cap": 2.0, "importance_level": "row"}, "importance_level must be one of .* got 'row'"),
        ({"importance_cap": 2.0, "importance_beyond": "drop"}, "importance_beyond must be one of .* got 'drop'"),
        (
            {"loss_type": "vespo", "importance_cap": 2.0, "importance_level": "sequence"},
            "importance_level must be 'token' for loss_type='vespo'",
        ),
        ({"vespo_k_pos": 3.0}, "vespo_k_pos has no meaning for loss_type='dapo'"),
        ({"loss_type": "vespo", "vespo_lambda_neg": 0}, "vespo_lambda_neg must be a positive finite number, got 0"),
        ({"loss_type": "vespo", "clip_eps": 0.1}, "clip_eps has no meaning for loss_type='vespo'"),
        ({"entropy_coef": -1.0}, "entropy_coef must be 0 or a positive finite number, got -1.0"),
        ({"loss_type": "dr_grpo"}, "max_completion_length must be given with normaliser='constant'"),
        (
            {"max_completion_length": 5},
            "max_completion_length must be given with normaliser='constant' and with no other",
        ),
        (
            {"loss_type": "dr_grpo", "max_completion_length": 0},
            "max_completion_length must be a positive integer, got 0",
        ),
    ],
)
def test_bad_options_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        LossOptions(**changes)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"mask": np.ones(5)}, {}, r"completion_mask must be 2D \[num_sequences, completion_len\]."),
        ({"mask": np.ones((6, 5), np.complex64)}, {}, "completion_mask must be bool, integer or float, got complex64."),
        ({"old": np.zeros((6, 4), np.float32)}, {}, r"old_logps shape \(6, 4\) does not match completion_mask shape"),
        ({"logp": np.zeros((6, 5))}, {}, "logp must be bfloat16, float16 or float32, got float64"),
        ({"ref": 0.0}, {}, "ref_logps must be a JAX or NumPy array, got builtins.float"),
        ({"ref": None}, {"beta": 0.1}, "beta=0.1 requires ref_logps"),
        ({"rollout": None}, {"importance_cap": 2.0}, "rollout_logps and importance_cap must be given together"),
        ({"entropy": None}, {"entropy_coef": 0.1}, "entropy_coef=0.1 requires entropy"),
        ({"advantages": np.zeros(5)}, {}, r"advantages must be \[B\] or \[B, T\] of completion_mask shape \(6, 5\)"),
        ({"advantages": np.zeros(6, np.complex64)}, {}, "advantages must be bool or real numbers, got complex64"),
    ],
)
def test_bad_arrays_raise(changes, options, message):
    with pytest.raises(ValueError, match=message):
        make_tokens().call(LossOptions(**options), **changes)


@pytest.mark.parametrize(("options", "kind"), [(None, "NoneType"), ({"beta": 0.1}, "dict")])
def test_what_are_no_options_raises(options, kind):
    tokens, message = make_tokens(), f"options must be LossOptions, got {kind}."
    with pytest.raises(ValueError, match=message):
        policy_loss(*tokens[:4], options=options)
    with pytest.raises(ValueError, match=message):
        loss_denominator(tokens.mask, options=options)


def test_rollout_logps_without_a_cap_raise():
    tokens = make_tokens()
    with pytest.raises(ValueError, match="rollout_logps and importance_cap must be given together"):
        policy_loss(*tokens[:4], rollout_logps=tokens.rollout)


@pytest.mark.parametrize(
    ("denominator", "message"),
    [
        (-1, "denominator must be 0 or a positive finite number, got -1"),
        (np.ones(3), r"denominator must be a scalar, got shape \(3,\)"),
    ],
)
def test_bad_denominators_raise(denominator, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(*make_tokens()[:4], denominator=denominator)


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (-1, "entropy_threshold must be 0 or a positive finite number, got -1"),
        (np.ones(3), r"entropy_threshold must be a scalar, got shape \(3,\)"),
    ],
)
def test_bad_thresholds_raise(threshold, message):
    tokens = make_tokens()
    with pytest.raises(ValueError, match=message):
        policy_loss(*tokens[:4], entropy=tokens.entropy, entropy_threshold=threshold)
    with pytest.raises(ValueError, match="entropy_threshold requires entropy"):
        policy_loss(*tokens[:4], entropy_threshold=0.5)


def test_a_denominator_that_only_the_device_knows():
    """Below 0 it gives NaN; it is no way for gradients."""
    call = jax.jit(lambda x: policy_loss(*make_tokens()[:4], denominator=x).loss)
    assert jnp.isnan(call(-6.0)) and jnp.isfinite(call(6.0))
    assert jax.grad(call)(6.0) == 0


def test_a_denominator_of_zero_counts_as_one():
    """That of a batch without active tokens on any rank."""
    tokens = make_tokens()
    helpers.assert_same_bits(policy_loss(*tokens[:4], denominator=0), policy_loss(*tokens[:4], denominator=1))


def test_options_are_equal_and_hash_by_value():
    assert LossOptions(beta=0.1) == dataclasses.replace(LossOptions(), beta=0.1)
    assert len({LossOptions(), LossOptions(), LossOptions(beta=0.1)}) == 2


def test_rewards_may_be_verdicts():
    verdicts = np.array([True, False, False, True])
    expected = group_advantages(verdicts.astype(np.float32), samples_per_prompt=2)
    helpers.assert_same_bits(group_advantages(verdicts, samples_per_prompt=2), expected)
