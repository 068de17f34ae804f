"""The forward of attention: blocks of keys stream past a tile of queries, whose softmax runs along (online).

Two compute warpgroups of 64 queries each take turns, so that one multiplies while the other exponentiates; a producer
warpgroup loads blocks of keys and values by TMA. Key blocks start at multiples of their width from the sequence's own
first key, and a block of which a query sees nothing changes nothing for it: its largest score stays, it is multiplied
by 2^0, and zeros are added. So a query's bits depend on its own sequence alone.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import (
    QUERIES,
    WARPGROUPS,
    AttentionShape,
    AttentionTile,
    SequencePlaces,
    attention_tile,
)
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.logits import LOG2_E
from pallas_kernels.mosaic.main_loop import ROW, WARPGROUP_ROWS, tiled
from pallas_kernels.mosaic.statistics import softcapped

Array = jax.Array
Ref = Any
_LOWEST = -1e30
"""The score that maxima start from: with −inf the difference of two maxima could be NaN."""


class _Softmax(NamedTuple):
    """A softmax so far, by query: the largest score times log2(e), Σ 2^(score − largest), and the weighted sum of
    values in chunks of columns.
    """

    largest: Array
    total: Array
    values: tuple[Array, ...]


class _Chunk(NamedTuple):
    """64 columns, or fewer, of rows in shared memory, as TMA and as wgmma see them: `[count, rows, 1, columns]` and
    `[count, rows, columns]`.

    Both are the same bytes. TMA copies tiles of 8 rows from multiples of 8 rows on alone; a tile of one row may come
    from anywhere.
    """

    rows: Ref
    tiles: Ref


class _Run(NamedTuple):
    """Queries of a tile that belong to one sequence: its first slot, and the first and the last query."""

    first_slot: Array
    first_query: Array
    last_query: Array


@dataclass(frozen=True)
class _Call:
    """The facts of one launch, and what all warpgroups of a block compute alike."""

    shape: AttentionShape
    tile: AttentionTile
    places: SequencePlaces
    batch: Array
    first_query: Array
    queries: int
    is_interpreted: bool

    def tma_view(self, chunk: _Chunk) -> tuple[Any, Ref]:
        """What TMA copies, and to or from where. The interpreter keeps both views of a chunk apart."""
        return (0, chunk.tiles) if self.is_interpreted else (slice(None), chunk.rows)

    def runs(self, visit: Callable[[_Run, Any], Any], start: Any) -> Any:
        """`visit(run, so far)` for the runs of the tile, the last one first."""
        last = jnp.minimum(self.first_query + QUERIES, self.queries) - 1
        if not self.shape.holds_several:
            return visit(_Run(self.places.first_slots[self.batch, 0], self.first_query, last), start)

        def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
            last, so_far = state
            first = jnp.maximum(self.places.runs[self.batch, last], self.first_query)
            return first - 1, visit(_Run(self.places.first_slots[self.batch, last], first, last), so_far)

        return lax.while_loop(lambda state: state[0] >= self.first_query, body, (last, start))[1]

    def slot(self, query: Array) -> Array:
        """The slot of a query."""
        return self.places.start[0] + query

    def blocks(self, run: _Run) -> tuple[Array, Array]:
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

    def spans(self, run: _Run, visit: Callable[[Array, Array, Any], Any], start: Any) -> Any:
        """`visit(first block, block behind the last, so far)` for the spans of a run's keys in ascending order."""
        first, end = self.blocks(run)
        if self.tile.span_blocks is None:
            return visit(first, end, start)
        width = jnp.int32(self.tile.span_blocks)

        def body(span: Array, so_far: Any) -> Any:
            return visit(jnp.maximum(first, span * width), jnp.minimum(end, (span + 1) * width), so_far)

        return lax.fori_loop(lax.div(first, width), lax.div(end + width - 1, width), body, start)


class _Arguments(NamedTuple):
    """The references that the kernel of `attend` is given."""

    query_gmem: Ref
    key_gmem: Ref
    value_gmem: Ref
    places_gmem: SequencePlaces
    output_gmem: Ref
    log_total_gmem: Ref


class _Memory(NamedTuple):
    """The shared memory of a block in chunks of columns, by warpgroup or by stage: queries, and in their place the
    output in the end; keys; values; and the weighted sums of values over all spans but the last one, None where there
    is one span.
    """

    query: tuple[_Chunk, ...]
    output: tuple[_Chunk, ...]
    key: tuple[_Chunk, ...]
    value: tuple[_Chunk, ...]
    kept: tuple[Ref, ...] | None


def _chunks(columns: int) -> list[int]:
    """The widths of the chunks of so many columns, a multiple of 16."""
    width = next(width for width in (64, 32, 16) if columns % width == 0)
    return [width] * (columns // width)


class _Barriers(NamedTuple):
    """Barriers for when something is loaded, when both warpgroups have read a stage, whose turn it is, and when both
    have emptied their part of a block's last values.
    """

    query_full: Ref
    key_full: Ref
    value_full: Ref
    key_empty: Ref
    value_empty: Ref
    turn: Ref
    edge: Ref


def attend(
    shape: AttentionShape, machine: Machine, query: Array, key: Array, value: Array, places: SequencePlaces
) -> tuple[Array, Array]:
    """The output `[B, T, H, F]` in query's dtype, and log2 of each query's softmax total, +inf where it sees nothing:
    float32 `[B, H, T]` with T rounded up to a multiple of 128.

    query is `[B, T, H, E]`, key `[B, S, G, E]` and value `[B, S, G, F]`, of one 16-bit dtype. T >= 1.
    """
    batch, queries, heads, size = query.shape
    value_size, dtype = value.shape[3], query.dtype
    tile = attention_tile(max(size, value_size))
    tiles = -(-queries // QUERIES)

    def body(
        query_gmem: Ref,
        key_gmem: Ref,
        value_gmem: Ref,
        start_gmem: Ref,
        first_slots_gmem: Ref,
        runs_gmem: Ref,
        output_gmem: Ref,
        log_total_gmem: Ref,
        **scratch: Ref,
    ) -> None:
        places = SequencePlaces(start_gmem, first_slots_gmem, runs_gmem)
        refs = _Arguments(query_gmem, key_gmem, value_gmem, places, output_gmem, log_total_gmem)
        chunks = tuple(tuple(map(_Chunk, *views)) for views in _pairs(scratch))
        memory = _Memory(*chunks, scratch.get("kept_smem"))
        barriers = _Barriers(*(scratch[name] for name in _Barriers._fields))
        # The last tiles, which see the most keys, come first.
        first_query = (tiles - 1 - lax.axis_index("tiles")) * QUERIES
        call = _Call(shape, tile, places, lax.axis_index("batch"), first_query, queries, machine.interpret is not None)
        head, warpgroup = lax.axis_index("heads"), lax.axis_index("warpgroup")

        @pl.when(warpgroup == WARPGROUPS)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            _load(call, refs, memory, barriers, lax.div(head, jnp.int32(shape.group_heads)))

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            _Warpgroup(call, machine, refs, memory, barriers, head, warpgroup).run()

    of_warpgroups, of_stages = (WARPGROUPS, WARPGROUP_ROWS), (tile.stages, tile.keys)
    stages = {"num_barriers": tile.stages}
    scratch = {
        "query_smem": plgpu.RefUnion(*_views(of_warpgroups, size, dtype), *_views(of_warpgroups, value_size, dtype)),
        "key_smem": plgpu.RefUnion(*_views(of_stages, size, dtype)),
        "value_smem": plgpu.RefUnion(*_views(of_stages, value_size, dtype)),
        "query_full": plgpu.Barrier(num_arrivals=len(_chunks(size)), num_barriers=WARPGROUPS),
        "key_full": plgpu.Barrier(num_arrivals=len(_chunks(size)), **stages),
        "value_full": plgpu.Barrier(num_arrivals=len(_chunks(value_size)), **stages),
        "key_empty": plgpu.Barrier(num_arrivals=WARPGROUPS, **stages),
        "value_empty": plgpu.Barrier(num_arrivals=WARPGROUPS, **stages),
        "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "edge": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    if tile.span_blocks is not None:
        scratch["kept_smem"] = _views(of_warpgroups, value_size, jnp.float32)[1]
    output, log_total = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, queries, heads, 1, value_size), dtype),
            jax.ShapeDtypeStruct((batch, heads, tiles * QUERIES), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(heads, tiles, batch),
        grid_names=("heads", "tiles", "batch"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="attention",
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*(x[:, :, :, None] for x in (query, key, value)), *places)
    return output[:, :, :, 0], log_total


def _views(shape: tuple[int, int], columns: int, dtype: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shared memory for chunks of `[count, rows]` rows, as TMA and as wgmma see it."""

    def view(width: int, *, single: bool) -> Any:
        transforms: Any = tiled(width, dtype)
        if not single:
            return plgpu.SMEM((*shape, width), dtype, transforms=transforms)
        tiling: Any = plgpu.TilingTransform
        return plgpu.SMEM((*shape, 1, width), dtype, transforms=(tiling((1, width)), *transforms[1:]))

    rows, tiles = (tuple(view(width, single=single) for width in _chunks(columns)) for single in (True, False))
    return rows, tiles


def _pairs(scratch: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The two views of queries, of the output, of keys and of values."""
    yield from itertools.batched((*scratch["query_smem"], *scratch["key_smem"], *scratch["value_smem"]), 2)


def _with_columns[Chunk](chunks: Sequence[Chunk], widths: Sequence[int]) -> Iterator[tuple[Any, Chunk]]:
    """The chunks with the columns that each holds."""
    for width, end, chunk in zip(widths, itertools.accumulate(widths), chunks, strict=True):
        yield pl.ds(end - width, width), chunk


def _load(call: _Call, refs: _Arguments, memory: _Memory, barriers: _Barriers, group: Array) -> None:
    """For the producer: load the keys and the values of all blocks that the tile sees, and wait until they are read."""
    stages = jnp.int32(call.tile.stages)

    def over_run(run: _Run, count: Array) -> Array:
        def block(i: Array, count: Array) -> Array:
            slot = lax.rem(count, stages)
            there = (call.batch, pl.ds(run.first_slot + i * call.tile.keys, call.tile.keys), group)
            for gmem, smem, full, empty in (
                (refs.key_gmem, memory.key, barriers.key_full, barriers.key_empty),
                (refs.value_gmem, memory.value, barriers.value_full, barriers.value_empty),
            ):

                @pl.when(count >= stages)
                def _(empty: Ref = empty) -> None:
                    plgpu.barrier_wait(empty.at[slot])

                for columns, chunk in _with_columns(smem, _chunks(gmem.shape[-1])):
                    part, to_smem = call.tma_view(chunk)
                    plgpu.copy_gmem_to_smem(gmem.at[*there, part, columns], to_smem.at[slot], full.at[slot])
            return count + 1

        return lax.fori_loop(*call.blocks(run), block, count)

    count = call.runs(over_run, jnp.int32(0))

    def drain(i: Array, _: None) -> None:
        for empty in (barriers.key_empty, barriers.value_empty):
            plgpu.barrier_wait(empty.at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, None)


def _empty(columns: int) -> _Softmax:
    """The softmax over no keys."""

    def rows(value: float) -> Array:
        return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.float32), ROW)

    def zeros(width: int) -> Array:
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)

    return _Softmax(rows(_LOWEST), rows(0), tuple(map(zeros, _chunks(columns))))


def _over(rows: Array, columns: int) -> Array:
    """A value for each query, repeated in all columns."""
    return lax.broadcast_in_dim(rows, (WARPGROUP_ROWS, columns), [0])


class _Totals(Protocol):
    """The largest score and the total of a softmax."""

    @property
    def largest(self) -> Array: ...

    @property
    def total(self) -> Array: ...


def _factors(first: _Totals, second: _Totals) -> tuple[Array, Array, Array]:
    """The larger one of two largest scores, and what the sums below each are multiplied by to refer to it."""
    largest = jnp.maximum(first.largest, second.largest)
    return largest, jnp.exp2(first.largest - largest), jnp.exp2(second.largest - largest)


def merged_totals(first: _Totals, second: _Totals) -> tuple[Array, Array]:
    """The largest score and the total over the keys of both."""
    largest, a, b = _factors(first, second)
    return largest, first.total * a + second.total * b


def merged(first: _Softmax, second: _Softmax) -> _Softmax:
    """The softmax over the keys of both. One of no keys changes no bit of the other."""
    _, a, b = _factors(first, second)

    def chunk(x: Array, y: Array) -> Array:
        return x * _over(a, x.shape[1]) + y * _over(b, x.shape[1])

    values = tuple(map(chunk, first.values, second.values))
    return _Softmax(*merged_totals(first, second), values)


class _Progress(NamedTuple):
    """How far a warpgroup has come: spans and blocks begun; the largest score and the total of all spans but the last
    one, and the softmax of the last one.
    """

    spans: Array
    blocks: Array
    largest: Array
    total: Array
    last: _Softmax


@dataclass(frozen=True)
class _Warpgroup:
    """One compute warpgroup: 64 queries of one head."""

    call: _Call
    machine: Machine
    refs: _Arguments
    memory: _Memory
    barriers: _Barriers
    head: Array
    number: Array

    @property
    def first_query(self) -> Array:
        """The number of its first query."""
        return self.call.first_query + self.number * WARPGROUP_ROWS

    def run(self) -> None:
        """Load the queries, run the blocks of keys past them, and store the output."""
        call, columns = self.call, self.refs.value_gmem.shape[-1]
        full = self.barriers.query_full.at[self.number]
        there = (call.batch, pl.ds(self.first_query, WARPGROUP_ROWS), self.head)
        for own, chunk in _with_columns(self.memory.query, _chunks(self.refs.query_gmem.shape[-1])):
            part, to_smem = call.tma_view(chunk)
            plgpu.copy_gmem_to_smem(self.refs.query_gmem.at[*there, part, own], to_smem.at[self.number], full)
        plgpu.barrier_wait(full)

        @pl.when(self.number == 1)
        def _() -> None:
            self._take_turns()

        def span(run: _Run, first: Array, end: Array, state: _Progress) -> _Progress:
            def step(i: Array, so_far: _Softmax) -> _Softmax:
                return self._add_block(run, i, state.blocks + i - first, so_far)

            kept = self._keep(state)
            last = lax.fori_loop(first, end, step, _empty(columns))
            return _Progress(state.spans + 1, state.blocks + end - first, *kept, last)

        def over_run(run: _Run, state: _Progress) -> _Progress:
            return call.spans(run, lambda first, end, state: span(run, first, end, state), state)

        none = _empty(columns)
        state = call.runs(over_run, _Progress(jnp.int32(0), jnp.int32(0), none.largest, none.total, none))

        @pl.when(self.number == 0)
        def _() -> None:
            self._take_turns()

        if self.memory.kept is None:
            self._store(state.last)
            return

        @pl.when(state.spans > 1)
        def _() -> None:
            self._store(merged(self._kept(state), state.last))

        @pl.when(state.spans <= 1)
        def _() -> None:
            self._store(state.last)

    def _take_turns(self) -> None:
        plgpu.barrier_arrive(self.barriers.turn)
        plgpu.barrier_wait(self.barriers.turn)

    def _kept(self, state: _Progress) -> _Softmax:
        """The softmax of all spans but the last one."""
        assert self.memory.kept is not None
        layout = {"layout": plgpu.Layout.WGMMA, "optimized": False}
        values = tuple(plgpu.load(chunk.at[self.number], **layout) for chunk in self.memory.kept)
        return _Softmax(state.largest, state.total, values)

    def _keep(self, state: _Progress) -> tuple[Array, Array]:
        """Merge the last span into those before it, whose sums of values shared memory holds: registers have no room.

        Returns the largest score and the total of both. There is no last span before the first one.
        """
        if self.memory.kept is None:
            return state.largest, state.total
        largest, total = merged_totals(state, state.last)
        kept_smem = self.memory.kept

        def store(x: _Softmax) -> None:
            for chunk, values in zip(kept_smem, x.values, strict=True):
                chunk.at[self.number][...] = values

        @pl.when(state.spans == 1)
        def _() -> None:
            store(state.last)

        @pl.when(state.spans > 1)
        def _() -> None:
            store(merged(self._kept(state), state.last))

        return largest, total

    def _visible(self, run: _Run, block: Array) -> Array:
        """Which keys of a block each query sees, `[64, keys]`."""
        call, shape = self.call, (WARPGROUP_ROWS, self.call.tile.keys)
        query = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW) + self.first_query
        if call.shape.holds_several:
            query = jnp.where((query >= run.first_query) & (query <= run.last_query), query, -(2**30))
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        base = call.slot(jnp.int32(0)) - run.first_slot - block * call.tile.keys
        # How many slots a key stands before the query; as an unsigned number it is large where it stands behind.
        distance = lax.bitcast_convert_type(_over(query + base, call.tile.keys) - key, jnp.uint32)
        return distance < jnp.uint32(call.shape.sliding_window or 2**31 - 1)

    def _is_seen_by_all(self, run: _Run, block: Array) -> Array:
        """Whether every query of the tile sees the whole block."""
        call = self.call
        last_key = run.first_slot + (block + 1) * call.tile.keys - 1
        whole = last_key <= call.slot(call.first_query)
        if call.shape.sliding_window is not None:
            first_key = last_key - call.tile.keys + 1
            whole = whole & (first_key > call.slot(call.first_query + QUERIES - 1) - call.shape.sliding_window)
        if call.shape.holds_several:
            whole = whole & (run.first_query == call.first_query) & (run.last_query >= call.first_query + QUERIES - 1)
        return whole

    def _scores(self, run: _Run, block: Array, slot: Array) -> Array:
        """The block's scores times log2(e), −inf where a query does not see a key."""
        shape = self.call.shape

        def multiply(acc: Ref) -> Array:
            for query, key in zip(self.memory.query, self.memory.key, strict=True):
                plgpu.wgmma(acc, query.tiles.at[self.number], key.tiles.at[slot].transpose((1, 0)))
            self._take_turns()
            return acc[...]

        products = pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, self.call.tile.keys), jnp.float32))
        plgpu.barrier_arrive(self.barriers.key_empty.at[slot])
        if shape.softcap is None:
            scores = products * (shape.scale * LOG2_E)
        else:
            scores = softcapped(products * shape.scale, shape.softcap)[0] * LOG2_E
        return lax.cond(
            self._is_seen_by_all(run, block),
            lambda: scores,
            lambda: jnp.where(self._visible(run, block), scores, -jnp.inf),
        )

    def _add_block(self, run: _Run, block: Array, step: Array, so_far: _Softmax) -> _Softmax:
        """The softmax with one block of keys added; `step` counts the blocks of the tile."""
        barriers, keys = self.barriers, self.call.tile.keys
        slot = lax.rem(step, jnp.int32(self.call.tile.stages))
        plgpu.barrier_wait(barriers.key_full.at[slot])
        scores = self._scores(run, block, slot)
        largest = jnp.maximum(so_far.largest, scores.max(axis=1))
        factor = jnp.exp2(so_far.largest - largest)
        exponentials = jnp.exp2(scores - _over(largest, keys))
        total = so_far.total * factor + exponentials.sum(axis=1)
        values = tuple(chunk * _over(factor, chunk.shape[1]) for chunk in so_far.values)
        weights = exponentials.astype(self.refs.value_gmem.dtype)
        values, total, largest, weights = lax.optimization_barrier((values, total, largest, weights))
        plgpu.barrier_arrive(barriers.turn)
        plgpu.barrier_wait(barriers.value_full.at[slot])
        self._empty_unseen_values(run, block, slot)
        plgpu.barrier_wait(barriers.turn)
        values = self._add_product(values, weights, slot)
        plgpu.barrier_arrive(barriers.value_empty.at[slot])
        return _Softmax(largest, total, values)

    def _add_product(self, values: tuple[Array, ...], weights: Array, slot: Array) -> tuple[Array, ...]:
        """values + weights·block, by chunk."""
        blocks = [chunk.tiles.at[slot] for chunk in self.memory.value]
        if not self.call.is_interpreted:

            def multiply(accs: tuple[Ref, ...]) -> None:
                for acc, block in zip(accs, blocks, strict=True):
                    plgpu.wgmma(acc, weights, block)

            return pl.run_state(multiply)(tuple(map(plgpu.ACC.init, values)))

        # The interpreter multiplies what is in shared memory alone, and cannot store to accumulators.
        def added(x: Array, block_smem: Ref) -> Array:
            block = plgpu.load(block_smem, layout=plgpu.Layout.WGMMA, optimized=False)
            return x + lax.dot(weights, block, preferred_element_type=jnp.float32)

        values = tuple(map(added, values, blocks))
        plgpu.commit_smem()
        return values

    def _empty_unseen_values(self, run: _Run, block: Array, slot: Array) -> None:
        """Write zeros over values behind the run's last query: they may be anything, and 0·NaN would be NaN."""
        call, keys = self.call, self.call.tile.keys
        seen = call.slot(run.last_query) - run.first_slot - block * keys + 1
        part = keys // WARPGROUPS if keys >= WARPGROUPS * WARPGROUP_ROWS else keys

        @pl.when(seen < keys)
        def _() -> None:
            @pl.when(self.number < keys // part)
            def _() -> None:
                first = self.number * part
                for chunk in self.memory.value:
                    rows_smem = chunk.tiles.at[slot, pl.ds(first, part)]
                    rows = plgpu.load(rows_smem, layout=plgpu.Layout.WGMMA, optimized=False)
                    number = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=plgpu.Layout.WGMMA) + first
                    rows_smem[...] = jnp.where(number < seen, rows, jnp.zeros_like(rows))
                plgpu.commit_smem()

            plgpu.barrier_arrive(self.barriers.edge)
            plgpu.barrier_wait(self.barriers.edge)

    def _store(self, softmax: _Softmax) -> None:
        """Write the output of 64 queries, and the logarithm of their totals."""
        call, there = self.call, pl.ds(self.first_query, WARPGROUP_ROWS)
        is_empty = softmax.total == 0
        log_total = jnp.where(is_empty, jnp.inf, softmax.largest + jnp.log(softmax.total) * LOG2_E)
        self.refs.log_total_gmem[call.batch, self.head, there] = log_total
        inverse = jnp.where(is_empty, 0.0, 1 / softmax.total)
        for chunk, values in zip(self.memory.output, softmax.values, strict=True):
            values = values * _over(inverse, values.shape[1])
            # An infinite value makes infinite sums, and NaN is what every query gets that sees one.
            finite = jnp.where(jnp.abs(values) < jnp.inf, values, jnp.nan)
            chunk.tiles.at[self.number][...] = finite.astype(chunk.tiles.dtype)
        plgpu.commit_smem()
        for own, chunk in _with_columns(self.memory.output, _chunks(self.refs.value_gmem.shape[-1])):
            part, from_smem = call.tma_view(chunk)
            to_gmem = self.refs.output_gmem.at[call.batch, there, self.head, part, own]
            plgpu.copy_smem_to_gmem(from_smem.at[self.number], to_gmem)
        plgpu.wait_smem_to_gmem(0)
