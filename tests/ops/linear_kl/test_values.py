"""What every implementation of linear_kl must give: the divergences and the gradients of the definition."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax import linear_kl
from tests.support import divergences, helpers
from tests.support.divergences import KINDS, Case, assert_found
from tests.support.helpers import assert_same_bits

_HEADS = {"vocab": 310, "teacher_vocab": 300}
_REAL = {"global_vocab_size": 290, "teacher_global_vocab_size": 290}
EVERYTHING = Case(
    "everything",
    (4, 10),
    bias=True,
    mask=True,
    temperature="per token",
    teacher_temperature=1.3,
    options={"logit_softcap": 3.0, "teacher_logit_softcap": 4.0, "teacher_weight_layout": "dv", **_REAL},
    **_HEADS,
)
CASES = (
    Case("plain"),
    Case("bias", bias=True),
    Case("two temperatures", temperature=0.7, teacher_temperature=1.5),
    Case("one temperature of both", temperature=1.8),
    Case("per-token temperature", (5, 8), temperature="per token"),
    Case("softcap", options={"logit_softcap": 2.0}, scale=4.0),
    Case("the teacher's softcap", options={"teacher_logit_softcap": 2.0}, scale=4.0),
    Case("padded heads", bias=True, options=_REAL, **_HEADS),
    Case("dv of both", options={"weight_layout": "dv", "teacher_weight_layout": "dv"}),
    Case("dv of the student", options={"weight_layout": "dv", **_REAL}, **_HEADS),
    Case("masked", (100,), mask=True, bias=True),
    Case("one column of each", (9,), 1, 1, 2, 2),
    Case("no lead", (), 64, 16, 70, 70),
    Case("several blocks", (2, 65), 24, 17, 1000, 1000, bias=True),
    EVERYTHING,
)
DTYPES_OF = {"plain": helpers.DTYPES, "everything": helpers.DTYPES}


WITHOUT_OPTIONS = ("plain", "per-token temperature", "dv of the student", "masked", "one column of each", "no lead")
"""The cases of what "everything" does not do."""


def each_pair_once() -> Iterator[tuple[Case, str, Any, str]]:
    """(case, kind, dtype, implementation): three of them have every pair of two, where a fourth depends on them."""
    for (i, case), (j, kind) in itertools.product(enumerate(CASES), enumerate(KINDS)):
        for k, dtype in enumerate(DTYPES_OF.get(case.name, (jnp.float32,))):
            yield case, kind, dtype, helpers.IMPLEMENTATIONS[(i + j + k) % 3]


def of_kind(case: Case, kind: str) -> Case:
    return replace(case, options={**case.options, "kind": kind, **({"beta": 0.3} if kind == "jsd" else {})})


def with_anything_where_nothing_counts(problem: divergences.Problem, case: Case) -> divergences.Problem:
    """NaN in the padding of both heads and in the rows that the mask leaves out. In NumPy, nothing is compiled."""
    real, mask = np.arange(case.vocab) < case.real, problem.completion_mask
    counts = {"weight": real, "bias": real, "hidden": mask}
    counts |= {f"teacher_{name}": np.arange(case.teacher_vocab) < case.real for name in ("weight", "bias")}
    counts |= {"teacher_hidden": mask}

    def spoilt(x, where):
        return np.where(np.reshape(where, (*np.shape(where), *(1,) * (x.ndim - np.ndim(where)))), x, np.nan).astype(
            x.dtype
        )

    given = {name: getattr(problem, name) for name in counts}
    return problem._replace(
        **{name: spoilt(x, counts[name]) for name, x in given.items() if x is not None and counts[name] is not None}
    )


# In make test, all options at once are in every implementation, and in xla in every kind and dtype. Single options are
# caught by all at once, "several blocks" by test_budgets_that_hold_one_block, which has several in each implementation.
@helpers.cover(
    "case, kind, dtype, implementation",
    each_pair_once(),
    lambda case, kind, dtype, implementation: (
        (case.name == "everything" and (dtype == jnp.float32 or implementation == "xla"))
        or (case.name in WITHOUT_OPTIONS and (dtype, implementation) == (jnp.float32, "xla"))
    ),
)
def test_against_float64(case, kind, dtype, implementation):
    case = of_kind(case, kind)
    problem = divergences.make(case, dtype)
    expected = divergences.gold(case, problem)
    problem = with_anything_where_nothing_counts(problem, case)
    actual = divergences.found(case, problem, implementation)
    assert_found(actual, expected, dtype)
    if problem.completion_mask is not None:
        assert not actual.values[~problem.completion_mask].any() and not actual.hidden[~problem.completion_mask].any()
    assert not actual.weight[case.real :].any()


# The tests below share the programs of this case, one for each kind and implementation. deterministic has two blocks.
BASE = Case("base", (100,), bias=True, mask=True)
FEW = [("xla", "forward"), ("xla", "reverse"), ("xla", "jsd"), ("deterministic", "jsd")]
"""The formulas of the kinds are those of divergence.py for all implementations."""


# The sums of all kinds go by the same blocks.
@pytest.mark.parametrize("implementation", ["xla", "deterministic"])
def test_budgets_that_hold_one_block(implementation):
    """xla works on 16 rows at a time, of which the last block has fewer; deterministic promises bits."""
    case = of_kind(BASE, "jsd")
    problem = divergences.make(case, jnp.float32)
    actual = divergences.found(case, problem, implementation, memory_budget=1)
    assert_found(actual, divergences.gold(case, problem), jnp.float32)
    if implementation == "deterministic":
        assert_same_bits(actual, divergences.found(case, problem, implementation))


SAME = Case(
    "same",
    (4, 10),
    bias=True,
    temperature="per token",
    noise=0.0,
    options={"logit_softcap": 3.0, "teacher_logit_softcap": 3.0, "beta": 0.3},
)


# Both heads are multiplied alike in every dtype, and the differences of all kinds are those of divergence.py.
@pytest.mark.parametrize(
    ("implementation", "kind", "dtype"),
    [*((*x, jnp.float32) for x in FEW), ("reference", "forward", jnp.float32), ("xla", "reverse", jnp.bfloat16)],
)
def test_identical_student_and_teacher(implementation, kind, dtype):
    """The divergence and every gradient are exactly 0."""
    case = replace(SAME, options={**SAME.options, "kind": kind})
    problem = divergences.make(case, dtype)
    for x in jax.tree.leaves(divergences.found(case, problem, implementation)):
        assert not x.any()


# Outside jit, forward and backward are programs of their own: a kind stands for all.
@helpers.cover(
    "implementation, kind",
    itertools.product(helpers.IMPLEMENTATIONS, KINDS),
    lambda implementation, kind: (implementation, kind) == ("xla", "jsd"),
)
def test_identical_student_and_teacher_outside_jit(implementation, kind):
    case = replace(SAME, options={**SAME.options, "kind": kind})
    problem = divergences.make(case, jnp.bfloat16)
    gradient = jax.grad(lambda h: problem._replace(hidden=h).call(case, implementation).sum())(problem.hidden)
    assert not gradient.any()


# In make test, xla has each kind and each dtype once: the formulas are those of divergence.py for all.
@helpers.cover(
    "kind, implementation, dtype",
    [
        x
        for x in itertools.product(KINDS, helpers.IMPLEMENTATIONS, helpers.DTYPES)
        if x[1] == "xla" or x[2] == jnp.float32
    ],
    lambda kind, implementation, dtype: (
        (dtype == jnp.float32 and (implementation, kind) in FEW)
        or (implementation == "xla" and (kind, dtype) in (("forward", jnp.bfloat16), ("reverse", jnp.float16)))
    ),
)
def test_a_teacher_near_the_student(kind, implementation, dtype):
    """Logits that differ by 1e-3 of themselves: gradients are differences of probabilities that nearly cancel."""
    case = of_kind(Case("near", (64,), 128, 128, 2000, 2000, bias=True, noise=1e-3), kind)
    problem = divergences.make(case, dtype)
    # Gradients as small as these are lost in float16 but for a loss scale.
    problem = problem._replace(upstream=problem.upstream * 2.0**12)
    actual = divergences.found(case, problem, implementation)
    assert_found(actual, divergences.gold(case, problem), dtype, "linear_kl_near")


# In make test, the formulas of divergence.py have each kind once, and deterministic's own sums of exponentials one.
@helpers.cover(
    "kind, implementation",
    itertools.product(KINDS, helpers.IMPLEMENTATIONS),
    lambda kind, implementation: (implementation, kind) in FEW,
)
def test_far_apart(kind, implementation):
    """Probabilities of one that are 0 in float32 where those of the other are 1."""
    case = of_kind(Case("far apart", scale=60.0), kind)
    problem = divergences.make(case, jnp.float32)
    actual = divergences.found(case, problem, implementation)
    assert_found(actual, divergences.gold(case, problem), jnp.float32, "linear_kl_peaked")


IMPOSSIBLE = {
    ("forward", "student"): np.inf,
    ("forward", "teacher"): None,
    ("forward", "both"): None,
    ("reverse", "student"): None,
    ("reverse", "teacher"): np.inf,
    ("reverse", "both"): None,
    ("jsd", "student"): None,
    ("jsd", "teacher"): None,
    ("jsd", "both"): None,
}
"""The divergence where a token is impossible for one or both; None where it is finite."""


# The formulas are those of divergence.py for all.
@helpers.cover(
    "kind, who, implementation",
    [(*x, implementation) for x in IMPOSSIBLE for implementation in helpers.IMPLEMENTATIONS],
    lambda kind, who, implementation: implementation == "xla",
)
def test_impossible_tokens(kind, who, implementation):
    case = of_kind(BASE, kind)
    problem = divergences.make(case, jnp.float32)
    names = [name for name, x in (("bias", "student"), ("teacher_bias", "teacher")) if who in (x, "both")]
    problem = problem._replace(**{name: getattr(problem, name).at[:200].set(-jnp.inf) for name in names})
    actual, expected = divergences.found(case, problem, implementation), divergences.gold(case, problem)
    if IMPOSSIBLE[kind, who] is None:
        assert_found(actual, expected, jnp.float32)
    else:
        active = problem.completion_mask
        assert (actual.values[active] == np.inf).all() and (expected.values[active] == np.inf).all()
        # The gradient of a forward divergence is that of p − q.
        is_known = np.isfinite if kind == "forward" else np.isnan
        assert is_known(actual.hidden[active]).all() and np.isfinite(actual.weight).all() == (kind == "forward")


@pytest.mark.parametrize(("beta", "kind"), [(0, "forward"), (1.0, "reverse")])
def test_the_ends_of_jsd_are_the_other_kinds(beta, kind):
    problem = divergences.make(BASE, jnp.float32)
    ends = divergences.found(BASE, problem, "xla", kind="jsd", beta=beta)
    assert_same_bits(ends, divergences.found(BASE, problem, "xla", kind=kind))


# In make test, one share near each end stands for the others.
@helpers.cover("beta", [(1e-8,), (1e-4,), (0.999999,)], lambda beta: beta != 1e-8)
def test_mixtures_of_nearly_one_alone(beta):
    """A small share keeps its digits, though the mixture is nearly one distribution."""
    case = Case("beta", scale=2.0, options={"kind": "jsd", "beta": beta})
    problem = divergences.make(case, jnp.float32)
    assert_found(divergences.found(case, problem, "xla"), divergences.gold(case, problem), jnp.float32)


def test_a_share_below_the_digits_of_the_gold():
    case = Case("beta", scale=10.0, options={"kind": "jsd", "beta": 1e-30})
    problem = divergences.make(case, jnp.float32)
    for x in jax.tree.leaves(divergences.found(case, problem, "xla")):
        assert jnp.isfinite(x).all()


@pytest.mark.full
def test_jsd_is_that_of_trl():
    """In `make test`, test_against_float64 has the same formula; TRL takes long to import."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    torch = pytest.importorskip("torch")
    case = Case("trl", temperature=1.7, options={"kind": "jsd", "beta": 0.2})
    problem = divergences.make(case, jnp.float32)
    operands = (problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight)
    h, w, th, tw = (torch.from_numpy(np.array(x, np.float64)) for x in operands)
    expected = gkd.GKDTrainer.generalized_jsd_loss(h @ w.T, th @ tw.T, None, 0.2, 1.7, "none").sum(dim=-1)
    helpers.assert_within_contract(problem.call(case, "xla"), expected.numpy(), "linear_kl", jnp.float32, "forward")


@pytest.mark.parametrize("mask_dtype", [jnp.bool, jnp.int32, jnp.float32, np.float64])
def test_masks_of_every_dtype(mask_dtype):
    case = Case("mask", (12,), mask=True)
    problem = divergences.make(case, jnp.float32)
    expected = problem.call(case, "xla")
    mask = np.asarray(problem.completion_mask).astype(mask_dtype) * (mask_dtype(0.5) if mask_dtype == np.float64 else 1)
    assert_same_bits(problem._replace(completion_mask=mask).call(case, "xla"), expected)


# Active tokens are found in core for all implementations; in make test, test_bits.py has masked rows of deterministic.
@helpers.implementations("xla")
def test_no_tokens_and_no_token_that_counts(implementation):
    case = Case("none", (0, 3))
    problem = divergences.make(case, jnp.float32)
    assert problem.call(case, implementation).shape == (0, 3)
    case = of_kind(BASE, "jsd")
    problem = divergences.make(case, jnp.float32)._replace(completion_mask=jnp.zeros(100, bool))
    for x in jax.tree.leaves(divergences.found(case, problem, implementation)):
        assert not x.any()


@helpers.implementations("xla", "deterministic")  # the reference leaves out what the others do, and has no blocks
def test_a_row_without_an_upstream_gradient_contributes_0(implementation):
    case = of_kind(BASE, "jsd")
    problem = divergences.make(case, jnp.float32)
    row = int(np.flatnonzero(problem.completion_mask)[2])
    problem = problem._replace(upstream=problem.upstream.at[row].set(0))
    expected = divergences.found(case, problem, implementation)
    nan = {name: getattr(problem, name).at[row].set(jnp.nan) for name in ("hidden", "teacher_hidden")}
    assert_same_bits(divergences.found(case, problem._replace(**nan), implementation)[1:], expected[1:])


def test_mixed_dtypes_and_numpy_inputs():
    """Each head multiplies in its own dtypes; gradients have those of their operands."""
    case = Case("mixed", bias=True)
    problem = divergences.make(case, jnp.bfloat16)
    problem = problem._replace(
        weight=problem.weight.astype(jnp.float32),
        bias=np.asarray(problem.bias, np.float16),
        teacher_hidden=np.asarray(problem.teacher_hidden, np.float32),
        teacher_weight=problem.teacher_weight.astype(jnp.float16),
    )
    actual, expected = divergences.found(case, problem, "xla"), divergences.gold(case, problem)
    helpers.assert_within_contract(actual.values, expected.values, "linear_kl", jnp.float32, "forward")
    assert [x.dtype for x in actual] == [jnp.float32, jnp.bfloat16, jnp.float32, jnp.float16]
    for name in ("hidden", "weight", "bias"):
        narrow = jnp.bfloat16 if name == "hidden" else jnp.float16
        helpers.assert_within_contract(getattr(actual, name), getattr(expected, name), "linear_kl", narrow, "gradient")


def test_it_is_public_and_promises_bits():
    case = Case("public", (12,))
    problem = divergences.make(case, jnp.float32)
    operands = (problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight)
    assert_same_bits(linear_kl(*operands), problem.call(case, "xla"))
