"""The gradients of attention's keys and values: 64 keys in each warpgroup meet the queries that see them.

Queries come in blocks of 64 that count from the sequence's own first token, and for each block the heads that share the
keys come in order. So a gradient is one chain whose order depends on its own sequence alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import AttentionShape, SequencePlaces, key_gradient_tile
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.logits import LOG2_E
from pallas_kernels.mosaic.attention_tiles import (
    Call,
    Chunk,
    Ring,
    Run,
    add_product,
    chunk_widths,
    empty_outside,
    pairs,
    views,
    with_columns,
)
from pallas_kernels.mosaic.main_loop import COLUMN, ROW, WARPGROUP_ROWS
from pallas_kernels.mosaic.statistics import softcapped

Array = jax.Array
Ref = Any
_QUERIES = 64
"""Queries of a block."""
_MARGIN = 64
"""Places before and behind the numbers of each query: a block may begin before the first and end behind the last."""


class _Memory(NamedTuple):
    """The shared memory of a block in chunks of columns, by warpgroup or by stage: keys and values, in whose place
    their gradients stand in the end; queries; and their upstream gradients.
    """

    key: tuple[Chunk, ...]
    value: tuple[Chunk, ...]
    query: Ring
    upstream: Ring


class _Arguments(NamedTuple):
    """The references that the kernel is given."""

    key_gmem: Ref
    value_gmem: Ref
    log_total_gmem: Ref
    center_gmem: Ref
    ends_gmem: Ref
    d_key_gmem: Ref
    d_value_gmem: Ref


@dataclass(frozen=True)
class _KeyTile:
    """The keys of a block of threads, and the queries that it meets; what all warpgroups compute alike."""

    call: Call
    first_key: Array
    end: Array
    """How many first queries belong to sequences that begin before the last key of the tile does."""

    @property
    def last_key(self) -> Array:
        """The slot of the last key."""
        return self.first_key + self.call.tile.queries - 1

    def runs(self, visit: Callable[[Run, Any], Any], start: Any) -> Any:
        """`visit(run, so far)` for the queries of each sequence that may see a key of the tile, the last one first."""
        call = self.call
        if not call.shape.holds_several:
            first_slot = call.places.first_slots[call.batch, 0]
            return visit(Run(first_slot, jnp.int32(0), jnp.int32(call.queries - 1)), start)

        def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
            last, so_far = state
            first = call.places.runs[call.batch, last]
            return first - 1, visit(Run(call.places.first_slots[call.batch, last], first, last), so_far)

        def goes_on(state: tuple[Array, Any]) -> Array:
            return (state[0] >= 0) & (call.slot(state[0]) >= self.first_key)

        return lax.while_loop(goes_on, body, (self.end - 1, start))[1]

    def first_of(self, run: Run, block: Array) -> Array:
        """The number of the first query of a block; that of the sequence's first token may be negative."""
        return run.first_slot - self.call.places.start[0] + block * _QUERIES

    def blocks(self, run: Run) -> tuple[Array, Array]:
        """The first block of queries that may see a key of the tile, and the one behind the last."""
        base = self.first_of(run, jnp.int32(0))
        start = self.call.places.start[0]
        first = jnp.maximum(jnp.maximum(run.first_query, self.first_key - start), base)
        last = run.last_query
        if self.call.shape.sliding_window is not None:
            last = jnp.minimum(last, self.last_key + self.call.shape.sliding_window - 1 - start)
        size = jnp.int32(_QUERIES)
        block = lax.div(first - base, size)
        return block, jnp.where(last < first, block, lax.div(last - base, size) + 1)


def key_gradients(
    shape: AttentionShape,
    machine: Machine,
    query: Array,
    key: Array,
    value: Array,
    log_total: Array,
    center: Array,
    upstream: Array,
    places: SequencePlaces,
) -> tuple[Array, Array]:
    """dK `[B, S, G, E]` and dV `[B, S, G, F]` in key's dtype; 0 in slots that no query sees.

    log_total is what `attend` gave, and center what `query_gradient` did. upstream is `[B, T, H, F]`.
    """
    batch, slots, groups, size = key.shape
    value_size, dtype, queries = value.shape[3], key.dtype, query.shape[1]
    tile = key_gradient_tile(max(size, value_size))
    tiles = -(-slots // tile.queries)
    last_keys = jnp.arange(1, tiles + 1, dtype=jnp.int32) * tile.queries - 1
    ends = jax.vmap(lambda x: jnp.searchsorted(x, last_keys, side="right").astype(jnp.int32))(places.first_slots)

    def body(
        query_gmem: Ref,
        key_gmem: Ref,
        value_gmem: Ref,
        upstream_gmem: Ref,
        log_total_gmem: Ref,
        center_gmem: Ref,
        ends_gmem: Ref,
        start_gmem: Ref,
        first_slots_gmem: Ref,
        runs_gmem: Ref,
        d_key_gmem: Ref,
        d_value_gmem: Ref,
        **scratch: Ref,
    ) -> None:
        places = SequencePlaces(start_gmem, first_slots_gmem, runs_gmem)
        refs = _Arguments(key_gmem, value_gmem, log_total_gmem, center_gmem, ends_gmem, d_key_gmem, d_value_gmem)
        names = ("key_smem", "value_smem", "query_smem", "upstream_smem")
        key, value, query, upstream = (tuple(map(Chunk, *views)) for views in pairs(scratch, names))
        memory = _Memory(
            key,
            value,
            Ring(query_gmem, query, scratch["query_full"], scratch["query_empty"]),
            Ring(upstream_gmem, upstream, scratch["upstream_full"], scratch["upstream_empty"]),
        )
        number, warpgroup = lax.axis_index("tiles"), lax.axis_index("warpgroup")
        call = Call(shape, tile, places, lax.axis_index("batch"), jnp.int32(0), queries, machine.interpret is not None)
        keys = _KeyTile(call, number * tile.queries, ends_gmem[call.batch, number])
        group = lax.axis_index("groups")

        @pl.when(warpgroup == tile.warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            _load_queries(keys, (memory.query, memory.upstream), group)

        @pl.when(warpgroup < tile.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            barriers = (scratch["key_full"], scratch["value_full"], scratch["edge"])
            _Warpgroup(keys, refs, memory, *barriers, group, warpgroup).run()

    of_warpgroups, of_stages = (tile.warpgroups, WARPGROUP_ROWS), (tile.stages, _QUERIES)
    stages, own = {"num_barriers": tile.stages}, {"num_barriers": tile.warpgroups}
    of_size, of_value = len(chunk_widths(size)), len(chunk_widths(value_size))
    scratch = {
        "key_smem": plgpu.RefUnion(*views(of_warpgroups, size, dtype)),
        "value_smem": plgpu.RefUnion(*views(of_warpgroups, value_size, dtype)),
        "query_smem": plgpu.RefUnion(*views(of_stages, size, dtype)),
        "upstream_smem": plgpu.RefUnion(*views(of_stages, value_size, dtype)),
        "key_full": plgpu.Barrier(num_arrivals=of_size, **own),
        "value_full": plgpu.Barrier(num_arrivals=of_value, **own),
        "query_full": plgpu.Barrier(num_arrivals=of_size, **stages),
        "upstream_full": plgpu.Barrier(num_arrivals=of_value, **stages),
        "query_empty": plgpu.Barrier(num_arrivals=tile.warpgroups, **stages),
        "upstream_empty": plgpu.Barrier(num_arrivals=tile.warpgroups, **stages),
        "edge": plgpu.Barrier(num_arrivals=tile.warpgroups),
    }
    numbers = (_from_any_place(x) for x in (log_total, center))
    d_key, d_value = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((batch, slots, groups, 1, n), dtype) for n in (size, value_size)),
        scratch_types=scratch,
        grid=(groups, tiles, batch),
        grid_names=("groups", "tiles", "batch"),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="attention_d_key",
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*(x[:, :, :, None] for x in (query, key, value, upstream)), *numbers, ends, *places)
    return d_key[:, :, :, 0], d_value[:, :, :, 0]


def _from_any_place(numbers: Array) -> Array:
    """Numbers of queries `[B, H, T]` as `[B, H, 2, T + margins]`: once as they are, and once one place further on.

    Threads read two at a time from even places, and a block may begin at an odd one.
    """
    copies = (jnp.pad(numbers, ((0, 0), (0, 0), (_MARGIN + i, _MARGIN - i))) for i in range(2))
    return jnp.stack(tuple(copies), axis=2)


def _load_queries(keys: _KeyTile, rings: tuple[Ring, Ring], group: Array) -> None:
    """For the producer: load all queries that the tile meets, and wait until they are read."""
    call = keys.call
    heads, stages = jnp.int32(call.shape.group_heads), jnp.int32(call.tile.stages)

    def over_run(run: Run, count: Array) -> Array:
        first, end = keys.blocks(run)

        def step(i: Array, count: Array) -> Array:
            block, head = first + lax.div(i, heads), group * heads + lax.rem(i, heads)
            there = (call.batch, pl.ds(keys.first_of(run, block), _QUERIES), head)
            for ring in rings:
                ring.load(call, there, count)
            return count + 1

        return lax.fori_loop(0, (end - first) * heads, step, count)

    count = keys.runs(over_run, jnp.int32(0))

    def drain(i: Array, _: None) -> None:
        for ring in rings:
            plgpu.barrier_wait(ring.empty.at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, None)


class _Sums(NamedTuple):
    """The gradients of the keys and of the values so far, by chunk."""

    key: tuple[Array, ...]
    value: tuple[Array, ...]


@dataclass(frozen=True)
class _Warpgroup:
    """One compute warpgroup: 64 keys of one head."""

    keys: _KeyTile
    refs: _Arguments
    memory: _Memory
    key_full: Ref
    value_full: Ref
    edge: Ref
    group: Array
    number: Array

    @property
    def first_key(self) -> Array:
        """The slot of its first key."""
        return self.keys.first_key + self.number * WARPGROUP_ROWS

    def run(self) -> None:
        """Load the keys and the values, run the queries past them, and store the gradients."""
        call, refs, memory = self.keys.call, self.refs, self.memory
        there = (call.batch, pl.ds(self.first_key, WARPGROUP_ROWS), self.group)
        loads = ((refs.key_gmem, memory.key, self.key_full), (refs.value_gmem, memory.value, self.value_full))
        for gmem, chunks, full in loads:
            for own, chunk in with_columns(chunks, chunk_widths(gmem.shape[-1])):
                part, to_smem = call.tma_view(chunk)
                plgpu.copy_gmem_to_smem(gmem.at[*there, part, own], to_smem.at[self.number], full.at[self.number])
        for full in (self.key_full, self.value_full):
            plgpu.barrier_wait(full.at[self.number])
        heads = jnp.int32(call.shape.group_heads)

        def over_run(run: Run, state: tuple[Array, _Sums]) -> tuple[Array, _Sums]:
            steps, sums = state
            first, end = self.keys.blocks(run)

            def step(i: Array, sums: _Sums) -> _Sums:
                return self._add_block(run, first + lax.div(i, heads), lax.rem(i, heads), steps + i, sums)

            count = (end - first) * heads
            return steps + count, lax.fori_loop(0, count, step, sums)

        def zeros(gmem: Ref) -> tuple[Array, ...]:
            return tuple(
                plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
                for width in chunk_widths(gmem.shape[-1])
            )

        _, sums = self.keys.runs(over_run, (jnp.int32(0), _Sums(zeros(refs.key_gmem), zeros(refs.value_gmem))))
        scaled = tuple(x * call.shape.scale for x in sums.key)
        stores = ((refs.d_key_gmem, memory.key, scaled), (refs.d_value_gmem, memory.value, sums.value))
        for _, chunks, gradient in stores:
            for chunk, values in zip(chunks, gradient, strict=True):
                chunk.tiles.at[self.number][...] = values.astype(chunk.tiles.dtype)
        plgpu.commit_smem()
        for gmem, chunks, _ in stores:
            for own, chunk in with_columns(chunks, chunk_widths(gmem.shape[-1])):
                part, from_smem = call.tma_view(chunk)
                plgpu.copy_smem_to_gmem(from_smem.at[self.number], gmem.at[*there, part, own])
        plgpu.wait_smem_to_gmem(0)

    def _add_block(self, run: Run, block: Array, head: Array, step: Array, sums: _Sums) -> _Sums:
        """The gradients with one block of queries of one head added; `step` counts those of the tile."""
        call, memory, shape = self.keys.call, self.memory, self.keys.call.shape
        slot = lax.rem(step, jnp.int32(call.tile.stages))
        first = self.keys.first_of(run, block)
        is_odd = first & 1
        own_head = self.group * shape.group_heads + head
        there = (call.batch, own_head, is_odd, pl.ds(first + _MARGIN + is_odd, _QUERIES))
        plgpu.barrier_wait(memory.query.full.at[slot])
        plgpu.barrier_wait(memory.upstream.full.at[slot])
        low, high = run.first_query - first, run.last_query - first + 1
        chunks = (*memory.query.chunks, *memory.upstream.chunks)
        empty_outside(call.tile, chunks, slot, self.number, self.edge, low, high)
        products = self._products(memory.key, memory.query.chunks, slot)
        scores, slope = softcapped(products * shape.scale, shape.softcap)
        weights = jnp.exp2(scores * LOG2_E - _over_keys(self.refs.log_total_gmem, there))
        of_weights = self._products(memory.value, memory.upstream.chunks, slot)
        d_scores = weights * (of_weights - _over_keys(self.refs.center_gmem, there))
        d_scores = d_scores if slope is None else d_scores * slope
        rounded = weights.astype(self.refs.d_key_gmem.dtype), d_scores.astype(self.refs.d_key_gmem.dtype)
        weights, d_scores = self._masked(run, first, *rounded)
        d_value = add_product(call, sums.value, weights, memory.upstream.chunks, slot)
        plgpu.barrier_arrive(memory.upstream.empty.at[slot])
        d_key = add_product(call, sums.key, d_scores, memory.query.chunks, slot)
        plgpu.barrier_arrive(memory.query.empty.at[slot])
        return _Sums(d_key, d_value)

    def _masked(self, run: Run, first_query: Array, *values: Array) -> tuple[Array, ...]:
        """The values of a block's queries, with 0 where a query does not see a key."""
        call, last_query = self.keys.call, first_query + _QUERIES - 1
        whole = (self.keys.first_key >= run.first_slot) & (call.slot(first_query) >= self.keys.last_key)
        whole = whole & (first_query >= run.first_query) & (last_query <= run.last_query)
        if call.shape.sliding_window is not None:
            whole = whole & (call.slot(last_query) - self.keys.first_key < call.shape.sliding_window)

        def masked() -> tuple[Array, ...]:
            visible = self._visible(run, first_query)
            return tuple(jnp.where(visible, x, jnp.zeros_like(x)) for x in values)

        return lax.cond(whole, lambda: values, masked)

    def _visible(self, run: Run, first_query: Array) -> Array:
        """Which queries of a block see each key, `[64 keys, 64 queries]`."""
        call, shape = self.keys.call, (WARPGROUP_ROWS, _QUERIES)
        key = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW) + self.first_key
        key = jnp.where(key >= run.first_slot, key, 2**30)
        query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first_query
        distance = query + call.places.start[0] - lax.broadcast_in_dim(key, shape, [0])
        seen = lax.bitcast_convert_type(distance, jnp.uint32) < jnp.uint32(call.shape.sliding_window or 2**31 - 1)
        return seen & (query >= run.first_query) & (query <= run.last_query)

    def _products(self, rows: tuple[Chunk, ...], blocks: tuple[Chunk, ...], slot: Array) -> Array:
        """The products `[64 keys, 64 queries]` of the warpgroup's rows and a block's."""

        def multiply(acc: Ref) -> Array:
            for row, block in zip(rows, blocks, strict=True):
                plgpu.wgmma(acc, row.tiles.at[self.number], block.tiles.at[slot].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, _QUERIES), jnp.float32))


def _over_keys(numbers_gmem: Ref, there: Any) -> Array:
    """A number for each query of a block, repeated for all keys."""
    numbers = plgpu.load(numbers_gmem.at[there], layout=COLUMN, optimized=False)
    return lax.broadcast_in_dim(numbers, (WARPGROUP_ROWS, _QUERIES), [1])
