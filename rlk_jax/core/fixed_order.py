"""Sums and products whose order is written down, so that their bits depend on nothing else.

The softmax's vocabulary is cut into eight groups of columns, so that 1, 2, 4 or 8 ranks own whole groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.transforms import varying_like

Array = jax.Array
GROUPS = 8
"""Groups of columns that a whole vocabulary is cut into."""
BLOCK_ROWS = 64
BLOCK_COLUMNS = 256
DEPTH_MULTIPLE = 64
"""`deterministic` works on blocks of 64 rows and 256 columns, and pads K with zeros to a multiple of 64."""


@dataclass(frozen=True)
class ColumnGroups:
    """The groups that one weight's columns are cut into, `width` columns each; the last ones may be short or empty."""

    count: int
    width: int


def column_groups(vocab_size: int) -> ColumnGroups:
    """The eight groups of a whole vocabulary of this true size V, each of ceil(V / 64)·8 columns."""
    return ColumnGroups(GROUPS, -(-vocab_size // 64) * 8)


def ascending_sum(parts: Array) -> Array:
    """Σ of `parts [count, ...]` in ascending order, starting from 0."""
    start = varying_like(jnp.zeros_like(parts[0]), parts)
    # The loop is unrolled so that XLA makes one pass over all parts.
    return lax.scan(lambda so_far, part: (so_far + part, None), start, parts, unroll=True)[0]


@jax.custom_jvp
def pairwise_sum(values: jax.Array) -> jax.Array:
    """Σ over the last axis by adjacent pairs: ((x0 + x1) + (x2 + x3)) + ...; 0 for none.

    Zeros appended to the axis change no bit of the sum: they pair up among themselves and are added last. A zero sum is
    +0. The derivative is that of a sum; tangents are added up in no fixed order.
    """
    count = values.shape[-1]
    whole = 1 << max(count - 1, 0).bit_length()
    # The barrier keeps XLA from fusing a product that made the values into the sum, which would skip its rounding.
    sums = lax.optimization_barrier(jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, whole - count)]))
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    total = sums[..., 0]
    # −0 + 0 is +0, so that the sign of a zero sum would tell whether zeros were appended.
    return total + jnp.where(total == 0, -total, 0)


@pairwise_sum.defjvp
def _pairwise_sum_jvp(values: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # The transpose of the tree of pairs would add as many zeros as there are numbers; the transpose of a plain sum is
    # a broadcast.
    return pairwise_sum(*values), lax.optimization_barrier(jnp.sum(*tangents, axis=-1))


def pairwise_spread(values: jax.Array, count: int) -> jax.Array:
    """`values [...]` repeated `count` times along a new last axis; its derivative is summed as by `pairwise_sum`."""
    spread, width = values[..., None], 1
    while width < count:
        width *= 2
        spread = jnp.stack([spread, spread], axis=-1).reshape(*values.shape, width)
    return lax.optimization_barrier(spread[..., :count])


def fma_chain(a_transposed: Array, b: Array, c: Array) -> Array:
    """c + aᵀ·b `[R, C]`, each element one chain fma(a_k, b_k, ·) over ascending k that starts from c.

    `a_transposed` is `[K, R]`, b is `[K, C]` and c is float32 `[R, C]`.
    """

    def step(k: Array, c: Array) -> Array:
        return c + a_transposed[k][:, None] * b[k][None, :]

    return lax.fori_loop(0, b.shape[0], step, varying_like(c, b))


def halving_sum(x: Array) -> Array:
    """Σ over the second axis of `[rows, 2^k]`: the upper half is added to the lower one, k times."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def sum_of_squares(x: Array) -> Array:
    """Σ x² over all of an array: 64 equal parts are added by halves, again and again until one number is left.

    The parts are those of the array in row-major order, however it lies in memory, and on how many devices it was.
    """
    # The barrier keeps XLA from fusing squares into the sum, which would skip their rounding.
    sums = lax.optimization_barrier(jnp.square(x)).reshape(-1)
    while sums.size > 1:
        sums = halving_sum(zeros_behind(sums, 0, 64).reshape(64, -1).T)
    return sums[0]


def rounded_product(a: Array, b: Array) -> Array:
    """a·b, rounded even where a sum follows: abs and select keep compilers from fusing the product into the sum.

    Which products compilers fuse depends on the surrounding program, and the bits of a result must not.
    """
    magnitude = jnp.abs(a * b)
    return jnp.where((a < 0) != (b < 0), -magnitude, magnitude)


def zeros_behind(x: Array, axis: int, multiple: int) -> Array:
    """x with zeros behind it along one axis, whose size becomes a multiple of `multiple`.

    A sum that goes on over such zeros keeps its bits.
    """
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, padding)


def blockwise(function: Callable[[Array], Array], x: Array) -> Array:
    """An elementwise function with the same bits in arrays of every shape: XLA's vector code may differ from its code
    for the rest of an array.
    """
    blocks = zeros_behind(x.reshape(-1), 0, 128).reshape(-1, 128)
    found = jax.lax.optimization_barrier(function(jax.lax.optimization_barrier(blocks)))
    return found.reshape(-1)[: x.size].reshape(x.shape)


def blockwise_exp(x: Array) -> Array:
    """exp with the same bits in arrays of every shape."""
    return blockwise(jnp.exp, x)


def sum_rows_by_id(ids: Array, rows: Array, size: int) -> Array:
    """The sums `[size, D]` of rows `[N, D]` by id int32 `[N]`: row i sums the rows whose id is i, in a fixed order.

    Rows are sorted by id. After k doublings each place holds the sum of its own row and of those among the 2^k − 1
    rows before it that have the same id. Ids out of range are dropped.
    """
    count = len(ids)
    places = jnp.arange(count)
    order = jnp.argsort(ids, stable=True)
    ids, rows = ids[order], rows[order]

    def double(k: Array, sums: Array) -> Array:
        before = places - (1 << k)
        joins = (before >= 0) & (ids[before] == ids)
        return sums + jnp.where(joins[:, None], sums[before], 0)

    sums = lax.fori_loop(0, max(0, count - 1).bit_length(), double, rows)
    is_last = jnp.append(ids[1:], -1) != ids
    # Every other row is sent to a place of its own that does not exist.
    targets = jnp.where(is_last & (ids >= 0) & (ids < size), ids, size + places)
    zeros = varying_like(jnp.zeros((size, rows.shape[1]), rows.dtype), sums)
    return zeros.at[targets].set(sums, mode="drop", unique_indices=True)
