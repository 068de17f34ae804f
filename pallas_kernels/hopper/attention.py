"""The blocks in which attention is computed on Hopper. Key blocks count from a sequence's own first key."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

SPAN_KEYS = 1024
"""Keys whose softmax is summed up apart. Spans are merged in ascending order, so that a long context can be decoded by
several blocks with the bits of one.
"""

PACKED_COLUMNS = 64
"""Columns that heads are a multiple of where a row holds several sequences: these are stored row by row, and TMA takes
single rows of 128 bytes from shared memory, but no shorter ones.
"""


@dataclass(frozen=True)
class AttentionShape:
    """The static facts of a call that its kernels are compiled for."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    group_heads: int
    """How many query heads share a key head."""
    holds_several: bool
    """Whether a row of the batch may hold several sequences."""


class SequencePlaces(NamedTuple):
    """Where queries and their sequences are among the slots, int32.

    start `[1]`: the slot of the first query. first_slots `[B, T]`: the first slot of each query's own sequence. runs
    `[B, T]`: the first of the neighbouring queries that have the same first slot, and −1 in rows of the batch whose
    results are to be NaN. Both are `[B, 1]` where each row of the batch holds one sequence.
    """

    start: Any
    first_slots: Any
    runs: Any


@dataclass(frozen=True)
class AttentionTile:
    """What one block of threads works on: compute warpgroups of 64 queries of one head each."""

    keys: int
    """Keys of a block. It depends on the head's size alone, and is the same in every kernel."""
    stages: int
    """Blocks of keys and values in flight."""

    span_blocks: int | None
    """Blocks of keys in a span; None where all keys are one span."""
    warpgroups: int = 2
    shares_rows: bool = False
    """Whether all warpgroups work on the same 64 rows, each on a gradient of its own."""
    stores_apart: bool = False
    """Whether the output has memory of its own, so that the queries of the next tile load while it is stored."""
    heads_are_rows: bool = False
    """Whether the rows are the heads of one query that share keys."""

    @property
    def queries(self) -> int:
        """Queries of a tile, or keys where keys are its rows."""
        if self.heads_are_rows:
            return 1
        return 64 * (1 if self.shares_rows else self.warpgroups)


def attention_tile(size: int, slots: int) -> AttentionTile:
    """The tile for heads of this many columns, over so many slots."""
    if size > 128:
        # Shared memory has no room for the sums of a span.
        return AttentionTile(keys=64, stages=2, span_blocks=None)
    return AttentionTile(
        keys=128, stages=2, span_blocks=None if slots <= SPAN_KEYS else SPAN_KEYS // 128, stores_apart=True
    )


def decode_tile(size: int, slots: int) -> AttentionTile:
    """The tile in which one query of a sequence is decoded: its blocks of keys are those of `attention_tile`."""
    return replace(attention_tile(size, slots), warpgroups=1, heads_are_rows=True)


def query_gradient_tile(size: int) -> AttentionTile:
    """The tile in which the gradient of queries is computed."""
    if size > 128:
        return AttentionTile(keys=64, stages=2, span_blocks=None, warpgroups=1)
    # With 128 columns, registers have no room for the scores of 128 keys beside the gradient.
    return AttentionTile(keys=128 if size <= 96 else 64, stages=2 if size <= 96 else 4, span_blocks=None)


def key_gradient_tile(size: int) -> AttentionTile:
    """The tile in which the gradients of keys and values are computed, in blocks of 64 queries, which count from the
    sequence's own first token: 64 keys for each warpgroup, or 64 for two where registers have no room for both
    gradients.
    """
    return AttentionTile(keys=64, stages=4 if size <= 128 else 2, span_blocks=None, shares_rows=size > 128)
