"""The softmax of attention's kernels: block by block (online), and span by span."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.attention import AttentionShape
from pallas_kernels.logits import LOG2_E
from pallas_kernels.mosaic.attention_tiles import zero_sums
from pallas_kernels.mosaic.main_loop import ROW, WARPGROUP_ROWS, over_columns
from pallas_kernels.mosaic.softcap import softcapped

Array = jax.Array
_LOWEST = -1e30
"""The score that maxima start from: with −inf the difference of two maxima could be NaN."""


class Softmax(NamedTuple):
    """A softmax so far, by query: the largest score times log2(e), Σ 2^(score − largest), and the weighted sum of
    values in chunks of columns.
    """

    largest: Array
    total: Array
    values: tuple[Array, ...]


def empty_softmax(columns: int, *, spread_over: int | None = None) -> Softmax:
    """The softmax over no keys: of 64 queries in chunks of columns, or of `spread_over` queries in one chunk, whose
    largest score and total are repeated for every column.
    """
    if spread_over is not None:
        shape = (spread_over, columns)
        layout = plgpu.Layout.WG_STRIDED(shape, vec_size=1)
        largest, total, values = (plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout) for x in (_LOWEST, 0, 0))
        return Softmax(largest, total, (values,))

    def rows(value: float) -> Array:
        return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.float32), ROW)

    return Softmax(rows(_LOWEST), rows(0), zero_sums(columns))


def repeated(numbers: Array, columns: int) -> Array:
    """A number of each query for every column; where it is repeated already, itself."""
    return numbers if numbers.ndim == 2 else over_columns(numbers, columns)


def scores_of(shape: AttentionShape, products: Array) -> tuple[Array, float]:
    """The scores of products query·key, and what they are multiplied by to become scores times log2(e)."""
    if shape.softcap is None:
        return products, shape.scale * LOG2_E
    return softcapped(products * shape.scale, shape.softcap)[0], LOG2_E


def with_scores(so_far: Softmax, scores: Array, scale: float, dtype: Any) -> tuple[Softmax, Array]:
    """The softmax with a block's scores in its total, and its values rescaled to be added to; and the block's weights,
    in the values' dtype. `scale` makes scores times log2(e): its product joins the difference to the largest score.
    """
    largest = jnp.maximum(so_far.largest, scores.max(axis=1) * scale)
    factor = jnp.exp2(so_far.largest - largest)
    exponentials = jnp.exp2(scores * scale - over_columns(largest, scores.shape[1]))
    total = so_far.total * factor + exponentials.sum(axis=1)
    values = tuple(chunk * over_columns(factor, chunk.shape[1]) for chunk in so_far.values)
    return lax.optimization_barrier((Softmax(largest, total, values), exponentials.astype(dtype)))


class _Totals(Protocol):
    """The largest score and the total of a softmax."""

    @property
    def largest(self) -> Array: ...

    @property
    def total(self) -> Array: ...


def _factors(first: _Totals, second: _Totals) -> tuple[Array, Array, Array]:
    """The larger one of two largest scores, and what the sums below each are multiplied by to refer to it."""
    largest = jnp.maximum(first.largest, second.largest)
    return largest, jnp.exp2(first.largest - largest), jnp.exp2(second.largest - largest)


def merged_totals(first: _Totals, second: _Totals) -> tuple[Array, Array]:
    """The largest score and the total over the keys of both."""
    largest, a, b = _factors(first, second)
    return largest, first.total * a + second.total * b


def merged(first: Softmax, second: Softmax) -> Softmax:
    """The softmax over the keys of both. One of no keys changes no bit of the other."""
    _, a, b = _factors(first, second)

    def chunk(x: Array, y: Array) -> Array:
        return x * repeated(a, x.shape[1]) + y * repeated(b, x.shape[1])

    values = tuple(map(chunk, first.values, second.values))
    return Softmax(*merged_totals(first, second), values)


def output_of(softmax: Softmax, poison: Array) -> tuple[tuple[Array, ...], Array]:
    """The output by chunk, 0 for a query that sees nothing, and log2 of the softmax total, +inf for that query.

    `poison` is 1, or NaN to make all of it NaN.
    """
    is_empty = softmax.total == 0
    log_total = jnp.where(is_empty, jnp.inf, softmax.largest + jnp.log(softmax.total) * LOG2_E) * poison
    inverse = jnp.where(is_empty, 0.0, 1 / softmax.total) * poison

    def chunk(values: Array) -> Array:
        # A sum that was scaled down to −0 turns into 0 where it is merged with that of a span, so it is 0 everywhere.
        values = jnp.where(values == 0, 0.0, values) * repeated(inverse, values.shape[1])
        # An infinite value makes infinite sums, and NaN is what every query gets that sees one.
        return jnp.where(jnp.abs(values) < jnp.inf, values, jnp.nan)

    return tuple(map(chunk, softmax.values)), log_total


def weights_of(shape: AttentionShape, products: Array, log_total: Array) -> tuple[Array, Array | None]:
    """For gradients: the softmax weights of products query·key, and the slope of the softcap, None without one."""
    if shape.softcap is None:
        return jnp.exp2(products * (shape.scale * LOG2_E) - log_total), None
    scores, slope = softcapped(products * shape.scale, shape.softcap)
    return jnp.exp2(scores * LOG2_E - log_total), slope
