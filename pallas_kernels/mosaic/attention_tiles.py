"""What attention's kernels share: how queries meet blocks of keys, and how these come into shared memory.

Key blocks start at multiples of their width from the sequence's own first key, and a block of which a query sees
nothing changes nothing for it. So a query's bits depend on its own sequence alone.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import AttentionShape, AttentionTile, SequencePlaces
from pallas_kernels.mosaic.main_loop import ROW, WARPGROUP_ROWS, over_columns, tiled

Array = jax.Array
Ref = Any


def zero_beside(x: Array) -> Array:
    """0 in x's dtype, as a value: Mosaic lowers no operation on constants alone (jax 0.11.2)."""
    return x * 0


class Chunk(NamedTuple):
    """64 columns, or fewer, of rows in shared memory, as TMA and as wgmma see them: `[count, rows, 1, columns]` and
    `[count, rows, columns]`.

    Both are the same bytes. TMA copies tiles of 8 rows from multiples of 8 rows on alone; a tile of one row may come
    from anywhere.
    """

    rows: Ref
    tiles: Ref


class Run(NamedTuple):
    """Queries of a tile that belong to one sequence: its first slot, and the first and the last query."""

    first_slot: Array
    first_query: Array
    last_query: Array


@dataclass(frozen=True)
class Call:
    """The facts of one launch, and what all warpgroups of a block compute alike."""

    shape: AttentionShape
    tile: AttentionTile
    places: SequencePlaces
    batch: Array
    first_query: Array
    queries: int
    is_interpreted: bool

    def tma_view(self, chunk: Chunk) -> tuple[Any, Ref]:
        """What TMA copies, and to or from where. The interpreter keeps both views of a chunk apart."""
        return (0, chunk.tiles) if self.is_interpreted else (slice(None), chunk.rows)

    @property
    def last_query(self) -> Array:
        """The last query of the tile."""
        return jnp.minimum(self.first_query + self.tile.queries, self.queries) - 1

    def stored(self, run: Run) -> tuple[Array, Array] | None:
        """The first and the last query that belong to the run; None where all do."""
        return (run.first_query, run.last_query) if self.shape.holds_several else None

    def only_run(self) -> Run:
        """The tile's queries where all belong to one sequence."""
        return Run(self.places.first_slots[self.batch, 0], self.first_query, self.last_query)

    def runs(self, visit: Callable[[Run, Any], Any], start: Any) -> Any:
        """`visit(run, so far)` for the runs of the tile, the last one first."""
        if not self.shape.holds_several:
            return visit(self.only_run(), start)

        def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
            last, so_far = state
            first = jnp.maximum(self.places.runs[self.batch, last], self.first_query)
            return first - 1, visit(Run(self.places.first_slots[self.batch, last], first, last), so_far)

        return lax.while_loop(lambda state: state[0] >= self.first_query, body, (self.last_query, start))[1]

    @property
    def poison(self) -> Array:
        """A factor of results: 1, and NaN in a row of the batch whose results are to be NaN."""
        is_bad = self.places.runs[self.batch, 0] < 0
        return jnp.where(is_bad, jnp.float32(jnp.nan), jnp.float32(1))

    def slot(self, query: Array) -> Array:
        """The slot of a query."""
        return self.places.start[0] + query

    def blocks(self, run: Run) -> tuple[Array, Array]:
        """The first block of keys that a query of the run sees, and the one behind the last."""
        keys = jnp.int32(self.tile.keys)
        end = jnp.maximum(lax.div(self.slot(run.last_query) - run.first_slot + keys, keys), 0)
        # Queries before their sequence see nothing: the quotient of a negative number is rounded towards 0.
        end = jnp.where(self.slot(run.last_query) < run.first_slot, 0, end)
        first = jnp.int32(0)
        if self.shape.sliding_window is not None:
            outside = self.slot(run.first_query) - self.shape.sliding_window + 1 - run.first_slot
            first = jnp.minimum(lax.div(jnp.maximum(outside, 0), keys), end)
        return first, end

    def spans(self, run: Run, visit: Callable[[Array, Array, Any], Any], start: Any) -> Any:
        """`visit(first block, block behind the last, so far)` for the spans of a run's keys in ascending order."""
        first, end = self.blocks(run)
        if self.tile.span_blocks is None:
            return visit(first, end, start)
        width = jnp.int32(self.tile.span_blocks)

        def body(span: Array, so_far: Any) -> Any:
            return visit(jnp.maximum(first, span * width), jnp.minimum(end, (span + 1) * width), so_far)

        return lax.fori_loop(lax.div(first, width), lax.div(end + width - 1, width), body, start)

    def visible(self, run: Run, block: Array, first_query: Array) -> Array:
        """Which keys of a block each of 64 queries sees, `[64, keys]`, where all belong to the run: the others' results
        are not stored.
        """
        shape = (WARPGROUP_ROWS, self.tile.keys)
        query = plgpu.layout_cast(lax.broadcast(first_query, (WARPGROUP_ROWS,)), ROW)
        if not self.tile.heads_are_rows:
            query = query + plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW)
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        base = self.slot(jnp.int32(0)) - run.first_slot - block * self.tile.keys
        # How many slots a key stands before the query; as an unsigned number it is large where it stands behind.
        distance = lax.bitcast_convert_type(over_columns(query + base, self.tile.keys) - key, jnp.uint32)
        return distance < jnp.uint32(self.shape.sliding_window or 2**31 - 1)

    def masked(self, run: Run, block: Array, first_query: Array, values: Array, fill: float) -> Array:
        """The values of a block's keys, with `fill` where a query does not see one."""
        return jnp.where(self.visible(run, block, first_query), values, fill)

    def each_block[State](
        self, run: Run, first: Array, end: Array, step: Callable[[Array, State, bool], State], start: State
    ) -> State:
        """`step(block, so far, is_masked)` for the blocks first … end − 1 in ascending order.

        Every query of the run sees all of a block that is not masked: a branch for each block would cost as much as its
        mask.
        """
        low, high = self._whole_blocks(run)
        low = first if self.shape.sliding_window is None else jnp.minimum(jnp.maximum(low, first), end)
        high = jnp.minimum(jnp.maximum(high, low), end)
        parts = [(low, high, False), (high, end, True)]
        parts = parts if self.shape.sliding_window is None else [(first, low, True), *parts]
        so_far = start
        for begin, stop, is_masked in parts:
            so_far = lax.fori_loop(begin, stop, lambda i, x, is_masked=is_masked: step(i, x, is_masked), so_far)
        return so_far

    def _whole_blocks(self, run: Run) -> tuple[Array, Array]:
        """The first block of keys that every query of the run sees as a whole, and the one behind the last."""
        keys = jnp.int32(self.tile.keys)
        end = lax.div(self.slot(run.first_query) + 1 - run.first_slot, keys)
        if self.shape.sliding_window is None:
            return jnp.int32(0), end
        outside = self.slot(run.last_query) - self.shape.sliding_window + 1 - run.first_slot
        return lax.div(jnp.maximum(outside, 0) + keys - 1, keys), end

    def empty_unseen(
        self, run: Run, block: Array, chunks: Sequence[Chunk], slot: Array, warpgroup: Array, edge: Ref
    ) -> None:
        """Write zeros over the rows of a block that no query of the run sees."""
        first_key = run.first_slot + block * self.tile.keys
        start = jnp.int32(0)
        if self.shape.sliding_window is not None:
            start = self.slot(run.first_query) - self.shape.sliding_window + 1 - first_key
        empty_outside(self.tile, chunks, slot, warpgroup, edge, start, self.slot(run.last_query) - first_key + 1)


def empty_outside(
    tile: AttentionTile, chunks: Sequence[Chunk], slot: Array, warpgroup: Array, edge: Ref, start: Array, end: Array
) -> None:
    """Write zeros over the rows of a block but start … end − 1: they may be anything, and 0·NaN would be NaN.

    The warpgroups share the rows, and wait for each other at the barrier `edge`, before and after: another one may
    still read the block.
    """
    shares = min(tile.warpgroups, tile.keys // WARPGROUP_ROWS)

    @pl.when((end < tile.keys) | (start > 0))
    def _() -> None:
        plgpu.barrier_arrive(edge)
        plgpu.barrier_wait(edge)

        @pl.when(warpgroup < shares)
        def _() -> None:
            own = warpgroup * (tile.keys // shares)
            for chunk in chunks:
                rows_smem = chunk.tiles.at[slot, pl.ds(own, tile.keys // shares)]
                rows = plgpu.load(rows_smem, layout=plgpu.Layout.WGMMA, optimized=False)
                number = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=plgpu.Layout.WGMMA) + own
                rows_smem[...] = jnp.where((number < end) & (number >= start), rows, jnp.zeros_like(rows))
            plgpu.commit_smem()

        plgpu.barrier_arrive(edge)
        plgpu.barrier_wait(edge)


def chunk_widths(columns: int, most: int = 64) -> list[int]:
    """The widths of the chunks of so many columns, a multiple of 16."""
    width = next(width for width in (64, 32, 16) if columns % width == 0 and width <= most)
    return [width] * (columns // width)


def views(shape: tuple[int, int], columns: int, dtype: Any, most: int = 64) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shared memory for chunks of `[count, rows]` rows and at most so many columns, as TMA and as wgmma see it."""

    def view(width: int, *, single: bool) -> Any:
        transforms: Any = tiled(width, dtype)
        if not single:
            return plgpu.SMEM((*shape, width), dtype, transforms=transforms)
        tiling: Any = plgpu.TilingTransform
        return plgpu.SMEM((*shape, 1, width), dtype, transforms=(tiling((1, width)), *transforms[1:]))

    rows, tiles = (
        tuple(view(width, single=single) for width in chunk_widths(columns, most)) for single in (True, False)
    )
    return rows, tiles


def pairs(scratch: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """The two views of everything that the named pieces of shared memory hold."""
    return itertools.batched((view for name in names for view in scratch[name]), 2)


def with_columns[Chunk](chunks: Sequence[Chunk], widths: Sequence[int]) -> Iterator[tuple[Any, Chunk]]:
    """The chunks with the columns that each holds."""
    for width, end, chunk in zip(widths, itertools.accumulate(widths), chunks, strict=True):
        yield pl.ds(end - width, width), chunk


def zero_sums(columns: int) -> tuple[Array, ...]:
    """Sums `[64, columns]` over nothing, by chunk."""
    return tuple(
        plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
        for width in chunk_widths(columns)
    )


def load_rows(call: Call, chunks: Sequence[Chunk], gmem: Ref, there: tuple[Any, ...], number: Any, full: Ref) -> None:
    """Have the rows `there` of global memory loaded to place `number` of the chunks; `full` hears of each chunk."""
    for columns, chunk in with_columns(chunks, chunk_widths(gmem.shape[-1])):
        part, to_smem = call.tma_view(chunk)
        plgpu.copy_gmem_to_smem(gmem.at[*there, part, columns], to_smem.at[number], full)


def store_rows(
    call: Call,
    number: Array,
    chunks: Sequence[Chunk],
    gmem: Ref,
    head: Array,
    first_row: Array,
    stored: tuple[Array, Array] | None,
    *,
    waits: bool = True,
) -> None:
    """Copy 64 rows of a head to global memory, from `first_row` on, and wait until they are read if told so.

    Only the first row of `stored` to the last one are copied, one by one where these are not all, which needs chunks of
    64 columns; None stands for all rows that there are.
    """
    plgpu.commit_smem()

    def copy(from_rows: Any, to_rows: Any) -> None:
        for own, chunk in with_columns(chunks, chunk_widths(gmem.shape[-1])):
            part, from_smem = call.tma_view(chunk)
            plgpu.copy_smem_to_gmem(from_smem.at[number, from_rows], gmem.at[call.batch, to_rows, head, part, own])

    def all_rows() -> None:
        copy(pl.ds(0, WARPGROUP_ROWS), pl.ds(first_row, WARPGROUP_ROWS))

    if stored is None:
        all_rows()
    else:
        begin = jnp.maximum(stored[0] - first_row, 0)
        end = jnp.minimum(stored[1] - first_row + 1, WARPGROUP_ROWS)
        is_whole = (begin == 0) & (end == WARPGROUP_ROWS)
        pl.when(is_whole)(all_rows)

        @pl.when(~is_whole)
        def _() -> None:
            def one(i: Array, _: None) -> None:
                copy(pl.ds(i, 1), pl.ds(first_row + i, 1))

            lax.fori_loop(begin, end, one, None)

    if waits:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclass(frozen=True)
class Ring:
    """Blocks of one array in shared memory, with barriers for when a stage is loaded and when all have read it. Blocks
    of queries come with a number for each, given as `from_any_place` gives it, and by stage.
    """

    gmem: Ref
    chunks: tuple[Chunk, ...]
    full: Ref
    empty: Ref
    numbers_gmem: Ref | None = None
    numbers_smem: Ref | None = None

    def load(self, call: "Call", there: tuple[Any, ...], count: Array) -> None:
        """For the producer: load a block once its stage is free. `count` counts the blocks before it."""
        stages = jnp.int32(call.tile.stages)
        slot = lax.rem(count, stages)

        @pl.when(count >= stages)
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[slot])

        load_rows(call, self.chunks, self.gmem, there, slot, self.full.at[slot])
        if self.numbers_gmem is not None and self.numbers_smem is not None:
            batch, queries, head = there
            shift = -queries.start & 3
            numbers_gmem = self.numbers_gmem.at[batch, head, shift, pl.ds(queries.start + shift, queries.size)]
            plgpu.copy_gmem_to_smem(numbers_gmem, self.numbers_smem.at[slot], self.full.at[slot])

    def tiles(self, slot: Array) -> tuple[Ref, ...]:
        """The chunks of one stage, as wgmma sees them."""
        return tuple(chunk.tiles.at[slot] for chunk in self.chunks)


def from_any_place(numbers: Array) -> Array:
    """Numbers of queries `[B, H, T]` four times, `[B, H, 4, T + 4]`, copy i with i places in front.

    TMA reads rows of numbers from multiples of 16 bytes on alone (an H100 stops at any other place), and a sequence may
    begin anywhere.
    """
    return jnp.stack([jnp.pad(numbers, ((0, 0), (0, 0), (i, 4 - i))) for i in range(4)], axis=2)


def load_keys(call: "Call", rings: Sequence[Ring], group: Array, count: Array) -> Array:
    """For the producer: load all blocks of keys and values that the tile sees. `count` counts the blocks before them;
    returns how many there are with them.
    """

    def over_run(run: Run, count: Array) -> Array:
        return load_key_blocks(call, rings, group, run, call.blocks(run), count)

    return call.runs(over_run, count)


def load_key_blocks(
    call: "Call", rings: Sequence[Ring], group: Array, run: Run, blocks: tuple[Array, Array], count: Array
) -> Array:
    """For the producer: load the blocks first … end − 1 of a run's keys and values. `count` counts the blocks before
    them; returns how many there are with them.
    """

    def block(i: Array, count: Array) -> Array:
        there = (call.batch, pl.ds(run.first_slot + i * call.tile.keys, call.tile.keys), group)
        for ring in rings:
            ring.load(call, there, count)
        return count + 1

    return lax.fori_loop(*blocks, block, count)


def drain(tile: AttentionTile, rings: Sequence[Ring], count: Array) -> None:
    """For the producer: wait until all of `count` blocks are read."""
    stages = jnp.int32(tile.stages)

    def wait(i: Array, _: None) -> None:
        for ring in rings:
            plgpu.barrier_wait(ring.empty.at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(count - stages, 0), count, wait, None)
