"""The bits that `deterministic` promises: those of a row in any batch, and of dW and db with masked rows anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import divergences, helpers
from tests.support.divergences import KINDS, Case, Found, Problem
from tests.support.helpers import assert_same_bits

LEAD = 70
CASE = Case("bits", (LEAD,), 24, 40, 300, 290, bias=True, options={"global_vocab_size": 290, "logit_softcap": 3.0})


def found(problem: Problem, kind: str) -> Found:
    return jax.device_get(divergences.found(CASE, problem, "deterministic", kind=kind))


def rows_of(problem: Problem, index: np.ndarray, fill: float = 0.0) -> Problem:
    """The problem with other tokens; where the index is −1, a token that the mask leaves out and that holds `fill`."""
    real = index >= 0

    def taken(x, filling):
        # In NumPy, nothing is compiled.
        return np.where(real.reshape(-1, *(1,) * (x.ndim - 1)), np.asarray(x)[index], filling).astype(x.dtype)

    return problem._replace(
        hidden=taken(problem.hidden, fill),
        teacher_hidden=taken(problem.teacher_hidden, fill),
        completion_mask=real,
        temperature=taken(problem.temperature, 1.0),
        upstream=taken(problem.upstream, 1.0),
    )


@pytest.fixture(scope="module")
def problem():
    made = divergences.make(CASE, jnp.bfloat16)
    temperature = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2.0, LEAD), jnp.float32)
    return made._replace(completion_mask=jnp.ones(LEAD, bool), temperature=temperature)


ARRANGEMENTS = {
    "alone": np.array([33]),
    "reversed": np.arange(LEAD)[::-1],
    "masked before and between": np.concatenate([[-1] * 57, np.insert(np.arange(LEAD), [5, 5, 40], -1)]),
    "masked behind": np.concatenate([np.arange(LEAD), [-1] * 60]),
}


# In make test one kind stands for all: jsd, whose terms have the products of the others.
of_kinds = helpers.cover("kind", [(x,) for x in KINDS], lambda kind: kind == "jsd")


@of_kinds
def test_rows_keep_their_bits(kind, problem):
    expected = found(problem, kind)
    for name, index in ARRANGEMENTS.items():
        actual = found(rows_of(problem, index, np.nan), kind)
        real = index >= 0
        for x, e in ((actual.values, expected.values), (actual.hidden, expected.hidden)):
            assert_same_bits(x[real], e[index[real]])
        if name.startswith("masked"):
            assert_same_bits((actual.weight, actual.bias), (expected.weight, expected.bias))


@of_kinds
def test_values_alone_and_one_gradient_alone_have_their_bits(kind, problem):
    expected = found(problem, kind)
    assert_same_bits(problem.call(CASE, "deterministic", kind=kind), expected.values)

    @jax.jit
    def of_hidden(problem):
        def values(hidden):
            return problem._replace(hidden=hidden).call(CASE, "deterministic", kind=kind)

        return jax.vjp(values, problem.hidden)[1](problem.upstream)[0]

    assert_same_bits(of_hidden(problem), expected.hidden)
    assert_same_bits(found(problem, kind), expected)
