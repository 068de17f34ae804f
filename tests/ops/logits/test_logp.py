"""logp on a CPU: accuracy, raw bits, masks, gradients, JAX's transformations, a message for every bad input."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.sharding import Mesh, PartitionSpec

import rlk_jax
from rlk_jax import logp
from rlk_jax.core import dispatch
from rlk_jax.ops import promising
from tests.support import helpers, rollouts
from tests.support import logits as ops
from tests.support.helpers import IMPLEMENTATIONS, assert_same_bits, bits
from tests.support.logits import Case

# What stands in autodiff, checks and core for all implementations: xla alone would catch its bug.
in_core = helpers.implementations("xla")
BITS = Case("bits", (140,), 700, {"logit_softcap": 4.0}, "per token")


def outputs(p, case, implementation="deterministic", **changes):
    """The values and the gradient, all by the program of the gradient."""
    values, gradient = p.values_and_gradient(case, implementation, **changes)
    return (*values, gradient)


def is_in_make_test(case, dtype, implementation):
    if dtype != jnp.float32:
        return case.name == "everything" and implementation == "xla"
    others = {"xla": ("plain", "no lead", "one token of two"), "deterministic": ("impossible tokens",), "reference": ()}
    return case.name in ("everything", *others[implementation])


# Single options are caught by all of them at once, in a vocabulary of many chunks.
@helpers.cover(
    "case, dtype, implementation",
    [(*pair, x) for pair in helpers.in_dtypes(ops.CASES) for x in IMPLEMENTATIONS],
    is_in_make_test,
)
def test_against_float64(case, implementation, dtype):
    ops.check_against_gold(case, dtype, implementation)


# 16-bit logits are widened before anything is done to them; `rlk check` has these modes in float16.
@helpers.cover(
    "case, dtype, implementation",
    itertools.product(ops.LARGE, ops.DTYPES, IMPLEMENTATIONS),
    lambda case, dtype, implementation: dtype == jnp.float32 and implementation != "reference",
)
def test_large_and_peaked_logits(case, implementation, dtype):
    ops.check_large(case, dtype, implementation)


# The reference has the derivative that JAX makes.
@pytest.mark.parametrize("implementation", ["xla", "deterministic"])
def test_the_gradient_of_a_likely_token_is_as_exact_as_its_logp(implementation):
    """At the target it is −g·expm1(logp): g·(1 − p) would lose the bits in which p is below 1."""
    case = ops.LARGE[1]
    p = ops.make(case, jnp.float32)
    g, *others = p.upstream
    p = p._replace(token_ids=jnp.full(20, 17), upstream=(g, *(0 * x for x in others)))
    values, gradient = p.values_and_gradient(case, implementation)
    expected = -np.asarray(g, np.float64) * np.expm1(np.asarray(values.logp, np.float64))
    helpers.assert_within_contract(gradient[:, 17], expected, "logp", jnp.float32, "gradient")


# Sums are of float32 numbers in every dtype; test_ratio_kl.py has 65 rows of log-probs, `rlk check` others in float16.
@helpers.cover("count, dtype", itertools.product([1, 65], ops.DTYPES), lambda *x: x == (1, jnp.float32))
def test_rows_do_not_depend_on_the_batch(dtype, count):
    p = ops.make(BITS, dtype)
    whole = outputs(p, BITS)
    anywhere = np.random.default_rng(count).integers(0, 140, count)  # some of them more than once
    for rows in (slice(count), slice(17, 17 + count), anywhere):
        assert_same_bits(outputs(p.rows(rows), BITS), tuple(x[rows] for x in whole))


# Each example compiles programs. In `make test`, test_rows_do_not_depend_on_the_batch selects rows from anywhere, some
# of them twice; other numbers of rows than 1 and, in test_ratio_kl.py, 65 are left to `make test-full` alone.
@pytest.mark.full
@settings(max_examples=6)
@given(data=st.data())
def test_any_rows_at_any_place(data):
    case = Case("any", (90,), 300)
    p = ops.make(case, jnp.bfloat16)
    index = np.asarray(data.draw(st.lists(st.integers(0, 89), min_size=1, max_size=130)))
    expected = tuple(x[index] for x in p.outputs(case, "deterministic"))
    assert_same_bits(p.rows(index).outputs(case, "deterministic"), expected)


def test_lead_dimensions_and_padding_change_no_bit():
    """2 x 16 tokens, alone, and flat beside rows of padding."""
    case = Case("layout", (2, 16), 257)
    p = ops.make(case, jnp.bfloat16)

    def flat(x):
        if not jnp.ndim(x):
            return x
        padded = np.pad(np.asarray(x), ((0, 0), (3, 5), *((0, 0),) * (x.ndim - 2)))
        return jnp.asarray(padded.reshape(48, *x.shape[2:]))

    found = outputs(jax.tree.map(flat, p), Case("flat", (48,), 257))
    assert_same_bits(tuple(x.reshape(2, 24, *x.shape[1:])[:, 3:19] for x in found), outputs(p, case))


# `deterministic` leaves out the sums that only the entropy needs.
@helpers.cover(
    "asked_for, implementation",
    itertools.product([{}, {"return_lse": True}, {"return_entropy": True}], IMPLEMENTATIONS),
    lambda asked_for, implementation: implementation == "xla" or (not asked_for and implementation == "deterministic"),
)
def test_outputs_that_were_not_asked_for(implementation, asked_for):
    case = Case("outputs", (5,), 40)
    p = ops.make(case, jnp.float32)
    wanted = {"return_lse": False, "return_entropy": False, **asked_for}
    found = p.call(case, implementation, **wanted)
    everything = p.call(case, implementation)
    if not asked_for:
        assert_same_bits(found, everything.logp)
        return
    for name, value in found._asdict().items():
        assert (value is not None) == (name == "logp" or wanted[f"return_{name}"])
        if value is not None:
            assert_same_bits(value, getattr(everything, name))


# Rows are left out in core, for all implementations and whatever they hold.
@helpers.cover(
    "poison, implementation",
    itertools.product([np.nan, np.inf, -np.inf, 1e30], IMPLEMENTATIONS),
    lambda poison, implementation: implementation == "xla" or (implementation == "deterministic" and poison == np.inf),
)
def test_ignored_rows_leak_nothing(implementation, poison):
    case = Case("ignored", (12,), 90, {"ignore_index": -100})
    p = ops.make(case, jnp.float32)
    ignored = np.arange(12) % 3 == 1
    p = p._replace(token_ids=jnp.where(ignored, -100, p.token_ids))
    expected = outputs(p, case, implementation)
    poisoned = p._replace(logits=jnp.where(ignored[:, None], poison, p.logits))
    assert_same_bits(outputs(poisoned, case, implementation), expected)
    assert not any(np.any(np.asarray(x)[ignored]) for x in expected)
    if implementation == "deterministic":
        alone = outputs(p.rows(np.flatnonzero(~ignored)), case)
        assert_same_bits(alone, tuple(x[~ignored] for x in expected))


@helpers.implementations("xla", "deterministic")  # the reference leaves no rows out
def test_rows_without_an_upstream_gradient_get_none(implementation):
    case = Case("masked", (8,), 60)
    p = ops.make(case, jnp.bfloat16)
    masked = np.arange(8) < 4
    p = p._replace(
        logits=jnp.where(masked[:, None], jnp.nan, p.logits),
        upstream=tuple(jnp.where(masked, 0, g) for g in p.upstream),
    )
    gradient = p.gradient(case, implementation)
    assert not np.any(gradient[:4]) and np.all(np.isfinite(gradient)) and np.any(gradient[4:])


@helpers.implementations("xla", "deterministic")  # the reference is what the others are compared with
def test_only_the_row_of_impossible_tokens_is_nan(implementation):
    case = Case("no finite logit", (4,), 30)
    p = ops.make(case, jnp.float32)
    whole = p.call(case, implementation)
    found = p._replace(logits=p.logits.at[2].set(-jnp.inf)).call(case, implementation)
    assert np.isnan(found.logp[2])
    keep = np.array([0, 1, 3])
    np.testing.assert_array_equal(found.logp[keep], whole.logp[keep])


# The lowest numbers of both dtypes are finite in float32.
@helpers.cover(
    "dtype, implementation",
    itertools.product([jnp.float32, jnp.bfloat16], IMPLEMENTATIONS),
    lambda *x: x in ((jnp.float32, "xla"), (jnp.bfloat16, "deterministic")),
)
def test_rows_of_the_lowest_number(implementation, dtype):
    """What masks are filled with: all of them, a uniform choice; beside others, impossible."""
    ops.check_lowest(dtype, implementation)


@in_core
def test_a_token_that_cannot_be_taken(implementation):
    logits = jnp.zeros((2, 9)).at[:, 3].set(-jnp.inf)
    found = logp(logits, jnp.array([3, 4]), implementation=implementation)
    np.testing.assert_array_equal(found[0], -np.inf)
    gradient = jax.grad(lambda x: logp(x, jnp.array([3, 4]), implementation=implementation)[1])(logits)
    assert np.all(np.isfinite(gradient)) and not np.any(gradient[0])


@in_core
def test_listed_rows(implementation):
    case = Case("listed", (3, 4), 50)
    p = ops.make(case, jnp.float32)
    (whole, whole_gradient), rows = p.values_and_gradient(case, implementation), jnp.array([7, 0, 7, 11])
    listed = np.zeros(12, bool)
    listed[np.asarray(rows)] = True
    listed = listed.reshape(3, 4)
    found, gradient = p.values_and_gradient(case, implementation, row_indices=rows)
    assert_same_bits(found, tuple(jnp.where(listed, x, 0) for x in whole))
    initial = jnp.arange(12.0).reshape(3, 4)
    assert_same_bits(
        p.call(case, implementation, row_indices=rows, initial=initial).logp, jnp.where(listed, whole.logp, initial)
    )
    assert_same_bits(gradient, jnp.where(listed[..., None], whole_gradient, 0))
    nothing = p.call(case, implementation, row_indices=jnp.zeros(0, int), initial=initial)
    assert_same_bits(nothing.logp, initial)


def test_what_is_not_listed_passes_gradients_to_initial():
    case = Case("initial", (4,), 9)
    p = ops.make(case, jnp.float32)
    rows = jnp.array([1, 3])
    gradient = jax.grad(lambda x: logp(p.logits, p.token_ids, row_indices=rows, initial=x).sum())(jnp.ones(4))
    np.testing.assert_array_equal(gradient, [1, 0, 1, 0])


def test_initial_is_updated_in_place():
    p = ops.make(Case("donated", (2048,), 9), jnp.float32)
    rows = jnp.array([1, 3])
    program = jax.jit(
        lambda initial, p: logp(p.logits, p.token_ids, row_indices=rows, initial=initial), donate_argnums=0
    )
    initial = jnp.ones(2048)
    analysis = program.lower(initial, p).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == initial.nbytes


def test_donated_logits_hold_their_own_gradient():
    case = Case("memory", (256,), 8192)
    p = ops.make(case, jnp.bfloat16)

    def gradient(logits, donate):
        return jax.grad(lambda x: logp(x, p.token_ids, donate_logits=donate, implementation="xla").sum())(logits)

    donated = jax.jit(partial(gradient, donate=True), donate_argnums=0).lower(p.logits).compile().memory_analysis()
    assert donated.alias_size_in_bytes == p.logits.nbytes
    assert_same_bits(gradient(p.logits, True), gradient(p.logits, False))


@in_core
def test_no_tokens(implementation):
    case = Case("none", (0, 3), 20)
    p = ops.make(case, jnp.bfloat16)
    found = p.outputs(case, implementation)
    assert [x.shape for x in found] == [(0, 3), (0, 3), (0, 3), (0, 3, 20)]


@in_core
def test_strided_views(implementation):
    """A slice of every second token of longer sequences, and columns of a wider array."""
    case = Case("views", (3, 4), 40)
    p = ops.make(case, jnp.float32)
    wide = jnp.zeros((3, 8, 45)).at[:, ::2, 5:].set(p.logits)
    found = p._replace(logits=wide[:, ::2, 5:]).outputs(case, implementation)
    assert_same_bits(found, p.outputs(case, implementation))


TRANSFORMATIONS = {
    "vmap": lambda f: jax.vmap(f),
    "map": lambda f: lambda *x: jax.lax.map(lambda x: f(*x), x),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f)),
}


# The rules of vmap stand in autodiff for all, and a map has none.
@helpers.cover(
    "name, implementation",
    itertools.product(TRANSFORMATIONS, IMPLEMENTATIONS),
    lambda name, implementation: (name, implementation) == ("vmap of vmap", "deterministic"),
)
def test_transformations(name, implementation):
    case = Case("transformed", (6, 5), 80)
    p = ops.make(case, jnp.float32)
    whole = outputs(p, case, implementation)

    def of_row(logits, ids, *upstream):
        return outputs(ops.Problem(logits, ids, 1.0, upstream), case, implementation)

    found = TRANSFORMATIONS[name](of_row)(p.logits, p.token_ids, *p.upstream)
    for x, expected in zip(found, whole, strict=True):
        if implementation == "deterministic":
            assert_same_bits(x, expected)
        else:
            ops.helpers.assert_within_contract(x, expected, "logp", jnp.float32, "gradient")


@in_core
def test_shapes_without_values(implementation):
    p = ops.make(Case("transformed", (6, 5), 80), jnp.float32)
    shapes = jax.eval_shape(lambda x: logp(x, p.token_ids, implementation=implementation), p.logits)
    assert shapes.shape == (6, 5) and shapes.dtype == jnp.float32


# Types of varying axes are checked in one program; without their check the same program runs.
@helpers.cover("check_vma", [(True,), (False,)], lambda check_vma: check_vma)
def test_remat_and_shard_map_keep_the_bits(check_vma):
    case = Case("spread", (8,), 70)
    p = ops.make(case, jnp.float32)
    f = lambda x, ids: logp(x, ids, implementation="deterministic")  # noqa: E731

    def value_and_gradient(f):
        def loss(x):
            value = f(x, p.token_ids)
            return value.sum(), value

        gradient, value = jax.jit(jax.grad(loss, has_aux=True))(p.logits)
        return value, gradient

    expected = value_and_gradient(f)
    assert_same_bits(value_and_gradient(jax.checkpoint(f)), expected)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = PartitionSpec("data")
    spread = jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)
    assert_same_bits(value_and_gradient(spread), expected)


def test_derivatives_that_do_not_exist():
    logits, ids = jnp.zeros((2, 5)), jnp.zeros(2, int)
    with pytest.raises(ValueError, match="cannot be differentiated again"):
        jax.grad(lambda x: jax.grad(lambda y: logp(y, ids).sum())(x)[0, 1])(logits)
    with pytest.raises(TypeError):
        jax.jvp(lambda x: logp(x, ids), (logits,), (logits,))


# In make test, allowed tokens are beside a softcap and two row tiles.
@helpers.cover(
    "case",
    [(case,) for case in rollouts.CASES],
    lambda case: case.name in ("groups of several chunks", "padding and ignored tokens", "allowed tokens, softcap"),
)
def test_recorded_log_probs_have_the_bits_of_linear_logp(case):
    rollouts.check(case, "deterministic")


def _recorded(logits, ids):
    return logp(logits, ids, as_linear_logp=True, implementation="deterministic", validate=False)


def _spread(logits, ids):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("data")
    return jax.shard_map(_recorded, mesh=mesh, in_specs=rows, out_specs=rows)(logits, ids)


RECORDED = {
    "jit": jax.jit(_recorded),
    "vmap": jax.vmap(_recorded),
    "map": lambda *x: jax.lax.map(lambda row: _recorded(*row), x),
    "shard_map": _spread,
}


@helpers.cover("name", [(x,) for x in RECORDED], lambda name: name in ("vmap", "shard_map"))  # the others have no rule
def test_recorded_log_probs_keep_their_bits_under_transformations(name):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((4, 6, 300)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 300, (4, 6)))
    assert_same_bits(RECORDED[name](logits, ids), _recorded(logits, ids))


def test_recorded_log_probs_of_logits_that_are_not_finite():
    logits = jnp.zeros((4, 300), jnp.float32).at[:, 7].set(jnp.array([-jnp.inf, -jnp.inf, jnp.nan, jnp.inf]))
    found = np.asarray(_recorded(logits, jnp.array([0, 7, 0, 0])))
    helpers.assert_within_contract(found[:1], -np.log([299.0]), "logp", jnp.float32, "forward")
    assert found[1] == -np.inf and np.isnan(found[2:]).all()


def test_recorded_log_probs_have_no_gradient():
    with pytest.raises(ValueError, match="as_linear_logp gives log-probabilities to record, without a gradient"):
        jax.grad(lambda x: logp(x, jnp.arange(4), as_linear_logp=True, implementation="deterministic").sum())(
            jnp.zeros((4, 20))
        )


def test_only_implementations_with_the_bits_of_linear_logp_record_them():
    for name in ("xla", "triton", "reference"):
        with pytest.raises(ValueError, match="has other bits than those of linear_logp, which as_linear_logp asks for"):
            logp(**GOOD, as_linear_logp=True, implementation=name)
    assert promising("logp", **GOOD, as_linear_logp=True) == "deterministic"


GOOD = {"logits": jnp.zeros((4, 20)), "token_ids": jnp.arange(4)}
MASK_HINT = "Mask or filter padding / ignore-index values (e.g. -100) before this op."
BAD_INPUTS = {
    "leading shape": ({"token_ids": jnp.arange(3)}, "logits leading shape (4,) must match token_ids shape (3,)."),
    "scalar logits": ({"logits": jnp.zeros(()), "token_ids": jnp.zeros((), int)}, "logits must be [*lead, V], got"),
    "V = 0": ({"logits": jnp.zeros((4, 0))}, "logits must have at least one vocab column."),
    "float ids": ({"token_ids": jnp.ones(4)}, "token_ids must be integers, got float32."),
    "integer logits": ({"logits": jnp.zeros((4, 20), int)}, "logits must be bfloat16, float16 or float32, got int32."),
    "a list": ({"token_ids": [0, 1, 2, 3]}, "token_ids must be a JAX or NumPy array, got builtins.list."),
    "id below 0": (
        {"token_ids": jnp.array([0, 1, -100, 2])},
        f"token_ids out of range: expected [0, 19], got [-100, 2]. {MASK_HINT}",
    ),
    "id V": ({"token_ids": jnp.array([0, 1, 20, 2])}, "token_ids out of range: expected [0, 19], got [0, 20]."),
    "id in the padding": (
        {"token_ids": jnp.array([0, 1, 17, 2]), "global_vocab_size": 17},
        "token_ids out of range: expected [0, 16], got [0, 17].",
    ),
    "wide id": (
        {"token_ids": np.array([0, 1, 2**32 + 1, 2])},
        "token_ids out of range: expected [0, 19], got [0, 2147483647].",
    ),
    "beyond int32": (
        {"logits": jax.ShapeDtypeStruct((4, 2**31), jnp.bfloat16)},
        "logits rows and columns must fit into 32 bits, got 4 x 2147483648.",
    ),
    "more rows than int32 counts": (
        {
            "logits": jax.ShapeDtypeStruct((2**16, 2**16, 2), jnp.bfloat16),
            "token_ids": np.broadcast_to(0, (2**16, 2**16)),
        },
        "logits rows and columns must fit into 32 bits, got 4294967296 x 2.",
    ),
    "a shape": ({"logits": jax.ShapeDtypeStruct((4, 20), jnp.float32)}, "logits is a ShapeDtypeStruct: use"),
    "temperature 0": ({"temperature": 0.0}, "temperature must be positive and finite, got values in [0.0, 0.0]"),
    "temperature shape": (
        {"temperature": jnp.ones(3)},
        "temperature must be a scalar or have token_ids shape (4,), got (3,).",
    ),
    "softcap": ({"logit_softcap": -1.0}, "logit_softcap must be a positive finite number, got -1.0."),
    "vocabulary": ({"global_vocab_size": 21}, "global_vocab_size must be in [1, V=20], got 21."),
    "ignore_index": ({"ignore_index": 3}, "ignore_index 3 is a valid token id; it must lie outside [0, 19]."),
    "validate": ({"validate": 1.5}, "validate must be None, True or False, got 1.5."),
    "as_linear_logp": ({"as_linear_logp": 1}, "as_linear_logp must be True or False, got 1."),
    "rounded logits": (
        {"as_linear_logp": True, "logits": jnp.zeros((4, 20), jnp.bfloat16)},
        "as_linear_logp needs float32 logits, the sums hidden·Wᵀ before they are rounded, got bfloat16.",
    ),
    "row beyond": (
        {"row_indices": jnp.array([0, 4])},
        "row_indices contains an out-of-range row: expected [0, 3], got [0, 4].",
    ),
    "row below": ({"row_indices": jnp.array([-1])}, "row_indices contains an out-of-range row"),
    "rows of two dimensions": ({"row_indices": jnp.zeros((1, 1), int)}, "row_indices must be 1-D, got shape (1, 1)."),
    "float rows": ({"row_indices": jnp.ones(2)}, "row_indices must be integers, got float32."),
    "initial alone": ({"initial": jnp.zeros(4)}, "initial requires row_indices, the rows that it does not keep."),
    "initial's shape": (
        {"initial": jnp.zeros(3), "row_indices": jnp.array([0])},
        "initial must be float32 of token_ids shape (4,), got float32(3,).",
    ),
    "initial's dtype": (
        {"initial": jnp.zeros(4, jnp.bfloat16), "row_indices": jnp.array([0])},
        "initial must be float32 of token_ids shape (4,), got bfloat16(4,).",
    ),
}


@helpers.bad_inputs(BAD_INPUTS)
def test_bad_input(what, implementation):
    changes, message = BAD_INPUTS[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        logp(**{**GOOD, **changes}, implementation=implementation)


@pytest.mark.parametrize("name", ["token_ids", "temperature", "row_indices", "initial"])
def test_devices_must_match(name):
    first, second = jax.devices("cpu")[:2]
    extra = {"temperature": jnp.ones(4), "row_indices": jnp.array([0]), "initial": jnp.zeros(4)}
    arrays = {key: jax.device_put(x, first) for key, x in {**GOOD, **extra}.items()}
    arrays[name] = jax.device_put(arrays[name], second)
    with pytest.raises(ValueError, match=f"{name} device .* must match logits device .*"):
        logp(**arrays)


def test_explicitly_sharded_logits_are_refused():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        logits = jax.device_put(GOOD["logits"], PartitionSpec("data", None))
        ids = jax.device_put(GOOD["token_ids"], PartitionSpec("data"))
        for name, arguments in (("logits", (logits, GOOD["token_ids"])), ("token_ids", (GOOD["logits"], ids))):
            with pytest.raises(
                ValueError, match=f"{name} is sharded as .* over Explicit mesh axes, which logp does not"
            ):
                logp(*arguments)


@in_core  # and `rlk check` has bad ids of `deterministic`
def test_unchecked_bad_values_are_nan_and_stay_in_their_row(implementation):
    case = Case("unchecked", (4,), 20)
    p = ops.make(case, jnp.float32)._replace(token_ids=jnp.array([1, 20, -1, 2]))
    with jax.transfer_guard_device_to_host("disallow"):
        found = p.outputs(case, implementation, validate=False)
    for value in found:
        is_nan = np.isnan(np.asarray(value).reshape(4, -1)).any(axis=1)
        np.testing.assert_array_equal(is_nan, [False, True, True, False])
    rows = jax.jit(lambda rows: logp(p.logits, jnp.arange(4), row_indices=rows, implementation=implementation))
    for bad in ([1, 9], [9, 9], [-1, 0]):
        assert np.all(np.isnan(rows(jnp.array(bad))))


def test_checkify_reports_what_was_not_checked():
    for bad, message in (
        ({"token_ids": jnp.array([0, 20, 1, 2])}, "token_ids out of range: expected"),
        ({"row_indices": jnp.array([0, 9])}, "row_indices contains an out-of-range row"),
    ):
        checked = checkify.checkify(jax.jit(lambda x: logp(GOOD["logits"], **x)))
        error, _ = checked({"token_ids": GOOD["token_ids"], **bad})
        with pytest.raises(checkify.JaxRuntimeError, match=message):
            error.throw()


def test_validate_true_needs_values():
    with pytest.raises(ValueError, match="validate=True needs concrete token_ids and temperature; under jit use"):
        jax.jit(lambda ids: logp(GOOD["logits"], ids, validate=True))(GOOD["token_ids"])


def test_explain_and_names():
    decision = rlk_jax.explain("logp", jax.ShapeDtypeStruct((4, 20), jnp.bfloat16), GOOD["token_ids"])
    assert decision.choice == "xla" and "compute capability 9.0" in decision.reasons["mosaic"][0]
    with pytest.raises(ValueError, match=r"logp cannot run 'mosaic' here: needs compute capability 9\.0"):
        logp(**GOOD, implementation="mosaic")


def test_hopper_runs_mosaic_whatever_the_batch(monkeypatch):
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "H200", "9.0"))
    for n in (1, 5000):
        logits, ids = jax.ShapeDtypeStruct((n, 20), jnp.float16), jax.ShapeDtypeStruct((n,), jnp.int32)
        assert rlk_jax.explain("logp", logits, ids).choice == "mosaic"
    policy, ref, ids, mask, old = ops.make_policies(jnp.bfloat16)
    assert rlk_jax.explain("ratio_kl", policy, ref, ids, mask, old).choice == "mosaic"
    decision = rlk_jax.explain("grpo_loss", policy, ref, ids, old, jnp.ones(4), mask, samples_per_prompt=2)
    assert decision.choice == "mosaic"


def test_one_name_for_the_tokens():
    by_name = logp(logits=GOOD["logits"], token_ids=GOOD["token_ids"])
    np.testing.assert_array_equal(bits(by_name), bits(logp(*GOOD.values())))
