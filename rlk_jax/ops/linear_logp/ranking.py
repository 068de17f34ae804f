"""Which columns of a row of logits are the largest, found in parts: those of blocks of columns, of shards, of all.

Columns are compared by their logits alone, equal ones by their places, so that no order of the parts changes a bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.head import RankingConfig
from rlk_jax.core.softmax import Statistics
from rlk_jax.core.tokens import LinearLogp, RankedLogp

Array = jax.Array
NO_TOKEN = -1
"""The id, and the rank, where there is no token: fewer than k are possible, or the row holds NaN or is ignored."""

BYTES_PER_RANKED_LOGIT = 20
"""float32 products, and where XLA sorts for a top-k, the logits and their columns before and after it."""


class Ranking(NamedTuple):
    """The ids int32 and log-probs float32 `[N, k]` of the most probable tokens, most probable first, and how many stand
    before the target, int32 `[N]`; None for what was not asked for.
    """

    ids: Array | None
    logps: Array | None
    target_rank: Array | None


class Target(NamedTuple):
    """What columns of a row are compared with: the target's logit, and its column, which may lie in another shard."""

    logit: Array
    column: Array


class BestColumns(NamedTuple):
    """The largest logits float32 `[N, k]` of some columns, and the columns int32 that have them, which is −1 where the
    logit is −inf; and how many columns stand before the target, int32 `[N]`. None stands for what was not asked for.

    Larger logits stand first, and columns of equal logits in ascending order. A logit of −inf is no token's.
    """

    logits: Array | None
    ids: Array | None
    before: Array | None


def no_columns(wanted: RankingConfig, rows: int) -> BestColumns:
    """The best of no columns, from which a fold starts."""
    before = jnp.zeros(rows, jnp.int32) if wanted.has_target_rank else None
    if wanted.top_k is None:
        return BestColumns(None, None, before)
    shape = (rows, wanted.top_k)
    return BestColumns(jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_TOKEN, jnp.int32), before)


def add_columns(so_far: BestColumns, logits: Array, columns: Array, target: Target) -> BestColumns:
    """The best of the columns so far and of more, `columns [1, C]` ascending and behind them, by `logits [rows, C]`."""
    # Zeros of both signs are equal; `lax.top_k` would tell them apart.
    logits, target_logit = (jnp.where(x == 0, 0, x) for x in (logits, target.logit[:, None]))
    before = so_far.before
    if before is not None:
        target_column = target.column[:, None]
        is_before = (logits > target_logit) | ((logits == target_logit) & (columns < target_column))
        # A target that was rounded otherwise elsewhere is not before itself.
        is_before &= (logits > -jnp.inf) & (columns != target_column)
        before += is_before.sum(axis=1, dtype=jnp.int32)
    if so_far.logits is None or so_far.ids is None:
        return BestColumns(None, None, before)
    largest, place = lax.top_k(logits, min(so_far.logits.shape[1], logits.shape[1]))
    ids = jnp.where(largest > -jnp.inf, columns[0][place], NO_TOKEN)
    return BestColumns(*_best_of_both(so_far.logits, so_far.ids, largest, ids), before)


def _best_of_both(logits: Array, ids: Array, more_logits: Array, more_ids: Array) -> tuple[Array, Array]:
    """The k best, in their order, of k logits `[rows, k]` and of others whose columns stand behind theirs."""
    all_logits, all_ids = (jnp.concatenate(x, axis=1) for x in ((logits, more_logits), (ids, more_ids)))
    return _first(all_logits, all_ids, logits.shape[1])


def _first(logits: Array, ids: Array, count: int) -> tuple[Array, Array]:
    """The largest of logits `[rows, C]`, in descending order, and their ids; of equal ones those that stand first."""
    largest, place = lax.top_k(logits, count)
    return largest, jnp.take_along_axis(ids, place, axis=1)


def counted_from(best: BestColumns, first: Any) -> BestColumns:
    """The best columns of a shard, counted from the first one of the vocabulary; `first` is that of the shard."""
    if best.ids is None:
        return best
    return best._replace(ids=jnp.where(best.ids == NO_TOKEN, NO_TOKEN, best.ids + first))


def as_integers(best: BestColumns) -> BestColumns:
    """The best columns with the bits of their logits in int32: so they pass through any collective as they are, and
    through one alone.
    """
    bits = None if best.logits is None else lax.bitcast_convert_type(best.logits, jnp.int32)
    return best._replace(logits=bits)


def best_of_shards(shards: BestColumns) -> BestColumns:
    """The best of the whole vocabulary, from those of its shards `[shards, ...]` in ascending order, `as_integers`."""
    bits, ids, before = shards
    if before is not None:
        before = before.sum(axis=0)
    if bits is None or ids is None:
        return BestColumns(None, None, before)
    logits = lax.bitcast_convert_type(bits, jnp.float32)
    if len(ids) == 1:
        return BestColumns(logits[0], ids[0], before)
    all_logits, all_ids = (jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1) for x in (logits, ids))
    return BestColumns(*_first(all_logits, all_ids, ids.shape[2]), before)


def logps_of_statistics(config: Any, tokens: Any, statistics: Statistics, logits: Array) -> Array:
    """The log-probs of logits `[N, k]`, in the form that implementations give them."""
    return statistics.logprobs(logits)


def finished(ranking: Ranking, logp: Array, active: Array) -> Ranking:
    """The ranking as callers get it. Rows whose target has a log-prob of NaN have no most probable token, for one of
    their logits is NaN or all are infinite; nor have rows that are not active.
    """

    is_known = ~jnp.isnan(logp)

    def of_known(x: Array | None, ignored: float, unknown: float) -> Array | None:
        if x is None:
            return None
        counts, known = (jnp.expand_dims(rows, tuple(range(1, x.ndim))) for rows in (active, is_known))
        return jnp.where(known, jnp.where(counts, x, ignored), unknown)

    return Ranking(
        of_known(ranking.ids, NO_TOKEN, NO_TOKEN),
        of_known(ranking.logps, 0, jnp.nan),
        of_known(ranking.target_rank, NO_TOKEN, NO_TOKEN),
    )


def ranking_of_no_tokens(wanted: RankingConfig) -> Ranking:
    """The ranking of no rows."""
    best = no_columns(wanted, 0)
    return Ranking(best.ids, best.logits, best.before)


def with_ranking(values: LinearLogp, ranking: Ranking | None) -> LinearLogp | RankedLogp:
    """The values, and the ranking where one was asked for."""
    return values if ranking is None else RankedLogp(*values, *ranking)
