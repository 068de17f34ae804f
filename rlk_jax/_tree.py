"""Sums in a fixed order. The softmax's tree has eight groups, so that 1, 2, 4 or 8 ranks own whole ones."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax._transforms import varying_like

GROUPS = 8


@dataclass(frozen=True)
class Tree:
    """The groups that one weight's columns are cut into, `width` columns each; the last ones may be short or empty."""

    groups: int
    width: int


def tree(vocab_size: int) -> Tree:
    """Of a true vocabulary of this size."""
    return Tree(GROUPS, -(-vocab_size // 64) * 8)


def ordered_sum(parts: jax.Array) -> jax.Array:
    """Σ of `parts [groups, ...]` in ascending order, from 0."""
    start = varying_like(jnp.zeros_like(parts[0]), parts)
    # Unrolled, XLA makes one pass over all parts of it.
    return lax.scan(lambda so_far, part: (so_far + part, None), start, parts, unroll=True)[0]


@jax.custom_jvp
def pairwise_sum(values: jax.Array) -> jax.Array:
    """Σ over the last axis by adjacent pairs: ((x0 + x1) + (x2 + x3)) + ...; 0 for none.

    Zeros appended to the axis change no bit of the sum: they pair up among themselves and are added last. A zero sum is
    +0. The derivative is that of a sum; tangents are added up in no fixed order.
    """
    count = values.shape[-1]
    whole = 1 << max(count - 1, 0).bit_length()
    # Behind the barrier, XLA cannot fuse a product that made the values into the sum, which would skip its rounding.
    sums = lax.optimization_barrier(jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, whole - count)]))
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    total = sums[..., 0]
    # −0 + 0 is +0, so that the sign of a zero sum would tell whether zeros were appended.
    return total + jnp.where(total == 0, -total, 0)


@pairwise_sum.defjvp
def _sum_of_tangents(values: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # Transposed, the tree would be as many additions of zeros for each number; of this, it is a broadcast.
    return pairwise_sum(*values), lax.optimization_barrier(jnp.sum(*tangents, axis=-1))


def pairwise_spread(values: jax.Array, count: int) -> jax.Array:
    """`values [...]` `count` times over along a new last axis; the derivative adds up as `pairwise_sum` does."""
    spread, width = values[..., None], 1
    while width < count:
        width *= 2
        spread = jnp.stack([spread, spread], axis=-1).reshape(*values.shape, width)
    return lax.optimization_barrier(spread[..., :count])
