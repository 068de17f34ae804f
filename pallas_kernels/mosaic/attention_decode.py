"""Decoding: one query of each sequence meets its keys, with the bits that `attend` gives it.

The heads that share keys are rows of one tile, so that keys and values are read once. Each block of threads has one
span of keys, and a second kernel merges the spans in ascending order, as `attend` does.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import AttentionShape, AttentionTile, SequencePlaces, decode_tile
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.mosaic.attention_products import Scores, Weighted, multiply
from pallas_kernels.mosaic.attention_softmax import Softmax, empty_softmax, merged, output_of, scores_of, with_scores
from pallas_kernels.mosaic.attention_tiles import (
    Call,
    Chunk,
    Ring,
    chunk_widths,
    drain,
    load_key_blocks,
    load_rows,
    pairs,
    views,
    with_columns,
    zero_beside,
)
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, over_columns

Array = jax.Array
Ref = Any
MOST_GROUP_HEADS = WARPGROUP_ROWS
_SUM_COLUMNS = 32
"""Columns of a chunk of float32 sums: TMA swizzles at most 128 bytes of a row."""
_ROWS_IN_FLIGHT = 256
"""Rows of spans that a block of the merging kernel has in flight."""
_SPANS_AT_ONCE = 4
"""Spans that are merged without a branch between them, so that the latencies of their exponentials overlap."""


class _Spans(NamedTuple):
    """The softmax of each span, float32 `[B, G, spans, rows, ·]`: its weighted values in F columns, and its largest
    score and its total, repeated for the columns of one chunk. Rows are the heads of a group, and further ones up to a
    multiple of 8.
    """

    values: Array
    largest: Array
    total: Array


def decode(
    shape: AttentionShape, machine: Machine, query: Array, key: Array, value: Array, places: SequencePlaces
) -> tuple[Array, Array]:
    """What `attend` gives for one query of each sequence: query is `[B, 1, H, E]`, and at most MOST_GROUP_HEADS heads
    share keys.
    """
    heads = query.shape[2]
    tile = decode_tile(max(query.shape[3], value.shape[3]), key.shape[1])
    spans = _span_count(key.shape[1], tile)
    found = _by_span(shape, machine, spans, query[:, 0], key, value, places)
    if spans == 1:
        output, by_group = found
        log_total = by_group[:, :, : shape.group_heads].reshape(-1, heads, 1)
    else:
        output, by_column = _merge(shape, machine, heads, value, found, places)
        log_total = by_column[:, :, :1]
    return output[:, None], jnp.pad(log_total, ((0, 0), (0, 0), (0, 127)), constant_values=jnp.inf)


def _span_count(slots: int, tile: AttentionTile) -> int:
    return 1 if tile.span_blocks is None else -(-slots // (tile.keys * tile.span_blocks))


def _span_blocks(call: Call, span: Array, run: Any) -> tuple[Array, Array]:
    """The first block of keys of a span that the query sees, and the one behind the last."""
    first, end = call.blocks(run)
    if call.tile.span_blocks is None:
        return first, end
    width = jnp.int32(call.tile.span_blocks)
    return jnp.maximum(first, span * width), jnp.minimum(end, (span + 1) * width)


def _by_span(
    shape: AttentionShape, machine: Machine, spans: int, query: Array, key: Array, value: Array, places: SequencePlaces
) -> Any:
    """The softmax of each of several spans (`_Spans`), or of the only span the output `[B, H, F]` and log_total
    `[B, G, 64]`, of each group's heads in front. query is `[B, H, E]`.
    """
    batch, heads, size = query.shape
    slots, groups, value_size, dtype = key.shape[1], key.shape[2], value.shape[3], query.dtype
    tile, rows = decode_tile(max(size, value_size), slots), -(-shape.group_heads // 8) * 8
    sum_columns = _sum_columns(value_size)

    def body(
        query_gmem: Ref,
        key_gmem: Ref,
        value_gmem: Ref,
        start_gmem: Ref,
        first_slots_gmem: Ref,
        runs_gmem: Ref,
        *out_gmem: Ref,
        **scratch: Ref,
    ) -> None:
        places = SequencePlaces(start_gmem, first_slots_gmem, runs_gmem)
        names = ("query_smem", "key_smem", "value_smem", *(["sums_smem"] if spans > 1 else []))
        query, output, key, value, *sums = (tuple(map(Chunk, *views)) for views in pairs(scratch, names))
        key_ring = Ring(key_gmem, key, scratch["key_full"], scratch["key_empty"])
        value_ring = Ring(value_gmem, value, scratch["value_full"], scratch["value_empty"])
        batch, group = lax.axis_index("batch"), lax.axis_index("groups")
        first_query = zero_beside(group)
        call = Call(shape, tile, places, batch, first_query, 1, machine.interpret is not None)
        warpgroup, span = lax.axis_index("warpgroup"), lax.axis_index("spans")
        run = call.only_run()
        first, end = _span_blocks(call, span, run)

        @pl.when(warpgroup == 1)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            rings = (key_ring, value_ring)
            drain(tile, rings, load_key_blocks(call, rings, group, run, (first, end), jnp.int32(0)))

        @pl.when(warpgroup == 0)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            full = scratch["query_full"]
            there = (batch, pl.ds(group * shape.group_heads, WARPGROUP_ROWS))
            load_rows(call, query, query_gmem, there, 0, full)
            plgpu.barrier_wait(full)

            def step(i: Array, so_far: Softmax, is_masked: bool) -> Softmax:
                slot = lax.rem(i - first, jnp.int32(tile.stages))
                plgpu.barrier_wait(key_ring.full.at[slot])
                rows = tuple(chunk.tiles.at[first_query] for chunk in query)
                ((products,),) = multiply(call, Scores(rows, key_ring.tiles(slot)))
                plgpu.barrier_arrive(key_ring.empty.at[slot])
                scores, scale = scores_of(shape, products)
                if is_masked:
                    scores = call.masked(run, i, first_query, scores, -jnp.inf)
                softmax, weights = with_scores(so_far, scores, scale, dtype)
                plgpu.barrier_wait(value_ring.full.at[slot])
                if is_masked:
                    call.empty_unseen(run, i, value_ring.chunks, slot, warpgroup, scratch["edge"])
                (values,) = multiply(call, Weighted(softmax.values, weights, value_ring.tiles(slot)))
                plgpu.barrier_arrive(value_ring.empty.at[slot])
                return softmax._replace(values=values)

            softmax = call.each_block(run, first, end, step, empty_softmax(value_size))
            if spans == 1:
                output_gmem, log_total_gmem = out_gmem
                found, log_total = output_of(softmax, call.poison)
                log_total_gmem[batch, group, pl.ds(0, WARPGROUP_ROWS)] = log_total
                own = output_gmem.at[batch, pl.ds(group * shape.group_heads, shape.group_heads)]
                _store_rows(call, [own], [output], [found])
                return
            *values, largest, total = sums[0]
            per_row = ([over_columns(x, sum_columns)] for x in (softmax.largest, softmax.total))
            here = [x.at[batch, group, span] for x in out_gmem]
            _store_rows(call, here, [values, [largest], [total]], [softmax.values, *per_row])

    of_stages = (tile.stages, tile.keys)
    stages: dict[str, Any] = {"num_barriers": tile.stages}
    columns = len(chunk_widths(size))
    scratch: dict[str, Any] = {
        "query_smem": plgpu.RefUnion(
            *views((1, WARPGROUP_ROWS), size, dtype), *views((1, WARPGROUP_ROWS), value_size, dtype)
        ),
        "key_smem": plgpu.RefUnion(*views(of_stages, size, dtype)),
        "value_smem": plgpu.RefUnion(*views(of_stages, value_size, dtype)),
        "query_full": plgpu.Barrier(num_arrivals=columns),
        "key_full": plgpu.Barrier(num_arrivals=columns, **stages),
        "value_full": plgpu.Barrier(num_arrivals=len(chunk_widths(value_size)), **stages),
        "key_empty": plgpu.Barrier(num_arrivals=1, **stages),
        "value_empty": plgpu.Barrier(num_arrivals=1, **stages),
        "edge": plgpu.Barrier(num_arrivals=1),
    }
    if spans > 1:
        every = value_size + 2 * sum_columns
        scratch["sums_smem"] = plgpu.RefUnion(*views((1, WARPGROUP_ROWS), every, jnp.float32, _SUM_COLUMNS))
    parts = (
        jax.ShapeDtypeStruct((batch, groups, spans, rows, 1, columns), jnp.float32)
        for columns in (value_size, sum_columns, sum_columns)
    )
    whole = (
        jax.ShapeDtypeStruct((batch, heads, 1, value_size), dtype),
        jax.ShapeDtypeStruct((batch, groups, WARPGROUP_ROWS), jnp.float32),
    )
    found = plgpu.kernel(
        body,
        out_type=whole if spans == 1 else tuple(parts),
        scratch_types=scratch,
        grid=(groups, spans, batch),
        grid_names=("groups", "spans", "batch"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="attention_decode",
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(query[:, :, None], *(x[:, :, :, None] for x in (key, value)), *places)
    return (found[0][:, :, 0], found[1]) if spans == 1 else _Spans(*(x[..., 0, :] for x in found))


def _sum_columns(value_size: int) -> int:
    """Columns of a chunk of float32 sums."""
    return chunk_widths(value_size, _SUM_COLUMNS)[0]


def _store_rows(
    call: Call, gmems: Sequence[Ref], staged: Sequence[Sequence[Chunk]], values: Sequence[Sequence[Array]]
) -> None:
    """Write the first rows of values `[64, columns]`, each given by chunk, to global memory `[rows, 1, columns]`."""
    for chunks, own in zip(staged, values, strict=True):
        width = chunks[0].tiles.shape[-1]
        parts = (x[:, i : i + width] for x in own for i in range(0, x.shape[1], width))
        for chunk, part in zip(chunks, parts, strict=True):
            chunk.tiles.at[call.first_query][...] = part.astype(chunk.tiles.dtype)
    plgpu.commit_smem()
    for gmem, chunks in zip(gmems, staged, strict=True):
        first_rows = pl.ds(0, gmem.shape[0])
        for columns, chunk in with_columns(chunks, [chunk.tiles.shape[-1] for chunk in chunks]):
            part, from_smem = call.tma_view(chunk)
            plgpu.copy_smem_to_gmem(from_smem.at[call.first_query, first_rows], gmem.at[first_rows, part, columns])
    plgpu.wait_smem_to_gmem(0)


def _merge(
    shape: AttentionShape, machine: Machine, heads: int, value: Array, spans: _Spans, places: SequencePlaces
) -> tuple[Array, Array]:
    """The output `[B, H, F]`, and log_total repeated for every column, float32 in the same shape."""
    batch, groups, count, rows, value_size = spans.values.shape
    tile, dtype, own_heads = decode_tile(value_size, value.shape[1]), value.dtype, shape.group_heads
    columns = _sum_columns(value_size)
    in_flight = min(count, _ROWS_IN_FLIGHT // rows)

    def body(
        values_gmem: Ref,
        largest_gmem: Ref,
        total_gmem: Ref,
        start_gmem: Ref,
        first_slots_gmem: Ref,
        runs_gmem: Ref,
        output_gmem: Ref,
        log_total_gmem: Ref,
        *,
        values_smem: Ref,
        largest_smem: Ref,
        total_smem: Ref,
        output_smem: Ref,
        log_total_smem: Ref,
        full: Ref,
    ) -> None:
        batch, group = lax.axis_index("batch"), lax.axis_index("groups")
        own_columns = pl.ds(lax.axis_index("columns") * columns, columns)
        places = SequencePlaces(start_gmem, first_slots_gmem, runs_gmem)
        call = Call(shape, tile, places, batch, zero_beside(group), 1, machine.interpret is not None)
        first_block, end_block = call.blocks(call.only_run())
        width = jnp.int32(tile.span_blocks or 2**30)
        first_span, end_span = lax.div(first_block, width), lax.div(end_block + width - 1, width)

        def one_round(i: Array, so_far: Softmax) -> Softmax:
            start = first_span + i * in_flight
            end = jnp.minimum(start + in_flight, end_span)
            # The last round may begin among spans that are merged already.
            first_loaded = jnp.minimum(start, count - in_flight)
            own = (batch, group, pl.ds(first_loaded, in_flight), slice(None))
            plgpu.copy_gmem_to_smem(values_gmem.at[*own, own_columns], values_smem, full)
            plgpu.copy_gmem_to_smem(largest_gmem.at[*own], largest_smem, full)
            plgpu.copy_gmem_to_smem(total_gmem.at[*own], total_smem, full)
            plgpu.barrier_wait(full)

            first, here, loaded_smem = start - first_loaded, end - start, (largest_smem, total_smem, values_smem)

            def add(place: Array, so_far: Softmax) -> Softmax:
                """The softmax with one loaded span."""
                largest, total, values = (_spread(x.at[place], rows, columns) for x in loaded_smem)
                return merged(so_far, Softmax(largest, total, (values,)))

            def add_some(j: Array, so_far: Softmax) -> Softmax:
                for k in range(_SPANS_AT_ONCE):
                    so_far = add(first + j * _SPANS_AT_ONCE + k, so_far)
                return so_far

            together = lax.div(here, jnp.int32(_SPANS_AT_ONCE))
            so_far = lax.fori_loop(0, together, add_some, so_far)
            so_far = lax.fori_loop(together * _SPANS_AT_ONCE, here, lambda j, x: add(first + j, x), so_far)
            # All threads have read the spans before those of the next round take their place.
            plgpu.commit_smem()
            return so_far

        rounds = lax.div(end_span - first_span + in_flight - 1, jnp.int32(in_flight))
        softmax = lax.fori_loop(0, rounds, one_round, empty_softmax(columns, spread_over=rows))
        (output,), log_total = output_of(softmax, call.poison)
        output_smem[...] = output.astype(dtype)
        log_total_smem[...] = log_total
        plgpu.commit_smem()
        own = (batch, pl.ds(group * own_heads, own_heads), own_columns)
        for smem, gmem in ((output_smem, output_gmem), (log_total_smem, log_total_gmem)):
            plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, own_heads)], gmem.at[own])
        plgpu.wait_smem_to_gmem(0)

    of_spans = plgpu.SMEM((in_flight, rows, columns), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((batch, heads, value_size), x) for x in (dtype, jnp.float32)),
        scratch_types={
            **dict.fromkeys(("values_smem", "largest_smem", "total_smem"), of_spans),
            "output_smem": plgpu.SMEM((rows, columns), dtype),
            "log_total_smem": plgpu.SMEM((rows, columns), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=3),
        },
        grid=(groups, value_size // columns, batch),
        grid_names=("groups", "columns", "batch"),
        kernel_name="attention_merge",
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*spans, *places)


def _spread(smem: Ref, rows: int, columns: int) -> Array:
    return plgpu.load(smem, layout=plgpu.Layout.WG_STRIDED((rows, columns), vec_size=1), optimized=False)
