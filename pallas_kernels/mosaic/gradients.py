"""The second half of linear_logp's backward: dH, dW and db from the gradients of one slice's logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import HiddenGradient, VocabSlice
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine, gemm_tile
from pallas_kernels.hopper.vocabulary import HeadAccess
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import (
    STRIP,
    WARPGROUP_ROWS,
    Block,
    Product,
    Stretch,
    multiply,
    over_columns,
    row_vector,
    store_through,
)
from pallas_kernels.mosaic.statistics import chunk_width, row_clusters
from pallas_kernels.products import padded

Array = jax.Array
Ref = Any
_PIECE_ROWS = 8
"""Rows of the smallest piece that TMA stores."""


class _HiddenGradientArguments(NamedTuple):
    """The references that the kernel of `add_hidden_gradient` is given."""

    where_gmem: VocabSlice
    dlogits_gmem: Ref
    weight_gmem: Ref
    unscale_gmem: Ref | None
    out_gmem: HiddenGradient


def add_hidden_gradient(
    head: HeadAccess,
    machine: Machine,
    where: VocabSlice,
    dlogits: Array,
    weight: Array,
    unscale: Array | None,
    chain: range,
    out: HiddenGradient,
) -> None:
    """Add dlogits·W over one slice to `out.chain`, in place. `chain` is the range of chunks that are summed up there.

    The weight is the head's, or that of a low-rank term, for which the sums are the gradient of its columns of hidden.

    Each element's float32 sum goes on from where the slice before left it, so that slices change no bits. The first
    slice starts it from 0, whatever `out` holds. The last slice multiplies each row of the complete sum by unscale,
    float32 `[rows]` or None, and writes it to `out.rounded` in that dtype, or to `out.chain` where `rounded` is None.
    """
    vocabulary = head.vocabulary
    n, dim = out.chain.shape[0], weight.shape[1 if head.layout == "vd" else 0]
    tile = gemm_tile(n, dim)
    column_blocks = -(-dim // tile.columns)

    def first_step(refs: _HiddenGradientArguments) -> Array:
        return vocabulary.steps_before(refs.where_gmem.first_chunk[0])

    def steps(refs: _HiddenGradientArguments) -> Array:
        where_gmem = refs.where_gmem
        return vocabulary.steps_before(where_gmem.first_chunk[0] + where_gmem.chunks[0]) - first_step(refs)

    def place_of_step(refs: _HiddenGradientArguments, k: Array) -> tuple[Array, Array]:
        """The slice's chunk that step k reads, and the step's first column in it."""
        chunk, step = vocabulary.place(first_step(refs) + k)
        return chunk - refs.where_gmem.first_chunk[0], step * DEPTH

    def load_a(refs: _HiddenGradientArguments, block: Block, k: Array) -> Ref:
        chunk, offset = place_of_step(refs, k)
        return refs.dlogits_gmem.at[pl.ds(block.row, tile.rows), pl.ds(chunk * COLUMNS + offset, DEPTH)]

    def load_b(refs: _HiddenGradientArguments, block: Block, k: Array) -> Ref:
        chunk, offset = place_of_step(refs, k)
        depth = pl.ds(head.row(refs.where_gmem.first_chunk[0], chunk) + offset, DEPTH)
        wide = pl.ds(block.column_block * tile.columns, tile.columns)
        return refs.weight_gmem.at[depth, wide] if head.layout == "vd" else refs.weight_gmem.at[wide, depth]

    def finish(refs: _HiddenGradientArguments, block: Block, product: Any, staging_smem: Ref) -> None:
        there = pl.ds(block.row, WARPGROUP_ROWS), pl.ds(block.column_block * tile.columns, tile.columns)
        where_gmem, out_gmem = refs.where_gmem, refs.out_gmem
        # The sums are loaded even where they start from 0: a branch around the load would make ptxas serialise the
        # wgmmas.
        so_far = plgpu.load(out_gmem.chain.at[there], layout=plgpu.Layout.WGMMA, optimized=False)
        goes_on = jnp.broadcast_to(where_gmem.first_chunk[0] > chain.start, so_far.shape)
        values = product(jnp.where(goes_on, so_far, 0.0))
        is_last = where_gmem.first_chunk[0] + where_gmem.chunks[0] == chain.stop

        @pl.when(jnp.logical_not(is_last))
        def _() -> None:
            out_gmem.chain[there] = values

        @pl.when(is_last)
        def _() -> None:
            unscale_gmem = refs.unscale_gmem
            done = (
                values
                if unscale_gmem is None
                else values * over_columns(row_vector(unscale_gmem, block.row), tile.columns)
            )
            complete_gmem = out_gmem.chain if out_gmem.rounded is None else out_gmem.rounded
            complete_gmem[there] = done.astype(complete_gmem.dtype)

    row_blocks = padded(n, tile.cluster_rows) // tile.cluster_rows
    product = Product(
        name="linear_logp_d_hidden",
        tile=tile,
        dtype=dlogits.dtype,
        a_transposed=False,
        b_transposed=head.layout == "dv",
        max_blocks=(row_blocks, column_blocks),
        blocks=lambda refs: (row_clusters(refs.where_gmem.rows[0], tile.cluster_rows), column_blocks),
        stretches=(Stretch(steps, load_a, load_b),),
        finish=finish,
    )
    multiply(product, machine, _HiddenGradientArguments(where, dlogits, weight, unscale, out))


class _WeightGradientArguments(NamedTuple):
    """The references that the kernel of `store_weight_gradient` is given."""

    where_gmem: VocabSlice
    dlogits_gmem: Ref
    hidden_gmem: Ref
    unscale_gmem: Ref | None
    out_gmem: Ref


def store_weight_gradient(
    head: HeadAccess,
    machine: Machine,
    where: VocabSlice,
    dlogits: Array,
    hidden: Array,
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

    def load(ref: Ref, k: Array, start: Array, width: int) -> Ref:
        return ref.at[pl.ds(k * DEPTH, DEPTH), pl.ds(start, width)]

    def finish(refs: _WeightGradientArguments, block: Block, product: Any, staging_smem: Ref) -> None:
        values = product()
        if refs.unscale_gmem is not None:
            values = values * refs.unscale_gmem[0]
        chunk = lax.div(block.row, jnp.int32(COLUMNS)) if vocabulary_is_rows else block.column_block
        first = refs.where_gmem.first_chunk[0]
        row_in_chunk = lax.rem(block.row, jnp.int32(COLUMNS)) if vocabulary_is_rows else 0
        width = COLUMNS if head.copied else chunk_width(vocabulary, refs.where_gmem, first + chunk)
        there = head.row(first, chunk) + row_in_chunk

        def copy(from_smem: Ref, to_gmem: Ref, condition: Any) -> None:
            @pl.when(condition)
            def _() -> None:
                plgpu.copy_smem_to_gmem(from_smem, to_gmem, commit_group=False)

        def store(strip: int, strip_smem: Ref) -> None:
            """Copy the places of a strip that hold columns of the chunk: the next ones belong to another group.

            Strips outside the array are left out here: Mosaic drops the index of a dimension that is one tile wide, and
            with it the bounds check.
            """
            start = strip * STRIP
            if vocabulary_is_rows and dim <= start:
                return
            if not vocabulary_is_rows:
                to = refs.out_gmem.at[pl.ds(block.row, WARPGROUP_ROWS), pl.ds(there + start, STRIP)]
                copy(strip_smem, to, start < width)
                return
            columns = pl.ds(block.column_block * tile.columns + start, STRIP)
            whole = row_in_chunk + WARPGROUP_ROWS <= width
            copy(strip_smem, refs.out_gmem.at[pl.ds(there, WARPGROUP_ROWS), columns], whole)

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                for piece in range(0, WARPGROUP_ROWS, _PIECE_ROWS):
                    to = refs.out_gmem.at[pl.ds(there + piece, _PIECE_ROWS), columns]
                    copy(strip_smem.at[pl.ds(piece, _PIECE_ROWS)], to, row_in_chunk + piece < width)

        def strip_of(strip: int) -> Array:
            return values[:, strip * STRIP : (strip + 1) * STRIP].astype(out.dtype)

        store_through(staging_smem, block.warpgroup, machine, strip_of, store, tile.columns // STRIP)

    def blocks(refs: _WeightGradientArguments) -> tuple[Any, Any]:
        chunks = refs.where_gmem.chunks[0]
        if vocabulary_is_rows:
            return row_clusters(chunks * COLUMNS, tile.cluster_rows), -(-dim // tile.columns)
        return padded(dim, tile.cluster_rows) // tile.cluster_rows, chunks

    def steps(refs: _WeightGradientArguments) -> Array:
        return row_clusters(refs.where_gmem.rows[0], DEPTH)

    def load_a(refs: _WeightGradientArguments, block: Block, k: Array) -> Ref:
        return load(refs.dlogits_gmem if vocabulary_is_rows else refs.hidden_gmem, k, block.row, tile.rows)

    def load_b(refs: _WeightGradientArguments, block: Block, k: Array) -> Ref:
        ref = refs.hidden_gmem if vocabulary_is_rows else refs.dlogits_gmem
        return load(ref, k, block.column_block * tile.columns, tile.columns)

    output_rows, output_columns = (slice_columns, dim) if vocabulary_is_rows else (dim, slice_columns)
    product = Product(
        name="linear_logp_d_weight",
        tile=tile,
        dtype=dlogits.dtype,
        a_transposed=True,
        b_transposed=False,
        max_blocks=(
            padded(output_rows, tile.cluster_rows) // tile.cluster_rows,
            -(-output_columns // tile.columns),
        ),
        blocks=blocks,
        stretches=(Stretch(steps, load_a, load_b),),
        finish=finish,
        store_dtype=out.dtype,
    )
    multiply(product, machine, _WeightGradientArguments(where, dlogits, hidden, unscale, out))


def column_sums(where: VocabSlice, dlogits: Array, row_unscale: Array | None, machine: Machine) -> Array:
    """The sum over rows of one slice's gradients, float32 `[columns]`: sums of 64 rows, folded in ascending order.

    row_unscale, float32 `[rows]` or None, multiplies each row.
    """
    columns = dlogits.shape[1]
    layout = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=2)

    def body(where_gmem: VocabSlice, dlogits_gmem: Ref, row_unscale_gmem: Ref | None, out_gmem: Ref) -> None:
        here = pl.ds(lax.axis_index("blocks") * COLUMNS, COLUMNS)

        def block_sum(block: Array) -> Array:
            total = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), layout)
            for i in range(WARPGROUP_ROWS):
                row = block * WARPGROUP_ROWS + i
                values = plgpu.load(dlogits_gmem.at[row, here], layout=layout, optimized=False).astype(jnp.float32)
                total = total + (values if row_unscale_gmem is None else values * row_unscale_gmem[row])
            return total

        start = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), layout)
        row_blocks = row_clusters(where_gmem.rows[0], WARPGROUP_ROWS)
        out_gmem[here] = lax.fori_loop(0, row_blocks, lambda i, x: x + block_sum(i), start)

    out_type = jax.ShapeDtypeStruct((columns,), jnp.float32)
    grid = (columns // COLUMNS,)
    return launch(body, "linear_logp_d_bias", machine, out_type, grid, where, dlogits, row_unscale)
