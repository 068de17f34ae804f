"""A token's output and gradients have the same raw bits wherever its sequence stands, and however it came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax.ops.attention.api import attention
from tests.support import attention as support
from tests.support.attention import Case
from tests.support.helpers import assert_same_bits

PROMISING = "deterministic"
ALONE = Case(batch=1, length=30, slots=30)
OPTIONS = [{}, {"sliding_window": 9, "logit_softcap": 2.0}]
GARBAGE = 1e4


def placed(problem, at, slots, batch=1, row=0, seed=7):
    """The sequence of a problem of one row at slots `at`, …, among other numbers."""
    rng = np.random.default_rng(seed)

    def put(x):
        around = jnp.asarray(GARBAGE * rng.standard_normal((batch, slots, *x.shape[2:])), x.dtype)
        return around.at[row, at : at + x.shape[1]].set(x[0])

    return support.Problem(*map(put, problem))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_alone_in_a_batch_and_behind_any_padding(options):
    problem = support.make(ALONE, jnp.bfloat16)
    expected = support.found(Case(**{**vars(ALONE), "options": options}), problem, PROMISING)
    for before, slots, row in ((0, 31, 0), (1, 40, 2), (63, 93, 1), (64, 120, 0), (70, 130, 1)):
        padding = tuple(before if i == row else i for i in range(3))
        case = Case(batch=3, length=slots, slots=slots, padding=padding, options=options)
        actual = support.found(case, placed(problem, before, slots, batch=3, row=row), PROMISING)
        own = slice(before, before + 30)
        assert_same_bits([x[row, own] for x in actual[:2]], [x[0] for x in expected[:2]])
        if slots == before + 30:
            assert_same_bits([x[row, own] for x in actual[2:]], [x[0] for x in expected[2:]])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_at_every_offset(options):
    problem = support.make(ALONE, jnp.bfloat16)
    expected = support.found(Case(**{**vars(ALONE), "options": options}), problem, PROMISING)
    for before in (*range(5), 31, 63, 64, 65):
        slots = before + 30 + 12
        starts = (*(0,) * before, *(before,) * 30, *(before + 30,) * 12)
        case = Case(batch=1, length=slots, slots=slots, segment_starts=(starts,), options=options)
        actual = support.found(case, placed(problem, before, slots), PROMISING)
        own = slice(before, before + 30)
        assert_same_bits([x[0, own] for x in actual], [x[0] for x in expected])


def test_prefilled_in_chunks_and_decoded_one_by_one():
    query, key, value, _ = support.make(ALONE, jnp.bfloat16)
    whole = attention(query, key, value, implementation=PROMISING)
    part = jax.jit(lambda q, k, v, start: attention(q, k, v, start=start, implementation=PROMISING))

    def cache(x, count):
        return jnp.full((1, 50, *x.shape[2:]), jnp.nan, x.dtype).at[:, :count].set(x[:, :count])

    for sizes in ((30,), (7, 23), (11, 1, 18), (1,) * 30):
        at = 0
        for size in sizes:
            own, end = slice(at, at + size), at + size
            assert_same_bits(part(query[:, own], cache(key, end), cache(value, end), at), whole[:, own])
            at = end


def test_run_to_run_in_and_outside_jit_and_under_vmap():
    case = Case(start=6, padding=(0, 11))
    problem = support.make(case, jnp.bfloat16)
    first = support.found(case, problem, PROMISING)
    assert_same_bits(support.found(case, problem, PROMISING), first)
    assert_same_bits(jax.jit(lambda x: support.found(case, x, PROMISING))(problem), first)
    query, key, value, _ = problem
    one = lambda q, k, v, p: attention(q[None], k[None], v[None], start=6, padding=p[None], implementation=PROMISING)[0]  # noqa: E731
    assert_same_bits(jax.vmap(one)(query, key, value, jnp.asarray(case.padding)), first.output)
