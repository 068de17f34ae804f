"""The gradient of linear_logp's hidden from the gradients of one slice's logits: dH = dlogits·W."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import HiddenGradient, VocabSlice
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine, gemm_tile
from pallas_kernels.hopper.vocabulary import HeadAccess
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, Block, Product, Stretch, multiply, over_columns, row_vector
from pallas_kernels.mosaic.statistics import row_clusters
from pallas_kernels.products import padded

Array = jax.Array
Ref = Any


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
