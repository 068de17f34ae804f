"""Gradients of the logits of one slice from the exponentials that the forward kept, at the speed of memory."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import Coefficients, KeptExponentials, KeptRowMap, VocabSlice
from pallas_kernels.hopper.parts import in_parts, parts_of, whole
from pallas_kernels.hopper.tiles import COLUMNS, Machine, statistics_tile
from pallas_kernels.hopper.vocabulary import Vocabulary
from pallas_kernels.mosaic.dlogits import chunk_coefficients, with_uniform
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import (
    STRIP,
    WARPGROUP_ROWS,
    column_numbers,
    over_columns,
    row_vector,
    tiled,
)
from pallas_kernels.mosaic.statistics import chunk_width, row_clusters, target_place
from pallas_kernels.mosaic.stores import store_rows

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
    out: Any,
) -> None:
    """Write what `dlogits` would write, from the exponentials that the forward kept instead of a product.

    Row i reads row `row_map.row[i]` of what was kept. Where `kept.exponentials` is None, `out` holds the exponentials
    of the first chunks and the gradients take their place. A block takes 64 rows of one chunk through shared memory.
    Where rows moved, they are loaded one by one; in their own place one block takes all rows of its chunk in ascending
    order, so that none is overwritten before it is read. Where `out` is in two parts, exponentials are too, and have a
    k for 128 columns.
    """
    parts, dtype = len(parts_of(out)), parts_of(out)[0].dtype
    n, chunks = out.shape[0], out.shape[1] // COLUMNS
    written, loaded_rows = statistics_tile(n).cluster_rows, min(n, WARPGROUP_ROWS)
    strips_of_shift = _STRIPS // parts

    def body(
        where_gmem: VocabSlice,
        kept_gmem: KeptExponentials,
        row_map_gmem: KeptRowMap,
        rows_gmem: Coefficients,
        out_gmem: Any,
        _outputs: tuple[()],
    ) -> None:
        block, place = lax.axis_index("blocks"), lax.axis_index("groups")
        exponentials_gmem = parts_of(out_gmem if kept_gmem.exponentials is None else kept_gmem.exponentials)
        chunk = where_gmem.first_chunk[0] + place
        width = chunk_width(vocabulary, where_gmem, chunk)
        end = jnp.minimum(n, row_clusters(where_gmem.rows[0], written) * written)

        def constants(c: Coefficients, load_shift: Callable[[Any], Array]) -> list[Array]:
            """What the exponentials of each shift are multiplied by."""
            shifts = (chunk if parts == 1 else chunk * parts + i for i in range(parts))
            return [chunk_coefficients(c, load_shift(x), out.dtype).constant for x in shifts]

        def through_memory(strips_smem: Ref, loaded_barriers: Ref) -> None:
            row = block * WARPGROUP_ROWS

            def there(strip: Array) -> tuple[Any, Any]:
                return pl.ds(row, loaded_rows), pl.ds(chunk * COLUMNS + strip * STRIP, STRIP)

            def load(strip: Array, _: None) -> None:
                for part, part_gmem in enumerate(exponentials_gmem):
                    number = strip * parts + part
                    strip_smem = strips_smem.at[number, pl.ds(0, loaded_rows)]
                    plgpu.copy_gmem_to_smem(part_gmem.at[there(strip)], strip_smem, loaded_barriers.at[number])

            lax.fori_loop(0, _STRIPS, load, None)
            c = jax.tree.map(lambda ref: row_vector(ref, row), rows_gmem)
            of_shifts = constants(c, lambda x: row_vector(kept_gmem.shift.at[x], row))
            target = target_place(vocabulary, c.target_ids, chunk, width)
            counts = _row_numbers() < where_gmem.rows[0] - row

            def loaded(number: Array) -> Array:
                plgpu.barrier_wait(loaded_barriers.at[number])
                return plgpu.load(strips_smem.at[number], optimized=False)

            def replace(constant: Array, strip: Array, _: None) -> None:
                gradient = whole(loaded(strip * parts + part) for part in range(parts)) * over_columns(constant, STRIP)
                if c.uniform is not None:
                    gradient = with_uniform(gradient, over_columns(c.uniform, STRIP))
                column = column_numbers(STRIP) + strip * STRIP
                gradient = jnp.where(column == over_columns(target, STRIP), over_columns(c.at_target, STRIP), gradient)
                gradient = jnp.where(counts & (column < width), gradient, 0.0)
                columns = pl.ds(place * COLUMNS + strip * STRIP, STRIP)
                for number, rounded in enumerate(in_parts(gradient, out.dtype)):
                    strip_smem = strips_smem.at[strip * parts + number]
                    strip_smem[...] = rounded
                    plgpu.commit_smem()
                    store_rows(strip_smem, parts_of(out_gmem)[number], row, columns)
                    plgpu.commit_smem_to_gmem_group()

            for i, constant in enumerate(of_shifts):
                strips = i * strips_of_shift, (i + 1) * strips_of_shift
                lax.fori_loop(*strips, functools.partial(replace, constant), None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        at_once, counted = math.gcd(n, _ROWS_AT_ONCE), where_gmem.rows[0]

        def gradient_of(row: Array, column: Array, end: Array) -> tuple[Array, ...]:
            kept_row = row_map_gmem.row[row]
            there = kept_row, pl.ds(chunk * COLUMNS, COLUMNS)
            found = whole(plgpu.load(x.at[there], optimized=False) for x in exponentials_gmem)
            c = jax.tree.map(lambda ref: ref[row], rows_gmem)
            first, *others = constants(c, lambda x: kept_gmem.shift[x, kept_row])
            gradient = found * first
            for i, constant in enumerate(others, 1):
                in_shift = column < vocabulary.start(chunk) + i * strips_of_shift * STRIP
                gradient = jnp.where(in_shift, gradient, found * constant)
            if c.uniform is not None:
                gradient = with_uniform(gradient, c.uniform)
            gradient = jnp.where(column == c.target_ids, c.at_target, gradient)
            return in_parts(jnp.where(column < jnp.where(row < counted, end, 0), gradient, 0.0), out.dtype)

        def some_rows(i: Array, _: None) -> None:
            layout, start = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=2), vocabulary.start(chunk)
            column = plgpu.broadcasted_iota(jnp.int32, (COLUMNS,), 0, layout=layout) + start
            gradients = [gradient_of(i * at_once + j, column, start + width) for j in range(at_once)]
            for j, gradient in enumerate(gradients):
                for part_gmem, part in zip(parts_of(out_gmem), gradient, strict=True):
                    part_gmem[i * at_once + j, pl.ds(place * COLUMNS, COLUMNS)] = part

        moved, is_chunk = row_map_gmem.moved[0] != 0, place < where_gmem.chunks[0]

        @pl.when(is_chunk & jnp.logical_not(moved) & (block * WARPGROUP_ROWS < end))
        def in_order() -> None:
            shape = _STRIPS * parts, WARPGROUP_ROWS, STRIP
            memory = plgpu.SMEM(shape, dtype, transforms=tiled(STRIP, dtype))
            pl.run_scoped(through_memory, memory, plgpu.Barrier(num_barriers=_STRIPS * parts))

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
