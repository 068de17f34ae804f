"""Gradients of the logits of one slice from the exponentials that the forward kept, at the speed of memory."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import Coefficients, KeptExponentials, KeptRowMap, VocabSlice
from pallas_kernels.hopper.tiles import COLUMNS, Machine, statistics_tile
from pallas_kernels.hopper.vocabulary import Vocabulary
from pallas_kernels.mosaic.dlogits import chunk_coefficients
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import (
    STRIP,
    WARPGROUP_ROWS,
    column_numbers,
    over_columns,
    row_vector,
    store_rows,
    tiled,
)
from pallas_kernels.mosaic.statistics import chunk_width, row_clusters, target_place

Array = jax.Array
Ref = Any
_ROWS_AT_ONCE = 16
"""Rows, at most, that are loaded together where rows moved, so that their latencies overlap."""
_STRIPS = COLUMNS // STRIP


def dlogits_from_kept_exponentials(
    vocabulary: Vocabulary,
    machine: Machine,
    where: VocabSlice,
    kept: KeptExponentials,
    row_map: KeptRowMap,
    rows: Coefficients,
    out: Ref,
) -> None:
    """Write what `dlogits` would write, from the exponentials that the forward kept instead of a product.

    Row i reads row `row_map.row[i]` of what was kept. Where `kept.exponentials` is None, `out` holds the exponentials
    of the first chunks and the gradients take their place. A block takes 64 rows of one chunk through shared memory.
    Where rows moved, they are loaded one by one; in their own place one block takes all rows of its chunk in ascending
    order, so that none is overwritten before it is read.
    """
    n, chunks = out.shape[0], out.shape[1] // COLUMNS
    written, loaded_rows = statistics_tile(n).cluster_rows, min(n, WARPGROUP_ROWS)

    def body(
        where_gmem: VocabSlice,
        kept_gmem: KeptExponentials,
        row_map_gmem: KeptRowMap,
        rows_gmem: Coefficients,
        out_gmem: Ref,
        _outputs: tuple[()],
    ) -> None:
        block, place = lax.axis_index("blocks"), lax.axis_index("groups")
        exponentials_gmem = out_gmem if kept_gmem.exponentials is None else kept_gmem.exponentials
        chunk = where_gmem.first_chunk[0] + place
        width = chunk_width(vocabulary, where_gmem, chunk)
        end = jnp.minimum(n, row_clusters(where_gmem.rows[0], written) * written)

        def through_memory(strips_smem: Ref, loaded_barriers: Ref) -> None:
            row = block * WARPGROUP_ROWS

            def load(strip: Array, _: None) -> None:
                columns = pl.ds(chunk * COLUMNS + strip * STRIP, STRIP)
                strip_smem = strips_smem.at[strip, pl.ds(0, loaded_rows)]
                there = exponentials_gmem.at[pl.ds(row, loaded_rows), columns]
                plgpu.copy_gmem_to_smem(there, strip_smem, loaded_barriers.at[strip])

            lax.fori_loop(0, _STRIPS, load, None)
            c = jax.tree.map(lambda ref: row_vector(ref, row), rows_gmem)
            of_chunk = chunk_coefficients(c, row_vector(kept_gmem.shift.at[chunk], row), out.dtype)
            target = target_place(vocabulary, c.target_ids, chunk, width)
            counts = _row_numbers() < where_gmem.rows[0] - row

            def replace(strip: Array, _: None) -> None:
                strip_smem = strips_smem.at[strip]
                plgpu.barrier_wait(loaded_barriers.at[strip])
                found = plgpu.load(strip_smem, optimized=False).astype(jnp.float32)
                gradient = found * over_columns(of_chunk.constant, STRIP)
                column = column_numbers(STRIP) + strip * STRIP
                gradient = jnp.where(column == over_columns(target, STRIP), over_columns(c.at_target, STRIP), gradient)
                gradient = jnp.where(counts & (column < width), gradient, 0.0)
                strip_smem[...] = gradient.astype(out_gmem.dtype)
                plgpu.commit_smem()
                store_rows(strip_smem, out_gmem, row, pl.ds(place * COLUMNS + strip * STRIP, STRIP))
                plgpu.commit_smem_to_gmem_group()

            lax.fori_loop(0, _STRIPS, replace, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        at_once, counted = math.gcd(n, _ROWS_AT_ONCE), where_gmem.rows[0]

        def gradient_of(row: Array, column: Array, end: Array) -> Array:
            kept_row = row_map_gmem.row[row]
            there = exponentials_gmem.at[kept_row, pl.ds(chunk * COLUMNS, COLUMNS)]
            found = plgpu.load(there, optimized=False).astype(jnp.float32)
            c = jax.tree.map(lambda ref: ref[row], rows_gmem)
            of_chunk = chunk_coefficients(c, kept_gmem.shift[chunk, kept_row], out.dtype)
            gradient = jnp.where(column == c.target_ids, c.at_target, found * of_chunk.constant)
            return jnp.where(column < jnp.where(row < counted, end, 0), gradient, 0.0).astype(out_gmem.dtype)

        def some_rows(i: Array, _: None) -> None:
            layout, start = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=2), vocabulary.start(chunk)
            column = plgpu.broadcasted_iota(jnp.int32, (COLUMNS,), 0, layout=layout) + start
            gradients = [gradient_of(i * at_once + j, column, start + width) for j in range(at_once)]
            for j, gradient in enumerate(gradients):
                out_gmem[i * at_once + j, pl.ds(place * COLUMNS, COLUMNS)] = gradient

        moved, is_chunk = row_map_gmem.moved[0] != 0, place < where_gmem.chunks[0]

        @pl.when(is_chunk & jnp.logical_not(moved) & (block * WARPGROUP_ROWS < end))
        def in_order() -> None:
            shape, transforms = (_STRIPS, WARPGROUP_ROWS, STRIP), tiled(STRIP, out_gmem.dtype)
            strips = plgpu.SMEM(shape, out_gmem.dtype, transforms=transforms)
            pl.run_scoped(through_memory, strips, plgpu.Barrier(num_barriers=_STRIPS))

        @pl.when(is_chunk & moved)
        def one_after_another() -> None:
            first, last = block * WARPGROUP_ROWS, jnp.minimum(end, (block + 1) * WARPGROUP_ROWS)
            if kept_gmem.exponentials is None:
                first, last = jnp.int32(0), jnp.where(block == 0, end, 0)
            lax.fori_loop(lax.div(first, jnp.int32(at_once)), lax.div(last, jnp.int32(at_once)), some_rows, None)

    grid, arguments = (-(-n // WARPGROUP_ROWS), chunks), (where, kept, row_map, rows._replace(temperature=None), out)
    launch(body, "linear_logp_dlogits_from_kept_exponentials", machine, (), grid, *arguments, approx_math=True)


def _row_numbers() -> Array:
    """The numbers 0, 1, 2, … along the rows of a strip."""
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS, STRIP), 0, layout=plgpu.Layout.WGMMA)
