"""The most probable tokens and the target's rank by kernels on a GPU: values, order and raw bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import helpers
from tests.support.allowed import allowed_of, mask_of
from tests.support.helpers import Case, assert_same_bits
from tests.support.rankings import assert_exact, assert_ranks_gold, of_integers, ranking_of

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
SHAPES = (
    Case("one row", (1,), 64, 1000, bias=True),
    Case("few rows", (12,), 192, 5000),
    Case("few columns", (9,), 64, 130, scale=0.2),
    Case("ragged groups", (300,), 192, 1000, bias=True, temperature="per token"),
    Case("odd vocabulary", (130,), 64, 50257 // 16),
    Case("dv", (300,), 128, 4096, options={"weight_layout": "dv"}),
    Case("padded", (200,), 128, 1024, options={"global_vocab_size": 1001}),
    Case("softcap", (700,), 128, 5000, bias=True, options={"logit_softcap": 30.0}, temperature=0.7),
)
every_dtype = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [*(("mosaic", x) for x in DTYPES), *(("triton", x) for x in DTYPES[:2]), *(("cuda", x) for x in DTYPES[:2])],
    ids=lambda x: x if isinstance(x, str) else np.dtype(x).name,
    indirect=["implementation"],
)
every_k = pytest.mark.parametrize("top_k", [1, 20, 128])


def wanted(top_k: int) -> dict:
    return {"return_top_k": top_k, "return_target_rank": True}


@every_dtype
@every_k
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_against_float64(case, masked, top_k, implementation, dtype):
    problem = helpers.make(case, dtype)
    allowed = allowed_of(case, problem) if masked else None
    mask = {"allowed_mask": mask_of(allowed)} if masked else {}
    logits = helpers.gold(helpers.with_options(case, allowed=allowed) if masked else case, problem).logits
    found = problem.call(case, implementation, **mask, **wanted(top_k))
    # The log-probs of the most probable tokens are small beside the logits, of which two parts leave 4e-6.
    op_class = "linear_logp_peaked_wgmma" if dtype == jnp.float32 else "linear_logp_wgmma"
    assert_ranks_gold(found, logits, problem.target_ids, dtype, op_class=op_class)


@every_dtype
@every_k
@pytest.mark.parametrize("budget", [None, 2**21])
@pytest.mark.parametrize(("rows", "vocab"), [(12, 700), (300, 700), (300, 40000)])
def test_equal_logits_stand_in_the_order_of_their_ids(rows, vocab, budget, top_k, implementation, dtype):
    problem, logits = of_integers(rows, 64, vocab)
    problem = problem._replace(hidden=problem.hidden.astype(dtype), weight=problem.weight.astype(dtype))
    case = Case("integers", (rows,), 64, vocab)
    found = problem.call(case, implementation, memory_budget=budget, **wanted(top_k))
    assert_exact(found, logits, problem.target_ids)


@every_dtype
@every_k
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_bits(softcap, top_k, implementation, dtype):
    """In any batch and memory budget, and those of the same tokens as targets; nothing else changes a bit."""
    case = Case("bits", (700,), 192, 5000, bias=True, options={"logit_softcap": softcap})
    problem = helpers.make(case, dtype)
    found, gradients = problem.values_and_gradients(case, implementation, **wanted(top_k))
    plain, expected = problem.values_and_gradients(case, implementation)
    assert_same_bits((found[:3], gradients), (plain, expected))
    for budget in (2**21, 2**24):
        other = problem.call(case, implementation, memory_budget=budget, **wanted(top_k))
        for x, y in zip(ranking_of(other), ranking_of(found), strict=True):
            np.testing.assert_array_equal(x, y)
    for few in (np.asarray([640]), np.asarray([640, 3, 3, 69]), np.arange(100, 230)):
        small = Case("few", few.shape, 192, 5000, bias=True, options=case.options)
        rows = helpers.rows_of(problem, few).call(small, implementation, **wanted(top_k))
        for x, y in zip(ranking_of(rows), ranking_of(found), strict=True):
            np.testing.assert_array_equal(x, np.asarray(y)[few])
    for place in {0, top_k // 2, top_k - 1}:
        again = problem._replace(target_ids=found.top_ids[:, place]).call(case, implementation, return_target_rank=True)
        assert_same_bits(again.logp, found.top_logps[:, place])
        np.testing.assert_array_equal(again.target_rank, place)


@every_k
@pytest.mark.parametrize("implementation", ["mosaic", "cuda"], indirect=True)
def test_rows_of_nan_and_ignored_rows(implementation, top_k):
    case = Case("nan", (300,), 64, 5000, options={"ignore_index": -1})
    problem = helpers.make(case, jnp.bfloat16)
    ignored = jnp.arange(300) % 3 == 1
    hidden = jnp.where(ignored[:, None], jnp.nan, problem.hidden).at[7, 3].set(jnp.nan)
    target_ids = jnp.where(ignored, -1, problem.target_ids)
    given = problem._replace(hidden=hidden.at[7].set(jnp.nan), target_ids=target_ids.at[7].set(5))
    found = given.call(case, implementation, **wanted(top_k))
    whole = problem.call(case, implementation, **wanted(top_k))
    is_left = ~np.asarray(ignored)
    is_left[7] = False
    for x, y, nothing, unknown in zip(ranking_of(found), ranking_of(whole), (-1, 0, -1), (-1, np.nan, -1), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[np.asarray(ignored) & (np.arange(300) != 7)], nothing)
        np.testing.assert_array_equal(np.asarray(x)[7], unknown)
        np.testing.assert_array_equal(np.asarray(x)[is_left], np.asarray(y)[is_left])
