"""The other calls of attention in which a token keeps its bits: wherever its sequence stands, and however it comes.

Around what is moved there, queries and upstream gradients are large, and keys and values NaN.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlk_jax.checker.op_spec import Arrangement, OpSpec, Problem

_MORE_PADDING = 70
"""Slots of padding more than the first call has: more than a block of 64 keys, and no multiple of it."""
_AROUND = 9
"""Slots of each of the other two sequences in a packed row, and free slots of a cache."""
_BLOCK_EDGES = (0, 1, 63, 64, 127, 128)
"""Tokens on both sides of where blocks of 64 and 128 keys begin."""


@dataclass(frozen=True)
class _Move:
    """Slots `first` … `end` − 1 of a row of the first call, and where they begin in a row of another call."""

    row: int
    first: int
    end: int
    to_row: int
    to_slot: int

    def there(self, x: np.ndarray) -> np.ndarray:
        """These slots of an array of the first call."""
        return x[self.row, self.first : self.end]

    def here(self, x: np.ndarray) -> np.ndarray:
        """These slots of an array of the other call."""
        return x[self.to_row, self.to_slot : self.to_slot + self.end - self.first]


@dataclass(frozen=True)
class _Layout:
    """What goes into an array `[batch, slots, …]` of another call."""

    moves: Sequence[_Move]
    batch: int
    slots: int

    def filled(self, x: np.ndarray, filling: float) -> np.ndarray:
        """The array of the other call that has these slots of an array of the first, and this filling around them."""
        found = np.full((self.batch, self.slots, *x.shape[2:]), filling, x.dtype)
        for move in self.moves:
            move.here(found)[:] = move.there(x)
        return found


def arrange_attention(spec: OpSpec, problem: Problem) -> Iterator[Arrangement]:
    """The last sequence alone; all in a larger batch behind more padding; each between two others in a packed row; some
    queries of each over a cache; and tokens of the last one decoded, each in a row of its own.

    Each call is a program to compile, so that under a window the last one stands for all.
    """
    if problem.options["sliding_window"] is None:
        yield _alone(spec, problem)
        yield _in_a_larger_batch(spec, problem)
        yield _packed(spec, problem)
        yield _in_parts(spec, problem)
    yield _decoded(spec, problem)


def _alone(spec: OpSpec, problem: Problem) -> Arrangement:
    *_, (row, first, end) = _sequences(problem)
    layout = _Layout([_Move(row, first, end, 0, 0)], 1, end - first)
    return _arranged(spec, problem, "alone", layout, padding=np.zeros(1, np.int32))


def _in_a_larger_batch(spec: OpSpec, problem: Problem) -> Arrangement:
    """The sequences stand in reverse order, with a row of another one before them and behind them."""
    sequences = _sequences(problem)
    moves = [_Move(row, first, end, len(sequences) - row, first + _MORE_PADDING) for row, first, end in sequences]
    padding = np.pad(problem.options["padding"][::-1] + _MORE_PADDING, 1)
    layout = _Layout(moves, len(padding), _slots(problem) + _MORE_PADDING)
    return _arranged(spec, problem, "larger batch", layout, padding=padding)


def _packed(spec: OpSpec, problem: Problem) -> Arrangement:
    sequences = _sequences(problem)
    layout = _Layout(
        [_Move(row, first, end, row, _AROUND) for row, first, end in sequences],
        len(sequences),
        _slots(problem) + 2 * _AROUND,
    )
    starts = np.zeros((layout.batch, layout.slots), np.int32)
    for row, first, end in sequences:
        starts[row, _AROUND:], starts[row, _AROUND + end - first :] = _AROUND, _AROUND + end - first
    return _arranged(spec, problem, "packed", layout, padding=None, segment_starts=starts)


def _in_parts(spec: OpSpec, problem: Problem) -> Arrangement:
    """The queries from a third on to the last few. The cache has no keys behind their own yet."""
    sequences, slots = _sequences(problem), _slots(problem)
    start, end = slots // 3, slots - _AROUND
    cache = _Layout([_Move(row, first, end, row, first) for row, first, _ in sequences], len(sequences), slots)
    part = _Layout([_Move(row, start, end, row, 0) for row, *_ in sequences], len(sequences), end - start)
    return _arranged(spec, problem, "in parts", cache, part, start=start)


def _decoded(spec: OpSpec, problem: Problem) -> Arrangement:
    """Each token is the only query of a row. All stand in one slot, behind as much padding as it takes."""
    *_, (row, first, end) = _sequences(problem)
    start = _slots(problem)
    tokens = [first + t for t in _BLOCK_EDGES if first + t < end - 1] + [end - 1]
    seen = [_Move(row, first, t + 1, i, start - (t - first)) for i, t in enumerate(tokens)]
    cache = _Layout(seen, len(tokens), start + _AROUND)
    queries = _Layout([_Move(row, t, t + 1, i, 0) for i, t in enumerate(tokens)], len(tokens), 1)
    padding = np.array([move.to_slot for move in seen], np.int32)
    return _arranged(spec, problem, "decoded", cache, queries, start=start, padding=padding)


def _sequences(problem: Problem) -> list[tuple[int, int, int]]:
    """The row of each sequence of the first call, its first slot, and the slot behind its last one."""
    return [(row, int(first), _slots(problem)) for row, first in enumerate(problem.options["padding"])]


def _slots(problem: Problem) -> int:
    return problem.inputs["key"].shape[1]


def _arranged(
    spec: OpSpec, problem: Problem, name: str, keys: _Layout, queries: _Layout | None = None, **options: Any
) -> Arrangement:
    """The call of these keys and, where they are not those of all keys, these queries.

    Gradients of keys and values are sums over queries, so they keep their bits where all queries are there.
    """
    of_queries = queries or keys
    inputs = {n: (of_queries if n == "query" else keys).filled(x, spec.padding[n]) for n, x in problem.inputs.items()}
    upstream = {n: of_queries.filled(g, spec.padding["query"]) for n, g in problem.upstream.items()}
    changed = replace(problem, inputs=inputs, upstream=upstream, options={**problem.options, **options})
    return Arrangement(
        name,
        changed,
        lambda x: np.concatenate([move.here(x) for move in of_queries.moves]),
        lambda x: np.concatenate([move.there(x) for move in of_queries.moves]),
        sums=queries is None,
    )
