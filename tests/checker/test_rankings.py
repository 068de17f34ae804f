"""Ids and ranks are compared as integers, but where rounding decides which of two tokens stands first."""

import numpy as np
import pytest

from rlk_jax.checker import gold
from tests.checker.test_checker import checked
from tests.support import planted

LOGITS = np.array([[1.0, 4.0, -np.inf, 3.99, 2.0], [0.0, 0.0, 0.0, 1.0, -np.inf], [0.0, 1.0, 2.0, 3.0, 4.0]])
LSE = np.array([4.7, 1.5, np.nan])
NONE = [-1] * 5


@pytest.mark.parametrize(
    ("near", "unsure", "unsure_ranks"),
    [(0.0, [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], [0, 0]), (0.1, [[1, 1, 0, 0, 0], [0, 1, 1, 1, 0]], [1, 1])],
)
def test_what_rounding_decides_is_masked(near, unsure, unsure_ranks):
    found = gold.ranking_gold(LOGITS, [3, 1, 9], LSE, 5, near)
    np.testing.assert_array_equal(found.top_ids.data, [[1, 3, 4, 0, -1], [3, 0, 1, 2, -1], NONE])
    np.testing.assert_array_equal(found.top_ids.mask, [*np.array(unsure, bool), [False] * 5])
    np.testing.assert_array_equal(found.target_rank.data, [1, 2, -1])
    np.testing.assert_array_equal(found.target_rank.mask, [*map(bool, unsure_ranks), False])
    np.testing.assert_array_equal(np.isnan(found.top_logps), [[False] * 5, [False] * 5, [True] * 5])


def test_a_wrong_id_is_named():
    def wrong(*arrays, **options):
        *values, top_ids, top_logps, rank = planted.ranked_linear_logp(*arrays, **options)
        return *values, top_ids.at[1, 2, 3].set(300), top_logps, rank

    (case,) = (x for x in checked(wrong, "ranked_linear_logp").outputs if not x.passed and x.name == "top_ids")
    assert case.message.startswith("300.0 instead of ") and case.message.endswith(" at (1, 2, 3)")
