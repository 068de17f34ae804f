"""The gradient of attention's queries: a tile of queries meets its blocks of keys once more, in ascending order.

With P = 2^(score − log_total) and center = Σ dO·O, the gradient of a score is P·(dO·Vᵀ − center), rounded to 16 bits
before it is multiplied by the keys. Each gradient is one chain over a sequence's own blocks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import AttentionShape, SequencePlaces, query_gradient_tile
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.mosaic.attention_products import Scores, Weighted, multiply
from pallas_kernels.mosaic.attention_softmax import weights_of
from pallas_kernels.mosaic.attention_tiles import (
    Call,
    Chunk,
    Ring,
    Run,
    chunk_widths,
    drain,
    load_keys,
    load_rows,
    pairs,
    store_rows,
    views,
    zero_sums,
)
from pallas_kernels.mosaic.main_loop import ROW, WARPGROUP_ROWS, over_columns, row_vector

Array = jax.Array
Ref = Any


class _Arguments(NamedTuple):
    """The references that the kernel is given."""

    query_gmem: Ref
    upstream_gmem: Ref
    output_gmem: Ref
    log_total_gmem: Ref
    center_gmem: Ref
    gradient_gmem: Ref


class _Memory(NamedTuple):
    """The shared memory of a block in chunks of columns, by warpgroup or by stage. The gradient is written over the
    queries.
    """

    query: tuple[Chunk, ...]
    output: tuple[Chunk, ...]
    upstream: tuple[Chunk, ...]
    key: Ring
    value: Ring


class _Barriers(NamedTuple):
    """Barriers for when queries, output and upstream gradients are loaded, and when the edge of a block is empty."""

    query_full: Ref
    output_full: Ref
    upstream_full: Ref
    edge: Ref


def query_gradient(
    shape: AttentionShape,
    machine: Machine,
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    log_total: Array,
    upstream: Array,
    places: SequencePlaces,
) -> tuple[Array, Array]:
    """dQ `[B, T, H, E]` in query's dtype, and the center of each query, float32 in log_total's shape.

    output and upstream are `[B, T, H, F]`, of query's dtype; log_total is what `attend` gave.
    """
    batch, queries, heads, size = query.shape
    value_size, dtype = value.shape[3], query.dtype
    tile = query_gradient_tile(max(size, value_size))
    tiles = -(-queries // tile.queries)

    def body(
        query_gmem: Ref,
        key_gmem: Ref,
        value_gmem: Ref,
        output_gmem: Ref,
        upstream_gmem: Ref,
        log_total_gmem: Ref,
        start_gmem: Ref,
        first_slots_gmem: Ref,
        runs_gmem: Ref,
        gradient_gmem: Ref,
        center_gmem: Ref,
        **scratch: Ref,
    ) -> None:
        places = SequencePlaces(start_gmem, first_slots_gmem, runs_gmem)
        refs = _Arguments(query_gmem, upstream_gmem, output_gmem, log_total_gmem, center_gmem, gradient_gmem)
        names = ("query_smem", "output_smem", "upstream_smem", "key_smem", "value_smem")
        query, output, upstream, key, value = (tuple(map(Chunk, *views)) for views in pairs(scratch, names))
        memory = _Memory(
            query,
            output,
            upstream,
            Ring(key_gmem, key, scratch["key_full"], scratch["key_empty"]),
            Ring(value_gmem, value, scratch["value_full"], scratch["value_empty"]),
        )
        barriers = _Barriers(*(scratch[name] for name in _Barriers._fields))
        first_query = (tiles - 1 - lax.axis_index("tiles")) * tile.queries
        call = Call(shape, tile, places, lax.axis_index("batch"), first_query, queries, machine.interpret is not None)
        head, warpgroup = lax.axis_index("heads"), lax.axis_index("warpgroup")

        @pl.when(warpgroup == tile.warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(24, action="decrease")
            rings = memory.key, memory.value
            drain(tile, rings, load_keys(call, rings, lax.div(head, jnp.int32(shape.group_heads)), jnp.int32(0)))

        @pl.when(warpgroup < tile.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(240 if tile.warpgroups > 1 else 248, action="increase")
            _Warpgroup(call, refs, memory, barriers, head, warpgroup).run()

    of_warpgroups, of_stages = (tile.warpgroups, WARPGROUP_ROWS), (tile.stages, tile.keys)
    stages: dict[str, Any]
    own: dict[str, Any]
    stages, own = {"num_barriers": tile.stages}, {"num_barriers": tile.warpgroups}
    of_size, of_value = len(chunk_widths(size)), len(chunk_widths(value_size))
    scratch: dict[str, Any] = {
        "query_smem": plgpu.RefUnion(*views(of_warpgroups, size, dtype)),
        "output_smem": plgpu.RefUnion(*views(of_warpgroups, value_size, dtype)),
        "upstream_smem": plgpu.RefUnion(*views(of_warpgroups, value_size, dtype)),
        "key_smem": plgpu.RefUnion(*views(of_stages, size, dtype)),
        "value_smem": plgpu.RefUnion(*views(of_stages, value_size, dtype)),
        "query_full": plgpu.Barrier(num_arrivals=of_size, **own),
        "output_full": plgpu.Barrier(num_arrivals=of_value, **own),
        "upstream_full": plgpu.Barrier(num_arrivals=of_value, **own),
        "key_full": plgpu.Barrier(num_arrivals=of_size, **stages),
        "value_full": plgpu.Barrier(num_arrivals=of_value, **stages),
        "key_empty": plgpu.Barrier(num_arrivals=tile.warpgroups, **stages),
        "value_empty": plgpu.Barrier(num_arrivals=tile.warpgroups, **stages),
        "edge": plgpu.Barrier(num_arrivals=tile.warpgroups),
    }
    gradient, center = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, queries, heads, 1, size), dtype),
            jax.ShapeDtypeStruct(log_total.shape, jnp.float32),
        ),
        scratch_types=scratch,
        grid=(batch, tiles, heads),
        grid_names=("batch", "tiles", "heads"),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="attention_d_query",
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*(x[:, :, :, None] for x in (query, key, value, output, upstream)), log_total, *places)
    return gradient[:, :, :, 0], center


@dataclass(frozen=True)
class _Warpgroup:
    """One compute warpgroup: 64 queries of one head."""

    call: Call
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
        """Run the blocks of keys past the queries, one sequence after the other, and store their gradients."""
        refs, memory, barriers = self.refs, self.memory, self.barriers
        self._load(refs.output_gmem, memory.output, barriers.output_full)
        self._load(refs.upstream_gmem, memory.upstream, barriers.upstream_full)
        self._load(refs.query_gmem, memory.query, barriers.query_full)
        for full in (barriers.output_full, barriers.upstream_full):
            plgpu.barrier_wait(full.at[self.number])
        center = self._center()
        there = pl.ds(self.first_query, WARPGROUP_ROWS)
        refs.center_gmem[self.call.batch, self.head, there] = center
        log_total = row_vector(refs.log_total_gmem.at[self.call.batch, self.head], self.first_query)

        def over_run(run: Run, steps: Array) -> Array:
            if self.call.shape.holds_several:

                @pl.when(run.last_query < self.call.last_query)
                def _again() -> None:
                    # The gradients of another sequence's queries stand in the queries' place.
                    plgpu.commit_smem()
                    self._load(refs.query_gmem, memory.query, barriers.query_full)

            plgpu.barrier_wait(barriers.query_full.at[self.number])
            first, end = self.call.blocks(run)

            def step(i: Array, gradient: tuple[Array, ...], is_masked: bool) -> tuple[Array, ...]:
                numbers = (log_total, center)
                return self._add_block(run, i, steps + i - first, *numbers, gradient, is_masked=is_masked)

            gradient = self.call.each_block(run, first, end, step, zero_sums(refs.query_gmem.shape[-1]))
            for chunk, values in zip(memory.query, gradient, strict=True):
                chunk.tiles.at[self.number][...] = (values * self.call.shape.scale).astype(chunk.tiles.dtype)
            rows = (self.head, self.first_query, self.call.stored(run))
            store_rows(self.call, self.number, memory.query, refs.gradient_gmem, *rows)
            return steps + end - first

        self.call.runs(over_run, jnp.int32(0))

    def _load(self, gmem: Ref, chunks: tuple[Chunk, ...], full: Ref) -> None:
        there = (self.call.batch, pl.ds(self.first_query, WARPGROUP_ROWS), self.head)
        load_rows(self.call, chunks, gmem, there, self.number, full.at[self.number])

    def _center(self) -> Array:
        """Σ dO·O of each query."""
        total = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), ROW)
        for pair in zip(self.memory.output, self.memory.upstream, strict=True):
            output, upstream = (
                plgpu.load(x.tiles.at[self.number], layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
                for x in pair
            )
            total = total + (output * upstream).sum(axis=1)
        return total

    def _add_block(
        self,
        run: Run,
        block: Array,
        step: Array,
        log_total: Array,
        center: Array,
        gradient: tuple[Array, ...],
        *,
        is_masked: bool,
    ) -> tuple[Array, ...]:
        """The gradient with one block of keys added; `step` counts the blocks of the tile."""
        memory, call, keys = self.memory, self.call, self.call.tile.keys
        slot = lax.rem(step, jnp.int32(call.tile.stages))
        plgpu.barrier_wait(memory.key.full.at[slot])
        plgpu.barrier_wait(memory.value.full.at[slot])
        query, upstream = (tuple(x.tiles.at[self.number] for x in y) for y in (memory.query, memory.upstream))
        terms = Scores(query, memory.key.tiles(slot)), Scores(upstream, memory.value.tiles(slot))
        (products,), (of_weights,) = multiply(call, *terms)
        plgpu.barrier_arrive(memory.value.empty.at[slot])
        weights, slope = weights_of(call.shape, products, over_columns(log_total, keys))
        d_scores = weights * (of_weights - over_columns(center, keys))
        d_scores = d_scores if slope is None else d_scores * slope
        if is_masked:
            d_scores = call.masked(run, block, self.first_query, d_scores, 0.0)
            call.empty_unseen(run, block, memory.key.chunks, slot, self.number, self.barriers.edge)
        d_scores = d_scores.astype(self.refs.query_gmem.dtype)
        (gradient,) = multiply(call, Weighted(gradient, d_scores, memory.key.tiles(slot)))
        plgpu.barrier_arrive(memory.key.empty.at[slot])
        return gradient
