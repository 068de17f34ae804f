"""Device code of linear_logp.py's forward, and the products that its backward shares with it.

Every product runs the loop of `multiply`: one chain over ascending K, never split. A tile of logits is `rows` ×
`columns`; its columns from `end` on belong to the next group or are padding.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.row_kernels import LN_2, finite_gap, rescale, softcapped, subtractable

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_column(slice_start):
    """The first column of a slice. It is a multiple of 8, so that 16-bit columns can be read 16 bytes at a time."""
    return tl.multiple_of(tl.load(slice_start), 8)


@triton.jit
def multiply(product, a, a_tile, a_mask, a_step, b, b_tile, b_mask, b_step, steps):
    """product + A·B over `steps` blocks of K.

    a and b point to the corners of the first tiles. a_tile and b_tile are the elements' int32 offsets within every
    tile: 64-bit pointers to each element would take twice the registers.
    """
    for _ in range(steps):
        of_a = tl.load(a + a_tile) if a_mask is None else tl.load(a + a_tile, mask=a_mask, other=0.0)
        product = tl.dot(of_a, tl.load(b + b_tile, mask=b_mask, other=0.0), product)
        a += a_step
        b += b_step
    return product


@triton.jit
def multiply_all(
    product,
    a,
    a_tile,
    a_mask,
    a_stride: tl.constexpr,
    b,
    b_tile,
    b_mask,
    b_stride: tl.constexpr,
    size: tl.constexpr,
    depth: tl.constexpr,
):
    """product + A·B over all `size` of K, of which two neighbours lie a_stride and b_stride elements apart."""
    whole: tl.constexpr = size // depth
    a_step: tl.constexpr = depth * a_stride
    b_step: tl.constexpr = depth * b_stride
    product = multiply(product, a, a_tile, a_mask, a_step, b, b_tile, b_mask, b_step, whole)
    if size % depth != 0:
        is_k = tl.arange(0, depth) < size % depth
        a += tl.cast(whole, tl.int64) * a_step
        b += tl.cast(whole, tl.int64) * b_step
        a_rest = is_k[None, :] if a_mask is None else a_mask & is_k[None, :]
        product = multiply(product, a, a_tile, a_rest, a_step, b, b_tile, b_mask & is_k[:, None], b_step, 1)
    return product


@triton.jit
def place_in_band(row_tiles, column_tiles, band: tl.constexpr):
    """The row and the column of this program's tile.

    Tiles are visited band by band of rows, and in a band column by column, so that caches keep both operands.
    """
    program = tl.program_id(0)
    first = program // (band * column_tiles) * band
    height = tl.minimum(band, row_tiles - first)
    inside = program - first * column_tiles
    return first + inside % height, inside // height


@triton.jit
def hidden_times_head(
    product,
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
    """product + a tile of hidden·Wᵀ whose columns begin at column `start` of the head.

    It adds 0 where the head has no column.
    """
    column, k = tl.arange(0, columns)[None, :], tl.arange(0, depth)
    column_stride: tl.constexpr = dim if layout == "vd" else 1
    k_stride: tl.constexpr = 1 if layout == "vd" else vocab_size
    a = hidden + row_tile.to(tl.int64) * (rows * dim)
    a_tile = tl.arange(0, rows)[:, None] * dim + k[None, :]
    b = weight + start.to(tl.int64) * column_stride
    b_tile = column * column_stride + k[:, None] * k_stride
    is_column = column < vocab_size - start
    return multiply_all(product, a, a_tile, None, 1, b, b_tile, is_column, k_stride, dim, depth)


@triton.jit
def logit_products(
    hidden,
    weight,
    low_rank_hidden,
    low_rank_weight,
    row_tile,
    start,
    dim: tl.constexpr,
    rank: tl.constexpr,
    vocab_size: tl.constexpr,
    layout: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """A tile of hidden·Wᵀ, whose chain goes on over the columns of a low-rank term where `rank` is not 0."""
    product = tl.zeros((rows, columns), tl.float32)
    product = hidden_times_head(product, hidden, weight, row_tile, start, dim, vocab_size, layout, rows, columns, depth)
    if rank > 0:
        product = hidden_times_head(
            product, low_rank_hidden, low_rank_weight, row_tile, start, rank, vocab_size, layout, rows, columns, depth
        )
    return product


@triton.jit
def with_bias(product, bias, column, vocab_size: tl.constexpr, has_bias: tl.constexpr):
    """product + bias, or the product where there is no bias."""
    if has_bias:
        product += tl.load(bias + column, mask=column < vocab_size, other=0.0).to(tl.float32)[None, :]
    return product


@triton.jit
def is_allowed(allowed, row_tile, start, mask_bytes: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Whether each row of a tile may take each of its columns, which begin at column `start`, a multiple of 8.

    Bit i of byte j of a row is column 8·j + i. Each byte is loaded once and then spread over its columns: an address
    for each column would take more registers than there are.
    """
    byte, column = tl.arange(0, columns // 8)[None, :], tl.arange(0, columns)[None, :]
    first = allowed + row_tile.to(tl.int64) * (rows * mask_bytes) + start // 8
    there = tl.arange(0, rows)[:, None] * mask_bytes + byte
    own = tl.load(first + there, mask=byte < mask_bytes - start // 8, other=0)
    of_columns = tl.reshape(tl.broadcast_to(own[:, :, None], (rows, columns // 8, 8)), (rows, columns))
    return (of_columns.to(tl.int32) >> (column % 8)) & 1 != 0


@triton.jit
def partials(
    hidden,
    weight,
    low_rank_hidden,
    low_rank_weight,
    bias,
    allowed,
    target_ids,
    temperature,
    count,
    real_columns,
    maximum_out,
    total_out,
    target_out,
    gap_out,
    sum_out,
    dim: tl.constexpr,
    rank: tl.constexpr,
    vocab_size: tl.constexpr,
    layout: tl.constexpr,
    softcap: tl.constexpr,
    has_bias: tl.constexpr,
    mask_bytes: tl.constexpr,
    with_gap: tl.constexpr,
    with_sum: tl.constexpr,
    groups: tl.constexpr,
    group_width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    band: tl.constexpr,
):
    """Each program computes the softmax of a tile of rows over one chunk of the vocabulary, `[rows, chunks]`."""
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
    product = logit_products(
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
    x = softcapped(with_bias(product, bias, column, vocab_size, has_bias), softcap)
    is_real = column[None, :] < end
    is_target = (column[None, :] == tl.load(target_ids + row)[:, None]) & is_real
    target = tl.sum(tl.where(is_target, x, 0.0), axis=1)
    logit_sum = tl.sum(tl.where(is_real, x, 0.0), axis=1)
    x = tl.where(is_real, x, float("-inf"))
    if mask_bytes > 0:
        x = tl.where(is_allowed(allowed, row_tile, start, mask_bytes, rows, columns), x, float("-inf"))
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
    if with_sum:
        tl.store(sum_out + there, logit_sum)


@triton.jit
def logits(
    hidden,
    weight,
    low_rank_hidden,
    low_rank_weight,
    bias,
    allowed,
    temperature,
    count,
    slice_start,
    end,
    out,
    dim: tl.constexpr,
    rank: tl.constexpr,
    vocab_size: tl.constexpr,
    layout: tl.constexpr,
    softcap: tl.constexpr,
    has_bias: tl.constexpr,
    mask_bytes: tl.constexpr,
    slice_width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    band: tl.constexpr,
):
    """Each program computes one tile of a slice's logits / T, with the bits that `partials` and `fold` give a target's:
    −inf from column `end` on, and where a row may not take the column.
    """
    column_tiles: tl.constexpr = slice_width // columns
    row_tile, column_tile = place_in_band(tl.num_programs(0) // column_tiles, column_tiles, band)
    if row_tile * rows >= tl.load(count):
        return
    row = row_tile * rows + tl.arange(0, rows)
    start = first_column(slice_start) + column_tile * columns
    column = start + tl.arange(0, columns)
    product = logit_products(
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
    x = softcapped(with_bias(product, bias, column, vocab_size, has_bias), softcap)
    counts = column[None, :] < tl.load(end)
    if mask_bytes > 0:
        counts &= is_allowed(allowed, row_tile, start, mask_bytes, rows, columns)
    inverse = 1 / tl.load(temperature + row)
    first = out + row_tile.to(tl.int64) * (rows * slice_width) + column_tile * columns
    there = tl.arange(0, rows)[:, None] * slice_width + tl.arange(0, columns)[None, :]
    tl.store(first + there, tl.where(counts, x * inverse[:, None], float("-inf")))


@triton.jit
def fold(
    maximum,
    total,
    target,
    gap,
    logit_sum,
    temperature,
    count,
    maximum_out,
    total_out,
    target_out,
    gap_out,
    sum_out,
    groups: tl.constexpr,
    group_chunks: tl.constexpr,
    with_gap: tl.constexpr,
    with_sum: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
):
    """Each program folds the softmaxes of one group's chunks, `[groups, rows]`, for some rows of logits / T."""
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
    if with_sum:
        sums = tl.load(logit_sum + there, mask=is_chunk, other=0.0)
        tl.store(sum_out + out, tl.sum(sums, axis=1) * inverse)
