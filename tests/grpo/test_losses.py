"""The GRPO losses against independent float64 definitions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_jax.grpo import (
    clipped_surrogate,
    clipped_tokens,
    group_advantages,
    grpo_loss_from_logps,
    k3_kl,
    masked_mean,
)
from tests import helpers

CLIP_EPS, BETA = 0.2, 0.05


def gold_advantages(rewards: np.ndarray, samples: int, eps: float = 1e-6) -> np.ndarray:
    """The definition, one group at a time, in float64."""
    advantages = []
    for start in range(0, len(rewards), samples):
        group = rewards[start : start + samples].astype(np.float64)
        advantages.append((group - group.mean()) / max(group.std(), eps))
    return np.concatenate(advantages)


def gold_loss(logp, old, ref, advantages, mask, clip_eps, beta):
    """(loss, policy_loss, kl, clip_fraction) and the gradient of loss by hand, one token at a time, in float64."""
    policy, kl, clipped, gradient = 0.0, 0.0, 0, np.zeros(logp.shape)
    count = max(mask.sum(), 1)
    for b, t in zip(*np.nonzero(mask), strict=True):
        x, o, r, a = (float(v) for v in (logp[b, t], old[b, t], ref[b, t], advantages[b]))
        ratio = np.exp(x - o)
        outside = ratio > 1 + clip_eps if a > 0 else ratio < 1 - clip_eps
        bound = 1 + clip_eps if a > 0 else 1 - clip_eps
        policy -= (bound if outside else ratio) * a / count
        kl += (np.exp(r - x) - 1 - (r - x)) / count
        clipped += outside and a != 0
        gradient[b, t] = ((0 if outside else -ratio * a) + beta * (1 - np.exp(r - x))) / count
    return (policy + beta * kl, policy, kl, clipped / count), gradient


def make_tokens(seed: int, batch: int = 8, length: int = 6) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    logp, old, ref = (-rng.exponential(size=(batch, length)).astype(np.float32) for _ in range(3))
    return logp, old, ref, rng.normal(size=batch).astype(np.float32), rng.random((batch, length)) < 0.7


class LossVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_loss_and_metrics_equal_the_definition(self):
        tokens = make_tokens(0)
        loss = self.variant(lambda *x: grpo_loss_from_logps(*x, clip_eps=CLIP_EPS, beta=BETA))(*tokens)
        gold, _ = gold_loss(*tokens, CLIP_EPS, BETA)
        assert gold[3] > 0  # the clip acts in this data
        for value, expected in zip(loss, gold, strict=True):
            chex.assert_type(value, jnp.float32)
            helpers.assert_within_contract(value, expected, "grpo_losses", jnp.float32, "forward")

    @chex.variants(with_jit=True, without_jit=True)
    def test_advantages_equal_the_definition(self):
        rewards = np.random.default_rng(1).normal(size=24).astype(np.float32)
        advantages = self.variant(lambda x: group_advantages(x, samples_per_prompt=6))(rewards)
        helpers.assert_within_contract(advantages, gold_advantages(rewards, 6), "grpo_losses", jnp.float32, "forward")

    @chex.variants(with_jit=True, without_jit=True)
    def test_terms_equal_the_definition(self):
        logp, old, ref, advantages, mask = make_tokens(2)
        x, o, r, a = (array.astype(np.float64) for array in (logp, old, ref, advantages[:, None]))
        ratio = np.exp(x - o)
        limited = np.where(a > 0, np.minimum(ratio, 1 + CLIP_EPS), np.maximum(ratio, 1 - CLIP_EPS))
        for function, arguments, gold in (
            (lambda *x: clipped_surrogate(*x, CLIP_EPS), (logp, old, advantages[:, None]), limited * a),
            (k3_kl, (logp, ref), np.exp(r - x) - 1 - (r - x)),
            (masked_mean, (logp, mask), x[mask].sum() / mask.sum()),
        ):
            value = self.variant(function)(*arguments)
            chex.assert_type(value, jnp.float32)
            helpers.assert_within_contract(value, gold, "grpo_losses", jnp.float32, "forward")
        clipped = self.variant(lambda *x: clipped_tokens(*x, CLIP_EPS))(logp, old, advantages[:, None])
        np.testing.assert_array_equal(clipped, limited != ratio)
        assert 0 < np.sum(clipped) < clipped.size  # both sides of the clip are in this data


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), beta=st.sampled_from([0.0, 0.05, 1.0]))
def test_gradient_equals_the_derivative_by_hand(seed, beta):
    tokens = make_tokens(seed)
    gradient = jax.grad(lambda x: grpo_loss_from_logps(x, *tokens[1:], clip_eps=CLIP_EPS, beta=beta).loss)(tokens[0])
    _, gold = gold_loss(*tokens, CLIP_EPS, beta)
    helpers.assert_within_contract(gradient, gold, "grpo_losses", jnp.float32, "gradient")


def test_only_logp_gets_a_gradient_and_only_through_loss():
    *floats, mask = make_tokens(0)

    def loss(*floats):
        return grpo_loss_from_logps(*floats, mask, clip_eps=CLIP_EPS, beta=BETA)

    gradients = jax.grad(lambda *x: loss(*x).loss, argnums=(1, 2, 3))(*floats)
    metrics = jax.grad(lambda x: sum(loss(x, *floats[1:])[1:]))(floats[0])
    chex.assert_trees_all_equal((gradients, metrics), jax.tree.map(np.zeros_like, (tuple(floats[1:]), floats[0])))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_tokens_leak_nothing(poison):
    *floats, mask = make_tokens(0)
    poisoned = [np.where(mask, x, poison).astype(np.float32) for x in floats[:3]]

    def value_and_grad(logp, old, ref):
        return jax.value_and_grad(
            lambda x: grpo_loss_from_logps(x, old, ref, floats[3], mask, clip_eps=CLIP_EPS, beta=BETA).loss
        )(logp)

    actual, expected = value_and_grad(*poisoned), value_and_grad(*floats[:3])
    chex.assert_tree_all_finite(actual)
    chex.assert_trees_all_equal(actual, expected)
    assert not np.any(np.asarray(actual[1])[~mask])


def test_fully_masked_batch_is_zero_with_zero_gradient():
    *tokens, mask = make_tokens(0)
    value, gradient = jax.value_and_grad(
        lambda x: grpo_loss_from_logps(x, *tokens[1:], np.zeros_like(mask), clip_eps=CLIP_EPS, beta=BETA).loss
    )(tokens[0])
    assert value == 0
    assert not np.any(gradient)


@settings(deadline=None, max_examples=50)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=8, max_size=8),
    samples=st.sampled_from([2, 4, 8]),
    offset=st.sampled_from([0.0, 1e4, -1e4]),
)
def test_advantages_have_no_cancellation(rewards, samples, offset):
    rewards = (np.array(rewards, np.float32) + np.float32(offset)).astype(np.float32)
    advantages = group_advantages(rewards, samples_per_prompt=samples)
    helpers.assert_within_contract(advantages, gold_advantages(rewards, samples), "grpo_losses", jnp.float32, "forward")


@given(reward=st.floats(-1e6, 1e6, width=32), samples=st.sampled_from([2, 7, 16]))
@settings(deadline=None, max_examples=50)
def test_constant_group_is_exactly_zero(reward, samples):
    assert not np.any(group_advantages(np.full(2 * samples, reward, np.float32), samples_per_prompt=samples))


def test_k3_is_never_negative_and_zero_for_equal_policies():
    logp, _, ref, *_ = make_tokens(3)
    assert np.all(np.asarray(k3_kl(logp, ref)) >= 0)
    assert not np.any(k3_kl(logp, logp))


def test_masked_mean_counts_tokens_not_sequences():
    assert masked_mean(jnp.array([[1.0, 2.0], [6.0, jnp.nan]]), jnp.array([[True, True], [True, False]])) == 3


@pytest.mark.parametrize(
    ("count", "samples", "message"),
    [
        (4, 1, "samples_per_prompt must be at least 2 for group normalization."),
        (5, 2, r"num_sequences \(B\) must be divisible by samples_per_prompt \(n\)."),
    ],
)
def test_bad_groups_raise(count, samples, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(jnp.zeros(count), samples_per_prompt=samples)
