"""The most probable tokens by linear_logp's Mosaic kernels, in Pallas' interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax import linear_logp
from tests.support import helpers
from tests.support.allowed import allowed_of, mask_of
from tests.support.helpers import Case, assert_same_bits
from tests.support.rankings import assert_exact, assert_ranks_gold, of_integers, ranking_of

BF16, F16 = jnp.bfloat16, jnp.float16
RAGGED = Case("ragged, bias", (6,), 64, 1000, bias=True, temperature="per token", options={"ignore_index": -1})
SOFTCAP = Case("softcap, dv, padded", (70,), 72, 512, options={"logit_softcap": 2.0, "weight_layout": "dv"})
BOTH = {"return_top_k": 6, "return_target_rank": True}
SEVERAL_SLICES = 3 * 4 * 256 * 8
"""A budget for the products of 8 rows and three chunks."""

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("case", [RAGGED, pytest.param(SOFTCAP, marks=pytest.mark.full)], ids=str)
def test_against_float64(case):
    """Rows are masked; in the first case the last slice has fewer chunks than the others. In make test without a
    softcap, which test_equal_logits_and_bits has there.
    """
    dtype = BF16 if case is RAGGED else F16
    problem = helpers.make(case, dtype)
    allowed = allowed_of(case, problem)
    found = problem.call(case, "mosaic", allowed_mask=mask_of(allowed), memory_budget=SEVERAL_SLICES, **BOTH)
    logits = helpers.gold(helpers.with_options(case, allowed=allowed), problem).logits
    assert_ranks_gold(found, logits, problem.target_ids, dtype, op_class="linear_logp_wgmma")


@pytest.mark.parametrize("softcap", [30.0, pytest.param(None, marks=pytest.mark.full)])
def test_equal_logits_and_bits(softcap):
    """Products of integers are exact, so that log-probs must have the bits of the same tokens as targets. Ignored rows
    hold NaN, and a row of NaN has no most probable token. In make test with a softcap, which takes one step more.
    """
    problem, logits = of_integers(7, 64, 700)
    case = Case("integers", (7,), 64, 700, options={"temperature": 0.7, "logit_softcap": softcap, "ignore_index": -1})
    hidden = problem.hidden.at[3].set(jnp.nan).at[5].set(jnp.nan).astype(BF16)
    problem = problem._replace(
        hidden=hidden, weight=problem.weight.astype(BF16), target_ids=problem.target_ids.at[3].set(-1)
    )
    found = problem.call(case, "mosaic", memory_budget=SEVERAL_SLICES, **BOTH)
    for x, (ignored, unknown) in zip(ranking_of(found), ((-1, -1), (0, np.nan), (-1, -1)), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[3], np.full_like(x[3], ignored))
        np.testing.assert_array_equal(np.asarray(x)[5], np.full_like(x[5], unknown))
    kept = np.delete(np.arange(7), [3, 5])
    own = found._replace(top_ids=found.top_ids[kept], target_rank=found.target_rank[kept])
    assert_exact(own, logits[kept], problem.target_ids[kept])
    for place in (0, 5):
        again = problem._replace(target_ids=jnp.maximum(found.top_ids[:, place], 0)).call(case, "mosaic")
        assert_same_bits(again.logp[kept], found.top_logps[kept, place])


@pytest.mark.full
def test_a_low_rank_term_counts():
    """In make test all implementations share how a term's columns are made, and the kernels how they multiply them."""
    problem, logits = of_integers(7, 64, 700)
    factors = of_integers(8, 64, 700)[0].hidden, of_integers(700, 8, 8)[0].hidden
    logits = logits + np.asarray(problem.hidden @ factors[0].T @ factors[1].T)
    arrays = problem.hidden.astype(BF16), problem.weight.astype(BF16), problem.target_ids
    found = linear_logp(*arrays, low_rank=(*factors, 1.0), implementation="mosaic", **BOTH)
    assert_exact(found, logits, problem.target_ids)
