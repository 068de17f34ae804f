"""linear_kl by Triton's kernels in Triton's interpreter: float64 gold and raw bits. tests/gpu has both on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton import linear_logp as kernels
from rlk_jax.ops.linear_kl.options import KlOptions
from tests.ops.linear_kl import test_list_shards
from tests.ops.linear_kl import test_top_k as listed
from tests.ops.linear_kl.test_bits import rows_of
from tests.ops.linear_kl.test_values import EVERYTHING, SAME, of_kind, with_anything_where_nothing_counts
from tests.pallas_kernels.triton import interpreted
from tests.support import divergences, helpers
from tests.support.divergences import KINDS, Case, Found, Problem, assert_found
from tests.support.helpers import assert_same_bits, assert_within_contract
from tests.support.kl_shards import list_one_rank_after_another, one_rank_after_another

# The terms of all kinds are those of divergence.py, and jsd has the products of the others.
one_kind_in_make_test = helpers.cover("kind", [(x,) for x in KINDS], lambda kind: kind == "jsd")


@pytest.fixture(autouse=True, scope="module")
def on_this_cpu():
    with interpreted.runs("linear_kl", kernels):
        yield


def found(case: Case, problem: Problem, kind: str, **changes: object) -> Found:
    return jax.device_get(divergences.found(of_kind(case, kind), problem, "triton", **changes))


ODD = Case("two row tiles, odd heads", (140,), 72, 37, 301, 320, options={"teacher_global_vocab_size": 301})


@helpers.cover(
    "case, kind",
    [(case, kind) for case in (EVERYTHING, ODD) for kind in KINDS],
    lambda case, kind: kind == ("jsd" if case is EVERYTHING else "forward"),
)
def test_against_float64(case, kind):
    """Gradients are compared in float16, since the interpreter truncates to bfloat16 where a GPU rounds.

    Padding of both heads holds NaN. In make test each case has one kind, and test_impossible_tokens (here) the third.
    """
    problem = divergences.make(case, jnp.float16)
    actual = found(case, with_anything_where_nothing_counts(problem, case), kind)
    assert_found(actual, divergences.gold(of_kind(case, kind), problem), jnp.float16)
    if problem.completion_mask is not None:
        assert not actual.values[~problem.completion_mask].any() and not actual.hidden[~problem.completion_mask].any()
    assert not actual.weight[case.real :].any()


@one_kind_in_make_test
def test_a_teacher_near_the_student(kind):
    """Gradients as small as these are lost in float16 but for a loss scale."""
    case = Case("near", (40,), 128, 128, 500, 500, bias=True, noise=1e-3)
    problem = divergences.make(case, jnp.float16)
    names = ("teacher_hidden", "teacher_weight", "teacher_bias")
    problem = problem._replace(**{name: getattr(problem, name).astype(jnp.float16) for name in names})
    problem = problem._replace(upstream=problem.upstream * 2.0**12)
    expected = divergences.gold(of_kind(case, kind), problem)
    assert_found(found(case, problem, kind), expected, jnp.float16, "linear_kl_near")


@one_kind_in_make_test
def test_identical_student_and_teacher(kind):
    """The divergence and every gradient are exactly 0."""
    for x in found(SAME, divergences.make(SAME, jnp.float16), kind):
        assert not x.any()


@helpers.cover(
    "kind, who",
    [("forward", "bias"), ("reverse", "teacher_bias"), ("reverse", "both")],
    lambda kind, who: who == "both",
)
def test_impossible_tokens(kind, who):
    """Groups of no token that one head or both can take. In make test, tests/ops/linear_kl has divergences of ∞."""
    case = Case("impossible", bias=True)
    problem = divergences.make(case, jnp.float16)
    names = ("bias", "teacher_bias") if who == "both" else (who,)
    problem = problem._replace(**{name: getattr(problem, name).at[:200].set(-jnp.inf) for name in names})
    actual = found(case, problem, kind)
    if who == "both":
        assert_found(actual, divergences.gold(of_kind(case, kind), problem), jnp.float16)
    else:
        assert (actual.values == np.inf).all()


LEAD = 130
BITS = Case("bits", (LEAD,), 64, 40, 1100, 1060, bias=True, options={"global_vocab_size": 1060, "logit_softcap": 3.0})
MASKED = np.concatenate([[-1] * 57, np.insert(np.arange(LEAD), [5, 5, 40], -1)])


@pytest.fixture
def exact_products():
    with interpreted.exact_products():
        yield


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_bits(kind, exact_products):
    """Masked rows and a budget for one chunk at a time, and a row alone. In `make test`, test_bits_of_lists has rows
    and test_shards slices of both heads.
    """
    temperature = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2.0, LEAD), jnp.float32)
    made = divergences.make(BITS, jnp.float16)
    problem = made._replace(completion_mask=jnp.ones(LEAD, bool), temperature=temperature)
    expected = found(BITS, problem, kind)
    masked, real = found(BITS, rows_of(problem, MASKED, np.nan), kind, memory_budget=1), MASKED >= 0
    rows = masked.values[real], masked.hidden[real]
    assert_same_bits(Found(*rows, masked.weight, masked.bias), expected)
    alone = found(BITS, rows_of(problem, np.array([103])), kind)
    assert_same_bits((alone.values, alone.hidden), (expected.values[103:104], expected.hidden[103:104]))


_SIZES = ("global_vocab_size", "teacher_global_vocab_size")
SHARDS = dataclasses.replace(
    EVERYTHING, vocab=512, teacher_vocab=512, options=EVERYTHING.options | dict.fromkeys(_SIZES, 500)
)


@one_kind_in_make_test
def test_shards(kind):
    """Two ranks have the bits of whole heads; padding lies in the last shard."""
    case = of_kind(SHARDS, kind)
    problem = divergences.make(case, jnp.float16)
    whole = divergences.found(case, problem, "triton")
    assert_same_bits(one_rank_after_another(case, problem, "triton", 2), whole)


@one_kind_in_make_test
def test_shards_beside_a_list(kind):
    case = test_list_shards.CASE
    problem = listed.make(case, jnp.float16)
    options = KlOptions(kind=kind, beta=listed.BETA, **case.options)
    actual = list_one_rank_after_another(options, problem, "triton", 2)
    assert_same_bits(actual, listed.found(case, problem, kind, "triton"))


def test_a_bad_temperature_is_nan_and_nothing_else_is():
    problem = divergences.make(Case("bad", temperature="per token"), jnp.float16)
    problem = problem._replace(temperature=problem.temperature.at[7].set(-1))
    actual = found(Case("bad"), problem, "jsd", validate=False)
    is_bad = np.arange(40) == 7
    assert (np.isnan(actual.values) == is_bad).all() and np.isnan(actual.weight).all()
    assert (np.isnan(actual.hidden) == is_bad[:, None]).all()


def test_no_token_that_counts():
    case = Case("none", bias=True)
    problem = divergences.make(case, jnp.float16)._replace(completion_mask=jnp.zeros(40, bool))
    for x in found(case, problem, "jsd"):
        assert not x.any()


LISTS = (listed.EVERYTHING, dataclasses.replace(listed.CASES[-1], vocab=1100, real=1100))


@helpers.cover(
    "case, kind",
    [(case, kind) for case in LISTS for kind in KINDS],
    lambda case, kind: (case is listed.EVERYTHING) == (kind == "reverse") and kind != "forward",
)
def test_lists_against_float64(case, kind):
    """In make test each case has one kind: buckets of all kinds are made by the same functions."""
    problem = listed.make(case, jnp.float16)
    actual, expected = listed.found(case, problem, kind, "triton"), listed.gold(case, problem, kind)
    assert_within_contract(actual.values, expected.values, case.op_class, jnp.float16, "forward")
    for name in ("hidden", "weight", "bias"):
        if getattr(expected, name) is not None:
            assert_within_contract(
                getattr(actual, name), getattr(expected, name), case.op_class, jnp.float16, "gradient"
            )
    left_out = ~np.asarray(problem.mask)
    assert not actual.values[left_out].any() and not actual.hidden[left_out].any()


def test_bits_of_lists(exact_products):
    """A row alone, and a budget for one chunk at a time."""
    case = dataclasses.replace(LISTS[1], tokens=12)
    problem = listed.make(case, jnp.float16)
    expected = listed.found(case, problem, "reverse", "triton")
    row = int(np.flatnonzero(problem.mask)[3])
    taken = {name: getattr(problem, name)[row : row + 1] for name in ("hidden", "ids", "logps", "mask", "upstream")}
    cut = dataclasses.replace(case, name="cut", options={"memory_budget": 1})
    alone = listed.found(cut, problem._replace(**taken), "reverse", "triton")
    assert_same_bits(alone[:2], (expected.values[row : row + 1], expected.hidden[row : row + 1]))
