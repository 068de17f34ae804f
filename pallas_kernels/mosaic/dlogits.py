"""Backward of linear_logp, first half: gradients of the products hidden·Wᵀ for one slice of chunks, rounded to 16 bits.

With y = z·log2(e) and p = 2^(y − k) / Σ 2^(y − k), the gradient of a logit is
    p·(g_lse − g_logp − g_entropy·(z − Σ p·z)) + [target]·g_logp,
and at the target −g_logp·expm1(logp) stands for g_logp·(1 − p). bfloat16 gradients round E = bf16(2^(y − k)) first,
so that E itself could be kept from a forward pass without changing a bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.main_loop import (
    STRIP,
    WARPGROUP_ROWS,
    Block,
    column_numbers,
    multiply,
    over_columns,
    row_vector,
    store_through,
)
from pallas_kernels.mosaic.statistics import (
    LN_2,
    LOG2_E,
    Logits,
    Slice,
    chunk_of,
    column_bias,
    place_of,
    product_with_head,
)
from pallas_kernels.mosaic.tiles import COLUMNS, Machine, statistics_tile

Array = jax.Array
Ref = Any


class Rows(NamedTuple):
    """What the gradient knows of each row, `[rows]`; float32 but for `target_ids`. Neutral where a row does not count.

    `scale` is a power of two that the row's gradients are multiplied by before they are rounded, or None.
    """

    target_ids: Any
    temperature: Any
    logp: Any
    shift: Any
    total: Any
    gap: Any
    g_logp: Any
    g_lse: Any
    g_entropy: Any
    scale: Any


class _Arguments(NamedTuple):
    where: Slice
    hidden: Ref
    weight: Ref
    bias: Ref | None
    rows: Rows
    out: Ref


class _Coefficients(NamedTuple):
    """dlogit = 2^(y − shift)·(constant + slope·(y − shift)), and `at_target` at the target."""

    scale: Array
    shift: Array
    constant: Array
    slope: Array | None
    at_target: Array


def _minus_expm1(x: Array) -> Array:
    """1 − exp(x) for x <= 0, without the cancellation near 0."""
    series = -x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
    return jnp.where(x > -0.1, series, 1 - jnp.exp2(x * LOG2_E))


def _coefficients(rows: Rows) -> _Coefficients:
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
    return _Coefficients(
        scale=LOG2_E / rows.temperature,
        shift=rows.shift,
        constant=others * weight,
        slope=None if slope is None else slope * weight,
        at_target=at_target * per_logit,
    )


def _gradient(
    logits: Logits, c: _Coefficients, products: Array, bias: Array | None, target: Array, rounds_exponentials: bool
) -> Array:
    """Gradients of some columns of products; `target` is the target's place among them."""
    columns = products.shape[1]
    values, derivative = logits.bounded(products, bias)
    # y − shift is at most 1/2; where y has no digits behind the point, a fused product would exceed it by far.
    y = jnp.minimum(values * over_columns(c.scale, columns) - over_columns(c.shift, columns), 1.0)
    exponentials = jnp.exp2(y)
    if rounds_exponentials:
        exponentials = exponentials.astype(jnp.bfloat16)
        if derivative is None:
            # So that one instruction rounds two of them, not each one as slow as exp2; spills beside a softcap.
            exponentials = lax.optimization_barrier(exponentials)
        exponentials = exponentials.astype(jnp.float32)
    factor = over_columns(c.constant, columns)
    if c.slope is not None:
        # An exponential of 0 stands beside y = −∞, and 0·∞ must be 0.
        factor = factor + over_columns(c.slope, columns) * jnp.maximum(y, -1e30)
    is_target = column_numbers(columns) == over_columns(target, columns)
    gradient = jnp.where(is_target, over_columns(c.at_target, columns), exponentials * factor)
    return gradient if derivative is None else gradient * derivative


def dlogits(
    logits: Logits,
    machine: Machine,
    where: Slice,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    rows: Rows,
    out: Ref,
) -> None:
    """Write the gradients of one slice into the reference `out [rows, chunks · 256]`; 0 in places that hold no column.

    hidden `[rows, D]`, weight and bias as in `statistics.partials`.
    """
    head = logits.head

    def finish(refs: _Arguments, block: Block, product: Any, staging: Ref) -> None:
        # Asked for before the product and used after it: the latency of memory hides there.
        rows = jax.tree.map(lambda ref: row_vector(ref, block.row), refs.rows)
        products = product()
        chunk, width = chunk_of(head.vocabulary, refs.where, block)
        target = place_of(head.vocabulary, rows.target_ids, chunk, width)
        c = _coefficients(rows)

        def strip_of(strip: int) -> Array:
            start = strip * STRIP
            # Asked for here rather than before the product: 64 more registers would spill beside a softcap.
            bias = column_bias(refs.bias, block.column_block * COLUMNS + start, STRIP)
            strip_products = products[:, start : start + STRIP]
            gradient = _gradient(logits, c, strip_products, bias, target - start, out.dtype == jnp.bfloat16)
            return logits.masked(gradient.astype(out.dtype), width - start, 0)

        def store(strip: int, smem: Ref) -> None:
            columns = pl.ds(block.column_block * COLUMNS + strip * STRIP, STRIP)
            there = refs.out.at[pl.ds(block.row, WARPGROUP_ROWS), columns]
            plgpu.copy_smem_to_gmem(smem, there, commit_group=False)

        store_through(staging, block.warpgroup, machine, strip_of, store)

    tile, chunks = statistics_tile(hidden.shape[0]), out.shape[1] // COLUMNS
    product = product_with_head("linear_logp_dlogits", head, tile, hidden, chunks, finish, out.dtype)
    multiply(product, machine, _Arguments(where, hidden, weight, bias, rows, out))
