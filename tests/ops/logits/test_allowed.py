"""logp, ratio_kl and grpo_loss over the tokens that each row allows: values, bits, transformations, messages.

How ids and masks become words is the same as for linear_logp, whose test_allowed.py has more of it.
"""

import functools
import itertools
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import rlk_jax
from rlk_jax import grpo_loss, logp, ratio_kl
from rlk_jax.checker import gold
from tests.support import helpers
from tests.support import logits as ops
from tests.support.allowed import allowed_beside, ids_of, mask_of
from tests.support.helpers import IMPLEMENTATIONS, assert_same_bits, assert_within_contract
from tests.support.logits import Case

# What stands in core for all implementations: xla alone would catch its bug.
in_core = helpers.implementations("xla")
EVERYTHING = Case("everything", (7, 10), 1300, {"logit_softcap": 3.0, "global_vocab_size": 1290}, "per token", 4.0)
PLAIN = Case("plain", (37,), 301)


# Logits of every dtype are widened before anything is done to them.
@helpers.cover(
    "case, dtype, implementation",
    itertools.product((EVERYTHING, PLAIN), ops.DTYPES, IMPLEMENTATIONS),
    lambda case, dtype, implementation: (
        (case.name, dtype, implementation)
        in (
            ("everything", jnp.float32, "xla"),
            ("everything", jnp.float32, "deterministic"),
            ("plain", jnp.bfloat16, "xla"),
            ("plain", jnp.bfloat16, "reference"),
        )
    ),
)
def test_against_float64(case, dtype, implementation):
    ops.check_allowed(case, dtype, implementation)


# The reference promises no bits; a mask becomes words in front of all.
@helpers.cover(
    "case, implementation",
    itertools.product((EVERYTHING, PLAIN), IMPLEMENTATIONS),
    lambda case, implementation: (case.name, implementation) in (("plain", "xla"), ("everything", "deterministic")),
)
def test_a_mask_that_allows_everything_gives_the_bits_of_no_mask(case, implementation):
    ops.check_everything_allowed(case, jnp.float32, implementation)


@helpers.implementations("xla")  # ids become a mask in front of all implementations
def test_ids_mask_and_logits_of_minus_infinity_give_the_same_bits(implementation):
    """Without a softcap, which is finite there, what is not allowed is what a sampler sets to −inf."""
    p = ops.make(PLAIN, jnp.bfloat16)
    allowed = ops.allowed_of(PLAIN, p)
    expected = p.values_and_gradient(PLAIN, implementation, allowed_mask=mask_of(allowed))
    assert_same_bits(p.values_and_gradient(PLAIN, implementation, allowed_ids=ids_of(allowed)), expected)
    left_out = p._replace(logits=jnp.where(allowed, p.logits, -jnp.inf))
    (values, gradient), (values_out, gradient_out) = expected, left_out.values_and_gradient(PLAIN, implementation)
    assert_same_bits(values_out, values)
    np.testing.assert_array_equal(gradient_out, gradient)  # −inf may have −0, as a gradient of 0·p


@in_core
def test_the_token_alone(implementation):
    """K = 1: the only outcome has log-prob 0 and entropy 0, and the gradient of its lse is all of the upstream."""
    p = ops.make(PLAIN, jnp.float32)
    values, gradient = p.values_and_gradient(PLAIN, implementation, allowed_ids=p.token_ids[:, None])
    assert not np.asarray(values.logp).any() and not np.asarray(values.entropy).any()
    lse, expected = np.zeros((2, 37, 301))
    rows = np.arange(37), np.asarray(p.token_ids)
    expected[rows] = p.upstream[1]
    lse[rows] = np.asarray(p.logits)[rows]
    assert_same_bits(gradient, expected.astype(np.float32))
    assert_same_bits(values.lse, lse[rows].astype(np.float32))


def test_rows_keep_their_bits_in_any_batch():
    case = Case("bits", (140,), 700, {"logit_softcap": 4.0}, "per token")
    p = ops.make(case, jnp.bfloat16)
    mask, few = mask_of(ops.allowed_of(case, p)), np.asarray([100, 3, 3, 69])
    whole = p.values_and_gradient(case, "deterministic", allowed_mask=mask)
    alone = p.rows(few).values_and_gradient(case, "deterministic", allowed_mask=mask[few])
    assert_same_bits(alone, jax.tree.map(lambda x: x[few], whole))


def test_rows_that_do_not_count_may_allow_anything():
    """Rows that are ignored or not listed allow nothing, or ids that do not exist."""
    case = Case("listed", (12,), 90, {"ignore_index": -1})
    p = ops.make(case, jnp.float32)
    rows, initial = jnp.asarray([7, 0, 11, 5]), jnp.arange(12.0)
    p = p._replace(token_ids=p.token_ids.at[5].set(-1))
    ids = ids_of(ops.allowed_of(Case("ids", (12,), 90), p._replace(token_ids=jnp.maximum(p.token_ids, 0))))
    counts = np.isin(np.arange(12), [7, 0, 11])
    nothing = jnp.where(counts[:, None], ids, -1).at[1].set(99)
    given = {"row_indices": rows, "initial": initial}
    found = p.call(case, "xla", allowed_ids=nothing, **given)
    expected = p.call(case, "xla", allowed_ids=ids, row_indices=rows)
    kept = np.where(np.isin(np.arange(12), rows), expected.logp, initial)
    assert_same_bits(found, (kept, *expected[1:]))
    assert expected.logp[5] == 0 and np.asarray(expected.logp)[counts].any()


def test_lead_dimensions_vmap_and_shards_of_tokens():
    case = Case("lead", (4, 6), 80)
    p = ops.make(case, jnp.float32)
    mask = mask_of(ops.allowed_of(case, p))
    call = partial(logp, implementation="deterministic")

    def value_and_gradient(f: Any) -> Any:
        def loss(x: Any) -> Any:
            value = f(x, p.token_ids, mask)
            return value.sum(), value

        return jax.jit(jax.grad(loss, has_aux=True))(p.logits)

    def of_rows(x: Any, ids: Any, words: Any) -> Any:
        return call(x, ids, allowed_mask=words)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spread = jax.shard_map(of_rows, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    expected = value_and_gradient(of_rows)
    for f in (jax.vmap(of_rows), spread):
        assert_same_bits(value_and_gradient(f), expected)
    assert call(p.logits[:0], p.token_ids[:0], allowed_mask=mask[:0]).shape == (0, 6)


def two_policies() -> tuple[ops.Policies, np.ndarray, ops.Policies]:
    """Two policies, what is allowed, and the same policies with −inf where nothing is, for a gold without masks.

    Masked tokens allow nothing.
    """
    p = ops.make_policies(jnp.float32, (5, 6), 200)
    allowed = allowed_beside(p.action_ids, 200)
    p = p._replace(old_logps=jnp.asarray(gold.logps(np.where(allowed, p.policy_logits, -np.inf), p.action_ids) - 0.1))
    left_out = (jnp.where(allowed, x, -jnp.inf) for x in p[:2])
    given = np.where(np.asarray(p.completion_mask)[..., None], allowed, False)
    return p, given, ops.Policies(*left_out, *p[2:])


# Both ops are made of logp, which has its own tests.
@in_core
def test_policy_and_reference_have_the_same_allowed_tokens(implementation):
    p, allowed, left_out = two_policies()
    g = tuple(jnp.asarray(np.random.default_rng(i).normal(size=(5, 6)), jnp.float32) for i in (1, 2))
    expected = ops.ratio_kl_gold(left_out, g)

    def loss(policy: Any) -> Any:
        found = p._replace(policy_logits=policy).ratio_kl(implementation, allowed_ids=ids_of(allowed))
        return jnp.vdot(g[0], found.ratio) + jnp.vdot(g[1], found.kl), found

    gradient, found = jax.grad(loss, has_aux=True)(p.policy_logits)
    for value, right in zip(found, expected, strict=False):
        assert_within_contract(value, right, "ratio_kl", jnp.float32, "forward")
    assert_within_contract(gradient, expected.gradient, "ratio_kl", jnp.float32, "gradient")
    assert not np.asarray(gradient)[~allowed].any()
    assert not np.allclose(p.ratio_kl(implementation).kl, expected.kl)


@in_core
def test_grpo_loss(implementation):
    p, allowed, left_out = two_policies()
    rewards, boundaries, clip = np.array([1.0, 3.0, 10.0, 20.0, 30.0], np.float32), [0, 2, 5], 0.15
    advantages = gold.group_advantages_gold(rewards, boundaries)
    *values, expected = gold.grpo_loss_gold(*left_out, advantages, clip=(clip, clip), beta=0.07)
    how = {"group_boundaries": boundaries, "clip_eps": clip, "beta": 0.07, "allowed_mask": mask_of(allowed)}

    def loss(policy: Any) -> Any:
        found = p._replace(policy_logits=policy).grpo_loss(rewards, implementation, **how)
        return found.loss, found

    gradient, found = jax.grad(loss, has_aux=True)(p.policy_logits)
    assert_within_contract(np.array(found), np.array(values), "grpo_loss", jnp.float32, "forward")
    assert_within_contract(gradient, expected, "grpo_loss", jnp.float32, "gradient")


LOGITS, IDS = jnp.ones((3, 40)), jnp.asarray([0, 1, 39])
ALL = jnp.tile(jnp.arange(40), (3, 1))
WORDS = jnp.full((3, 2), -1, jnp.int32)
NAMES = {"logp": "token_ids", "ratio_kl": "action_ids", "grpo_loss": "action_ids"}
STATIC = {
    "both": (
        {"allowed_ids": ALL, "allowed_mask": WORDS},
        "allowed_ids and allowed_mask say the same: give one of them.",
    ),
    "ids of other rows": (
        {"allowed_ids": ALL[:2]},
        "allowed_ids must be [*lead, K] with {name}' lead shape {lead}, got",
    ),
    "words of another width": (
        {"allowed_mask": WORDS[:, :1]},
        "allowed_mask must be [*lead, ceil(V / 32)] with {name}' lead shape {lead} and 2 words, got shape ",
    ),
    "float ids": ({"allowed_ids": ALL.astype(float)}, "allowed_ids must be integers, got float32."),
    "bytes": ({"allowed_mask": WORDS.astype(jnp.uint8)}, "token 32·j + i, got uint8."),
    "bools": ({"allowed_mask": WORDS.astype(bool)}, "allowed_mask must be int32 or uint32, of which"),
}
VALUES = {
    "id V": (
        {"allowed_ids": ALL.at[1, 7].set(40)},
        "allowed_ids out of range: expected [0, 39], or -1 as padding, got values in [0, 40].",
    ),
    "nothing": (
        {"allowed_mask": WORDS.at[1].set(0)},
        "every token that counts needs an allowed id: rows 1 to 1 of the flat tokens have none.",
    ),
    "another token": (
        {"allowed_ids": ALL.at[1].set(5)},
        "{name} must be allowed: they are not in rows 1 to 1 of the flat tokens.",
    ),
}


def call_of(op: str, given: dict[str, Any], **options: Any) -> Any:
    """The values of three tokens; grpo_loss has them as one token each of three sequences."""
    if op == "logp":
        return logp(LOGITS, IDS, **given, **options)
    zeros, ones = jnp.zeros(3), jnp.ones(3)
    if op == "ratio_kl":
        return ratio_kl(LOGITS, LOGITS, IDS, ones, zeros, **given, **options)
    column = [x[:, None] for x in (LOGITS, LOGITS, IDS, zeros)]
    given = {name: x[:, None] for name, x in given.items()}
    return grpo_loss(*column, None, ones[:, None], advantages=ones, **given, **options)


@pytest.mark.parametrize("what", [*STATIC, *VALUES])
@pytest.mark.parametrize("op", NAMES)
def test_messages(op, what):
    given, message = (STATIC | VALUES)[what]
    message = message.replace("{name}", NAMES[op]).replace("{lead}", "(3, 1)" if op == "grpo_loss" else "(3,)")
    for validate in (None, True):
        with pytest.raises(ValueError, match=re.escape(message)):
            call_of(op, given, validate=validate)
    if what in STATIC:
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(lambda: call_of(op, given, validate=False))


@pytest.mark.parametrize("op", NAMES)
def test_masks_under_jit_cannot_be_validated(op):
    call = jax.jit(lambda words: call_of(op, {"allowed_mask": words}, validate=True))
    with pytest.raises(ValueError, match=f"validate=True needs concrete {NAMES[op]}"):
        call(WORDS)


# What marks a row stands in core, for all implementations.
@pytest.mark.parametrize(("what", "implementation"), list(zip(VALUES, IMPLEMENTATIONS, strict=True)))
def test_a_bad_row_is_nan(what, implementation):
    options = {"return_lse": True, "return_entropy": True, "validate": False, "implementation": implementation}

    @jax.jit
    def gradient_and_values(x: Any, given: Any) -> Any:
        def loss(x: Any) -> Any:
            values = logp(x, IDS, **given, **options)
            return sum(value.sum() for value in values), values

        return jax.grad(loss, has_aux=True)(x)

    gradient, values = gradient_and_values(LOGITS, VALUES[what][0])
    for x in (*values, gradient):
        np.testing.assert_array_equal(np.isnan(np.asarray(x)).reshape(3, -1).any(1), [False, True, False])


@functools.cache
def reported(op: str) -> Any:
    return jax.jit(checkify.checkify(partial(call_of, op)))


# The ops differ in the name of their ids.
@pytest.mark.parametrize(
    ("op", "what"),
    [*(("logp", what) for what in VALUES), ("ratio_kl", "another token"), ("grpo_loss", "another token")],
)
def test_a_bad_row_is_reported(op, what):
    given, message = VALUES[what]
    assert message.replace("{name}", NAMES[op]) in str(reported(op)(given)[0].get())


def test_a_mask_must_be_where_the_logits_are():
    first, second = jax.devices("cpu")[:2]
    logits, mask = jax.device_put(LOGITS, first), jax.device_put(WORDS, second)
    with pytest.raises(ValueError, match=r"allowed_mask device .* must match logits device .*"):
        logp(logits, IDS, allowed_mask=mask)


def test_explain_takes_masks():
    mask = jax.ShapeDtypeStruct((3, 2), jnp.int32)
    assert rlk_jax.explain("logp", LOGITS, IDS, allowed_mask=mask).choice == "xla"
    with pytest.raises(ValueError, match="allowed_mask is a ShapeDtypeStruct"):
        logp(LOGITS, IDS, allowed_mask=mask)
