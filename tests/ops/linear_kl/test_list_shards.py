"""The student's head cut along the vocabulary beside a teacher's list, inside shard_map: the same values and bits."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops.linear_kl import test_top_k as listed
from tests.ops.linear_kl.test_shards import ORDERS, mesh_of
from tests.ops.linear_kl.test_top_k import Case, Found, Problem
from tests.support import helpers
from tests.support.divergences import KINDS
from tests.support.helpers import assert_same_bits, assert_within_contract

CASE = Case(
    "shards",
    vocab=1024,
    real=1000,
    count=20,
    bias=True,
    temperature=True,
    options={"logit_softcap": 3.0, "weight_layout": "dv", "global_vocab_size": 1000},
)
"""The padding lies in the last shard, and every shard has some of the listed tokens."""
# Most of so few tokens are listed, and the little that is left to the rest is peaked; the reference is as far off.
PADDING = Case(
    "shards of padding alone", vocab=64, real=10, op_class="linear_kl_peaked", options={"global_vocab_size": 10}
)
SPECS = Problem(*[jax.P()] * len(Problem._fields))._replace(weight=jax.P("tp"), bias=jax.P("tp"))


@functools.partial(jax.jit, static_argnames=("case", "kind", "implementation", "degree", "order"))
def _call(
    problem: Problem, *, case: Case, kind: str, implementation: str, degree: int, order: Sequence[int] | None
) -> Found:
    def on_rank(own: Problem) -> jax.Array:
        start = None
        if order is not None:
            start = jnp.asarray(order)[jax.lax.axis_index("tp")] * own.weight.shape[0]
        options = {**case.options, "axis_name": "tp", "vocab_start_index": start}
        return listed.values_of(own, replace(case, options=options), kind, implementation)

    call = jax.shard_map(on_rank, mesh=mesh_of(degree), in_specs=(SPECS,), out_specs=jax.P(), check_vma=degree != 8)
    values, pull_back = jax.vjp(lambda *student: call(Problem(*student, *problem[3:])), *problem[:3])
    return Found(values, *pull_back(problem.upstream))


def found(
    case: Case, problem: Problem, kind: str, implementation: str, degree: int, order: Sequence[int] | None = None
) -> Found:
    """Values and gradients over so many ranks, of which rank r holds shard number order[r]."""

    def in_order(x: Any, order: Any) -> Any:
        return None if x is None else np.asarray(x).reshape(degree, -1, *x.shape[1:])[order].reshape(x.shape)

    places = np.arange(degree) if order is None else np.asarray(order)
    given = problem._replace(weight=in_order(problem.weight, places), bias=in_order(problem.bias, places))
    call = {"case": case, "kind": kind, "implementation": implementation, "degree": degree, "order": order}
    actual, back = jax.device_get(_call(given, **call)), np.argsort(places)
    return actual._replace(weight=in_order(actual.weight, back), bias=in_order(actual.bias, back))


def assert_gold(actual: Found, expected: Found, case: Case) -> None:
    assert_within_contract(actual.values, expected.values, case.op_class, jnp.float32, "forward")
    for x, y in zip(actual[1:], expected[1:], strict=True):
        if y is not None:
            assert_within_contract(x, y, case.op_class, jnp.float32, "gradient")


VALUES = [(*x, degree) for x in itertools.product(KINDS, ("xla", "deterministic")) for degree in (2, 4, 8)]
VALUES_IN_MAKE_TEST = (("forward", "xla", 2), ("reverse", "xla", 4), ("jsd", "xla", 8))


# In make test every kind and every degree occurs once; test_same_bits_at_every_degree has deterministic.
@helpers.cover("kind, implementation, degree", VALUES, lambda *x: x in VALUES_IN_MAKE_TEST)
def test_against_float64(kind, implementation, degree):
    problem = listed.make(CASE, jnp.float32)
    assert_gold(found(CASE, problem, kind, implementation, degree), listed.gold(CASE, problem, kind), CASE)


def test_shards_of_padding_alone():
    """They have no token of the list, and none of the rest."""
    problem = listed.make(PADDING, jnp.float32)
    actual = found(PADDING, problem, "reverse", "xla", 8)
    assert_gold(actual, listed.gold(PADDING, problem, "reverse"), PADDING)


# In make test the kind with all terms, and two degrees, stand for all: groups and ranks are those of other tests.
@helpers.cover("kind, degree", itertools.product(KINDS, (1, 2, 4, 8)), lambda *x: x in (("jsd", 4), ("jsd", 8)))
def test_same_bits_at_every_degree(kind, degree):
    """Divergence, dW, db, and dH by the canonical reduction: as on one device, with ranks in any order."""
    problem = listed.make(CASE, jnp.bfloat16)
    expected = listed.found(CASE, problem, kind, "deterministic")
    canonical = replace(CASE, options={**CASE.options, "reduction": "canonical"})
    assert_same_bits(found(canonical, problem, kind, "deterministic", degree, ORDERS.get(degree)), expected)
