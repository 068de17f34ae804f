"""Device code of linear_logp.py. Every product runs the loop of `multiply`: one chain over ascending K, never split.

A tile of logits is `rows` × `columns`; columns from `end` on belong to the next group, or are padding.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.row_kernels import LN_2, finite_gap, rescale, softcap_derivative, softcapped, subtractable

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_column(slice_start):
    """Every slice starts at a multiple of 8: 16-bit columns can be read 16 bytes at a time."""
    return tl.multiple_of(tl.load(slice_start), 8)


@triton.jit
def multiply(product, a, a_tile, a_mask, a_step, b, b_tile, b_mask, b_step, steps):
    """product + A·B over `steps` blocks of K. a, b point to the corners of the first tiles, a_tile and b_tile are int32
    offsets within any: 64-bit pointers for each element would take twice the registers.
    """
    for _ in range(steps):
        of_a = tl.load(a + a_tile) if a_mask is None else tl.load(a + a_tile, mask=a_mask, other=0.0)
        product = tl.dot(of_a, tl.load(b + b_tile, mask=b_mask, other=0.0), product)
        a += a_step
        b += b_step
    return product


@triton.jit
def place_in_band(row_tiles, column_tiles, band: tl.constexpr):
    """This program's tile: bands of rows, in each the rows of a column first, so that caches keep both operands."""
    program = tl.program_id(0)
    first = program // (band * column_tiles) * band
    height = tl.minimum(band, row_tiles - first)
    inside = program - first * column_tiles
    return first + inside % height, inside // height


@triton.jit
def hidden_times_head(
    hidden,
    weight,
    row_tile,
    start,
    dim: tl.constexpr,
    vocab_size: tl.constexpr,
    layout: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """A tile of hidden·Wᵀ, its columns from `start` on; 0 where the head has none."""
    column, k = tl.arange(0, columns)[None, :], tl.arange(0, depth)
    column_stride: tl.constexpr = dim if layout == "vd" else 1
    k_stride: tl.constexpr = 1 if layout == "vd" else vocab_size
    a = hidden + row_tile.to(tl.int64) * (rows * dim)
    a_tile = tl.arange(0, rows)[:, None] * dim + k[None, :]
    b = weight + start.to(tl.int64) * column_stride
    b_tile = column * column_stride + k[:, None] * k_stride
    is_column = column < vocab_size - start
    product = tl.zeros((rows, columns), tl.float32)
    whole: tl.constexpr = dim // depth
    b_step: tl.constexpr = depth * k_stride
    product = multiply(product, a, a_tile, None, depth, b, b_tile, is_column, b_step, whole)
    if dim % depth != 0:
        is_k = k < dim % depth
        a += whole * depth
        b += tl.cast(whole, tl.int64) * b_step
        product = multiply(product, a, a_tile, is_k[None, :], depth, b, b_tile, is_column & is_k[:, None], b_step, 1)
    return product


@triton.jit
def with_bias(product, bias, column, vocab_size: tl.constexpr, has_bias: tl.constexpr):
    if has_bias:
        product += tl.load(bias + column, mask=column < vocab_size, other=0.0).to(tl.float32)[None, :]
    return product


@triton.jit
def partials(
    hidden,
    weight,
    bias,
    target_ids,
    temperature,
    count,
    real_columns,
    maximum_out,
    total_out,
    target_out,
    gap_out,
    dim: tl.constexpr,
    vocab_size: tl.constexpr,
    layout: tl.constexpr,
    softcap: tl.constexpr,
    has_bias: tl.constexpr,
    with_gap: tl.constexpr,
    groups: tl.constexpr,
    group_width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    band: tl.constexpr,
):
    """A row tile and a chunk of the vocabulary per program: the softmax over the chunk, `[rows, chunks]`."""
    group_chunks: tl.constexpr = (group_width + columns - 1) // columns
    chunks: tl.constexpr = groups * group_chunks
    row_tile, chunk = place_in_band(tl.num_programs(0) // chunks, chunks, band)
    if row_tile * rows >= tl.load(count):
        return
    row = row_tile * rows + tl.arange(0, rows)
    group = chunk // group_chunks
    start = group * group_width + chunk % group_chunks * columns
    column = start + tl.arange(0, columns)
    end = tl.minimum((group + 1) * group_width, tl.load(real_columns))
    product = hidden_times_head(hidden, weight, row_tile, start, dim, vocab_size, layout, rows, columns, depth)
    x = softcapped(with_bias(product, bias, column, vocab_size, has_bias), softcap)
    is_real = column[None, :] < end
    is_target = (column[None, :] == tl.load(target_ids + row)[:, None]) & is_real
    target = tl.sum(tl.where(is_target, x, 0.0), axis=1)
    x = tl.where(is_real, x, float("-inf"))
    maximum = tl.max(x, axis=1)
    scale = LOG2_E / tl.load(temperature + row)
    y = (x - subtractable(maximum)[:, None]) * scale[:, None]
    weights = tl.exp2(y)
    there = row.to(tl.int64) * chunks + chunk
    tl.store(maximum_out + there, maximum)
    tl.store(total_out + there, tl.sum(weights, axis=1))
    tl.store(target_out + there, target)
    if with_gap:
        tl.store(gap_out + there, tl.sum(weights * finite_gap(y), axis=1))


@triton.jit
def fold(
    maximum,
    total,
    target,
    gap,
    temperature,
    count,
    maximum_out,
    total_out,
    target_out,
    gap_out,
    groups: tl.constexpr,
    group_chunks: tl.constexpr,
    with_gap: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
):
    """Some rows and a group per program: its chunks' softmaxes to the group's, `[groups, rows]`, of logits / T."""
    block, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    if block * rows >= tl.load(count):
        return
    row = block * rows + tl.arange(0, rows)
    chunk = tl.arange(0, width)
    there = row.to(tl.int64)[:, None] * (groups * group_chunks) + group * group_chunks + chunk[None, :]
    is_chunk = chunk[None, :] < group_chunks
    of_chunk = tl.load(maximum + there, mask=is_chunk, other=float("-inf"))
    total = tl.load(total + there, mask=is_chunk, other=0.0)
    target = tl.load(target + there, mask=is_chunk, other=0.0)
    gaps = tl.load(gap + there, mask=is_chunk, other=0.0) if with_gap else total
    inverse = 1 / tl.load(temperature + row)
    whole = tl.max(of_chunk, axis=1)
    scale = LOG2_E * inverse
    total, gaps = rescale(of_chunk, total, gaps, subtractable(whole)[:, None], scale[:, None], with_gap)
    out = group.to(tl.int64) * (tl.num_programs(0) // groups * rows) + row
    tl.store(maximum_out + out, whole * inverse)
    tl.store(total_out + out, tl.sum(total, axis=1))
    tl.store(target_out + out, tl.sum(target, axis=1) * inverse)
    if with_gap:
        tl.store(gap_out + out, tl.sum(gaps, axis=1) * LN_2)


@triton.jit
def coefficients(
    temperature,
    log_sum,
    logp,
    gap,
    g_logp,
    g_lse,
    g_entropy,
    lift,
    constant_out,
    slope_out,
    at_target_out,
    with_lse: tl.constexpr,
    with_entropy: tl.constexpr,
    rows: tl.constexpr,
):
    """What gradients of logits are made of: p·(constant + slope·ln p), and `at_target` at the target."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    own = tl.load(logp + row)
    upstream = tl.load(g_logp + row)
    per_logit = tl.load(lift + row) / tl.load(temperature + row)
    probability = tl.exp2(own * LOG2_E)
    # 1 − exp(x) without the cancellation near 0.
    series = -own * (1 + own * (1 / 2 + own * (1 / 6 + own * (1 / 24 + own * (1 / 120)))))
    at_target = upstream * tl.where(own > -0.1, series, 1 - probability)
    constant = -upstream
    if with_lse:
        of_lse = tl.load(g_lse + row)
        constant += of_lse
        at_target += of_lse * probability
    if with_entropy:
        # The gradient is −p·(ln p + entropy).
        entropy = tl.load(log_sum + row) + tl.load(gap + row)
        of_entropy = tl.load(g_entropy + row)
        constant -= of_entropy * entropy
        at_target -= of_entropy * (entropy - finite_gap(own)) * probability
        tl.store(slope_out + row, -of_entropy * per_logit)
    tl.store(constant_out + row, constant * per_logit)
    tl.store(at_target_out + row, at_target * per_logit)


@triton.jit
def dlogits(
    hidden,
    weight,
    bias,
    target_ids,
    temperature,
    maximum,
    log_sum,
    constant,
    slope,
    at_target,
    count,
    real_columns,
    slice_start,
    out,
    dim: tl.constexpr,
    vocab_size: tl.constexpr,
    layout: tl.constexpr,
    softcap: tl.constexpr,
    has_bias: tl.constexpr,
    with_slope: tl.constexpr,
    slice_width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    band: tl.constexpr,
):
    """A tile of one slice per program: its logits' gradients; exactly 0 where a row or a column does not count."""
    column_tiles: tl.constexpr = slice_width // columns
    row_tile, column_tile = place_in_band(tl.num_programs(0) // column_tiles, column_tiles, band)
    rows_there = tl.load(count)
    if row_tile * rows >= rows_there:
        return
    row = row_tile * rows + tl.arange(0, rows)
    place = column_tile * columns + tl.arange(0, columns)
    start = first_column(slice_start) + column_tile * columns
    column = start + tl.arange(0, columns)
    raw = hidden_times_head(hidden, weight, row_tile, start, dim, vocab_size, layout, rows, columns, depth)
    raw = with_bias(raw, bias, column, vocab_size, has_bias)
    inverse = 1 / tl.load(temperature + row)
    log_p = (
        softcapped(raw, softcap) * inverse[:, None] - tl.load(maximum + row)[:, None] - tl.load(log_sum + row)[:, None]
    )
    factor = tl.load(constant + row)[:, None]
    if with_slope:
        factor -= tl.load(slope + row)[:, None] * finite_gap(log_p)
    value = tl.exp2(log_p * LOG2_E) * factor
    value = tl.where(column[None, :] == tl.load(target_ids + row)[:, None], tl.load(at_target + row)[:, None], value)
    if softcap is not None:
        value *= softcap_derivative(raw, softcap)
    counts = (row < rows_there)[:, None] & (column < tl.load(real_columns))[None, :]
    value = tl.where(counts, value, 0.0)
    there = out + row.to(tl.int64)[:, None] * slice_width + place[None, :]
    tl.store(there, value.to(out.dtype.element_ty))


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
    """A tile per program: chain + dlogits·W over one slice's columns before `end`; a chain's first slice starts from 0.

    Slices change no bits: they end at multiples of `depth` from the chain's start, and float32 keeps what a slice ends
    with.
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
    # Behind the last column the head may hold anything, and 0·NaN is NaN.
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
    """A tile per program of dlogitsᵀ·H ("vd") or Hᵀ·dlogits ("dv"), complete; columns from `end` on are left alone.

    Rows behind those that count are 0 in both operands up to a whole block of K.
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
    """Some columns per program: Σ over rows of one slice's gradients, in blocks of rows folded in ascending order."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    rows_there = tl.load(count)
    total = tl.zeros((columns,), tl.float32)
    for first in range(0, rows_there, rows):
        row = first + tl.arange(0, rows)
        there = row.to(tl.int64)[:, None] * slice_width + column[None, :]
        values = tl.load(dlogits + there, mask=(row < rows_there)[:, None], other=0.0).to(tl.float32)
        total += tl.sum(values * tl.load(row_unscale + row)[:, None], axis=0)
    tl.store(out + column, total)
