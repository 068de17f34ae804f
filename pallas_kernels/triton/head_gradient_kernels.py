"""Device code of linear_logp.py's backward: coefficients, gradients of logits, and dH, dW and db of one slice."""

import triton
import triton.language as tl

from pallas_kernels.triton.head_kernels import (
    LOG2_E,
    first_column,
    is_allowed,
    logit_products,
    multiply,
    place_in_band,
    with_bias,
)
from pallas_kernels.triton.row_kernels import finite_gap, softcap_derivative, softcapped


@triton.jit
def coefficients(
    temperature,
    log_sum,
    logp,
    gap,
    g_logp,
    g_lse,
    g_entropy,
    g_uniform,
    g_spread,
    lift,
    constant_out,
    slope_out,
    at_target_out,
    uniform_out,
    with_lse: tl.constexpr,
    with_entropy: tl.constexpr,
    with_uniform: tl.constexpr,
    rows: tl.constexpr,
):
    """The coefficients of each row: a logit's gradient is p·(constant + slope·ln p) + uniform, the target's is
    `at_target`.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    own = tl.load(logp + row)
    upstream = tl.load(g_logp + row)
    per_logit = tl.load(lift + row) / tl.load(temperature + row)
    probability = tl.exp2(own * LOG2_E)
    # The series gives 1 − exp(x) without the cancellation near 0.
    series = -own * (1 + own * (1 / 2 + own * (1 / 6 + own * (1 / 24 + own * (1 / 120)))))
    at_target = upstream * tl.where(own > -0.1, series, 1 - probability)
    constant = -upstream
    if with_lse:
        of_lse = tl.load(g_lse + row)
        constant += of_lse
        at_target += of_lse * probability
    if with_entropy:
        # The gradient of the entropy is −p·(ln p + entropy).
        entropy = tl.load(log_sum + row) + tl.load(gap + row)
        of_entropy = tl.load(g_entropy + row)
        constant -= of_entropy * entropy
        at_target -= of_entropy * (entropy - finite_gap(own)) * probability
        tl.store(slope_out + row, -of_entropy * per_logit)
    if with_uniform:
        uniform = tl.load(g_uniform + row)
        at_target += uniform - tl.load(g_spread + row)
        tl.store(uniform_out + row, uniform * per_logit)
    tl.store(constant_out + row, constant * per_logit)
    tl.store(at_target_out + row, at_target * per_logit)


@triton.jit
def dlogits(
    hidden,
    weight,
    low_rank_hidden,
    low_rank_weight,
    bias,
    allowed,
    target_ids,
    temperature,
    maximum,
    log_sum,
    constant,
    slope,
    at_target,
    uniform,
    count,
    real_columns,
    slice_start,
    out,
    dim: tl.constexpr,
    rank: tl.constexpr,
    vocab_size: tl.constexpr,
    layout: tl.constexpr,
    softcap: tl.constexpr,
    has_bias: tl.constexpr,
    mask_bytes: tl.constexpr,
    with_slope: tl.constexpr,
    with_uniform: tl.constexpr,
    slice_width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    band: tl.constexpr,
):
    """Each program computes the gradients of one tile of a slice's logits: 0 where a row or a column does not count, or
    a row may not take the column.
    """
    column_tiles: tl.constexpr = slice_width // columns
    row_tile, column_tile = place_in_band(tl.num_programs(0) // column_tiles, column_tiles, band)
    rows_there = tl.load(count)
    if row_tile * rows >= rows_there:
        return
    row = row_tile * rows + tl.arange(0, rows)
    start = first_column(slice_start) + column_tile * columns
    column = start + tl.arange(0, columns)
    raw = logit_products(
        hidden,
        weight,
        low_rank_hidden,
        low_rank_weight,
        row_tile,
        start,
        dim,
        rank,
        vocab_size,
        layout,
        rows,
        columns,
        depth,
    )
    raw = with_bias(raw, bias, column, vocab_size, has_bias)
    inverse = 1 / tl.load(temperature + row)
    log_p = (
        softcapped(raw, softcap) * inverse[:, None] - tl.load(maximum + row)[:, None] - tl.load(log_sum + row)[:, None]
    )
    factor = tl.load(constant + row)[:, None]
    if with_slope:
        factor -= tl.load(slope + row)[:, None] * finite_gap(log_p)
    value = tl.exp2(log_p * LOG2_E) * factor
    if with_uniform:
        value += tl.load(uniform + row)[:, None]
    value = tl.where(column[None, :] == tl.load(target_ids + row)[:, None], tl.load(at_target + row)[:, None], value)
    if softcap is not None:
        value *= softcap_derivative(raw, softcap)
    counts = (row < rows_there)[:, None] & (column < tl.load(real_columns))[None, :]
    if mask_bytes > 0:
        counts &= is_allowed(allowed, row_tile, start, mask_bytes, rows, columns)
    value = tl.where(counts, value, 0.0)
    first = out + row_tile.to(tl.int64) * (rows * slice_width) + column_tile * columns
    there = tl.arange(0, rows)[:, None] * slice_width + tl.arange(0, columns)[None, :]
    tl.store(first + there, value.to(out.dtype.element_ty))


@triton.jit
def hidden_gradient(
    dlogits,
    weight,
    count,
    slice_start,
    chain_start,
    end,
    chain,
    out,
    dim: tl.constexpr,
    vocab_size: tl.constexpr,
    layout: tl.constexpr,
    slice_width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    band: tl.constexpr,
):
    """Each program computes one tile of chain + dlogits·W over a slice's columns before `end`.

    A chain's first slice starts from 0. Slices change no bits: they end at multiples of `depth` from the chain's start,
    and the sums are kept in float32 between slices.
    """
    if out is None:
        out = chain
    column_tiles: tl.constexpr = (dim + columns - 1) // columns
    row_tile, column_tile = place_in_band(tl.num_programs(0) // column_tiles, column_tiles, band)
    if row_tile * rows >= tl.load(count):
        return
    start = first_column(slice_start)
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    k = tl.arange(0, depth)
    k_stride: tl.constexpr = dim if layout == "vd" else 1
    column_stride: tl.constexpr = 1 if layout == "vd" else vocab_size
    first_row = row_tile.to(tl.int64) * rows
    first_of_dim = column_tile.to(tl.int64) * columns
    a, a_tile = dlogits + first_row * slice_width, row * slice_width + k[None, :]
    b = weight + start.to(tl.int64) * k_stride + first_of_dim * column_stride
    b_tile = k[:, None] * k_stride + column * column_stride
    is_column = column < dim - first_of_dim
    there = first_row * dim + first_of_dim + row * dim + column
    product = tl.load(chain + there, mask=is_column & (start > tl.load(chain_start)), other=0.0)
    width = tl.maximum(tl.minimum(tl.load(end) - start, slice_width), 0)
    whole, rest = width // depth, width % depth
    b_step: tl.constexpr = depth * k_stride
    product = multiply(product, a, a_tile, None, depth, b, b_tile, is_column, b_step, whole)
    # Behind its last column the head may hold anything, and 0·NaN is NaN.
    is_k = is_column & (k < rest)[:, None]
    a += whole * depth
    b += whole.to(tl.int64) * b_step
    product = multiply(product, a, a_tile, None, depth, b, b_tile, is_k, b_step, tl.minimum(rest, 1))
    tl.store(out + there, product, mask=is_column)


@triton.jit
def weight_gradient(
    dlogits,
    hidden,
    unscale,
    count,
    slice_start,
    end,
    d_weight,
    out,
    dim: tl.constexpr,
    vocab_size: tl.constexpr,
    layout: tl.constexpr,
    slice_width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    band: tl.constexpr,
):
    """Each program computes one tile of dlogitsᵀ·H ("vd") or Hᵀ·dlogits ("dv"), complete.

    Columns of the vocabulary from `end` on are not written. Rows behind those that count are 0 in both operands up to a
    whole block of K.
    """
    if out is None:
        out = d_weight
    m_size: tl.constexpr = slice_width if layout == "vd" else dim
    n_size: tl.constexpr = dim if layout == "vd" else slice_width
    column_tiles: tl.constexpr = (n_size + columns - 1) // columns
    row_tile, column_tile = place_in_band((m_size + rows - 1) // rows, column_tiles, band)
    first_m, first_n = row_tile * rows, column_tile * columns
    m, n = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    k = tl.arange(0, depth)
    a = (dlogits if layout == "vd" else hidden) + first_m
    b = (hidden if layout == "vd" else dlogits) + first_n
    is_m, is_n = m < m_size - first_m, n < n_size - first_n
    steps = (tl.load(count) + depth - 1) // depth
    product = tl.zeros((rows, columns), tl.float32)
    product = multiply(
        product,
        a,
        k[None, :] * m_size + m,
        is_m,
        depth * m_size,
        b,
        k[:, None] * n_size + n,
        is_n,
        depth * n_size,
        steps,
    )
    product *= tl.load(unscale)
    first = first_column(slice_start) + (first_m if layout == "vd" else first_n)
    is_real = (m if layout == "vd" else n) < tl.load(end) - first
    if layout == "vd":
        there = first.to(tl.int64) * dim + first_n + m * dim + n
    else:
        there = first_m.to(tl.int64) * vocab_size + first + m * vocab_size + n
    tl.store(out + there, product.to(out.dtype.element_ty), mask=is_m & is_n & is_real)


@triton.jit
def column_sums(
    dlogits,
    row_unscale,
    count,
    out,
    slice_width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Each program sums some columns of one slice's gradients over blocks of rows, folded in ascending order."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    rows_there = tl.load(count)
    total = tl.zeros((columns,), tl.float32)
    for first in range(0, rows_there, rows):
        row = first + tl.arange(0, rows)
        there = row.to(tl.int64)[:, None] * slice_width + column[None, :]
        values = tl.load(dlogits + there, mask=(row < rows_there)[:, None], other=0.0).to(tl.float32)
        total += tl.sum(values * tl.load(row_unscale + row)[:, None], axis=0)
    tl.store(out + column, total)
