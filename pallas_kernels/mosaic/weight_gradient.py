"""The gradients of linear_logp's weight and bias, dW = dlogitsᵀ·H and db, from those of one slice's logits.

`store_weight_gradient` gives dW complete. `add_weight_gradient` goes on with the float32 sums of rows that came before,
and so can `column_sums`: cut at multiples of 64 rows, a sum has the bits of one that is not cut.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import VocabSlice
from pallas_kernels.hopper.parts import Matrix, parts_of, whole
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine, Tile, gemm_tile, of_parts
from pallas_kernels.hopper.vocabulary import HeadAccess
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import STRIP, WARPGROUP_ROWS, Block, Product, Stretch, multiply
from pallas_kernels.mosaic.statistics import chunk_width, row_clusters
from pallas_kernels.mosaic.stores import store_through
from pallas_kernels.products import padded

Array = jax.Array
Ref = Any
_PIECE_ROWS = 8
"""Rows of the smallest piece that TMA stores."""
_ROWS_SUMMED_AT_ONCE = 16
"""Rows, at most, that are loaded together to be summed up, so that their latencies overlap."""


class _WeightGradientArguments(NamedTuple):
    """The references that a kernel of dW is given."""

    where_gmem: VocabSlice
    dlogits_gmem: Any
    hidden_gmem: Any
    unscale_gmem: Ref | None
    out_gmem: Ref


def store_weight_gradient(
    head: HeadAccess,
    machine: Machine,
    where: VocabSlice,
    dlogits: Matrix,
    hidden: Matrix,
    unscale: Array | None,
    out: Ref,
) -> None:
    """Write one slice's rows of dW = dlogitsᵀ·H (columns of its transpose for "dv") into the reference `out`, complete.

    hidden `[rows, D]`, or `[rows, r]` for a low-rank term, is zero from row `where.rows` on. Sums are multiplied by
    unscale, float32 `[1]` or None, and rounded once to out's dtype.
    """
    dim = hidden.shape[1]
    vocabulary = head.vocabulary
    slice_columns = dlogits.shape[1]
    vocabulary_is_rows = head.layout == "vd"
    tile = gemm_tile(slice_columns, dim) if vocabulary_is_rows else gemm_tile(dim)
    of_product = (dlogits, hidden) if vocabulary_is_rows else (hidden, dlogits)
    tile = of_parts(tile, *(len(parts_of(x)) for x in of_product))
    strip = WARPGROUP_ROWS, 2 * STRIP // jnp.dtype(out.dtype).itemsize

    def finish(refs: _WeightGradientArguments, block: Block, product: Any, staging_smem: Ref) -> None:
        values = product()
        if refs.unscale_gmem is not None:
            values = values * refs.unscale_gmem[0]
        place = block.row if vocabulary_is_rows else block.column_block * tile.columns
        chunk, in_chunk = lax.div(place, jnp.int32(COLUMNS)), lax.rem(place, jnp.int32(COLUMNS))
        first = refs.where_gmem.first_chunk[0]
        width = COLUMNS if head.copied else chunk_width(vocabulary, refs.where_gmem, first + chunk)
        there = head.row(first, chunk) + in_chunk

        def copy(from_smem: Ref, to_gmem: Ref, condition: Any) -> None:
            @pl.when(condition)
            def _() -> None:
                plgpu.copy_smem_to_gmem(from_smem, to_gmem, commit_group=False)

        def store(number: int, strip_smem: Ref) -> None:
            """Copy the places of a strip that hold columns of the chunk: the next ones belong to another group.

            Strips outside the array are left out here: Mosaic drops the index of a dimension that is one tile wide, and
            with it the bounds check.
            """
            start = number * strip[1]
            if vocabulary_is_rows and dim <= start:
                return
            if not vocabulary_is_rows:
                to = refs.out_gmem.at[pl.ds(block.row, WARPGROUP_ROWS), pl.ds(there + start, strip[1])]
                copy(strip_smem, to, in_chunk + start < width)
                return
            columns = pl.ds(block.column_block * tile.columns + start, strip[1])
            fits = in_chunk + WARPGROUP_ROWS <= width
            copy(strip_smem, refs.out_gmem.at[pl.ds(there, WARPGROUP_ROWS), columns], fits)

            @pl.when(jnp.logical_not(fits))
            def _() -> None:
                def copy_piece(i: Array, _: None) -> None:
                    piece = pl.multiple_of(i * _PIECE_ROWS, _PIECE_ROWS)
                    to = refs.out_gmem.at[pl.ds(there + piece, _PIECE_ROWS), columns]
                    copy(strip_smem.at[pl.ds(piece, _PIECE_ROWS)], to, in_chunk + piece < width)

                lax.fori_loop(0, WARPGROUP_ROWS // _PIECE_ROWS, copy_piece, None)

        def strip_of(number: int) -> Array:
            return values[:, number * strip[1] : (number + 1) * strip[1]].astype(out.dtype)

        store_through(staging_smem, block.warpgroup, machine, strip_of, store, tile.columns // strip[1])

    def blocks(refs: _WeightGradientArguments) -> tuple[Any, Any]:
        chunks = refs.where_gmem.chunks[0]
        if vocabulary_is_rows:
            return row_clusters(chunks * COLUMNS, tile.cluster_rows), -(-dim // tile.columns)
        return padded(dim, tile.cluster_rows) // tile.cluster_rows, chunks * (COLUMNS // tile.columns)

    product = _product(dlogits, hidden, tile, blocks, finish, vocabulary_is_rows, out.dtype, strip)
    multiply(product, machine, _WeightGradientArguments(where, dlogits, hidden, unscale, out))


def add_weight_gradient(machine: Machine, where: VocabSlice, dlogits: Array, hidden: Array, out: Ref) -> None:
    """Add dlogitsᵀ·H of one slice to dW's float32 sums in the reference `out [all chunks · 256, D]`, in place.

    A sum goes on from where it was left. Every chunk of the vocabulary has 256 rows of `out`, whatever the head's
    layout; rows of places without a column are sums of zeros. `out` has zeros behind its D columns, up to a multiple
    of 256. hidden is that of `store_weight_gradient`.
    """
    dim = hidden.shape[1]
    tile = gemm_tile(dlogits.shape[1], dim)

    def finish(refs: _WeightGradientArguments, block: Block, product: Any, staging_smem: Ref) -> None:
        row = refs.where_gmem.first_chunk[0] * COLUMNS + block.row
        there = pl.ds(row, WARPGROUP_ROWS), pl.ds(block.column_block * tile.columns, tile.columns)
        so_far = plgpu.load(refs.out_gmem.at[there], layout=plgpu.Layout.WGMMA, optimized=False)
        refs.out_gmem[there] = product(so_far)

    def blocks(refs: _WeightGradientArguments) -> tuple[Any, Any]:
        return row_clusters(refs.where_gmem.chunks[0] * COLUMNS, tile.cluster_rows), -(-dim // tile.columns)

    product = _product(dlogits, hidden, tile, blocks, finish, True, None)
    multiply(product, machine, _WeightGradientArguments(where, dlogits, hidden, None, out))


def _product(
    dlogits: Matrix,
    hidden: Matrix,
    tile: Tile,
    blocks: Callable[[Any], tuple[Any, Any]],
    finish: Callable[..., None],
    vocabulary_is_rows: bool,
    store_dtype: Any,
    strip: tuple[int, int] = (WARPGROUP_ROWS, STRIP),
) -> Product:
    """dlogitsᵀ·H where the vocabulary is along the rows of tiles, else Hᵀ·dlogits, over the rows that count."""
    names, (rows, columns) = ("dlogits_gmem", "hidden_gmem"), (dlogits, hidden)
    if not vocabulary_is_rows:
        names, (rows, columns) = names[::-1], (columns, rows)
    a_name, b_name = names

    def load(matrix_gmem: Any, k: Array, start: Array, width: int) -> tuple[Ref, ...]:
        there = pl.ds(k * DEPTH, DEPTH), pl.ds(start, width)
        return tuple(part.at[there] for part in parts_of(matrix_gmem))

    def steps(refs: _WeightGradientArguments, block: Block) -> Array:
        return row_clusters(refs.where_gmem.rows[0], DEPTH)

    def load_a(refs: _WeightGradientArguments, block: Block, k: Array) -> tuple[Ref, ...]:
        return load(getattr(refs, a_name), k, block.row, tile.rows)

    def load_b(refs: _WeightGradientArguments, block: Block, k: Array) -> tuple[Ref, ...]:
        return load(getattr(refs, b_name), k, block.column_block * tile.columns, tile.columns)

    return Product(
        name="linear_logp_d_weight",
        tile=tile,
        dtype=parts_of(dlogits)[0].dtype,
        a_transposed=True,
        b_transposed=False,
        max_blocks=(
            padded(rows.shape[1], tile.cluster_rows) // tile.cluster_rows,
            -(-columns.shape[1] // tile.columns),
        ),
        blocks=blocks,
        stretches=(Stretch(steps, load_a, load_b),),
        finish=finish,
        store_dtype=store_dtype,
        strip=strip,
        parts=(len(parts_of(rows)), len(parts_of(columns))),
    )


def column_sums(
    where: VocabSlice, dlogits: Matrix, row_unscale: Array | None, machine: Machine, so_far: Array | None = None
) -> Array:
    """The sum over rows of one slice's gradients, float32 `[columns]`: sums of 64 rows, folded in ascending order.

    row_unscale, float32 `[rows]` or None, multiplies each row. so_far, float32 `[columns]` or None, is the sum of rows
    that came before, with which the fold begins.
    """
    columns = dlogits.shape[1]
    layout = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=2)

    def body(
        where_gmem: VocabSlice, dlogits_gmem: Any, row_unscale_gmem: Ref | None, so_far_gmem: Ref | None, out_gmem: Ref
    ) -> None:
        here = pl.ds(lax.axis_index("blocks") * COLUMNS, COLUMNS)
        zeros = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), layout)

        def block_sum(block: Array) -> Array:
            rows = min(WARPGROUP_ROWS, dlogits.shape[0])
            at_once = math.gcd(rows, _ROWS_SUMMED_AT_ONCE)

            def some_rows(i: Array, total: Array) -> Array:
                for j in range(at_once):
                    row = block * WARPGROUP_ROWS + i * at_once + j
                    values = whole(plgpu.load(part.at[row, here], optimized=False) for part in parts_of(dlogits_gmem))
                    total = total + (values if row_unscale_gmem is None else values * row_unscale_gmem[row])
                return total

            return lax.fori_loop(0, rows // at_once, some_rows, zeros)

        start = zeros if so_far_gmem is None else plgpu.load(so_far_gmem.at[here], layout=layout, optimized=False)
        row_blocks = row_clusters(where_gmem.rows[0], WARPGROUP_ROWS)
        out_gmem[here] = lax.fori_loop(0, row_blocks, lambda i, x: x + block_sum(i), start)

    out_type = jax.ShapeDtypeStruct((columns,), jnp.float32)
    grid = (columns // COLUMNS,)
    return launch(body, "linear_logp_d_bias", machine, out_type, grid, where, dlogits, row_unscale, so_far)
