"""Backward of linear_logp, second half: products with the gradients of logits of one slice, and their column sums."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import HiddenGradient, Slice
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine, gemm_tile, padded
from pallas_kernels.hopper.vocabulary import Head
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import (
    STRIP,
    WARPGROUP_ROWS,
    Block,
    Product,
    multiply,
    over_columns,
    row_vector,
    store_through,
)
from pallas_kernels.mosaic.statistics import row_clusters, width_of

Array = jax.Array
Ref = Any
_EIGHT = 8
"""Rows of the smallest piece that TMA stores."""


class _HiddenArguments(NamedTuple):
    where: Slice
    dlogits: Ref
    weight: Ref
    unscale: Ref | None
    out: HiddenGradient


def add_hidden_gradient(
    head: Head,
    machine: Machine,
    where: Slice,
    dlogits: Array,
    weight: Array,
    unscale: Array | None,
    chain: range,
    out: HiddenGradient,
) -> None:
    """out.chain += dlogits·W over one slice of the chunks `chain`, in place; behind the last slice out.rounded instead.

    The chain of each element goes on from where the slice before left it, so slices change no bits; the first slice
    starts it from 0, whatever `out` holds. unscale float32 `[rows]` multiplies each row of the complete sum.
    """
    vocabulary = head.vocabulary
    n, columns = out.chain.shape
    tile = gemm_tile(n)

    def first_step(refs: Any) -> Array:
        return vocabulary.steps_before(refs.where.first_chunk[0])

    def steps(refs: Any) -> Array:
        where = refs.where
        return vocabulary.steps_before(where.first_chunk[0] + where.chunks[0]) - first_step(refs)

    def chunk_of(refs: Any, k: Array) -> tuple[Array, Array]:
        chunk, step = vocabulary.place(first_step(refs) + k)
        return chunk - refs.where.first_chunk[0], step * DEPTH

    def load_a(refs: Any, block: Block, k: Array) -> Ref:
        chunk, offset = chunk_of(refs, k)
        return refs.dlogits.at[pl.ds(block.row, tile.rows), pl.ds(chunk * COLUMNS + offset, DEPTH)]

    def load_b(refs: Any, block: Block, k: Array) -> Ref:
        chunk, offset = chunk_of(refs, k)
        depth = pl.ds(head.row(refs.where.first_chunk[0], chunk) + offset, DEPTH)
        wide = pl.ds(block.column_block * COLUMNS, COLUMNS)
        return refs.weight.at[depth, wide] if head.layout == "vd" else refs.weight.at[wide, depth]

    def finish(refs: Any, block: Block, product: Any, staging: Ref) -> None:
        there = pl.ds(block.row, WARPGROUP_ROWS), pl.ds(block.column_block * COLUMNS, COLUMNS)
        where = refs.where
        # Not a branch around the load: ptxas would then serialise the wgmmas.
        so_far = plgpu.load(refs.out.chain.at[there], layout=plgpu.Layout.WGMMA, optimized=False)
        goes_on = jnp.broadcast_to(where.first_chunk[0] > chain.start, so_far.shape)
        values = product(jnp.where(goes_on, so_far, 0.0))
        is_last = where.first_chunk[0] + where.chunks[0] == chain.stop

        @pl.when(jnp.logical_not(is_last))
        def _() -> None:
            refs.out.chain[there] = values

        @pl.when(is_last)
        def _() -> None:
            done = values if refs.unscale is None else values * over_columns(row_vector(refs.unscale, block.row))
            complete = refs.out.chain if refs.out.rounded is None else refs.out.rounded
            complete[there] = done.astype(complete.dtype)

    row_blocks = padded(n, tile.cluster_rows) // tile.cluster_rows
    product = Product(
        name="linear_logp_d_hidden",
        tile=tile,
        dtype=dlogits.dtype,
        a_transposed=False,
        b_transposed=head.layout == "dv",
        max_blocks=(row_blocks, columns // COLUMNS),
        blocks=lambda refs: (row_clusters(refs.where.rows[0], tile.cluster_rows), columns // COLUMNS),
        steps=steps,
        load_a=load_a,
        load_b=load_b,
        finish=finish,
    )
    multiply(product, machine, _HiddenArguments(where, dlogits, weight, unscale, out))


class _WeightArguments(NamedTuple):
    where: Slice
    dlogits: Ref
    hidden: Ref
    unscale: Ref | None
    out: Ref


def store_weight_gradient(
    head: Head, machine: Machine, where: Slice, dlogits: Array, hidden: Array, unscale: Array | None, out: Ref
) -> None:
    """out[slice] = dlogitsᵀ·H (transposed for "dv"), complete, rounded once to out's dtype; in place.

    hidden `[rows, D]` is zero from row `where.rows` on. unscale float32 `[1]` multiplies before the rounding.
    """
    dim = hidden.shape[1]
    vocabulary = head.vocabulary
    slice_columns = dlogits.shape[1]
    vocabulary_is_rows = head.layout == "vd"
    tile = gemm_tile(slice_columns if vocabulary_is_rows else dim)

    def load(ref: Ref, k: Array, start: Array, width: int) -> Ref:
        return ref.at[pl.ds(k * DEPTH, DEPTH), pl.ds(start, width)]

    def finish(refs: Any, block: Block, product: Any, staging: Ref) -> None:
        values = product()
        if refs.unscale is not None:
            values = values * refs.unscale[0]
        chunk = lax.div(block.row, jnp.int32(COLUMNS)) if vocabulary_is_rows else block.column_block
        first = refs.where.first_chunk[0]
        row_in_chunk = lax.rem(block.row, jnp.int32(COLUMNS)) if vocabulary_is_rows else 0
        width = COLUMNS if head.copied else width_of(vocabulary, refs.where, first + chunk)
        there = head.row(first, chunk) + row_in_chunk

        def copy(smem: Ref, to: Ref, condition: Any) -> None:
            @pl.when(condition)
            def _() -> None:
                plgpu.copy_smem_to_gmem(smem, to, commit_group=False)

        def store(strip: int, smem: Ref) -> None:
            """Only places that hold columns: the next ones belong to another group.

            And only strips within the array: Mosaic drops the index of a dimension that is one tile wide, and with it
            the bounds check.
            """
            start = strip * STRIP
            if vocabulary_is_rows and dim <= start:
                return
            if not vocabulary_is_rows:
                to = refs.out.at[pl.ds(block.row, WARPGROUP_ROWS), pl.ds(there + start, STRIP)]
                copy(smem, to, start < width)
                return
            columns = pl.ds(block.column_block * COLUMNS + start, STRIP)
            whole = row_in_chunk + WARPGROUP_ROWS <= width
            copy(smem, refs.out.at[pl.ds(there, WARPGROUP_ROWS), columns], whole)

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                for piece in range(0, WARPGROUP_ROWS, _EIGHT):
                    to = refs.out.at[pl.ds(there + piece, _EIGHT), columns]
                    copy(smem.at[pl.ds(piece, _EIGHT)], to, row_in_chunk + piece < width)

        def strip_of(strip: int) -> Array:
            return values[:, strip * STRIP : (strip + 1) * STRIP].astype(out.dtype)

        store_through(staging, block.warpgroup, machine, strip_of, store)

    def blocks(refs: Any) -> tuple[Any, Any]:
        chunks = refs.where.chunks[0]
        if vocabulary_is_rows:
            return row_clusters(chunks * COLUMNS, tile.cluster_rows), padded(dim, COLUMNS) // COLUMNS
        return padded(dim, tile.cluster_rows) // tile.cluster_rows, chunks

    def load_a(refs: Any, block: Block, k: Array) -> Ref:
        return load(refs.dlogits if vocabulary_is_rows else refs.hidden, k, block.row, tile.rows)

    def load_b(refs: Any, block: Block, k: Array) -> Ref:
        ref = refs.hidden if vocabulary_is_rows else refs.dlogits
        return load(ref, k, block.column_block * COLUMNS, COLUMNS)

    output_rows, output_columns = (slice_columns, dim) if vocabulary_is_rows else (dim, slice_columns)
    product = Product(
        name="linear_logp_d_weight",
        tile=tile,
        dtype=dlogits.dtype,
        a_transposed=True,
        b_transposed=False,
        max_blocks=(
            padded(output_rows, tile.cluster_rows) // tile.cluster_rows,
            padded(output_columns, COLUMNS) // COLUMNS,
        ),
        blocks=blocks,
        steps=lambda refs: row_clusters(refs.where.rows[0], DEPTH),
        load_a=load_a,
        load_b=load_b,
        finish=finish,
        store_dtype=out.dtype,
    )
    multiply(product, machine, _WeightArguments(where, dlogits, hidden, unscale, out))


def column_sums(where: Slice, dlogits: Array, row_unscale: Array | None, machine: Machine) -> Array:
    """Σ over rows of the slice's gradients, float32 `[columns]`: 64-row blocks, folded in ascending order.

    row_unscale `[rows]` multiplies each row.
    """
    columns = dlogits.shape[1]
    layout = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=2)

    def body(where: Slice, dlogits: Ref, row_unscale: Ref | None, out: Ref) -> None:
        here = pl.ds(lax.axis_index("blocks") * COLUMNS, COLUMNS)

        def block_sum(block: Array) -> Array:
            total = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), layout)
            for i in range(WARPGROUP_ROWS):
                row = block * WARPGROUP_ROWS + i
                values = plgpu.load(dlogits.at[row, here], layout=layout, optimized=False).astype(jnp.float32)
                total = total + (values if row_unscale is None else values * row_unscale[row])
            return total

        start = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), layout)
        out[here] = lax.fori_loop(0, row_clusters(where.rows[0], WARPGROUP_ROWS), lambda i, x: x + block_sum(i), start)

    out_type = jax.ShapeDtypeStruct((columns,), jnp.float32)
    grid = (columns // COLUMNS,)
    return launch(body, "linear_logp_d_bias", machine, out_type, grid, where, dlogits, row_unscale)
