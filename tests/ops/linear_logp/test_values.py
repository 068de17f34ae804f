"""What every implementation of linear_logp must give: the values and gradients of the definition.

`make test` has xla in every case that it treats differently, and the others where they have code of their own:
`deterministic` is compared with float64 in test_bits.py too, and by `rlk check` in float16 in every input mode.
"""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_jax import LinearLogp, linear_logp
from tests.support import helpers
from tests.support.helpers import Case, assert_error, assert_within_contract

# What stands in autodiff, checks and core for all implementations: xla alone would catch its bug.
in_core = helpers.implementations("xla")


def check_against_gold(case: Case, dtype, implementation: str) -> None:
    problem = helpers.make(case, dtype)
    gold = helpers.gold(case, problem)
    values, gradients = problem.values_and_gradients(case, implementation)
    for value, expected in zip(values, gold.values, strict=True):
        chex.assert_type(value, jnp.float32)
        assert_within_contract(value, expected, "linear_logp", dtype, "forward")
    for gradient, expected in zip(gradients, gold.gradients, strict=True):
        chex.assert_type(gradient, dtype)
        assert_within_contract(gradient, expected, "linear_logp", dtype, "gradient")


def is_option_of_make_test(case, dtype, implementation):
    return case.name == "everything" and (dtype == jnp.float32 or (dtype, implementation) == (jnp.bfloat16, "xla"))


# Options one by one are caught by all of them at once, and by the random options below; no option at all by
# `test_peaked_and_large_logits`, and float16 by `rlk check` (test_everything_is_green_and_its_page_stands_alone in
# tests/checker/test_checker.py).
@helpers.cover(
    "case, dtype, implementation",
    [(*pair, x) for pair in helpers.in_dtypes(helpers.OPTION_CASES) for x in helpers.IMPLEMENTATIONS],
    is_option_of_make_test,
)
def test_options_against_float64(case, dtype, implementation):
    check_against_gold(case, dtype, implementation)


SHAPES_OF_MAKE_TEST = ("one of each", "no lead", "gpt2")


# Chunks of xla are crossed by `test_any_budget_gives_the_same_answer`, blocks of `deterministic` in test_bits.py.
@helpers.cover(
    "case, implementation",
    itertools.product(helpers.SHAPE_CASES, helpers.IMPLEMENTATIONS),
    lambda case, implementation: implementation == "xla" and case.name in SHAPES_OF_MAKE_TEST,
)
def test_shapes_against_float64(case, implementation):
    """In float32; models' own heads in the dtype that they have."""
    is_model = case.name in helpers.MODEL_SHAPES
    check_against_gold(case, jnp.bfloat16 if is_model else jnp.float32, implementation)


# The other dtypes take the same path through the layout.
@helpers.cover(
    "dtype, implementation",
    itertools.product(helpers.DTYPES, helpers.IMPLEMENTATIONS),
    lambda dtype, implementation: dtype == jnp.float32 and implementation != "reference",
)
def test_dv_layout_equals_vd(dtype, implementation):
    case = helpers.OPTION_CASES[-1]
    problem = helpers.make(case, dtype)
    dv = helpers.with_options(case, weight_layout="dv")
    found, expected = (problem.values_and_gradients(x, implementation) for x in (dv, case))
    for kind, xs, ys in zip(("forward", "gradient"), found, expected, strict=True):
        for a, b in zip(xs, ys, strict=True):
            assert_within_contract(a, b, "linear_logp", dtype, kind)


PEAKED = (
    Case("p = 0.999", (40,), 64, 300, scale=0.1),
    Case("logits of ±100", (40,), 64, 300, scale=25.0),
)


# The formulas are those of core/softmax.py for all. `rlk check` has these modes in float16, of `deterministic` too.
@helpers.cover(
    "case, dtype, implementation",
    itertools.product(PEAKED, helpers.DTYPES, helpers.IMPLEMENTATIONS),
    lambda case, dtype, implementation: implementation == "xla" and dtype == jnp.float32,
)
def test_peaked_and_large_logits(case, dtype, implementation):
    problem = helpers.make(case, dtype)
    if case.name.startswith("p ="):  # row i points at its target alone
        weight = problem.weight.at[problem.target_ids].set(problem.hidden * jnp.asarray(13.0 / case.dim, dtype))
        problem = problem._replace(weight=weight)
    gold = helpers.gold(case, problem)
    largest = np.abs(gold.logits).max()
    values, gradients = problem.values_and_gradients(case, implementation)
    for value, expected in zip(values, gold.values, strict=True):
        assert_error(float(np.abs(value - expected).max() / largest), "linear_logp_peaked", dtype, "forward")
    for gradient, expected in zip(gradients, gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_peaked", dtype, "gradient")


# The others keep gradients of logits in float32.
@helpers.implementations("xla")
def test_fp16_gradients_survive_tiny_upstream(implementation):
    """g·p near 1e-9 lies below float16's range: gradients of logits must be scaled before they are rounded."""
    case = Case("tiny upstream", (16,), 64, 151936)
    problem = helpers.make(case, jnp.float16)
    upstream = (jnp.full(16, 1e-4 / 16), jnp.zeros(16), jnp.zeros(16))
    problem = problem._replace(hidden=problem.hidden * 64, weight=problem.weight * 16, upstream=upstream)
    expected = helpers.gold(case, problem).gradients[0]
    (actual,) = (problem.gradients(case, implementation)[0],)
    assert_within_contract(actual, expected, "linear_logp_tiny_upstream", jnp.float16, "gradient")


@helpers.implementations()  # strict modes have mixed dtypes; strided inputs are NumPy's
def test_mixed_dtypes_and_numpy_inputs(implementation):
    case = helpers.OPTION_CASES[1]
    problem = helpers.make(case, jnp.bfloat16)
    mixed = problem._replace(weight=problem.weight.astype(jnp.float32), bias=np.asarray(problem.bias, np.float16))
    gold = helpers.gold(case, mixed)
    as_numpy = mixed._replace(hidden=np.asarray(mixed.hidden), target_ids=np.asarray(mixed.target_ids, np.int64))
    assert_within_contract(
        as_numpy.call(case, implementation).logp, gold.values[0], "linear_logp", jnp.float32, "forward"
    )
    for x, gradient in zip(mixed[:2], mixed.gradients(case, implementation), strict=False):
        chex.assert_trees_all_equal_shapes_and_dtypes(x, gradient)


@pytest.mark.parametrize(
    "ids_dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32, jnp.int32], ids=lambda d: np.dtype(d).name
)
def test_every_integer_dtype_of_ids(ids_dtype):
    case = Case("ids", (6,), 8, 100)
    problem = helpers.make(case, jnp.float32)
    other = problem._replace(target_ids=problem.target_ids.astype(ids_dtype))
    chex.assert_trees_all_equal(problem.call(case, "xla"), other.call(case, "xla"))


# Outputs come from core: those of `deterministic` are compared in test_bits.py, those of logp by xla.
@helpers.implementations()
def test_only_what_was_asked_for(implementation):
    case = helpers.OPTION_CASES[0]
    problem = helpers.make(case, jnp.float32)
    logp = problem.call(case, implementation, return_lse=False, return_entropy=False)
    chex.assert_shape(logp, case.lead)
    with_lse = problem.call(case, implementation, return_entropy=False)
    assert isinstance(with_lse, LinearLogp) and with_lse.entropy is None
    with_entropy = problem.call(case, implementation, return_lse=False)
    assert with_entropy.lse is None and with_entropy.entropy is not None
    chex.assert_trees_all_equal(logp, with_lse.logp, with_entropy.logp)


# No implementation is called; [3, 0] has an axis more.
@helpers.cover(
    "lead, implementation",
    itertools.product([(0,), (3, 0)], helpers.IMPLEMENTATIONS),
    lambda lead, implementation: lead == (3, 0) and implementation == "xla",
)
def test_no_tokens(implementation, lead):
    case = Case("empty", lead, 8, 20, bias=True)
    problem = helpers.make(case, jnp.float32)
    chex.assert_shape(list(problem.call(case, implementation)), lead)
    d_hidden, d_weight, d_bias = problem.gradients(case, implementation)
    chex.assert_shape(d_hidden, (*lead, 8))
    chex.assert_trees_all_equal((d_weight, d_bias), (jnp.zeros((20, 8)), jnp.zeros(20)))


# The reference has no blocks, and "one of each" of the shapes above nearly is this case for xla.
@helpers.implementations("deterministic")
def test_one_word_vocabulary(implementation):
    case = Case("V = 1", (3,), 4, 1)
    problem = helpers.make(case, jnp.float32)
    values = problem.call(case, implementation)
    chex.assert_trees_all_equal((values.logp, values.entropy), (jnp.zeros(3), jnp.zeros(3)))


@in_core  # and test_bits.py has NaN rows of `deterministic`
def test_ignored_tokens_contribute_exactly_nothing(implementation):
    case = helpers.OPTION_CASES[1]
    problem = helpers.make(case, jnp.float32)
    ignored = jnp.arange(40) % 3 == 0
    masked = problem._replace(
        hidden=jnp.where(ignored[:, None], jnp.nan, problem.hidden),
        target_ids=jnp.where(ignored, -100, problem.target_ids),
    )
    kept = problem._replace(upstream=tuple(jnp.where(ignored, 0, g) for g in problem.upstream))
    gold = helpers.gold(case, kept)
    values, gradients = masked.values_and_gradients(case, implementation, ignore_index=-100)
    for value, expected in zip(values, gold.values, strict=True):
        chex.assert_trees_all_equal(value[ignored], jnp.zeros(int(ignored.sum())))
        assert_within_contract(value[~ignored], expected[~ignored], "linear_logp", jnp.float32, "forward")
    np.testing.assert_array_equal(gradients[0][ignored], 0)
    for a, b in zip(gradients, gold.gradients, strict=True):
        assert_within_contract(a, b, "linear_logp", jnp.float32, "gradient")


@in_core  # and test_bits.py has such rows of `deterministic`
def test_rows_with_zero_upstream_contribute_exactly_nothing(implementation):
    """A masked loss: NaN rows and bad ids under a zero gradient reach no gradient."""
    case = helpers.OPTION_CASES[1]
    problem = helpers.make(case, jnp.float32)
    off = jnp.arange(40) % 2 == 0
    masked = problem._replace(
        hidden=jnp.where(off[:, None], jnp.nan, problem.hidden),
        target_ids=jnp.where(off, 10**6, problem.target_ids),
        upstream=tuple(jnp.where(off, 0, g) for g in problem.upstream),
    )
    expected = helpers.gold(case, problem._replace(upstream=masked.upstream)).gradients
    actual = masked.gradients(case, implementation)
    chex.assert_tree_all_finite(actual)
    np.testing.assert_array_equal(actual[0][off], 0)
    for a, b in zip(actual, expected, strict=True):
        assert_within_contract(a, b, "linear_logp", jnp.float32, "gradient")


@in_core  # and `rlk check` has bad ids of `deterministic`
@pytest.mark.parametrize("bad", [300, -1, -100, 10**6])
def test_unvalidated_bad_ids_give_nan(implementation, bad):
    case = helpers.OPTION_CASES[1]
    problem = helpers.make(case, jnp.float32)
    poisoned = problem._replace(target_ids=problem.target_ids.at[3].set(bad))
    clean, _ = problem.values_and_gradients(case, implementation, validate=False)
    values, gradients = poisoned.values_and_gradients(case, implementation, validate=False)
    is_row_3 = jnp.arange(40) == 3
    np.testing.assert_array_equal(jnp.isnan(values.logp), is_row_3)
    assert_within_contract(values.logp[~is_row_3], clean.logp[~is_row_3], "linear_logp", jnp.float32, "forward")
    d_hidden, d_weight, d_bias = gradients
    np.testing.assert_array_equal(jnp.isnan(d_hidden).all(axis=1), is_row_3)
    np.testing.assert_array_equal(jnp.isnan(d_hidden).any(axis=1), is_row_3)
    assert jnp.isnan(d_weight).all() and jnp.isnan(d_bias).all()


@in_core
@pytest.mark.parametrize("bad", [0.0, -1.0, jnp.nan, jnp.inf])
def test_unvalidated_bad_temperatures_give_nan(implementation, bad):
    case = helpers.OPTION_CASES[3]
    problem = helpers.make(case, jnp.float32)
    poisoned = problem._replace(temperature=problem.temperature.at[1, 2].set(bad))
    values = poisoned.call(case, implementation, validate=False)
    is_bad = jnp.zeros(case.lead, bool).at[1, 2].set(True)
    np.testing.assert_array_equal(jnp.isnan(values.logp), is_bad)


@helpers.implementations("xla", "deterministic")  # the reference folds nothing
def test_impossible_tokens(implementation):
    """−inf in the bias forbids tokens: they have probability 0, no NaN appears, and forbidding a target gives −inf."""
    case = Case("forbidden", (6,), 8, 600, bias=True)
    problem = helpers.make(case, jnp.float32)
    bias = problem.bias.at[:256].set(-jnp.inf)
    targets = jnp.asarray([256, 300, 599, 400, 500, 5])
    problem = problem._replace(bias=bias, target_ids=targets)
    gold = helpers.gold(case, problem._replace(target_ids=jnp.where(targets == 5, 300, targets)))
    values, gradients = problem.values_and_gradients(case, implementation)
    assert_within_contract(values.logp[:5], gold.values[0][:5], "linear_logp", jnp.float32, "forward")
    assert values.logp[5] == -jnp.inf
    for value, expected in zip(values[1:], gold.values[1:], strict=True):
        assert_within_contract(value, expected, "linear_logp", jnp.float32, "forward")
    chex.assert_tree_all_finite(gradients)


@pytest.mark.full
def test_tied_embeddings_sum_their_gradients():
    """In `make test`, test_three_steps_on_a_mesh_are_those_of_one_device (test_pjit_example.py) trains a model whose
    head is its embedding.
    """
    case = Case("tied", (12,), 16, 50)
    problem = helpers.make(case, jnp.float32)
    inputs = jnp.arange(12)

    def loss(embedding, head):
        return linear_logp(embedding[inputs], head, problem.target_ids).sum()

    tied = jax.grad(lambda w: loss(w, w))(problem.weight)
    apart = jax.grad(loss, argnums=(0, 1))(problem.weight, problem.weight)
    assert_within_contract(tied, apart[0] + apart[1], "linear_logp", jnp.float32, "gradient")


@in_core
def test_strided_inputs(implementation):
    """Views of every argument give what their copies give."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(24, 16)).astype(np.float32)[::2, ::2]
    weight = rng.normal(size=(8, 60)).astype(np.float32).T[::2]
    ids, bias = rng.integers(0, 30, 24)[::2], rng.normal(size=60).astype(np.float32)[::2]
    strided = linear_logp(hidden, weight, ids, bias, implementation=implementation)
    copied = linear_logp(*(np.ascontiguousarray(x) for x in (hidden, weight, ids, bias)), implementation=implementation)
    chex.assert_trees_all_equal(strided, copied)


any_shape_and_options = given(
    lead=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dim=st.integers(1, 70),
    vocab=st.integers(20, 600),
    padding=st.integers(0, 3),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    layout=st.sampled_from(["vd", "dv"]),
    bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.3, "per token"]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=2, deadline=None)
@any_shape_and_options
def test_a_few_shapes_and_options_against_float64(**drawn):
    check_any(**drawn)


# Each example compiles a program. In `make test`, test_a_few_shapes_and_options_against_float64 has two of them, and
# test_options_against_float64 all options at once. A shape that only other examples draw is left to `make test-full`.
@pytest.mark.full
@settings(max_examples=10, deadline=None)
@any_shape_and_options
def test_any_shape_and_options_against_float64(**drawn):
    check_any(**drawn)


def check_any(lead, dim, vocab, padding, softcap, layout, bias, temperature, seed):
    options = {"logit_softcap": softcap, "weight_layout": layout, "global_vocab_size": vocab - padding}
    case = Case("any", lead, dim, vocab, bias, options, temperature)
    problem = helpers.make(case, jnp.float32, seed)
    gold = helpers.gold(case, problem)
    values, gradients = problem.values_and_gradients(case, "xla")
    # One number alone may lie close to 0, where a relative error says nothing: judge all of a call together.
    for actual, expected, kind in ((values, gold.values, "forward"), (gradients, gold.gradients, "gradient")):
        joined = [np.concatenate([np.ravel(x) for x in xs]) for xs in (actual, expected)]
        assert_within_contract(*joined, "linear_logp", jnp.float32, kind)


# test_bits.py has padding of NaN for `deterministic`.
@helpers.cover(
    "layout, implementation",
    itertools.product(["vd", "dv"], helpers.IMPLEMENTATIONS),
    lambda layout, implementation: layout == "dv" and implementation == "xla",
)
def test_padding_of_the_head_may_hold_anything(implementation, layout):
    case = Case(
        "garbage", (12,), 16, 70, True, {"global_vocab_size": 63, "logit_softcap": 3.0, "weight_layout": layout}
    )
    problem = helpers.make(case, jnp.float32)
    zeros, garbage = (helpers.with_padding(case, problem, value) for value in (0, np.nan))
    values, gradients = garbage.values_and_gradients(case, implementation)
    chex.assert_trees_all_equal((values, gradients), zeros.values_and_gradients(case, implementation))
    chex.assert_tree_all_finite(gradients)
    np.testing.assert_array_equal(gradients[1][63:], 0)


@in_core
def test_the_temperature_of_an_ignored_token_is_not_looked_at(implementation):
    case = helpers.OPTION_CASES[3]
    problem = helpers.make(case, jnp.float32)
    ids, temperature = problem.target_ids.at[2, 1].set(-100), problem.temperature.at[2, 1].set(0)
    ignored = problem._replace(target_ids=ids, temperature=temperature)
    values, gradients = ignored.values_and_gradients(case, implementation, ignore_index=-100)
    assert values.logp[2, 1] == 0
    chex.assert_tree_all_finite((values, gradients))


def test_nnx_variables_and_numpy_scalars():
    case = helpers.OPTION_CASES[1]
    problem = helpers.make(case, jnp.float32)
    head = nnx.Param(problem.weight)
    options = {"temperature": np.float64(0.5), "logit_softcap": np.float32(30), "ignore_index": np.int32(-100)}
    plain = {"temperature": 0.5, "logit_softcap": 30.0, "ignore_index": -100, "global_vocab_size": 299}
    ids = problem.target_ids % 299
    chex.assert_trees_all_equal(
        linear_logp(problem.hidden, head, ids, global_vocab_size=np.int64(299), **options),
        linear_logp(problem.hidden, problem.weight, ids, **plain),
    )
    gradient, expected = (
        jax.jit(jax.grad(lambda w: linear_logp(problem.hidden, w, ids).sum()))(w) for w in (head, problem.weight)
    )
    chex.assert_trees_all_equal(gradient[...], expected)
