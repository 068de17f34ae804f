"""The product of two matrices in Triton, whose elements have the same bits however many rows and columns there are.

Its tile is small, because one side of a low-rank term's products is.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.triton.call import launch

Array = jax.Array
ALIGNED = 8
"""Rows of 16-bit numbers in a multiple of it can be read 16 bytes at a time."""
_GEMM_ROWS, _GEMM_COLUMNS = 64, 64
_GEMM_TILE = {"rows": _GEMM_ROWS, "columns": _GEMM_COLUMNS, "depth": 64, "band": 16}


def _with_zeros(x: Array, rows: int, columns: int, *, transposed: bool = False) -> Array:
    """A matrix with so many more rows and columns, or a transposed one with so many more columns and rows."""
    more = (columns, rows) if transposed else (rows, columns)
    return jnp.pad(x, [(0, count) for count in more])


def gemm(a: Array, b: Array, start: Array | None, *, a_transposed: bool, b_transposed: bool, out_dtype: Any) -> Array:
    """start + A·B `[M, N]`, one float32 chain over ascending K for each element, rounded once to out_dtype.

    a and b have one 16-bit dtype. a is `[M, K]`, or `[K, M]` if transposed; b is `[K, N]`, or `[N, K]` if transposed.
    start is float32 `[M, N]`, and the chain begins with it; None stands for zeros. No dimension is 0.
    """
    from pallas_kernels.triton import gemm_kernels

    m, k = a.shape[::-1] if a_transposed else a.shape
    n = b.shape[0 if b_transposed else 1]
    # Where a is transposed and b is not, K is along no row.
    more_m = -m % ALIGNED if a_transposed else 0
    more_n = 0 if b_transposed else -n % ALIGNED
    more_k = 0 if a_transposed and not b_transposed else -k % ALIGNED
    a = _with_zeros(a, more_m, more_k, transposed=a_transposed)
    b = _with_zeros(b, more_k, more_n, transposed=b_transposed)
    given = a if start is None else _with_zeros(start, more_m, more_n)
    (out,) = launch(
        gemm_kernels.gemm,
        (a, b, given),
        (jax.ShapeDtypeStruct((m + more_m, n + more_n), out_dtype),),
        {
            "m_size": m + more_m,
            "n_size": n + more_n,
            "k_size": k + more_k,
            "a_transposed": a_transposed,
            "b_transposed": b_transposed,
            "has_start": start is not None,
            **_GEMM_TILE,
        },
        grid=-(-m // _GEMM_ROWS) * -(-n // _GEMM_COLUMNS),
        num_warps=8,
        num_stages=3,
    )
    return out[:m, :n]
