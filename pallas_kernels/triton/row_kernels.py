"""Device code of rows.py, and the formulas that linear_logp's kernels share with it."""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
MINUS_2_LOG2_E = tl.constexpr(-2.8853900817779268)
SMALL = tl.constexpr(0.25)
"""For arguments of tanh below it, 1 − exp(−2x) loses digits that the series of tanh keeps."""


@triton.jit
def softcapped(x, softcap: tl.constexpr):
    """softcap(x) = c·tanh(x/c), or x without a softcap. The hardware's own tanh is not accurate enough."""
    if softcap is not None:
        share = x * (1.0 / softcap)
        e = tl.exp2(tl.abs(share) * MINUS_2_LOG2_E)
        large = (1 - e) / (1 + e)
        square = share * share
        series = share * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
        x = softcap * tl.where(tl.abs(share) < SMALL, series, tl.where(share < 0, -large, large))
    return x


@triton.jit
def softcap_derivative(x, softcap: tl.constexpr):
    """The derivative of softcap at x, 1 − tanh(x/c)², without the cancellation where tanh is near 1."""
    e = tl.exp2(tl.abs(x) * (MINUS_2_LOG2_E / softcap))
    return 4 * e / ((1 + e) * (1 + e))


@triton.jit
def subtractable(maximum):
    """The maximum, or 0 where it is −inf, so that −inf minus it is not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def finite_gap(y):
    """−y, made finite where y = −inf: the exponential of such a y is 0, and 0·∞ must be 0."""
    return tl.minimum(-y, 1e30)


@triton.jit
def rescale(maximum, total, gap, new_maximum, scale, with_gap: tl.constexpr):
    """The sums Σ 2^y and Σ 2^y·(−y) with y = (x − maximum)·scale, rescaled to a new maximum.

    The new maximum is not smaller than the old one, and not −inf.
    """
    y = (maximum - new_maximum) * scale
    factor = tl.exp2(y)
    if with_gap:
        gap = (gap + total * finite_gap(y)) * factor
    return total * factor, gap


@triton.jit
def is_allowed(words_of_row, column, exists):
    """Whether bit column modulo 32 is set in the word of each column that exists."""
    word = tl.load(words_of_row + column // 32, mask=exists, other=0)
    return ((word >> (column % 32)) & 1) != 0


@triton.jit
def statistics(
    logits,
    target_ids,
    temperature,
    active,
    allowed,
    maximum_out,
    total_out,
    target_out,
    gap_out,
    row_length: tl.constexpr,
    columns: tl.constexpr,
    softcap: tl.constexpr,
    with_gap: tl.constexpr,
    words: tl.constexpr,
    depth: tl.constexpr,
    lanes: tl.constexpr,
):
    """Each program takes one row. A lane keeps the maximum and sums of its own columns; lanes are merged at the end.

    words is how many words of `allowed` a row has, 0 where all columns are allowed.
    """
    row = tl.program_id(0)
    if tl.load(active + row) == 0:
        tl.store(maximum_out + row, 0.0)
        tl.store(total_out + row, 1.0)
        tl.store(target_out + row, 0.0)
        if with_gap:
            tl.store(gap_out + row, 0.0)
        return
    scale = 1.4426950408889634 / tl.load(temperature + row)
    of_row = logits + row.to(tl.int64) * row_length
    place = tl.arange(0, depth)[:, None] * lanes + tl.arange(0, lanes)[None, :]
    maximum = tl.full((lanes,), float("-inf"), tl.float32)
    total = tl.zeros((lanes,), tl.float32)
    gap = tl.zeros((lanes,), tl.float32)
    for first in range(0, columns, depth * lanes):
        column = first + place
        x = tl.load(of_row + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        if softcap is not None:
            x = tl.where(column < columns, softcapped(x, softcap), float("-inf"))
        largest = x
        if words > 0:
            counts = is_allowed(allowed + row.to(tl.int64) * words, column, column < columns)
            largest = tl.where(counts, x, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(largest, axis=0))
        below = subtractable(new_maximum)
        total, gap = rescale(maximum, total, gap, below, scale, with_gap)
        y = (x - below[None, :]) * scale
        if words > 0:
            # The difference is that of all values: compilers may fuse what x is a product of into it.
            y = tl.where(counts, y, float("-inf"))
        weight = tl.exp2(y)
        total += tl.sum(weight, axis=0)
        if with_gap:
            gap += tl.sum(weight * finite_gap(y), axis=0)
        maximum = new_maximum
    whole = tl.max(maximum, axis=0)
    total, gap = rescale(maximum, total, gap, subtractable(whole), scale, with_gap)
    tl.store(maximum_out + row, whole)
    tl.store(total_out + row, tl.sum(total, axis=0))
    if with_gap:
        tl.store(gap_out + row, tl.sum(gap, axis=0))
    target = tl.load(target_ids + row)
    is_here = (target >= 0) & (target < columns)
    x = tl.load(of_row + target, mask=is_here, other=0.0).to(tl.float32)
    tl.store(target_out + row, softcapped(x, softcap))


@triton.jit
def gradients(
    logits,
    target_ids,
    active,
    allowed,
    scale,
    maximum,
    log2_total,
    constant,
    slope,
    at_target,
    out,
    row_length: tl.constexpr,
    columns: tl.constexpr,
    softcap: tl.constexpr,
    with_slope: tl.constexpr,
    words: tl.constexpr,
    width: tl.constexpr,
):
    """Each program takes one block of one row. An element's gradient does not depend on other elements."""
    if out is None:
        out = logits
    blocks: tl.constexpr = (row_length + width - 1) // width
    row = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * width + tl.arange(0, width)
    start = row.to(tl.int64) * row_length
    in_row = column < row_length
    if tl.load(active + row) == 0:
        tl.store(out + start + column, tl.zeros((width,), out.dtype.element_ty), mask=in_row)
        return
    raw = tl.load(logits + start + column, mask=column < columns, other=0.0).to(tl.float32)
    y = (softcapped(raw, softcap) - tl.load(maximum + row)) * tl.load(scale + row) - tl.load(log2_total + row)
    factor = tl.load(constant + row)
    if with_slope:
        factor -= tl.load(slope + row) * finite_gap(y)
    value = tl.where(column == tl.load(target_ids + row), tl.load(at_target + row), tl.exp2(y) * factor)
    if softcap is not None:
        value *= softcap_derivative(raw, softcap)
    if words > 0:
        value = tl.where(is_allowed(allowed + row.to(tl.int64) * words, column, column < columns), value, 0.0)
    value = tl.where(column < columns, value, 0.0)
    tl.store(out + start + column, value.to(out.dtype.element_ty), mask=in_row)
