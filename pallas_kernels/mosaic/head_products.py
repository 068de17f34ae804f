"""The products of rows and one slice of a head in float32, for ops that need those of two heads at a time."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.arrays import VocabSlice
from pallas_kernels.hopper.tiles import Machine, statistics_tile
from pallas_kernels.hopper.vocabulary import HeadAccess
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, Block, multiply
from pallas_kernels.mosaic.statistics import product_with_head
from pallas_kernels.mosaic.stores import store_rows, store_through

Array = jax.Array
Ref = Any
_STRIP = 32
"""Float32 columns that are stored together: 128 bytes of each row."""


class _ProductsArguments(NamedTuple):
    """The references that the kernel of `head_products` is given."""

    where_gmem: VocabSlice
    hidden_gmem: Ref
    weight_gmem: Ref
    out_gmem: Ref


def head_products(
    head: HeadAccess, machine: Machine, where: VocabSlice, hidden: Array, weight: Array, out: Any
) -> None:
    """Write hidden·Wᵀ of one slice of chunks into the reference `out [rows, slice's chunks · 256]`, float32.

    hidden `[rows, D]` and weight are those of `partials`, whose products have the same bits. Places that hold no column
    get any value.
    """
    tile = statistics_tile(hidden.shape[0])

    def finish(refs: _ProductsArguments, block: Block, product: Any, staging_smem: Ref) -> None:
        values = product()

        def strip_of(strip: int) -> Array:
            return values[:, strip * _STRIP : (strip + 1) * _STRIP]

        def store(strip: int, strip_smem: Ref) -> None:
            columns = pl.ds(block.column_block * tile.columns + strip * _STRIP, _STRIP)
            store_rows(strip_smem, refs.out_gmem, block.row, columns)

        store_through(staging_smem, block.warpgroup, machine, strip_of, store, tile.columns // _STRIP)

    of_product = hidden, weight, None, out.shape[1] // tile.columns, finish
    product = product_with_head("head_products", head, tile, *of_product, jnp.float32)
    product = replace(product, strip=(WARPGROUP_ROWS, _STRIP))
    multiply(product, machine, _ProductsArguments(where, hidden, weight, out))
