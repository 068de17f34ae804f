"""The first half of linear_logp's backward: gradients of the logits of one slice of chunks, rounded to 16 bits.

With y = z·log2(e) and p = 2^(y − K) / Σ 2^(y − K), where the integer K is nearest to the row's largest y, a logit's
gradient is
    p·(g_lse − g_logp − g_entropy·(z − Σ p·z)) + [target]·g_logp.
At the target, −g_logp·expm1(logp) takes the place of g_logp·(1 − p). A softcap multiplies it by its derivative d.
Gradients are computed from the exponential 2^(y − k)·d, where k is the integer of the row's chunk of 256 columns,
rounded to 16 bits (`rounded_exponentials`). Their bits are the same whether it is computed again (`dlogits`) or was
kept by the forward (kept_exponentials.py). A smoothed target's part, g_logp·t_v·d, is added before they are rounded.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import (
    Coefficients,
    GradientRows,
    LogitsConfig,
    VocabSlice,
    exponential_scale,
)
from pallas_kernels.hopper.parts import Matrix, in_parts, parts_of, whole
from pallas_kernels.hopper.tiles import THREADS, Machine
from pallas_kernels.logits import LN_2, LOG2_E
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import (
    STRIP,
    Block,
    column_numbers,
    multiply,
    over_columns,
    row_vector,
)
from pallas_kernels.mosaic.statistics import (
    ExponentScaling,
    bits_of_tile,
    chunk_and_width,
    column_bias,
    cut_for,
    logit_exponents,
    logit_scaling,
    masked,
    may_be_masked,
    only_allowed,
    product_with_head,
    rounded_exponentials,
    target_place,
    with_bias,
)
from pallas_kernels.mosaic.stores import store_through, storing
from pallas_kernels.products import LowRankTerm

Array = jax.Array
Ref = Any


class _DlogitsArguments(NamedTuple):
    """The references that the kernel of `dlogits` is given."""

    where_gmem: VocabSlice
    hidden_gmem: Ref
    weight_gmem: Ref
    bias_gmem: Ref | None
    rows_gmem: Coefficients
    out_gmem: Ref
    low_rank_gmem: LowRankTerm | None


def _minus_expm1(x: Array) -> Array:
    """1 − exp(x) for x <= 0, without the cancellation near 0."""
    series = -x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
    return jnp.where(x > -0.1, series, 1 - jnp.exp2(x * LOG2_E))


def coefficients(rows: GradientRows, machine: Machine) -> Coefficients:
    """The coefficients that the gradients of each row's logits are computed from."""
    n = rows.logp.shape[0]
    facts, tree = jax.tree.flatten(rows._replace(target_ids=None))

    def body(facts_gmem: Ref, out_gmem: _Factors) -> None:
        here = pl.ds(lax.axis_index("blocks") * THREADS, THREADS)
        layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
        loaded = [plgpu.load(facts_gmem.at[i, here], layout=layout, optimized=False) for i in range(len(facts))]
        found = _factors(jax.tree.unflatten(tree, loaded))
        for ref, value in zip(out_gmem, found, strict=True):
            if ref is not None:
                ref[here] = value

    row = jax.ShapeDtypeStruct((n,), jnp.float32)
    slope, uniform = (None if x is None else row for x in (rows.g_entropy, rows.g_uniform))
    out_type = _Factors(row, row, row, slope, row, uniform)
    # XLA makes one array of all facts in one kernel, and each array of its own in one more.
    found = launch(body, "linear_logp_coefficients", machine, out_type, (n // THREADS,), jnp.stack(facts))
    return Coefficients(rows.target_ids, *found)


class _Factors(NamedTuple):
    """The fields of `Coefficients` in float32."""

    temperature: Any
    shift: Any
    constant: Any
    slope: Any
    at_target: Any
    uniform: Any


def _factors(rows: GradientRows) -> _Factors:
    per_logit = (1.0 if rows.scale is None else rows.scale) / rows.temperature
    others = -rows.g_logp if rows.g_lse is None else rows.g_lse - rows.g_logp
    slope = None
    probability = jnp.exp2(rows.logp * LOG2_E)
    at_target = rows.g_logp * _minus_expm1(rows.logp)
    if rows.g_lse is not None:
        at_target = at_target + rows.g_lse * probability
    if rows.g_entropy is not None:
        slope = -LN_2 * rows.g_entropy
        # log p = ln(2)·(y − shift) − ln(total) gives y − shift at the target without the product hidden·Wᵀ.
        target_y = jnp.maximum(rows.logp * LOG2_E + jnp.log2(rows.total), -1e30)
        at_target = at_target + slope * (target_y + rows.gap) * probability
        others = others + slope * rows.gap
    if rows.g_uniform is not None:
        at_target = at_target + (rows.g_uniform - rows.g_spread)
    weight = per_logit / rows.total
    at_target = at_target * per_logit
    if rows.target_derivative is not None:
        at_target = at_target * rows.target_derivative
    return _Factors(
        temperature=rows.temperature,
        shift=rows.shift,
        constant=others * weight,
        slope=None if slope is None else slope * weight,
        at_target=at_target,
        uniform=None if rows.g_uniform is None else rows.g_uniform * per_logit,
    )


class _ChunkCoefficients(NamedTuple):
    """Each row's coefficients in a chunk with a k of its own: a gradient is E·(constant + slope·(y − k)) + uniform·d,
    where E is the rounded exponential and d the softcap's derivative.
    """

    constant: Array
    slope: Array | None
    uniform: Array | None


def chunk_coefficients(c: Coefficients, shift: Array, dtype: Any) -> _ChunkCoefficients:
    """The coefficients of a chunk whose k is `shift`, and whose exponentials are rounded to `dtype`."""
    # A chunk without a finite logit has k = 0, which may be larger than the row's.
    below = jnp.minimum(shift - c.shift, 0.0)
    power = jnp.exp2(below) * (1 / exponential_scale(dtype))
    if c.slope is None:
        return _ChunkCoefficients(c.constant * power, None, c.uniform)
    # The power is 0 long before −1e3 is reached, and 0·∞ must be 0.
    return _ChunkCoefficients((c.constant + c.slope * jnp.maximum(below, -1e3)) * power, c.slope * power, c.uniform)


def with_uniform(gradients: Array, uniform: Array) -> Array:
    """The gradients plus what smoothed targets add to each."""
    # LLVM would fuse the gradients' last product into the sum, though not in every kernel. Behind the barrier ptxas
    # fuses it in all of them, except where LLVM has fused a softcap's derivative into the sum.
    return lax.optimization_barrier(gradients) + uniform


def _largest(logits: LogitsConfig, strips: list[Array], width: Array) -> Array:
    """The largest value of each row in a chunk, whose strips of columns are given."""

    def over_strips(strips: Iterable[Array]) -> Array:
        return functools.reduce(jnp.maximum, strips).max(axis=1)

    def inside(strip: int) -> Array:
        return jnp.where(column_numbers(STRIP) < width - strip * STRIP, strips[strip], -jnp.inf)

    if not may_be_masked(logits):
        return over_strips(strips)
    return lax.cond(
        width < len(strips) * STRIP, lambda: over_strips(map(inside, range(len(strips)))), lambda: over_strips(strips)
    )


def _gradient(
    logits: LogitsConfig, scaling: ExponentScaling, c: _ChunkCoefficients, products: Array, dtype: Any
) -> Array:
    """The gradients of some columns' products, which hold their bias, where none is the target."""
    columns = products.shape[1]
    y, derivative = logit_exponents(logits, scaling, products)
    if c.slope is not None:
        # The exponential of y = −∞ is 0, and 0·∞ must be 0.
        y = jnp.maximum(y, -1e30)
    factor = over_columns(c.constant, columns)
    if c.slope is not None:
        factor = factor + over_columns(c.slope, columns) * y
    found = whole(rounded_exponentials(jnp.exp2(y), derivative, dtype)) * factor
    if c.uniform is None:
        return found
    uniform = over_columns(c.uniform, columns)
    return with_uniform(found, uniform if derivative is None else uniform * derivative)


def dlogits(
    logits: LogitsConfig,
    machine: Machine,
    where: VocabSlice,
    hidden: Matrix,
    weight: Matrix,
    bias: Array | None,
    rows: Coefficients,
    out: Any,
    low_rank: LowRankTerm | None = None,
) -> None:
    """Write the gradients of one slice's logits into the reference `out [rows, chunks · 256]`.

    Places that hold no column become 0. hidden is `[rows, D]`; weight, bias and low_rank are those that `partials`
    takes. Where one of them is in two parts, so is `out`.
    """
    logits, tile = cut_for(logits, hidden, weight)
    head, count = logits.head, tile.columns // STRIP

    def finish(refs: _DlogitsArguments, block: Block, product: Any, staging_smem: Ref) -> None:
        # These are loaded before the product and used after it: the latency of memory hides there.
        c = jax.tree.map(lambda ref: row_vector(ref, block.row), refs.rows_gmem)
        bits = bits_of_tile(logits, refs.where_gmem, block)
        products = product()
        chunk, width = chunk_and_width(head.vocabulary, refs.where_gmem, block)

        def strip_of(strip: int) -> Array:
            # The bias is loaded here rather than before the product: with a softcap, 64 more registers would spill.
            bias = column_bias(refs.bias_gmem, block.column_block * tile.columns + strip * STRIP, STRIP)
            biased = with_bias(products[:, strip * STRIP : (strip + 1) * STRIP], bias)
            return only_allowed(biased, bits, strip * STRIP, -jnp.inf)

        strips = list(map(strip_of, range(count)))
        scaling = logit_scaling(logits, _largest(logits, strips, width), LOG2_E / c.temperature)
        of_chunk = chunk_coefficients(c, scaling.shift, out.dtype)
        target = target_place(head.vocabulary, c.target_ids, chunk, width)

        def strips_in_parts() -> Iterator[Array]:
            for strip in range(count):
                gradient = _gradient(logits, scaling, of_chunk, strips[strip], out.dtype)
                is_target = column_numbers(STRIP) == over_columns(target - strip * STRIP, STRIP)
                gradient = jnp.where(is_target, over_columns(c.at_target, STRIP), gradient)
                if logits.softcap is not None:
                    # The softcap of −∞ is finite.
                    gradient = only_allowed(gradient, bits, strip * STRIP, 0)
                for part in in_parts(gradient, out.dtype):
                    yield masked(logits, part, width - strip * STRIP, 0)

        computed, store = strips_in_parts(), storing(refs.out_gmem, block.row, block.column_block * tile.columns)
        parts = len(parts_of(out))
        store_through(staging_smem, block.warpgroup, machine, lambda _: next(computed), store, count * parts)

    of_product = hidden, weight, low_rank, out.shape[1] // tile.columns, finish
    product = product_with_head("linear_logp_dlogits", head, tile, *of_product, parts_of(out)[0].dtype)
    multiply(product, machine, _DlogitsArguments(where, hidden, weight, bias, rows, out, low_rank))
