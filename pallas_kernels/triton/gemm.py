"""The product of two matrices in Triton, whose elements have the same bits however many rows and columns there are.

Its tile is small, because one side of a low-rank term's products is.
"""

from typing import Any

import jax

from pallas_kernels.triton.call import launch

Array = jax.Array
_GEMM_ROWS, _GEMM_COLUMNS = 64, 64
_GEMM_TILE = {"rows": _GEMM_ROWS, "columns": _GEMM_COLUMNS, "depth": 64, "band": 16}


def gemm(a: Array, b: Array, start: Array | None, *, a_transposed: bool, b_transposed: bool, out_dtype: Any) -> Array:
    """start + A·B `[M, N]`, one float32 chain over ascending K for each element, rounded once to out_dtype.

    a and b have one 16-bit dtype. a is `[M, K]`, or `[K, M]` if transposed; b is `[K, N]`, or `[N, K]` if transposed.
    start is float32 `[M, N]`, and the chain begins with it; None stands for zeros. No dimension is 0.
    """
    from pallas_kernels.triton import gemm_kernels

    m, k = a.shape[::-1] if a_transposed else a.shape
    n = b.shape[0 if b_transposed else 1]
    (out,) = launch(
        gemm_kernels.gemm,
        (a, b, a if start is None else start),
        (jax.ShapeDtypeStruct((m, n), out_dtype),),
        {
            "m_size": m,
            "n_size": n,
            "k_size": k,
            "a_transposed": a_transposed,
            "b_transposed": b_transposed,
            "has_start": start is not None,
            **_GEMM_TILE,
        },
        grid=-(-m // _GEMM_ROWS) * -(-n // _GEMM_COLUMNS),
        num_warps=4,
        num_stages=3,
    )
    return out
