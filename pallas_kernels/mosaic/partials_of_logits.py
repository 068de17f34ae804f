"""The partial softmaxes of linear_logp from products that are in memory already: those of few rows, and logits that a
caller samples from.

A block takes 64 rows of one chunk, in the registers that a product would leave them in. So sums have the order, and the
results the bits, that the kernel with the product gives. Where there are no more rows than the 16 that one warp holds
there, a block takes four chunks, a warp each, so that all chunks are in flight at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import LogitsConfig, Partials, VocabSlice
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from pallas_kernels.logits import LOG2_E
from pallas_kernels.mosaic.launch import all_threads, launch
from pallas_kernels.mosaic.main_loop import ROW, WARPGROUP_ROWS, Block, row_vector
from pallas_kernels.mosaic.statistics import (
    ChunkTile,
    bits_of_tile,
    chunk_width,
    column_bias,
    rows_of_chunk,
    store_partial,
    with_bias,
)

Array = jax.Array
Ref = Any
_WARP_ROWS = 16
"""Rows of an accumulator that one warp holds."""
_WARPS = WARPGROUP_ROWS // _WARP_ROWS


def _copyable(products: Array) -> Array:
    """The products with zeros around them where Mosaic cannot copy tiles of 8 rows and 32 float32 columns of them."""
    rows, columns = products.shape
    return jnp.pad(products, ((0, -rows % 8 if rows > 8 else 0), (0, -columns % 32)))


def partials_of_logits(
    logits: LogitsConfig,
    machine: Machine,
    where: VocabSlice,
    products: Array,
    bias: Array | None,
    target_ids: Array,
    temperature: Array,
    out: Partials,
) -> None:
    """Write the partials of products `[N, columns]`, which are float32, into the references `out [chunks, rows]`.

    `where` is the whole vocabulary, and its bits of allowed columns are those of the rows. Rows are a multiple of
    THREADS, of which those behind the last 64 of N are not written, and of those behind N any. bias is float32
    `[chunks · 256]`, or None; target_ids int32 and temperature float32 are `[rows]`.
    """
    products = _copyable(products)
    # A bias or bits of four chunks, or the temporaries of a softcap, would not fit into registers.
    is_plain = bias is None and logits.softcap is None and where.allowed is None
    if products.shape[0] <= _WARP_ROWS and is_plain:
        _of_few_rows(logits, machine, where, products, target_ids, temperature, out)
        return
    vocabulary = logits.head.vocabulary
    loaded_rows = min(products.shape[0], WARPGROUP_ROWS)

    def body(
        where_gmem: VocabSlice,
        products_gmem: Ref,
        bias_gmem: Ref | None,
        target_ids_gmem: Ref,
        temperature_gmem: Ref,
        out_gmem: Partials,
        _outputs: tuple[()],
    ) -> None:
        row, chunk = lax.axis_index("blocks") * WARPGROUP_ROWS, lax.axis_index("groups")

        def of_tile(products_smem: Ref, is_loaded: Ref) -> None:
            there = products_gmem.at[pl.ds(row, loaded_rows), pl.ds(vocabulary.start(chunk), COLUMNS)]
            plgpu.copy_gmem_to_smem(there, products_smem.at[pl.ds(0, loaded_rows)], is_loaded)
            scale = LOG2_E / row_vector(temperature_gmem, row)
            added = column_bias(bias_gmem, chunk * COLUMNS, COLUMNS)
            block = Block(jnp.int32(0), row, chunk, jnp.int32(0))
            bits = bits_of_tile(logits, where_gmem, block, has_room=added is None)
            plgpu.barrier_wait(is_loaded)
            values = with_bias(plgpu.load(products_smem, layout=plgpu.Layout.WGMMA, optimized=False), added)
            tile = ChunkTile(chunk, chunk_width(vocabulary, where_gmem, chunk), row, scale, bits)
            store_partial(logits, tile, values, target_ids_gmem, None, rows_of_chunk(out_gmem, chunk, row))

        pl.run_scoped(of_tile, plgpu.SMEM((WARPGROUP_ROWS, COLUMNS), jnp.float32), plgpu.Barrier())

    grid = (-(-products.shape[0] // WARPGROUP_ROWS), vocabulary.chunks)
    arguments = (where, products, bias, target_ids, temperature, out)
    launch(body, "linear_logp_of_logits", machine, (), grid, *arguments, approx_math=True)


def _of_few_rows(
    logits: LogitsConfig,
    machine: Machine,
    where: VocabSlice,
    products: Array,
    target_ids: Array,
    temperature: Array,
    out: Partials,
) -> None:
    """`partials_of_logits` of rows that one warp holds, without a bias or a softcap."""
    vocabulary = logits.head.vocabulary
    rows = products.shape[0]

    def body(
        where_gmem: VocabSlice,
        products_gmem: Ref,
        target_ids_gmem: Ref,
        temperature_gmem: Ref,
        out_gmem: Partials,
        _outputs: tuple[()],
    ) -> None:
        first = lax.axis_index("blocks") * _WARPS
        # The last block's surplus warps take the last chunk, and store nothing.
        chunks = [jnp.minimum(first + warp, vocabulary.chunks - 1) for warp in range(_WARPS)]

        def of_tile(products_smem: Ref, out_smem: Partials, is_loaded: Ref) -> None:
            for warp, chunk in enumerate(chunks):
                there = products_gmem.at[pl.ds(0, rows), pl.ds(vocabulary.start(chunk), COLUMNS)]
                plgpu.copy_gmem_to_smem(there, products_smem.at[pl.ds(warp * _WARP_ROWS, rows)], is_loaded)
            scale = LOG2_E / row_vector(temperature_gmem, 0)
            number = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW)
            chunk = jnp.minimum(first + lax.div(number, jnp.int32(_WARP_ROWS)), vocabulary.chunks - 1)
            tile = ChunkTile(chunk, chunk_width(vocabulary, where_gmem, chunk), 0, scale)
            plgpu.barrier_wait(is_loaded)
            values = plgpu.load(products_smem, layout=plgpu.Layout.WGMMA, optimized=False)
            store_partial(logits, tile, values, target_ids_gmem, None, out_smem)
            all_threads()
            for warp, chunk in enumerate(chunks):

                @pl.when(first + warp < vocabulary.chunks)
                def store(warp: int = warp, chunk: Array = chunk) -> None:
                    here = pl.ds(warp * _WARP_ROWS, _WARP_ROWS)
                    for from_smem, to_gmem in zip(jax.tree.leaves(out_smem), jax.tree.leaves(out_gmem), strict=True):
                        to = to_gmem.at[chunk, pl.ds(0, _WARP_ROWS)]
                        plgpu.copy_smem_to_gmem(from_smem.at[here], to, commit_group=False)

            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0)

        of_out = jax.tree.map(lambda _: plgpu.SMEM((WARPGROUP_ROWS,), jnp.float32), out_gmem)
        pl.run_scoped(
            of_tile, plgpu.SMEM((WARPGROUP_ROWS, COLUMNS), jnp.float32), of_out, plgpu.Barrier(num_arrivals=_WARPS)
        )

    in_every_warp = (jnp.tile(x[:_WARP_ROWS], _WARPS) for x in (target_ids, temperature))
    grid = (-(-vocabulary.chunks // _WARPS),)
    arguments = (where, products, *in_every_warp, out)
    launch(body, "linear_logp_of_logits", machine, (), grid, *arguments, approx_math=True)
