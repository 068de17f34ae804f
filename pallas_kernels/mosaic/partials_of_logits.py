"""The partial softmaxes of linear_logp from products that are in memory already: those of few rows, and logits that a
caller samples from.

A block takes 64 rows of one chunk, in the registers that a product would leave them in. So sums have the order, and the
results the bits, that the kernel with the product gives.
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
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, row_vector
from pallas_kernels.mosaic.statistics import ChunkTile, chunk_width, column_bias, store_partial, with_bias

Array = jax.Array
Ref = Any


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

    `where` is the whole vocabulary. Rows are a multiple of THREADS, of which those behind the last 64 of N are not
    written. bias is float32 `[chunks · 256]`, or None; target_ids int32 and temperature float32 are `[rows]`.
    """
    vocabulary = logits.head.vocabulary
    products = _copyable(products)
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
            plgpu.barrier_wait(is_loaded)
            values = with_bias(plgpu.load(products_smem, layout=plgpu.Layout.WGMMA, optimized=False), added)
            tile = ChunkTile(chunk, chunk_width(vocabulary, where_gmem, chunk), row, scale)
            store_partial(logits, tile, values, target_ids_gmem, None, out_gmem)

        pl.run_scoped(of_tile, plgpu.SMEM((WARPGROUP_ROWS, COLUMNS), jnp.float32), plgpu.Barrier())

    grid = (-(-products.shape[0] // WARPGROUP_ROWS), vocabulary.chunks)
    arguments = (where, products, bias, target_ids, temperature, out)
    launch(body, "linear_logp_of_logits", machine, (), grid, *arguments, approx_math=True)
