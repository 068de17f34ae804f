"""The forward of linear_logp: the partial softmaxes of one slice, by one kernel or, for few rows, by that of det_gemm
and one that follows it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.arrays import LogitsConfig, Partials, SliceProducts, VocabSlice
from pallas_kernels.hopper.parts import Matrix, parts_of
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.logits import LOG2_E
from pallas_kernels.mosaic.gemm import gemm
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, Block, multiply, row_vector
from pallas_kernels.mosaic.partials_of_logits import partials_of_logits
from pallas_kernels.mosaic.statistics import (
    ChunkTile,
    bits_of_tile,
    chunk_and_width,
    column_bias,
    cut_for,
    product_with_head,
    rows_of_chunk,
    store_partial,
    with_bias,
)
from pallas_kernels.mosaic.stores import store_rows, store_through, storing
from pallas_kernels.products import LowRankTerm

Array = jax.Array
Ref = Any
_FEW_ROWS = 16
"""Rows up to which det_gemm's narrow tiles stream the head faster than tiles of a whole chunk, of which the last round
leaves multiprocessors idle. Products in float32 are then small beside the head."""


_PRODUCT_STRIP = 32
"""Columns of float32 products that are stored together: 128 bytes."""


class _PartialsArguments(NamedTuple):
    """The references that the kernel of `partials` is given."""

    where_gmem: VocabSlice
    hidden_gmem: Ref
    weight_gmem: Ref
    bias_gmem: Ref | None
    target_ids_gmem: Ref
    holds_target_gmem: Ref | None
    temperature_gmem: Ref
    out_gmem: Partials
    kept_gmem: Ref | None
    low_rank_gmem: LowRankTerm | None
    products_gmem: SliceProducts | None


def partials(
    logits: LogitsConfig,
    machine: Machine,
    where: VocabSlice,
    hidden: Matrix,
    weight: Matrix,
    bias: Array | None,
    target_ids: Array,
    holds_target: Array | None,
    temperature: Array,
    out: Partials,
    kept: Any = None,
    low_rank: LowRankTerm | None = None,
    products: SliceProducts | None = None,
) -> None:
    """Write the partials of one slice of chunks into the references `out`, and the exponentials of chunks into `kept`,
    or the products of the slice into `products`.

    hidden `[rows, D]` holds whole tiles of rows, or fewer than a tile; weight is stored as `logits.head` says; bias is
    float32 `[slice's chunks · 256]`; target_ids int32 and temperature float32 are `[rows]`. holds_target, int32
    `[rows / 64, all chunks]`, is not 0 where one of 64 rows has its target in a chunk; with None every chunk is
    searched. kept, a reference `[rows, first chunks · 256]` in hidden's dtype, takes the rounded exponentials of the
    chunks it has room for; there is none beside `products`. low_rank is a term of the head, or None. Where hidden or
    weight is in two parts, so is kept, and all chunks but those of `where` and of bias have 128 columns. Products of
    few rows are formed before their softmax; both ways give the same bits.
    """
    is_readable = not logits.head.copied and weight.shape[0] % 8 == 0
    is_plain = len(parts_of(hidden)) == len(parts_of(weight)) == 1 and low_rank is None and where.allowed is None
    if hidden.shape[0] <= _FEW_ROWS and is_readable and is_plain and kept is None and products is None:
        layout = {"a_transposed": False, "b_transposed": logits.head.layout == "vd"}
        found = gemm(hidden, weight, None, **layout, out_dtype=jnp.float32, machine=machine)
        partials_of_logits(logits, machine, where, found, bias, target_ids, temperature, out)
        return
    logits, cut = cut_for(logits, hidden, weight)
    head, store_dtype = logits.head, None if kept is None else kept.dtype

    def finish(refs: _PartialsArguments, block: Block, product: Any, staging_smem: Ref) -> None:
        chunk, width = chunk_and_width(head.vocabulary, refs.where_gmem, block)
        # These are loaded before the product and used after it: the latency of memory hides there.
        temperature = row_vector(refs.temperature_gmem, block.row)
        holds = (
            None
            if refs.holds_target_gmem is None
            else refs.holds_target_gmem[lax.div(block.row, jnp.int32(WARPGROUP_ROWS)), chunk] > 0
        )
        added = column_bias(refs.bias_gmem, block.column_block * cut.columns, cut.columns)
        bits = bits_of_tile(logits, refs.where_gmem, block, has_room=added is None)
        tile = ChunkTile(chunk, width, block.row, LOG2_E / temperature, bits)
        out_gmem = rows_of_chunk(refs.out_gmem, chunk, block.row)

        def see(values: Array, largest: Array) -> None:
            to_gmem = refs.products_gmem
            assert to_gmem is not None
            to_gmem.largest[block.column_block, pl.ds(block.row, WARPGROUP_ROWS)] = largest

            def strip_of(strip: int) -> Array:
                return values[:, strip * _PRODUCT_STRIP : (strip + 1) * _PRODUCT_STRIP]

            def store_strip(strip: int, strip_smem: Ref) -> None:
                first = block.column_block * cut.columns + strip * _PRODUCT_STRIP
                store_rows(strip_smem, to_gmem.values, block.row, pl.ds(first, _PRODUCT_STRIP))

            strips = cut.columns // _PRODUCT_STRIP
            store_through(staging_smem, block.warpgroup, machine, strip_of, store_strip, strips)

        of_tile = with_bias(product(), added), refs.target_ids_gmem, holds, out_gmem, store_dtype
        strips = store_partial(logits, tile, *of_tile, None if refs.products_gmem is None else see)
        if refs.kept_gmem is None:
            return
        first = tile.chunk * cut.columns

        @pl.when(first < refs.kept_gmem.shape[1])
        def _() -> None:
            store = storing(refs.kept_gmem, block.row, first)
            store_through(staging_smem, block.warpgroup, machine, strips.__getitem__, store, len(strips))

    of_product = hidden, weight, low_rank, out.shift.shape[0], finish
    if products is not None:
        product = product_with_head("linear_logp_products", head, cut, *of_product, jnp.float32, _PRODUCT_STRIP)
    else:
        staged = None if kept is None else parts_of(kept)[0].dtype
        product = product_with_head("linear_logp_statistics", head, cut, *of_product, staged)
    per_row = (target_ids, holds_target, temperature)
    multiply(product, machine, _PartialsArguments(where, hidden, weight, bias, *per_row, out, kept, low_rank, products))
