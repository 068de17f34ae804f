"""The partial softmaxes of linear_logp from logits that are in memory already, for callers that sample from these.

A block takes 64 rows of one chunk, in the registers that a product would leave them in. So sums have the order, and the
results the bits, that the kernel with the product gives.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import LogitsConfig, Partials
from pallas_kernels.hopper.tiles import COLUMNS, THREADS, Machine
from pallas_kernels.logits import LOG2_E
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, row_vector
from pallas_kernels.mosaic.statistics import ChunkTile, store_partial
from pallas_kernels.products import padded

Array = jax.Array
Ref = Any


def _copyable(products: Array) -> Array:
    """The products with zeros around them where Mosaic cannot copy tiles of 8 rows and 32 float32 columns of them."""
    rows, columns = products.shape
    return jnp.pad(products, ((0, -rows % 8 if rows > 8 else 0), (0, -columns % 32)))


def partials_of_logits(
    logits: LogitsConfig, machine: Machine, products: Array, target_ids: Array, temperature: Array, *, with_gap: bool
) -> Partials:
    """The partials `[chunks, rows]` of products `[N, columns]`, which are float32 and hold a bias already. Rows are a
    multiple of THREADS, of which those behind the last 64 of N are not written.

    target_ids int32 and temperature float32 are `[rows]`. with_gap: an entropy is asked for.
    """
    vocabulary, rows = logits.head.vocabulary, padded(products.shape[0], THREADS)
    products = _copyable(products)

    def body(products_gmem: Ref, target_ids_gmem: Ref, temperature_gmem: Ref, out_gmem: Partials) -> None:
        row, chunk = lax.axis_index("blocks") * WARPGROUP_ROWS, lax.axis_index("groups")

        def of_tile(products_smem: Ref, is_loaded: Ref) -> None:
            there = products_gmem.at[pl.ds(row, WARPGROUP_ROWS), pl.ds(vocabulary.start(chunk), COLUMNS)]
            plgpu.copy_gmem_to_smem(there, products_smem, is_loaded)
            scale = LOG2_E / row_vector(temperature_gmem, row)
            plgpu.barrier_wait(is_loaded)
            values = plgpu.load(products_smem, layout=plgpu.Layout.WGMMA, optimized=False)
            tile = ChunkTile(chunk, vocabulary.width(chunk), row, scale)
            store_partial(logits, tile, values, target_ids_gmem, None, out_gmem)

        pl.run_scoped(of_tile, plgpu.SMEM((WARPGROUP_ROWS, COLUMNS), jnp.float32), plgpu.Barrier())

    of_rows = jax.ShapeDtypeStruct((vocabulary.chunks, rows), jnp.float32)
    derivative = None if logits.softcap is None else of_rows
    out_type = Partials(of_rows, of_rows, of_rows, of_rows if with_gap else None, derivative)
    grid = (-(-products.shape[0] // WARPGROUP_ROWS), vocabulary.chunks)
    arguments = (products, target_ids, temperature)
    return launch(body, "linear_logp_of_logits", machine, out_type, grid, *arguments, approx_math=True)
