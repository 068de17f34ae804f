"""What the tests of the most probable tokens share: exact problems, and comparisons with all logits in order."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from rlk_jax import RankedLogp
from rlk_jax.checker import tolerance
from tests.support.helpers import Problem, assert_within_contract

BOTH = {"return_top_k": 20, "return_target_rank": True}


def ranking_of(found: RankedLogp) -> tuple[Any, ...]:
    return tuple(found[3:])


def assert_ranks_gold(
    found: RankedLogp, logits: np.ndarray, target_ids: Any, dtype: Any, *, op_class: str = "linear_logp"
) -> None:
    """The ranking is that of float64 logits `[N, V]`, but for tokens of logits that rounding cannot tell apart."""
    top_k, rows = found.top_ids.shape[-1], np.arange(len(logits))[:, None]
    largest = -np.sort(-logits, axis=1)[:, :top_k]
    possible = largest > -np.inf
    lse = np.log(np.exp(logits - largest[:, :1]).sum(axis=1, keepdims=True)) + largest[:, :1]
    ids, logps = (np.asarray(x).reshape(-1, top_k) for x in (found.top_ids, found.top_logps))
    assert (ids.dtype, logps.dtype, found.target_rank.dtype) == (np.int32, np.float32, np.int32)
    np.testing.assert_array_equal(ids == -1, ~possible)
    np.testing.assert_array_equal(logps == -np.inf, ~possible)
    assert all(len(set(x)) == len(x) for x in (row[row >= 0] for row in ids))
    for right in (largest, logits[rows, ids]):
        assert_within_contract(logps[possible], (right - lse)[possible], op_class, dtype, "forward")
    target = np.take_along_axis(logits, np.asarray(target_ids).reshape(-1, 1), axis=1)
    near = tolerance(op_class, dtype, "forward") * np.linalg.norm(largest[:, :1])
    rank = np.asarray(found.target_rank).reshape(-1)
    assert ((logits > target + near).sum(axis=1) <= rank).all() and (rank < (logits >= target - near).sum(axis=1)).all()


def of_integers(rows: int, dim: int, vocab: int) -> tuple[Problem, np.ndarray]:
    """A problem of small integers, whose logits are exact in any order of sums and often equal; and these logits."""
    rng = np.random.default_rng(0)
    hidden, weight = rng.integers(-2, 3, (rows, dim)), rng.integers(-1, 2, (vocab, dim))
    ids = jnp.asarray(rng.integers(0, vocab, rows), jnp.int32)
    arrays = (jnp.asarray(x, jnp.float32) for x in (hidden, weight))
    return Problem(*arrays, ids, None, 1.0, (jnp.ones(rows),) * 3), hidden @ weight.T


def assert_exact(found: RankedLogp, logits: np.ndarray, target_ids: Any) -> None:
    """Equal logits stand in ascending order of their columns."""
    order = np.argsort(-logits, axis=1, kind="stable")
    np.testing.assert_array_equal(found.top_ids, order[:, : found.top_ids.shape[1]])
    np.testing.assert_array_equal(found.target_rank, np.argmax(order == np.asarray(target_ids)[:, None], axis=1))
