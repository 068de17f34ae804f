"""Backward of linear_logp, first half: gradients of the products hidden·Wᵀ for one slice of chunks, rounded to 16 bits.

With y = z·log2(e) and p = 2^(y − K) / Σ 2^(y − K), K the integer nearest to the row's largest y, a logit's gradient is
    p·(g_lse − g_logp − g_entropy·(z − Σ p·z)) + [target]·g_logp,
and at the target −g_logp·expm1(logp) stands for g_logp·(1 − p). bfloat16 gradients round E = bf16(2^(y − k)) first, k
the integer of the row's chunk of 256 columns, whether E is computed here (`dlogits`) or was kept by the forward
(`from_powers`): which of the two changes no bit.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import LN_2, LOG2_E, Coefficients, Kept, Logits, Rows, Slice, Source
from pallas_kernels.hopper.tiles import COLUMNS, THREADS, Machine, statistics_tile
from pallas_kernels.hopper.vocabulary import Vocabulary
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import (
    STRIP,
    WARPGROUP_ROWS,
    Block,
    column_numbers,
    multiply,
    over_columns,
    over_rows,
    row_vector,
    store_through,
)
from pallas_kernels.mosaic.statistics import (
    Powers,
    bounded,
    chunk_of,
    column_bias,
    masked,
    place_of,
    powers,
    product_with_head,
    row_clusters,
    width_of,
)

Array = jax.Array
Ref = Any
_AT_ONCE = 16
"""Rows of kept powers loaded together, so that their latencies overlap."""


class _Arguments(NamedTuple):
    where: Slice
    hidden: Ref
    weight: Ref
    bias: Ref | None
    rows: Coefficients
    out: Ref


def _minus_expm1(x: Array) -> Array:
    """1 − exp(x) for x <= 0, without the cancellation near 0."""
    series = -x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
    return jnp.where(x > -0.1, series, 1 - jnp.exp2(x * LOG2_E))


def coefficients(rows: Rows, machine: Machine) -> Coefficients:
    """What the gradients of each row's logits are made of."""
    n = rows.logp.shape[0]

    def body(rows: Rows, out: _Computed) -> None:
        here = pl.ds(lax.axis_index("blocks") * THREADS, THREADS)
        layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
        found = _computed(jax.tree.map(lambda x: plgpu.load(x.at[here], layout=layout, optimized=False), rows))
        for ref, value in zip(out, found, strict=True):
            if ref is not None:
                ref[here] = value

    row = jax.ShapeDtypeStruct((n,), jnp.float32)
    out_type = _Computed(row, None if rows.g_entropy is None else row, row)
    found = launch(body, "linear_logp_coefficients", machine, out_type, (n // THREADS,), rows)
    return Coefficients(rows.target_ids, rows.temperature, rows.shift, *found)


class _Computed(NamedTuple):
    constant: Any
    slope: Any
    at_target: Any


def _computed(rows: Rows) -> _Computed:
    per_logit = (1.0 if rows.scale is None else rows.scale) / rows.temperature
    others = -rows.g_logp if rows.g_lse is None else rows.g_lse - rows.g_logp
    slope = None
    probability = jnp.exp2(rows.logp * LOG2_E)
    at_target = rows.g_logp * _minus_expm1(rows.logp)
    if rows.g_lse is not None:
        at_target = at_target + rows.g_lse * probability
    if rows.g_entropy is not None:
        slope = -LN_2 * rows.g_entropy
        # log p = ln(2)·(y − shift) − ln(total), so that at the target y − shift needs no product of its own.
        target_y = jnp.maximum(rows.logp * LOG2_E + jnp.log2(rows.total), -1e30)
        at_target = at_target + slope * (target_y + rows.gap) * probability
        others = others + slope * rows.gap
    weight = per_logit / rows.total
    return _Computed(
        constant=others * weight,
        slope=None if slope is None else slope * weight,
        at_target=at_target * per_logit,
    )


class _Chunk(NamedTuple):
    """Of a row within one chunk of its own k: dlogit = 2^(y − k)·(constant + slope·(y − k))."""

    constant: Array
    slope: Array | None


def _within(c: Coefficients, shift: Array) -> _Chunk:
    # A chunk of no finite logit has k = 0, which may be above the row's.
    below = jnp.minimum(shift - c.shift, 0.0)
    power = jnp.exp2(below)
    if c.slope is None:
        return _Chunk(c.constant * power, None)
    # The power is 0 long before, and 0·∞ must be 0.
    return _Chunk((c.constant + c.slope * jnp.maximum(below, -1e3)) * power, c.slope * power)


def _largest(vocabulary: Vocabulary, values_of: Callable[[int], Array], width: Array) -> Array:
    """Per row, the largest value of a chunk."""

    def over_strips(values_of: Callable[[int], Array]) -> Array:
        return functools.reduce(jnp.maximum, map(values_of, range(COLUMNS // STRIP))).max(axis=1)

    def inside(strip: int) -> Array:
        return jnp.where(column_numbers(STRIP) < width - strip * STRIP, values_of(strip), -jnp.inf)

    def whole() -> Array:
        return over_strips(values_of)

    return lax.cond(width < COLUMNS, lambda: over_strips(inside), whole) if vocabulary.is_ragged else whole()


def _gradient(
    logits: Logits, to_powers: Powers, c: _Chunk, products: Array, bias: Array | None, rounds_powers: bool
) -> tuple[Array, Array | None]:
    """Gradients of some columns' logits away from the target, and what all of them are to be multiplied by."""
    columns = products.shape[1]
    values, derivative = bounded(logits, products, bias)
    y = to_powers.exponents(values)
    if derivative is not None:
        # At most 1/2, but for a fused product of values that have no digits behind the point.
        y = jnp.minimum(y, 1.0)
    if c.slope is not None:
        # A power of 0 stands beside y = −∞, and 0·∞ must be 0.
        y = jnp.maximum(y, -1e30)
    factor = over_columns(c.constant, columns)
    if c.slope is not None:
        factor = factor + over_columns(c.slope, columns) * y
    found = jnp.exp2(y)
    if rounds_powers:
        found = found.astype(jnp.bfloat16)
        if derivative is None:
            # So that one instruction rounds two of them, not each one as slow as exp2; spills beside a softcap.
            found = lax.optimization_barrier(found)
        found = found.astype(jnp.float32)
    return found * factor, derivative


def dlogits(
    logits: Logits,
    machine: Machine,
    where: Slice,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    rows: Coefficients,
    out: Ref,
) -> None:
    """Write the gradients of one slice into the reference `out [rows, chunks · 256]`; 0 in places that hold no column.

    hidden `[rows, D]`, weight and bias as in `statistics.partials`.
    """
    head = logits.head

    def finish(refs: _Arguments, block: Block, product: Any, staging: Ref) -> None:
        # Asked for before the product and used after it: the latency of memory hides there.
        c = jax.tree.map(lambda ref: row_vector(ref, block.row), refs.rows)
        products = product()
        chunk, width = chunk_of(head.vocabulary, refs.where, block)
        target = place_of(head.vocabulary, c.target_ids, chunk, width)

        def bias_of(strip: int) -> Array | None:
            # Asked for here rather than before the product: 64 more registers would spill beside a softcap.
            return column_bias(refs.bias, block.column_block * COLUMNS + strip * STRIP, STRIP)

        def products_of(strip: int) -> Array:
            return products[:, strip * STRIP : (strip + 1) * STRIP]

        def biased(strip: int) -> Array:
            bias = bias_of(strip)
            return products_of(strip) if bias is None else products_of(strip) + over_rows(bias)

        scale = LOG2_E / c.temperature
        if logits.softcap is None:
            to_powers = powers(_largest(head.vocabulary, biased, width), scale)
            within = _within(c, to_powers.shift)
        else:
            # Nothing is kept beside a softcap: the row's own integer will do, and more registers would spill.
            to_powers = Powers(jnp.zeros_like(scale), scale, c.shift, -c.shift)
            within = _Chunk(c.constant, c.slope)

        def strip_of(strip: int) -> Array:
            rounds = out.dtype == jnp.bfloat16
            gradient, derivative = _gradient(logits, to_powers, within, products_of(strip), bias_of(strip), rounds)
            is_target = column_numbers(STRIP) == over_columns(target - strip * STRIP, STRIP)
            gradient = jnp.where(is_target, over_columns(c.at_target, STRIP), gradient)
            gradient = gradient if derivative is None else gradient * derivative
            return masked(logits, gradient.astype(out.dtype), width - strip * STRIP, 0)

        def store(strip: int, smem: Ref) -> None:
            columns = pl.ds(block.column_block * COLUMNS + strip * STRIP, STRIP)
            there = refs.out.at[pl.ds(block.row, WARPGROUP_ROWS), columns]
            plgpu.copy_smem_to_gmem(smem, there, commit_group=False)

        store_through(staging, block.warpgroup, machine, strip_of, store)

    tile, chunks = statistics_tile(hidden.shape[0]), out.shape[1] // COLUMNS
    product = product_with_head("linear_logp_dlogits", head, tile, hidden, chunks, finish, out.dtype)
    multiply(product, machine, _Arguments(where, hidden, weight, bias, rows, out))


def from_powers(
    vocabulary: Vocabulary, machine: Machine, where: Slice, kept: Kept, source: Source, rows: Coefficients, out: Ref
) -> None:
    """What `dlogits` writes, from the powers that the forward kept: row `source.row[i]` of them belongs to row i.

    In place where `kept.powers` is None and `out` holds them, for the first chunks. A thread reads a row of a chunk
    before it writes one, and rows that moved are taken in order by one block: none is overwritten before it is read.
    """
    layout = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=2)
    n, chunks = out.shape[0], out.shape[1] // COLUMNS
    written = statistics_tile(n).cluster_rows

    def body(where: Slice, kept: Kept, source: Source, rows: Coefficients, out: Ref, no_more: tuple[()]) -> None:
        block, place = lax.axis_index("blocks"), lax.axis_index("groups")
        powers = out if kept.powers is None else kept.powers
        chunk = where.first_chunk[0] + place
        width = width_of(vocabulary, where, chunk)
        column = plgpu.broadcasted_iota(jnp.int32, (COLUMNS,), 0, layout=layout)

        def gradient_of(row: Array) -> Array:
            there = source.row[row]
            found = plgpu.load(powers.at[there, pl.ds(chunk * COLUMNS, COLUMNS)], layout=layout, optimized=False)
            c = jax.tree.map(lambda ref: ref[row], rows)
            within = _within(c, kept.shift[chunk, there])
            target = place_of(vocabulary, c.target_ids, chunk, width)
            gradient = jnp.where(column == target, c.at_target, found.astype(jnp.float32) * within.constant)
            holds = jnp.where(row < where.rows[0], width, 0)
            return jnp.where(column < holds, gradient, 0.0).astype(out.dtype)

        def some_rows(i: Array, _: None) -> None:
            first = i * _AT_ONCE
            gradients = [gradient_of(first + j) for j in range(_AT_ONCE)]
            for j, gradient in enumerate(gradients):
                out[first + j, pl.ds(place * COLUMNS, COLUMNS)] = gradient

        @pl.when(place < where.chunks[0])
        def _() -> None:
            end = row_clusters(where.rows[0], written) * written
            first, last = block * WARPGROUP_ROWS, jnp.minimum(end, (block + 1) * WARPGROUP_ROWS)
            if kept.powers is None:
                moved = source.moved[0] != 0
                first, last = jnp.where(moved, 0, first), jnp.where(moved, jnp.where(block == 0, end, 0), last)
            at_once = jnp.int32(_AT_ONCE)
            lax.fori_loop(lax.div(first, at_once), lax.div(last, at_once), some_rows, None)

    grid, arguments = (n // WARPGROUP_ROWS, chunks), (where, kept, source, rows, out)
    launch(body, "linear_logp_from_powers", machine, (), grid, *arguments, approx_math=True)
