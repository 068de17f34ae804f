"""Outputs and gradients of attention against float64."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax.ops.attention.api import attention
from tests.support import attention as support
from tests.support import helpers
from tests.support.attention import Case
from tests.support.helpers import assert_within_contract

IMPLEMENTATIONS = ["reference", "xla", "deterministic"]
SEGMENTS = (tuple([0] * 5 + [5] * 9 + [14] * 7), tuple([3] * 12 + [15] * 4 + [16] * 5))
CASES = {
    "causal": Case(slots=21),
    "cache": Case(start=17),
    "padding": Case(batch=3, start=6, padding=(0, 11, 30)),
    "segments": Case(segment_starts=SEGMENTS),
    "window": Case(start=3, padding=(0, 5), options={"sliding_window": 7}),
    "softcap": Case(options={"logit_softcap": 1.5, "scale": 0.5}),
    "one head": Case(heads=1, groups=1, size=1, value_size=1),
    "multi-query": Case(heads=6, groups=1),
    "one query": Case(length=1, start=39, heads=16, groups=4, value_size=64),
    "all at once": Case(
        length=5,
        slots=200,
        start=150,
        padding=(7, 100),
        options={"sliding_window": 90, "logit_softcap": 1.5, "scale": 0.5},
    ),
    "over blocks": Case(batch=1, length=5, slots=200, heads=2, groups=1, start=150, padding=(7,)),
}


IN_MAKE_TEST = {
    "reference": ("padding", "all at once"),
    "xla": tuple(name for name in CASES if name not in ("all at once", "over blocks")),
    "deterministic": ("padding", "all at once", "over blocks"),
}
found = jax.jit(support.found, static_argnums=(0, 2))


# In make test, xla has each case, and the others have all options at once: blocks of keys are deterministic's alone.
# test_bits.py has packed sequences and a window of deterministic.
@helpers.cover(
    "name, implementation",
    itertools.product(CASES, IMPLEMENTATIONS),
    lambda name, implementation: name in IN_MAKE_TEST[implementation],
)
def test_against_float64(name, implementation):
    case = CASES[name]
    problem = support.make(case, jnp.bfloat16)
    actual, expected = found(case, problem, implementation), support.gold(case, problem)
    assert_within_contract(actual.output, expected.output, "attention", jnp.bfloat16, "forward")
    for a, e in zip(actual[1:], expected[1:], strict=True):
        if case.size > 1:
            assert_within_contract(a, e, "attention", jnp.bfloat16, "gradient")


@pytest.mark.parametrize(("dtype", "peak"), [(jnp.float16, 1.0), (jnp.bfloat16, 12.0), (jnp.float16, 12.0)])
def test_other_dtypes_and_peaked_rows(dtype, peak):
    case = CASES["padding"]
    op_class = "attention" if peak == 1 else "attention_peaked"
    problem = support.make(replace(case, peak=peak), dtype)
    for implementation in ("xla", "deterministic"):
        actual, expected = found(case, problem, implementation), support.gold(case, problem)
        assert_within_contract(actual.output, expected.output, op_class, dtype, "forward")
        for a, e in zip(actual[1:], expected[1:], strict=True):
            assert_within_contract(a, e, op_class, dtype, "gradient")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_before_its_sequence_gives_0_and_has_no_gradient(implementation):
    """Five queries of the second row, and all of the third."""
    case = CASES["padding"]
    actual = found(case, support.make(case, jnp.bfloat16), implementation)
    assert not np.any(actual.output[1, :5]) and not np.any(actual.output[2])
    assert not np.any(actual.query[1, :5]) and not np.any(actual.query[2]) and not np.any(actual.key[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_that_no_query_sees_may_hold_anything(implementation):
    case = CASES["padding"]
    problem = support.make(case, jnp.bfloat16)
    unseen = np.zeros((3, 40, 1, 1), bool)
    unseen[:, 27:], unseen[1, :11], unseen[2] = True, True, True
    spoilt = problem._replace(
        key=jnp.where(unseen, jnp.nan, problem.key), value=jnp.where(unseen, jnp.inf, problem.value)
    )
    for a, e in zip(*(found(case, x, implementation) for x in (spoilt, problem)), strict=True):
        np.testing.assert_array_equal(a, e)


def test_what_is_not_finite_reaches_the_queries_that_see_it_alone():
    case = Case(batch=1, slots=21, segment_starts=(SEGMENTS[0],))
    problem = support.make(case, jnp.bfloat16)
    for name, bad in (("key", jnp.nan), ("value", jnp.inf), ("key", -jnp.inf)):
        spoilt = problem._replace(**{name: getattr(problem, name).at[0, 7, 1].set(bad)})
        actual, clean = (found(case, x, "deterministic") for x in (spoilt, problem))
        assert np.isnan(np.asarray(actual.output[0, 7:14, 2:], np.float32)).all()
        for a, e, rows in ((actual.output, clean.output, 21), (actual.key, clean.key, 21)):
            others = [i for i in range(rows) if not 5 <= i < 14]
            np.testing.assert_array_equal(a[0, others], e[0, others])


# On a CPU, xla has the formula of the reference.
@helpers.cover("implementation", [(x,) for x in IMPLEMENTATIONS], lambda implementation: implementation != "reference")
def test_places_that_do_not_fit_are_nan_rows(implementation):
    support.check_places_that_do_not_fit(Case(), jnp.bfloat16, implementation)


def test_no_queries_no_sequences():
    arrays = [jnp.zeros(shape, jnp.bfloat16) for shape in ((0, 3, 4, 8), (0, 5, 2, 8), (0, 5, 2, 6))]
    assert attention(*arrays).shape == (0, 3, 4, 6)
    arrays = [jnp.zeros(shape, jnp.bfloat16) for shape in ((2, 0, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6))]
    gradients = jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), (0, 1, 2))(*arrays)
    assert [x.shape for x in gradients] == [x.shape for x in arrays] and not any(map(np.any, gradients))
