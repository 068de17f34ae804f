"""The sums of linear_kl over the products with two heads, chunk by chunk, in the epilogue of these products.

Strips of 32 columns, chunks of a group and groups are folded in ascending order. Sums of both heads go by the same
code, so that equal logits have equal ones.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import LogitsConfig
from pallas_kernels.hopper.divergence import (
    EMPTY_SHIFT,
    DivergencePartials,
    HeadRows,
    MixtureSums,
    RowNormalizer,
    TwoSlices,
)
from pallas_kernels.hopper.tiles import THREADS, Machine
from pallas_kernels.logits import LN_2, LOG2_E
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, Block, over_columns, row_vector
from pallas_kernels.mosaic.softcap import softcapped
from pallas_kernels.mosaic.statistics import chunk_and_width, logit_exponents, logit_scaling, masked
from pallas_kernels.mosaic.two_heads import FEW_COLUMNS, Step, Strip, TwoHeadsArguments, over_two_heads

Array = jax.Array
Ref = Any
NEAR = 0.5
"""Differences of logits up to this are small: there a series keeps the digits that eᵈ − 1 − d would lose."""
_NEAR_ONE = 0.25
"""Up to this distance from 1 a series computes logarithms."""
_SMALL_SHARE = 0.25
"""With a share below this, a mixture may be near one of both although they are not `NEAR` one another. What each adds
is formed by itself then, without the cancellation of their sum.
"""
LARGEST_DIFFERENCE = 80.0
"""Where one probability is less than e⁻⁸⁰ of the other, it adds nothing to their mixture, and eᵈ stays finite."""
SERIES = (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040, 1 / 40320)


def polynomial(x: Array, factors: tuple[float, ...]) -> Array:
    """Σ factors[i]·xⁱ."""
    first, *others = reversed(factors)
    return functools.reduce(lambda so_far, factor: so_far * x + factor, others, jnp.full_like(x, first))


def _excess(a: Array, b: Array, d: Array) -> Array:
    """a·(eᵈ − 1 − d), where b = a·eᵈ."""
    near, far = a * ((d * d) * polynomial(d, SERIES)), b - a * (1 + d)
    # An impossible column has d = ±∞, and 0·∞ must be 0.
    return jnp.where(a == 0, b, jnp.where(jnp.abs(d) < NEAR, near, far))


@functools.cache
def _mixture_series(share: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The factors of two series in d = ln(p / q), for the mixture m = share·q + (1 − share)·p: those of ln(m / p) / d,
    and of what a column adds to the divergence, over p·d². Up to `NEAR` they leave less than 5e-8 of either sum.

    With g = m / p and f = ln(g), g·f′ = g′ gives f, and the column adds −p·(g·f + share·d·e⁻ᵈ).
    """
    count = 10
    power = [(-1) ** n / math.factorial(n) for n in range(count)]
    g, f = [1.0, *(share * x for x in power[1:])], [0.0] * count
    for n in range(1, count):
        f[n] = g[n] - sum(k * f[k] * g[n - k] for k in range(1, n)) / n
    value = [-sum(g[k] * f[n - k] for k in range(n)) - share * power[n - 1] for n in range(2, count)]
    return tuple(f[1 : count - 1]), tuple(value)


def _log_near_one(w: Array) -> Array:
    """ln(1 + w) for |w| up to `_NEAR_ONE`: 2·artanh(s), of which a series keeps digits where w is near 0."""
    s = w / (2 + w)
    return s * polynomial(s * s, (2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9))


def log_mixture(share: float, difference: Array) -> Array:
    """ln(m / p) for the mixture m = share·q + (1 − share)·p and difference = ln(p / q); exactly 0 where p and q are
    equal.

    What is taken off the larger of both to make m has one logarithm, and m lies above the smaller by the rest.
    """
    apart = jnp.minimum(jnp.abs(difference), LARGEST_DIFFERENCE)
    is_teacher = difference < 0
    own, other = (jnp.where(is_teacher, x, 1 - x) for x in (share, 1 - share))
    power = jnp.exp2(apart * -LOG2_E)
    w = other * jnp.where(apart < NEAR, -apart * polynomial(-apart, (1.0, *SERIES)), power - 1)
    near = _log_near_one(w)
    of_larger = jnp.where(w > -_NEAR_ONE, near, jnp.log2(own + other * power) * LN_2)
    return jnp.where(is_teacher, of_larger + apart, of_larger)


def _mixture_terms(share: float, log_a: Array, log_b: Array) -> tuple[Array, Array]:
    """What columns add to the divergence from the mixture m = share·q + (1 − share)·p, and p·ln(m / p), from log2 of p
    and of q; exactly 0 where p and q are equal.
    """
    of_log, of_value = (functools.partial(polynomial, factors=x) for x in _mixture_series(share))
    log_larger = jnp.maximum(log_a, log_b)
    # Both may be −∞, whose difference is NaN.
    difference = jnp.where(log_larger == -jnp.inf, 0.0, (log_a - log_b) * LN_2)
    far = _far_terms if min(share, 1 - share) >= _SMALL_SHARE else _far_terms_of_small_share
    p, value, from_a = far(share, log_a, log_b, difference)
    is_near = jnp.abs(difference) < NEAR
    value = jnp.where(is_near, p * ((difference * difference) * of_value(difference)), value)
    return value, p * jnp.where(is_near, difference * of_log(difference), from_a)


def _far_terms(share: float, log_a: Array, log_b: Array, difference: Array) -> tuple[Array, Array, Array]:
    """p, what a column adds to the divergence, and ln(m / p), where p and q are not `NEAR` one another."""
    is_teacher, apart = difference < 0, jnp.minimum(jnp.abs(difference), LARGEST_DIFFERENCE)
    # The smaller of both is `ratio` of the larger one, and has the share `other` of the mixture.
    larger, ratio = jnp.exp2(jnp.maximum(log_a, log_b)), jnp.exp2(apart * -LOG2_E)
    other = jnp.where(is_teacher, 1 - share, share)
    mixture = (1 - other) + other * ratio
    from_larger = jnp.log2(mixture) * LN_2
    value = -larger * (mixture * from_larger + (other * ratio) * apart)
    from_a = jnp.where(is_teacher, from_larger + apart, from_larger)
    return jnp.where(is_teacher, larger * ratio, larger), value, from_a


def _far_terms_of_small_share(
    share: float, log_a: Array, log_b: Array, difference: Array
) -> tuple[Array, Array, Array]:
    """The same, where the mixture is nearly the one that has the larger share, a major part beside a minor one."""
    is_student, least = share < 0.5, min(share, 1 - share)
    apart = jnp.clip(difference if is_student else -difference, -LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    w = least * (jnp.exp2(apart * -LOG2_E) - 1)
    from_major = jnp.where(jnp.abs(w) < _NEAR_ONE, _log_near_one(w), jnp.log2(1 + w) * LN_2)
    from_minor = from_major + apart
    p, q = jnp.exp2(log_a), jnp.exp2(log_b)
    major, minor = (p, q) if is_student else (q, p)
    value = -((1 - least) * (major * from_major) + least * (minor * from_minor))
    return p, value, from_major if is_student else from_minor


def _over_chunks(
    name: str,
    two: TwoSlices,
    rows: Any,
    out: Any,
    sums_of: Callable[[tuple[HeadRows, HeadRows], Any, Array, Array], Callable[[Any, list[Array]], Any]],
    joined: Callable[[Any, Any], Any],
) -> None:
    """Write the sums of all 64 rows and each chunk of a slice into the references `out [chunks, rows]`.

    `sums_of(heads, rows, row, width)` loads what it needs and returns what gives the sums of one strip, from its first
    column and the products with both heads.
    """
    vocabulary = two.logits[0].head.vocabulary

    def finish(refs: TwoHeadsArguments, block: Block, over_strips: Callable[[Step], Any], _: Ref) -> None:
        chunk, width = chunk_and_width(vocabulary, refs.where_gmem, block)
        of_strip = sums_of(refs.heads_gmem, refs.rows_gmem, block.row, width)

        def step(strip: Strip, so_far: Any) -> Any:
            found = of_strip(strip.first, strip.products)
            return found if so_far is None else joined(so_far, found)

        for ref, value in zip(refs.out_gmem, over_strips(step), strict=True):
            ref[chunk, pl.ds(block.row, WARPGROUP_ROWS)] = value

    over_two_heads(name, two, rows, out, out[0].shape[0], finish)


def divergence_partials(two: TwoSlices, out: DivergencePartials) -> None:
    """Write the partials of D(a ‖ b) over one slice of chunks into the references `out [chunks, rows]`.

    Rows of `out` hold whole tiles. Those behind the last tile with a row that counts are not written.
    """

    def sums_of(
        heads: tuple[HeadRows, HeadRows], _: tuple[()], row: Array, width: Array
    ) -> Callable[[Any, list[Array]], DivergencePartials]:
        scales = [LOG2_E / row_vector(head.temperature, row) for head in heads]

        def of_head(config: LogitsConfig, values: Array, scale: Array, first: Any) -> tuple[Array, Array, Array, Array]:
            """Exponents and exponentials of a strip, its shift and its total."""
            values = masked(config, values, width - first, -jnp.inf)
            scaling = logit_scaling(config, values.max(axis=1), scale)
            exponents, derivative = logit_exponents(config, scaling, values)
            if derivative is not None:
                # The softcap of −∞ is finite.
                exponents = masked(config, exponents, width - first, -jnp.inf)
            exponentials = jnp.exp2(exponents)
            total = exponentials.sum(axis=1)
            return exponents, exponentials, jnp.where(total == 0, EMPTY_SHIFT, scaling.shift), total

        def add(first: Any, products: list[Array]) -> DivergencePartials:
            (y_a, exp_a, shift_a, total_a), (y_b, exp_b, shift_b, total_b) = (
                of_head(*x, first) for x in zip(two.logits, products, scales, strict=True)
            )
            difference = (y_b - y_a) + over_columns(shift_b - shift_a, FEW_COLUMNS)
            cross = jnp.where(exp_a == 0, 0.0, exp_a * difference).sum(axis=1)
            larger = jnp.maximum(shift_a, shift_b)
            to_a, to_b = (over_columns(jnp.exp2(shift - larger), FEW_COLUMNS) for shift in (shift_a, shift_b))
            excess = _excess(exp_a * to_a, exp_b * to_b, difference * LN_2).sum(axis=1)
            return DivergencePartials(shift_a, total_a, shift_b, total_b, cross, excess)

        return add

    _over_chunks("linear_kl_partials", two, (), out, sums_of, _joined)


def _joined(x: DivergencePartials, y: DivergencePartials) -> DivergencePartials:
    """The partials over the columns of both. Factors are powers of two, so that products round nothing."""
    shift_a, shift_b = jnp.maximum(x.shift_a, y.shift_a), jnp.maximum(x.shift_b, y.shift_b)
    larger = jnp.maximum(shift_a, shift_b)

    def rescaled(part: DivergencePartials) -> tuple[Array, Array, Array, Array]:
        of_a, of_b = jnp.exp2(part.shift_a - shift_a), jnp.exp2(part.shift_b - shift_b)
        of_excess = jnp.exp2(jnp.maximum(part.shift_a, part.shift_b) - larger)
        # A sum may be infinite, and 0·∞ must be 0.
        cross = jnp.where(of_a == 0, 0.0, part.cross * of_a)
        return part.total_a * of_a, part.total_b * of_b, cross, jnp.where(of_excess == 0, 0.0, part.excess * of_excess)

    total_a, total_b, cross, excess = map(jnp.add, rescaled(x), rescaled(y))
    return DivergencePartials(shift_a, total_a, shift_b, total_b, cross, excess)


def mixture_sums(
    two: TwoSlices, share: float, normalizers: tuple[RowNormalizer, RowNormalizer], out: MixtureSums
) -> None:
    """Write the sums of the generalised Jensen-Shannon divergence over one slice of chunks into the references
    `out [chunks, rows]`. `share` is that of b, the teacher, in the mixture.

    Rows of `out` are those that `divergence_partials` writes.
    """

    def sums_of(
        heads: tuple[HeadRows, HeadRows], rows: tuple[RowNormalizer, RowNormalizer], row: Array, width: Array
    ) -> Callable[[Any, list[Array]], MixtureSums]:
        scales = [LOG2_E / row_vector(head.temperature, row) for head in heads]
        known = [jax.tree.map(lambda ref: row_vector(ref, row), own) for own in rows]

        def add(first: Any, products: list[Array]) -> MixtureSums:
            log_a, log_b = (
                masked(of_head[0], log_probability(*of_head), width - first, -jnp.inf)
                for of_head in zip(two.logits, products, scales, known, strict=True)
            )
            value, slope = _mixture_terms(share, log_a, log_b)
            return MixtureSums(value.sum(axis=1), slope.sum(axis=1) * (share - 1))

        return add

    _over_chunks("linear_kl_mixture", two, normalizers, out, sums_of, _added)


def log_probability(logits: LogitsConfig, values: Array, scale: Array, normalizer: RowNormalizer) -> Array:
    """log2 of the probabilities of some columns."""
    values, columns = softcapped(values, logits.softcap)[0], values.shape[1]
    centred = values * over_columns(scale, columns) - over_columns(normalizer.shift, columns)
    return centred - over_columns(normalizer.log_total, columns)


def _added(x: MixtureSums, y: MixtureSums) -> MixtureSums:
    return MixtureSums(x.value + y.value, x.slope + y.slope)


def fold_divergence(partials: DivergencePartials, groups: int, active: Array, machine: Machine) -> DivergencePartials:
    """The partials of groups `[groups, rows]` from those of chunks or groups `[chunks, rows]`, in ascending order, for
    rows before `active [1]`. Rows are a multiple of THREADS.
    """
    return _fold("linear_kl_fold", _joined, partials, groups, active, machine)


def fold_mixture(sums: MixtureSums, groups: int, active: Array, machine: Machine) -> MixtureSums:
    """The sums over groups `[groups, rows]`, from those over chunks or groups, as `fold_divergence` folds partials."""
    return _fold("linear_kl_fold_mixture", _added, sums, groups, active, machine)


def _fold[Sums](
    name: str, joined: Callable[[Sums, Sums], Sums], partials: Any, groups: int, active: Array, machine: Machine
) -> Any:
    """Fold `[chunks, rows]` to `[groups, rows]`. Each thread has a row."""
    count, rows = partials[0].shape[0] // groups, partials[0].shape[1]

    def body(active_gmem: Ref, partials_gmem: Any, out_gmem: Any) -> None:
        block, group = lax.axis_index("blocks"), lax.axis_index("groups")

        @pl.when(block * THREADS < active_gmem[0])
        def _() -> None:
            here = pl.ds(block * THREADS, THREADS)

            def load(i: Any) -> Any:
                return jax.tree.map(
                    lambda ref: plgpu.load(ref.at[group * count + i, here], optimized=False), partials_gmem
                )

            folded = lax.fori_loop(1, count, lambda i, so_far: joined(so_far, load(i)), load(0))
            for ref, value in zip(out_gmem, folded, strict=True):
                ref[group, here] = value

    row = jax.ShapeDtypeStruct((groups, rows), jnp.float32)
    out_type = jax.tree.map(lambda _: row, partials)
    return launch(body, name, machine, out_type, (rows // THREADS, groups), active, partials)
