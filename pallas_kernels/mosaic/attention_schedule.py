"""Which tiles of queries each block of threads computes where there are as many blocks as multiprocessors."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


class TilePlace(NamedTuple):
    """The number of a tile among those of its row and head, its row of the batch, and its head."""

    tile: Array
    batch: Array
    head: Array


@dataclass(frozen=True)
class Schedule:
    """The tiles of all rows and heads, dealt out to `blocks` blocks of threads.

    The last tiles of all rows, which see the most keys, come first. Every second round is dealt out backwards, so that
    no block gets the longer tile of every round.
    """

    tiles: int
    batch: int
    heads: int
    blocks: int

    def rounds(self, block: Array) -> Array:
        """How many tiles a block of threads computes."""
        whole_rounds, rest = divmod(self.tiles * self.batch * self.heads, self.blocks)
        in_last_round = block if whole_rounds % 2 == 0 else self.blocks - 1 - block
        return whole_rounds + jnp.where(in_last_round < rest, 1, 0)

    def place(self, block: Array, number: int | Array) -> TilePlace:
        """The tile that a block of threads computes in a round."""
        number = jnp.int32(number)
        rows, heads = jnp.int32(self.batch * self.heads), jnp.int32(self.heads)
        index = number * self.blocks + jnp.where((number & 1) == 0, block, self.blocks - 1 - block)
        row = lax.rem(index, rows)
        return TilePlace(self.tiles - 1 - lax.div(index, rows), lax.div(row, heads), lax.rem(row, heads))
