"""ratio_kl on a CPU: accuracy, masks, gradients, a message for every bad input."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlk_jax
from rlk_jax import logp, ratio_kl
from tests.support import helpers
from tests.support import logits as ops
from tests.support.helpers import IMPLEMENTATIONS, assert_same_bits, assert_within_contract

# ratio_kl is made of logp, and what it adds is the same for all implementations: one of them would catch its bug.
in_core = helpers.implementations("xla")


def upstream(p: ops.Policies, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=p.action_ids.shape), jnp.float32) for _ in range(2))


def gradient(p: ops.Policies, g: tuple, implementation: str, **options) -> jax.Array:
    def loss(policy):
        found = p._replace(policy_logits=policy).ratio_kl(implementation, **options)
        return sum(jnp.vdot(a, b) for a, b in zip(g, found, strict=True) if a is not None)

    return jax.grad(loss)(p.policy_logits)


# logp has its own tests against float64, in every dtype and implementation.
@helpers.cover(
    "temperature, vocab, dtype, implementation",
    [(*x, *y) for x, *y in itertools.product([(0.6, 64), (1.0, 50257)], ops.DTYPES, IMPLEMENTATIONS)],
    lambda *x: (
        x in ((0.6, 64, jnp.float32, "xla"), (1.0, 50257, jnp.bfloat16, "xla"), (0.6, 64, jnp.float16, "deterministic"))
    ),
)
def test_against_float64(implementation, dtype, temperature, vocab):
    p = ops.make_policies(dtype, (2, 5), vocab)
    g = upstream(p)
    gold = ops.ratio_kl_gold(p, g, temperature)
    found = p.ratio_kl(implementation, temperature=temperature)
    for value, expected in zip(found, gold, strict=False):
        assert value.dtype == jnp.float32
        assert_within_contract(value, expected, "ratio_kl", dtype, "forward")
    d_policy = gradient(p, g, implementation, temperature=temperature)
    assert d_policy.dtype == dtype
    assert_within_contract(d_policy, gold.gradient, "ratio_kl", dtype, "gradient")


@in_core
@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_any_mask_that_is_not_zero_is_active(implementation, dtype):
    p = ops.make_policies(jnp.float32)
    weight = 0.5 if dtype is np.float32 else 1
    mask = (np.asarray(p.completion_mask) * weight).astype(dtype)
    assert_same_bits(p._replace(completion_mask=mask).ratio_kl(implementation), p.ratio_kl(implementation))


@in_core
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_tokens_are_neutral_whatever_they_hold(implementation, poison):
    p = ops.make_policies(jnp.float32)
    mask = np.asarray(p.completion_mask)
    poisoned = ops.Policies(
        *(jnp.where(mask[..., None], x, poison) for x in (p.policy_logits, p.ref_logits)),
        jnp.where(mask, p.action_ids, -100),
        p.completion_mask,
        jnp.where(mask, p.old_logps, poison),
    )
    assert_same_bits(poisoned.ratio_kl(implementation), p.ratio_kl(implementation))
    ratio, kl = (np.asarray(x)[~mask] for x in poisoned.ratio_kl(implementation))
    assert np.all(ratio == 1) and np.all(kl == 0)
    g = upstream(p)
    assert_same_bits(gradient(poisoned, g, implementation), gradient(p, g, implementation))
    assert not np.any(gradient(poisoned, g, implementation)[~mask])


@in_core
def test_only_the_policy_gets_a_gradient(implementation):
    p = ops.make_policies(jnp.float32)

    def loss(ref, old):
        return sum(jnp.sum(x) for x in p._replace(ref_logits=ref, old_logps=old).ratio_kl(implementation))

    assert not any(np.any(g) for g in jax.grad(loss, (0, 1))(p.ref_logits, p.old_logps))


@in_core
def test_upstream_gradients_scale_and_may_be_of_one_output(implementation):
    p = ops.make_policies(jnp.float32)
    g_ratio, g_kl = upstream(p)
    both = gradient(p, (g_ratio, g_kl), implementation)
    assert_same_bits(gradient(p, (4 * g_ratio, 4 * g_kl), implementation), 4 * both)
    alone = gradient(p, (g_ratio, None), implementation) + gradient(p, (None, g_kl), implementation)
    assert_within_contract(alone, both, "ratio_kl", jnp.float32, "gradient")


@in_core
def test_the_same_policy_has_ratio_one_and_no_kl(implementation):
    p = ops.make_policies(jnp.bfloat16)
    old = logp(p.policy_logits, p.action_ids, implementation=implementation)
    found = p._replace(old_logps=old, ref_logits=p.policy_logits).ratio_kl(implementation)
    assert np.all(found.ratio == 1) and np.all(found.kl == 0)


@in_core
def test_tokens_that_a_sampler_left_out(implementation):
    """The first 4096 logits are −inf: no NaN; an impossible token has ratio 0, and infinite kl unless both agree."""
    policy = jnp.zeros((3, 5000)).at[:, :4096].set(-jnp.inf)
    ref = policy.at[1].set(0.0)
    ids, old = jnp.array([4500, 7, 7]), jnp.full(3, -7.0)
    found = ratio_kl(policy, ref, ids, jnp.ones(3, bool), old, implementation=implementation)
    assert np.isfinite(found.ratio[0]) and found.ratio[0] > 0 and found.kl[0] == 0
    np.testing.assert_array_equal(found.ratio[1:], [0, 0])
    np.testing.assert_array_equal(found.kl[1:], [np.inf, 0])
    d_policy = jax.grad(lambda x: ratio_kl(x, ref, ids, jnp.ones(3), old, implementation=implementation).ratio.sum())(
        policy
    )
    assert np.all(np.isfinite(d_policy)) and np.any(d_policy[0]) and not np.any(d_policy[1:])


@in_core
def test_a_bound_keeps_ratio_and_kl_finite_and_is_exact_where_it_does_not_bind(implementation):
    """Tokens at −120 nats, impossible ones, and one that only the reference cannot take, beside ordinary tokens."""
    policy = jnp.zeros((6, 5)).at[1, 2].set(-120.0).at[2, 2].set(-jnp.inf)
    ref = jnp.zeros((6, 5)).at[3, 2].set(-jnp.inf)
    ids, old, bound = jnp.full(6, 2), jnp.array([-1.6, -1.6, -1.6, -1.6, 99.0, -99.0]), 4.0

    def call(x, **options):
        return ratio_kl(x, ref, ids, jnp.ones(6, bool), old, implementation=implementation, **options)

    free, held = call(policy), call(policy, log_ratio_bound=bound)
    assert not np.all(np.isfinite(free.kl)) and np.all(np.isfinite(held.ratio)) and np.all(np.isfinite(held.kl))
    ratios = np.exp(np.array([-bound, -bound, -bound, bound]))
    assert_within_contract(held.ratio[np.array([1, 2, 4, 5])], ratios, "ratio_kl", jnp.float32, "forward")
    kls = np.expm1([bound, bound, -bound]) - np.array([bound, bound, -bound])
    assert_within_contract(held.kl[1:4], kls, "ratio_kl", jnp.float32, "forward")
    assert_same_bits(
        (held.ratio[np.array([0, 3])], held.kl[np.array([0, 4, 5])]),
        (free.ratio[np.array([0, 3])], free.kl[np.array([0, 4, 5])]),
    )

    def gradients(**options):
        return [jax.grad(lambda x, k=k: call(x, **options)[k].sum())(policy) for k in (0, 1)]

    (free_ratio, free_kl), (held_ratio, held_kl) = gradients(), gradients(log_ratio_bound=bound)
    assert not np.any(held_ratio[np.array([1, 2, 4, 5])]) and not np.any(held_kl[1:4])
    assert_same_bits((held_ratio[0], held_ratio[3], held_kl[0]), (free_ratio[0], free_ratio[3], free_kl[0]))


@pytest.mark.parametrize("bound", [0, -1.0, 81, float("nan")])
def test_a_bound_that_cannot_work_is_refused(bound):
    p = ops.make_policies(jnp.float32)
    with pytest.raises(ValueError, match="log_ratio_bound must be"):
        p.ratio_kl(None, log_ratio_bound=bound)
    with pytest.raises(ValueError, match="log_ratio_bound must be"):
        rlk_jax.explain("ratio_kl", *p, log_ratio_bound=bound)


@in_core
def test_strided_views(implementation):
    p = ops.make_policies(jnp.float32)
    wide = [jnp.zeros((4, 12, 300)).at[:, ::2].set(x)[:, ::2] for x in (p.policy_logits, p.ref_logits)]
    assert_same_bits(ops.Policies(*wide, *p[2:]).ratio_kl(implementation), p.ratio_kl(implementation))


def test_policies_may_have_dtypes_of_their_own():
    p = ops.make_policies(jnp.float16)
    found = p._replace(ref_logits=p.ref_logits.astype(jnp.float32)).ratio_kl("deterministic")
    assert_same_bits(found, p.ratio_kl("deterministic"))


@helpers.cover("start, end", [(0, 1), (3, 68)], lambda start, end: start == 3)  # logp is computed for one row, too
def test_rows_do_not_depend_on_the_batch(start, end):
    p = ops.make_policies(jnp.bfloat16, (70,))
    outputs = jax.jit(lambda p, g: (*p.ratio_kl("deterministic"), gradient(p, g, "deterministic")))
    whole, part = (p, upstream(p)), slice(start, end)
    found, expected = outputs(*jax.tree.map(lambda x: x[part], whole)), outputs(*whole)
    assert_same_bits(found, tuple(x[part] for x in expected))


BAD_INPUTS = {
    "active id V": ({"action_ids": jnp.full((2, 3), 9)}, "action_ids at active (unmasked) positions must be in [0, V)"),
    "active id below 0": (
        {"action_ids": jnp.full((2, 3), -1)},
        "found out-of-range ids. Expected [0, 8], got [-1, -1].",
    ),
    "ids' shape": (
        {"action_ids": jnp.zeros((3, 2), int)},
        "action_ids shape (3, 2) does not match policy_logits.shape[:-1] (2, 3).",
    ),
    "mask's shape": (
        {"completion_mask": jnp.ones(6)},
        "completion_mask shape (6,) does not match policy_logits.shape[:-1] (2, 3).",
    ),
    "old_logps' shape": (
        {"old_logps": jnp.zeros((2, 4))},
        "old_logps shape (2, 4) does not match policy_logits.shape[:-1] (2, 3).",
    ),
    "another vocabulary": (
        {"ref_logits": jnp.zeros((2, 3, 8))},
        "ref_logits shape (2, 3, 8) does not match policy_logits shape (2, 3, 9).",
    ),
    "V = 0": (
        {"policy_logits": jnp.zeros((2, 3, 0)), "ref_logits": jnp.zeros((2, 3, 0))},
        "policy_logits must have at least one vocab column.",
    ),
    "float ids": ({"action_ids": jnp.zeros((2, 3))}, "action_ids must be integers, got float32."),
    "integer logits": (
        {"ref_logits": jnp.zeros((2, 3, 9), int)},
        "ref_logits must be bfloat16, float16 or float32, got int32.",
    ),
    "complex mask": (
        {"completion_mask": jnp.ones((2, 3), jnp.complex64)},
        "completion_mask must be bool, integer or float, got complex64.",
    ),
    "a list": ({"old_logps": [0.0]}, "old_logps must be a JAX or NumPy array, got builtins.list."),
    "temperature": ({"temperature": -1.0}, "temperature must be positive and finite"),
    "temperature's shape": (
        {"temperature": jnp.ones(2)},
        "temperature must be a scalar or have action_ids shape (2, 3), got (2,).",
    ),
    "validate": ({"validate": "no"}, "validate must be None, True or False, got 'no'."),
    "a shape": ({"ref_logits": jax.ShapeDtypeStruct((2, 3, 9), jnp.float32)}, "ref_logits is a ShapeDtypeStruct"),
}
GOOD = {
    "policy_logits": jnp.zeros((2, 3, 9)),
    "ref_logits": jnp.zeros((2, 3, 9)),
    "action_ids": jnp.zeros((2, 3), int),
    "completion_mask": jnp.ones((2, 3)),
    "old_logps": jnp.zeros((2, 3)),
}


@helpers.bad_inputs(BAD_INPUTS)
def test_bad_input(what, implementation):
    changes, message = BAD_INPUTS[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        ratio_kl(**{**GOOD, **changes}, implementation=implementation)


@pytest.mark.parametrize("name", ["ref_logits", "action_ids", "completion_mask", "old_logps"])
def test_devices_must_match(name):
    first, second = jax.devices("cpu")[:2]
    arrays = {key: jax.device_put(x, second if key == name else first) for key, x in GOOD.items()}
    with pytest.raises(ValueError, match=f"{name} device .* must match policy_logits device .*"):
        ratio_kl(**arrays)


@in_core
def test_an_unchecked_active_id_is_nan_and_never_another_token(implementation):
    ids = GOOD["action_ids"].at[1, 2].set(9).at[0, 0].set(-1)
    found = jax.jit(lambda ids: ratio_kl(**{**GOOD, "action_ids": ids}, implementation=implementation))(ids)
    bad = np.array([[True, False, False], [False, False, True]])
    for value in found:
        np.testing.assert_array_equal(np.isnan(value), bad)


# Fusion into products and sums of float32 numbers is the same in bfloat16, whose gradients are rounded after it.
@helpers.cover(
    "dtype, n",
    itertools.product([jnp.float32, jnp.bfloat16], [1, 7, 9, 12, 33]),
    lambda dtype, n: dtype == jnp.float32 and n in (1, 9),
)
def test_jitted_gradients_keep_their_bits(dtype, n):
    """XLA fuses products and sums of many tokens where it does not those of few, or of none outside jit."""
    p = ops.make_policies(dtype, (67,), 30)
    g = upstream(p)
    whole = gradient(p, g, "deterministic")
    assert_same_bits(jitted_gradient(p, g), whole)
    assert_same_bits(jitted_gradient(*jax.tree.map(lambda x: x[:n], (p, g))), whole[:n])


@jax.jit
def jitted_gradient(p, g):
    return gradient(p, g, "deterministic")


@in_core
def test_no_upstream_gradient_is_no_gradient_whatever_the_values(implementation):
    """A NaN row, and one whose ratio overflows."""
    p = ops.make_policies(jnp.float32, (6,))._replace(completion_mask=jnp.ones(6))
    p = p._replace(policy_logits=p.policy_logits.at[1].set(jnp.nan), old_logps=p.old_logps.at[3].set(-200.0))
    g = tuple(x.at[jnp.array([1, 3])].set(0) for x in upstream(p))
    for pair in (g, (g[0], None), (None, g[1])):
        found = np.asarray(gradient(p, pair, implementation))
        assert np.all(np.isfinite(found)) and not found[[1, 3]].any() and found[[0, 2, 4, 5]].any()
