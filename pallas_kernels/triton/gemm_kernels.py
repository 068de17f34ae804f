"""Device code of gemm.py."""

import triton
import triton.language as tl

from pallas_kernels.triton.head_kernels import multiply_all, place_in_band


@triton.jit
def gemm(
    a,
    b,
    start,
    out,
    m_size: tl.constexpr,
    n_size: tl.constexpr,
    k_size: tl.constexpr,
    a_transposed: tl.constexpr,
    b_transposed: tl.constexpr,
    has_start: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    band: tl.constexpr,
):
    """Each program computes one tile of start + A·B, in one chain over all of K."""
    row_tiles: tl.constexpr = (m_size + rows - 1) // rows
    column_tiles: tl.constexpr = (n_size + columns - 1) // columns
    row_tile, column_tile = place_in_band(row_tiles, column_tiles, band)
    first_m, first_n = row_tile.to(tl.int64) * rows, column_tile.to(tl.int64) * columns
    m, n = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    k = tl.arange(0, depth)
    m_stride: tl.constexpr = 1 if a_transposed else k_size
    n_stride: tl.constexpr = k_size if b_transposed else 1
    a_stride: tl.constexpr = m_size if a_transposed else 1
    b_stride: tl.constexpr = 1 if b_transposed else n_size
    a += first_m * m_stride
    b += first_n * n_stride
    a_tile = m * m_stride + k[None, :] * a_stride
    b_tile = k[:, None] * b_stride + n * n_stride
    is_m, is_n = m < m_size - first_m, n < n_size - first_n
    there = first_m * n_size + first_n + m * n_size + n
    if has_start:
        product = tl.load(start + there, mask=is_m & is_n, other=0.0)
    else:
        product = tl.zeros((rows, columns), tl.float32)
    product = multiply_all(product, a, a_tile, is_m, a_stride, b, b_tile, is_n, b_stride, k_size, depth)
    tl.store(out + there, product.to(out.dtype.element_ty), mask=is_m & is_n)
