"""The softmax's fixed tree over the vocabulary: eight groups, so that 1, 2, 4 or 8 ranks own whole ones."""

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
