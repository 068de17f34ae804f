"""The products of attention's kernels, which are in flight together."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.attention_tiles import Call
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS

Array = jax.Array
Ref = Any


class Scores(NamedTuple):
    """Products rows·blockᵀ of what shared memory holds by chunks of columns."""

    rows: tuple[Ref, ...]
    block: tuple[Ref, ...]


class Weighted(NamedTuple):
    """sums + weights·block by chunks of columns; the weights `[64, rows of the block]` are in registers."""

    sums: tuple[Array, ...]
    weights: Array
    block: tuple[Ref, ...]


def multiply(call: Call, *terms: Scores | Weighted) -> list[tuple[Array, ...]]:
    """The values of all terms, whose products are in flight together."""
    if call.is_interpreted:
        return [_interpreted(term) for term in terms]
    starts = [_zeros(term) if isinstance(term, Scores) else term.sums for term in terms]

    def start_all(accs: list[tuple[Ref, ...]]) -> None:
        for term, own in zip(terms, accs, strict=True):
            if isinstance(term, Scores):
                for row, block in zip(term.rows, term.block, strict=True):
                    plgpu.wgmma(own[0], row, block.transpose((1, 0)))
            else:
                for acc, block in zip(own, term.block, strict=True):
                    plgpu.wgmma(acc, term.weights, block)

    return pl.run_state(start_all)([tuple(map(plgpu.ACC.init, start)) for start in starts])


def _zeros(term: Scores) -> tuple[Array, ...]:
    shape = (WARPGROUP_ROWS, term.block[0].shape[0])
    return (plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),)


def _interpreted(term: Scores | Weighted) -> tuple[Array, ...]:
    """The interpreter multiplies what is in shared memory alone, and cannot store to accumulators."""
    if isinstance(term, Scores):

        def products(acc: Ref) -> Array:
            for row, block in zip(term.rows, term.block, strict=True):
                plgpu.wgmma(acc, row, block.transpose((1, 0)))
            return acc[...]

        return (pl.run_scoped(products, plgpu.ACC((WARPGROUP_ROWS, term.block[0].shape[0]), jnp.float32)),)

    def added(x: Array, block_smem: Ref) -> Array:
        block = plgpu.load(block_smem, layout=plgpu.Layout.WGMMA, optimized=False)
        return x + lax.dot(term.weights, block, preferred_element_type=jnp.float32)

    sums = tuple(map(added, term.sums, term.block))
    plgpu.commit_smem()
    return sums
