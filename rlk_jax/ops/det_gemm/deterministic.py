"""The portable implementation of det_gemm, with the same bits on any device. It is slow."""

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.fixed_order import BLOCK_COLUMNS, BLOCK_ROWS, DEPTH_MULTIPLE, fma_chain
from rlk_jax.core.gemm import GemmLayout

Array = jax.Array


def deterministic(layout: GemmLayout, a: Array, b: Array, start: Array | None) -> Array:
    """start + A·B in blocks of 64 × 256, K padded to a multiple of 64: each element is one chain over ascending k.

    Products of two 16-bit numbers are exact in float32, so that a step rounds once, whether it is fused or not.
    """
    m, k, n = layout.sizes(a, b)
    rows, columns, depth = -m % BLOCK_ROWS, -n % BLOCK_COLUMNS, -k % DEPTH_MULTIPLE
    a = a if layout.a_transposed else a.T
    b = b.T if layout.b_transposed else b
    a = jnp.pad(a.astype(jnp.float32), ((0, depth), (0, rows))).reshape(k + depth, -1, BLOCK_ROWS)
    b = jnp.pad(b.astype(jnp.float32), ((0, depth), (0, columns))).reshape(k + depth, -1, BLOCK_COLUMNS)
    start = jnp.zeros((m, n), jnp.float32) if start is None else start
    start = jnp.pad(start, ((0, rows), (0, columns))).reshape(-1, BLOCK_ROWS, b.shape[1], BLOCK_COLUMNS)
    b = b.swapaxes(0, 1)

    def of_rows(block: tuple[Array, Array]) -> Array:
        a, start = block
        return lax.map(lambda x: fma_chain(a, *x), (b, start.swapaxes(0, 1)))

    blocks = lax.map(of_rows, (a.swapaxes(0, 1), start))
    return blocks.swapaxes(1, 2).reshape(m + rows, n + columns)[:m, :n].astype(layout.out_dtype)
