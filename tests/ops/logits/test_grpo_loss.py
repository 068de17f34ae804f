"""grpo_loss on a CPU: the definition, groups, padding, gradients, a message for every bad input."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax import grpo_loss, logp
from rlk_jax.checker import gold
from rlk_jax.grpo import LossOptions, group_advantages, policy_loss
from tests.support import helpers
from tests.support import logits as ops
from tests.support.helpers import IN_FEW_DTYPES, assert_same_bits, assert_within_contract

# grpo_loss is made of logp, and what it adds is the same for all implementations: one of them would catch its bug.
in_core = helpers.implementations("xla")
REWARDS = np.array([1.0, 3.0, 10.0, 20.0, 30.0], np.float32)
BOUNDARIES = [0, 2, 5]
GROUPS = {"group_boundaries": BOUNDARIES}
CLIP, HIGH, BETA = 0.15, 0.3, 0.07


def policies(dtype=jnp.float32, **sizes) -> ops.Policies:
    return ops.make_policies(dtype, **{"lead": (5, 6), **sizes})


# logp has its own tests against float64, in every dtype and implementation.
@helpers.cover(
    "implementation, dtype",
    IN_FEW_DTYPES,
    lambda *x: x in (("xla", jnp.float32), ("deterministic", jnp.float16)),
)
def test_against_float64(implementation, dtype):
    p = policies(dtype)
    advantages = gold.group_advantages_gold(REWARDS, BOUNDARIES)
    *values, expected = gold.grpo_loss_gold(*p, advantages, clip=(CLIP, HIGH), beta=BETA)
    options = {**GROUPS, "clip_eps": CLIP, "clip_eps_high": HIGH, "beta": BETA}
    found = p.grpo_loss(REWARDS, implementation, **options)
    assert [x.dtype for x in found] == [jnp.float32] * 3 and found.loss.shape == ()
    assert_within_contract(np.array(found), np.array(values), "grpo_loss", dtype, "forward")

    def loss(policy):
        return p._replace(policy_logits=policy).grpo_loss(REWARDS, implementation, **options).loss

    for function in (loss, jax.jit(loss)) if dtype == jnp.float32 else (jax.jit(loss),):
        gradient = jax.grad(function)(p.policy_logits)
        assert gradient.dtype == dtype
        assert_within_contract(gradient, expected, "grpo_loss", dtype, "gradient")
        assert not np.any(gradient[~np.asarray(p.completion_mask)])


@in_core
def test_ready_advantages_take_the_place_of_rewards(implementation):
    p, rewards = policies(), jnp.asarray(REWARDS)
    expected = p.grpo_loss(rewards, implementation, **GROUPS)
    advantages = group_advantages(rewards, **GROUPS)
    assert_same_bits(p.grpo_loss(None, implementation, advantages=advantages), expected)
    per_token = jnp.broadcast_to(advantages[:, None], p.action_ids.shape)
    assert_same_bits(p.grpo_loss(None, implementation, advantages=per_token), expected)


def test_a_bound_is_that_of_policy_loss():
    """Beside a reference that is far away, the loss is finite, and the one that `policy_loss` has on log-probs."""
    p, rewards = policies(), jnp.asarray(REWARDS)
    p = p._replace(ref_logits=p.ref_logits * 400)
    options = {"beta": 0.04, "log_ratio_bound": 3.0}
    found = p.grpo_loss(rewards, "xla", samples_per_prompt=len(REWARDS), **options)
    policy, ref = (logp(x, jnp.where(p.completion_mask, p.action_ids, 0), implementation="xla") for x in p[:2])
    advantages = group_advantages(rewards, samples_per_prompt=len(REWARDS))
    expected = policy_loss(
        policy, p.old_logps, advantages, p.completion_mask, ref_logps=ref, options=LossOptions(**options)
    )
    assert np.isfinite(found.loss) and found.kl > 1
    numbers = np.array([expected.loss, expected.policy_loss, expected.kl])
    assert_within_contract(np.array(found), numbers, "grpo_loss", jnp.float32, "forward")
    with pytest.raises(ValueError, match="log_ratio_bound must be"):
        p.grpo_loss(rewards, "xla", samples_per_prompt=len(REWARDS), log_ratio_bound=0)


@in_core
def test_equal_groups_are_boundaries(implementation):
    p = policies(lead=(4, 6))
    rewards = REWARDS[:4]
    expected = p.grpo_loss(rewards, implementation, group_boundaries=np.array([0, 2, 4]))
    assert_same_bits(p.grpo_loss(rewards, implementation, samples_per_prompt=2), expected)


@in_core
def test_metrics_carry_no_gradient_and_nothing_else_gets_one(implementation):
    p = policies()

    def values(policy, ref, old, rewards):
        own = p._replace(policy_logits=policy, ref_logits=ref, old_logps=old)
        return own.grpo_loss(rewards, implementation, **GROUPS, beta=BETA)

    @jax.jit
    def gradients(*primals):
        found, pull_back = jax.vjp(values, *primals)
        one, zero = jnp.ones(()), jnp.zeros(())
        of_metrics = pull_back(type(found)(zero, one, one))
        return of_metrics[0], pull_back(type(found)(one, zero, zero))[1:]

    of_metrics, of_others = gradients(p.policy_logits, p.ref_logits, p.old_logps, jnp.asarray(REWARDS))
    assert not np.any(of_metrics) and not any(np.any(g) for g in of_others)


@in_core
def test_nothing_active_is_zero_with_zero_gradients(implementation):
    p = policies()
    p = p._replace(completion_mask=jnp.zeros((5, 6)), policy_logits=p.policy_logits * jnp.nan)

    def loss(policy):
        return p._replace(policy_logits=policy).grpo_loss(REWARDS, implementation, **GROUPS, beta=BETA).loss

    value, gradient = jax.jit(jax.value_and_grad(loss))(p.policy_logits)
    assert value == 0 and not np.any(gradient)


@in_core
def test_equal_rewards_give_no_policy_gradient(implementation):
    p = policies(lead=(7, 4))
    rewards = np.full(7, 0.1, np.float32)

    def loss(policy):
        return p._replace(policy_logits=policy).grpo_loss(rewards, implementation, samples_per_prompt=7).loss

    value, gradient = jax.jit(jax.value_and_grad(loss))(p.policy_logits)
    assert value == 0 and not np.any(gradient)


# Outside jit fewer operations can be fused; test_losses.py pads policy_loss there, too, and by one column alone.
@helpers.cover(
    "jitted, rows, columns",
    [(True, 0, 1), (True, 3, 0), (True, 4, 7), (False, 4, 7)],
    lambda *x: x == (True, 4, 7),
)
def test_padding_changes_no_bit(jitted, rows, columns):
    p = policies()
    advantages = group_advantages(jnp.asarray(REWARDS), **GROUPS)
    sizes = {"policy_logits": np.nan, "ref_logits": np.nan, "action_ids": -1, "completion_mask": 0, "old_logps": np.inf}

    def padded(rows: int, columns: int) -> ops.Policies:
        return ops.Policies(
            *(
                jnp.pad(x, ((0, rows), (0, columns), *((0, 0),) * (x.ndim - 2)), constant_values=sizes[name])
                for name, x in p._asdict().items()
            )
        )

    def value_and_grad(p, advantages):
        def loss(policy):
            own = p._replace(policy_logits=policy)
            found = own.grpo_loss(None, "deterministic", advantages=advantages, beta=BETA)
            return found.loss, found

        (_, found), gradient = jax.value_and_grad(loss, has_aux=True)(p.policy_logits)
        return found, gradient

    run = jax.jit(value_and_grad) if jitted else value_and_grad
    expected = run(p, advantages)
    found, gradient = run(padded(rows, columns), jnp.pad(advantages, (0, rows)))
    assert_same_bits((found, gradient[:5, :6]), expected)


@in_core
def test_five_steps_lower_the_loss(implementation):
    p = policies(jnp.float32, lead=(4, 6), vocab=64)

    @jax.jit
    def step(policy):
        loss = lambda x: p._replace(policy_logits=x).grpo_loss(REWARDS[:4], implementation, samples_per_prompt=2).loss  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(policy)
        return policy - 0.05 * gradient, value

    policy, values = p.policy_logits, []
    for _ in range(6):
        policy, value = step(policy)
        values.append(float(value))
    assert all(b < a for a, b in itertools.pairwise(values))


def arguments(**changes):
    """Four sequences in groups of two."""
    good = {
        "policy_logits": jnp.zeros((4, 3, 9)),
        "ref_logits": jnp.zeros((4, 3, 9)),
        "action_ids": jnp.zeros((4, 3), int),
        "old_logps": jnp.zeros((4, 3)),
        "rewards": jnp.arange(4.0),
        "completion_mask": jnp.ones((4, 3)),
        "samples_per_prompt": 2,
    }
    return {**good, **changes}


def with_boundaries(boundaries):
    return {"samples_per_prompt": None, "group_boundaries": boundaries}


FLAT = {
    "policy_logits": jnp.zeros((4, 9)),
    "ref_logits": jnp.zeros((4, 9)),
    "action_ids": jnp.zeros(4, int),
    "old_logps": jnp.zeros(4),
    "completion_mask": jnp.ones(4),
}
EDGES = "group_boundaries must start at 0 and end at num_sequences."
BAD_INPUTS = {
    "both kinds of group": (
        {"group_boundaries": [0, 4]},
        "Provide exactly one of samples_per_prompt or group_boundaries.",
    ),
    "no group": ({"samples_per_prompt": None}, "Provide exactly one of samples_per_prompt or group_boundaries."),
    "groups of one": (
        {"samples_per_prompt": 1},
        "samples_per_prompt must be at least 2 for group normalization.",
    ),
    "groups of 2.0": ({"samples_per_prompt": 2.0}, "samples_per_prompt must be an integer, got float."),
    "groups of three": ({"samples_per_prompt": 3}, "num_sequences (B) must be divisible by samples_per_prompt (n)."),
    "one boundary": (with_boundaries([0]), "group_boundaries must be a 1D tensor of length num_groups + 1."),
    "boundaries in two dimensions": (
        with_boundaries(np.zeros((2, 2), int)),
        "group_boundaries must be a 1D tensor of length num_groups + 1.",
    ),
    "boundaries that start late": (with_boundaries([2, 4, 6]), EDGES),
    "boundaries that end early": (with_boundaries([0, 2]), EDGES),
    "an empty group": (with_boundaries([0, 2, 2, 4]), "each group must contain at least one sequence."),
    "boundaries that fall": (with_boundaries([0, 3, 2, 4]), "each group must contain at least one sequence."),
    "mask not 2-D": (FLAT, "completion_mask must be 2D [num_sequences, completion_len]."),
    "rewards of others": (
        {"rewards": jnp.zeros(6)},
        "rewards must be one number for each of 4 sequences, got shape (6,).",
    ),
    "rewards and advantages": (
        {"advantages": jnp.zeros(4)},
        "Provide exactly one of rewards or advantages.",
    ),
    "neither": ({"rewards": None}, "Provide exactly one of rewards or advantages."),
    "advantages in groups": (
        {"rewards": None, "advantages": jnp.zeros(4)},
        "samples_per_prompt and group_boundaries are for rewards, not advantages.",
    ),
    "advantages' shape": (
        {"rewards": None, "samples_per_prompt": None, "advantages": jnp.zeros(3)},
        "advantages must be [B] or [B, T] of completion_mask shape (4, 3), got shape (3,).",
    ),
    "clip_eps below 0": ({"clip_eps": -0.1}, "clip_eps must be 0 or a positive finite number, got -0.1."),
    "clip_eps_high below 0": (
        {"clip_eps_high": -0.1},
        "clip_eps_high must be 0 or a positive finite number, got -0.1.",
    ),
    "beta below 0": ({"beta": -1}, "beta must be 0 or a positive finite number, got -1."),
    "eps 0": ({"eps": 0.0}, "eps must be a positive finite number, got 0.0."),
    "active id": (
        {"action_ids": jnp.full((4, 3), 9)},
        "action_ids at active (unmasked) positions must be in [0, V)",
    ),
    "ids' shape": (
        {"action_ids": jnp.zeros((4, 2), int)},
        "action_ids shape (4, 2) does not match policy_logits.shape[:-1] (4, 3).",
    ),
    "another vocabulary": (
        {"ref_logits": jnp.zeros((4, 3, 8))},
        "ref_logits shape (4, 3, 8) does not match policy_logits shape (4, 3, 9).",
    ),
    "a shape": ({"old_logps": jax.ShapeDtypeStruct((4, 3), jnp.float32)}, "old_logps is a ShapeDtypeStruct"),
}


@helpers.bad_inputs(BAD_INPUTS)
def test_bad_input(what, implementation):
    changes, message = BAD_INPUTS[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        grpo_loss(**arguments(**changes), implementation=implementation)


def test_groups_are_static():
    with pytest.raises(ValueError, match="group_boundaries must be static"):
        jax.jit(lambda x: grpo_loss(**arguments(samples_per_prompt=None, group_boundaries=x)))(jnp.array([0, 2, 4]))


def test_devices_must_match():
    first, second = jax.devices("cpu")[:2]
    arrays = {key: x if key == "samples_per_prompt" else jax.device_put(x, first) for key, x in arguments().items()}
    arrays["old_logps"] = jax.device_put(arrays["old_logps"], second)
    with pytest.raises(ValueError, match=r"old_logps device .* must match policy_logits device .*"):
        grpo_loss(**arrays)
