"""The gradients of attention's keys and values: 64 keys in each warpgroup meet the queries that see them.

Queries come in blocks of 64 that count from the sequence's own first token, and for each block the heads that share the
keys come in order. So a gradient is one chain whose order depends on its own sequence alone.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import AttentionShape, SequencePlaces, key_gradient_tile
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.mosaic.attention_key_tile import QUERIES, KeyTile
from pallas_kernels.mosaic.attention_products import Scores, Weighted, multiply
from pallas_kernels.mosaic.attention_softmax import weights_of
from pallas_kernels.mosaic.attention_tiles import (
    Call,
    Chunk,
    Ring,
    Run,
    chunk_widths,
    drain,
    empty_outside,
    from_any_place,
    load_rows,
    pairs,
    store_rows,
    views,
    zero_beside,
    zero_sums,
)
from pallas_kernels.mosaic.main_loop import COLUMN, ROW, WARPGROUP_ROWS

Array = jax.Array
Ref = Any


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
    d_key_gmem: Ref
    d_value_gmem: Ref


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
        refs = _Arguments(key_gmem, value_gmem, d_key_gmem, d_value_gmem)
        names = ("key_smem", "value_smem", "query_smem", "upstream_smem")
        key, value, query, upstream = (tuple(map(Chunk, *views)) for views in pairs(scratch, names))

        def ring(name: str, gmem: Ref, chunks: tuple[Chunk, ...], numbers_gmem: Ref) -> Ring:
            full, empty, numbers_smem = (scratch[f"{name}_{of}"] for of in ("full", "empty", "numbers"))
            return Ring(gmem, chunks, full, empty, numbers_gmem, numbers_smem)

        memory = _Memory(
            key,
            value,
            ring("query", query_gmem, query, log_total_gmem),
            ring("upstream", upstream_gmem, upstream, center_gmem),
        )
        number, warpgroup = lax.axis_index("tiles"), lax.axis_index("warpgroup")
        call = Call(shape, tile, places, lax.axis_index("batch"), jnp.int32(0), queries, machine.interpret is not None)
        keys = KeyTile(call, number * tile.queries, ends_gmem[call.batch, number])
        group = lax.axis_index("groups")

        @pl.when(warpgroup == tile.warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(24, action="decrease")
            _load_queries(keys, (memory.query, memory.upstream), group)

        def compute(rows: Array, *, has_key: bool, has_value: bool) -> None:
            plgpu.set_max_registers(240, action="increase")
            barriers = (scratch["key_full"], scratch["value_full"], scratch["edge"])
            _Warpgroup(keys, refs, memory, *barriers, group, warpgroup, rows, has_key, has_value).run()

        if not tile.shares_rows:
            pl.when(warpgroup < tile.warpgroups)(lambda: compute(warpgroup, has_key=True, has_value=True))
            return
        same_rows = zero_beside(warpgroup)
        pl.when(warpgroup == 0)(lambda: compute(same_rows, has_key=True, has_value=False))
        pl.when(warpgroup == 1)(lambda: compute(same_rows, has_key=False, has_value=True))

    rows = tile.queries // WARPGROUP_ROWS
    of_warpgroups, of_stages = (rows, WARPGROUP_ROWS), (tile.stages, QUERIES)
    stages: dict[str, Any]
    own: dict[str, Any]
    stages, own = {"num_barriers": tile.stages}, {"num_barriers": rows}
    of_size, of_value = len(chunk_widths(size)), len(chunk_widths(value_size))
    scratch: dict[str, Any] = {
        "key_smem": plgpu.RefUnion(*views(of_warpgroups, size, dtype)),
        "value_smem": plgpu.RefUnion(*views(of_warpgroups, value_size, dtype)),
        "query_smem": plgpu.RefUnion(*views(of_stages, size, dtype)),
        "upstream_smem": plgpu.RefUnion(*views(of_stages, value_size, dtype)),
        "key_full": plgpu.Barrier(num_arrivals=of_size, **own),
        "value_full": plgpu.Barrier(num_arrivals=of_value, **own),
        "query_numbers": plgpu.SMEM((tile.stages, QUERIES), jnp.float32),
        "upstream_numbers": plgpu.SMEM((tile.stages, QUERIES), jnp.float32),
        "query_full": plgpu.Barrier(num_arrivals=of_size + 1, **stages),
        "upstream_full": plgpu.Barrier(num_arrivals=of_value + 1, **stages),
        "query_empty": plgpu.Barrier(num_arrivals=tile.warpgroups, **stages),
        "upstream_empty": plgpu.Barrier(num_arrivals=tile.warpgroups, **stages),
        "edge": plgpu.Barrier(num_arrivals=tile.warpgroups),
    }
    d_key, d_value = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((batch, slots, groups, 1, n), dtype) for n in (size, value_size)),
        scratch_types=scratch,
        grid=(batch, tiles, groups),
        grid_names=("batch", "tiles", "groups"),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="attention_d_key",
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(
        *(x[:, :, :, None] for x in (query, key, value, upstream)),
        *map(from_any_place, (log_total, center)),
        ends,
        *places,
    )
    return d_key[:, :, :, 0], d_value[:, :, :, 0]


def _load_queries(keys: KeyTile, rings: tuple[Ring, Ring], group: Array) -> None:
    """For the producer: load all queries that the tile meets, and wait until they are read."""
    call = keys.call
    heads = jnp.int32(call.shape.group_heads)

    def over_run(run: Run, count: Array) -> Array:
        first, end = keys.blocks(run)

        def step(i: Array, count: Array) -> Array:
            block, head = first + lax.div(i, heads), group * heads + lax.rem(i, heads)
            there = (call.batch, pl.ds(keys.first_of(run, block), QUERIES), head)
            for ring in rings:
                ring.load(call, there, count)
            return count + 1

        return lax.fori_loop(0, (end - first) * heads, step, count)

    drain(call.tile, rings, keys.runs(over_run, jnp.int32(0)))


class _Sums(NamedTuple):
    """The gradients of the keys and of the values so far, by chunk; empty where another warpgroup has them."""

    key: tuple[Array, ...]
    value: tuple[Array, ...]


@dataclass(frozen=True)
class _Warpgroup:
    """One compute warpgroup: 64 keys of one head, and one of their gradients or both."""

    keys: KeyTile
    refs: _Arguments
    memory: _Memory
    key_full: Ref
    value_full: Ref
    edge: Ref
    group: Array
    warpgroup: Array
    number: Array
    """Which 64 keys of the tile."""
    has_key: bool
    has_value: bool

    @property
    def first_key(self) -> Array:
        """The slot of its first key."""
        return self.keys.first_key + self.number * WARPGROUP_ROWS

    def run(self) -> None:
        """Run the queries past the keys, one sequence after the other, and store the gradients."""
        if self.keys.call.shape.holds_several:
            self._store(self._zeros(), None)
        self.keys.runs(self._run_sequence, jnp.int32(0))

    def _run_sequence(self, run: Run, steps: Array) -> Array:
        """Compute and store the gradients of one sequence's keys. What stands in the rows of others may have met NaN.
        `steps` counts the blocks of queries before; returns how many there are with those of the sequence.
        """
        self._load_own()
        call, heads = self.keys.call, jnp.int32(self.keys.call.shape.group_heads)
        first, end = self.keys.blocks(run)

        def step(i: Array, sums: _Sums, *, is_masked: bool) -> _Sums:
            return self._add_block(run, first + lax.div(i, heads), steps + i, sums, is_masked=is_masked)

        low, high = self.keys.whole_blocks(run, first, end)
        edges = [(x - first) * heads for x in (first, low, high, end)]
        sums = self._zeros()
        for (begin, stop), is_masked in zip(itertools.pairwise(edges), (True, False, True), strict=True):
            sums = lax.fori_loop(begin, stop, functools.partial(step, is_masked=is_masked), sums)
        if not (self.has_key and self.has_value):
            # Another warpgroup may still read the keys or the values that the gradient takes the place of.
            plgpu.barrier_arrive(self.edge)
            plgpu.barrier_wait(self.edge)
        scaled = tuple(x * call.shape.scale for x in sums.key)
        rows = (run.first_slot, call.slot(run.last_query)) if call.shape.holds_several else None
        self._store(_Sums(scaled, sums.value), rows)
        return steps + (end - first) * heads

    def _zeros(self) -> _Sums:
        key = zero_sums(self.refs.key_gmem.shape[-1]) if self.has_key else ()
        value = zero_sums(self.refs.value_gmem.shape[-1]) if self.has_value else ()
        return _Sums(key, value)

    def _load_own(self) -> None:
        """Load the keys and the values. Warpgroups that share them load one each, and wait for both."""
        call, refs, memory = self.keys.call, self.refs, self.memory
        there = (call.batch, pl.ds(self.first_key, WARPGROUP_ROWS), self.group)
        loads = (
            (self.has_key, refs.key_gmem, memory.key, self.key_full),
            (self.has_value, refs.value_gmem, memory.value, self.value_full),
        )
        for is_own, gmem, chunks, full in loads:
            if is_own:
                load_rows(call, chunks, gmem, there, self.number, full.at[self.number])
        for full in (self.key_full, self.value_full):
            plgpu.barrier_wait(full.at[self.number])

    def _store(self, sums: _Sums, stored: tuple[Array, Array] | None) -> None:
        """Write the gradients of the keys in the slots `stored`, from the first to the last; None for all."""
        refs, memory = self.refs, self.memory
        own = (
            (self.has_key, refs.d_key_gmem, memory.key, sums.key),
            (self.has_value, refs.d_value_gmem, memory.value, sums.value),
        )
        for is_own, gmem, chunks, gradient in own:
            if not is_own:
                continue
            for chunk, values in zip(chunks, gradient, strict=True):
                chunk.tiles.at[self.number][...] = values.astype(chunk.tiles.dtype)
            store_rows(self.keys.call, self.number, chunks, gmem, self.group, self.first_key, stored)

    def _own(self, chunks: tuple[Chunk, ...]) -> tuple[Ref, ...]:
        return tuple(chunk.tiles.at[self.number] for chunk in chunks)

    def _add_block(self, run: Run, block: Array, step: Array, sums: _Sums, *, is_masked: bool) -> _Sums:
        """The gradients with one block of queries of one head added; `step` counts those of the tile."""
        call, memory = self.keys.call, self.memory
        dtype, first = self.refs.d_key_gmem.dtype, self.keys.first_of(run, block)
        slot = lax.rem(step, jnp.int32(call.tile.stages))
        query, upstream = memory.query.tiles(slot), memory.upstream.tiles(slot)
        plgpu.barrier_wait(memory.query.full.at[slot])
        plgpu.barrier_wait(memory.upstream.full.at[slot])
        if is_masked:
            low, high = run.first_query - first, run.last_query - first + 1
            chunks = (*memory.query.chunks, *memory.upstream.chunks)
            empty_outside(call.tile, chunks, slot, self.warpgroup, self.edge, low, high)
        values = [Scores(self._own(memory.value), upstream)] if self.has_key else []
        (products,), *rest = multiply(call, Scores(self._own(memory.key), query), *values)
        weights, slope = weights_of(call.shape, products, _over_keys(memory.query.numbers_smem, slot))
        terms = []
        if self.has_key:
            # Registers have no room for both numbers of a query at once, nor for weights in both precisions before.
            weights, of_weights = lax.optimization_barrier((weights, rest[0][0]))
            d_scores = weights * (of_weights - _over_keys(memory.upstream.numbers_smem, slot))
            d_scores = (d_scores if slope is None else d_scores * slope).astype(dtype)
            weights, d_scores = lax.optimization_barrier((weights, d_scores))
            d_scores = self._masked(run, first, d_scores) if is_masked else d_scores
            terms.append(Weighted(sums.key, d_scores, query))
        if self.has_value:
            rounded = weights.astype(dtype)
            rounded = self._masked(run, first, rounded) if is_masked else rounded
            terms.append(Weighted(sums.value, rounded, upstream))
        found = multiply(call, *terms)
        for ring in (memory.query, memory.upstream):
            plgpu.barrier_arrive(ring.empty.at[slot])
        return _Sums(found[0] if self.has_key else sums.key, found[-1] if self.has_value else sums.value)

    def _masked(self, run: Run, first_query: Array, values: Array) -> Array:
        """The values of a block's queries, with 0 where a query does not see a key."""
        return jnp.where(self._visible(run, first_query), values, jnp.zeros_like(values))

    def _visible(self, run: Run, first_query: Array) -> Array:
        """Which queries of a block see each key, `[64 keys, 64 queries]`."""
        call, shape = self.keys.call, (WARPGROUP_ROWS, QUERIES)
        key = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW) + self.first_key
        key = jnp.where(key >= run.first_slot, key, 2**30)
        query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first_query
        distance = query + call.places.start[0] - lax.broadcast_in_dim(key, shape, [0])
        seen = lax.bitcast_convert_type(distance, jnp.uint32) < jnp.uint32(call.shape.sliding_window or 2**31 - 1)
        return seen & (query >= run.first_query) & (query <= run.last_query)


def _over_keys(numbers_smem: Ref | None, slot: Array) -> Array:
    """A number for each query of a block, repeated for all keys."""
    assert numbers_smem is not None
    numbers = plgpu.load(numbers_smem.at[slot], layout=COLUMN, optimized=False)
    return lax.broadcast_in_dim(numbers, (WARPGROUP_ROWS, QUERIES), [1])
