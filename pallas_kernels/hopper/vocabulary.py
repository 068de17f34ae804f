"""The columns of the head, cut for Hopper as the softmax's fixed tree cuts them: groups, in them chunks of 256.

A group's last chunk may be narrower, and the last groups may be short or empty. In memory of our own (a slice's
gradients of logits, a copied slice of the head) every chunk has 256 places and those it does not fill hold zeros.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.tiles import COLUMNS, DEPTH

Array = jax.Array
STEPS = COLUMNS // DEPTH
"""K steps of one full chunk."""


@dataclass(frozen=True)
class Vocabulary:
    size: int
    """The true vocabulary: columns from here on are padding, or may be where only the device knows."""
    groups: int
    group_width: int

    @property
    def group_chunks(self) -> int:
        return -(-self.group_width // COLUMNS)

    @property
    def chunks(self) -> int:
        return self.groups * self.group_chunks

    @property
    def is_ragged(self) -> bool:
        """Some chunk has fewer than 256 columns."""
        return self.group_width % COLUMNS != 0 or self.groups * self.group_width != self.size

    def start(self, chunk: Array) -> Array:
        """First column of a chunk."""
        group, inside = _divmod(chunk, self.group_chunks)
        return group * self.group_width + inside * COLUMNS

    def width(self, chunk: Array, size: Any = None) -> Array:
        """Columns of a chunk, 0 … 256; `size` in the place of the vocabulary's, where only the device knows it."""
        group, inside = _divmod(chunk, self.group_chunks)
        end = jnp.minimum((group + 1) * self.group_width, self.size if size is None else size)
        return jnp.clip(end - group * self.group_width - inside * COLUMNS, 0, COLUMNS)

    def chunk_of(self, column: Any) -> Any:
        """The chunk that holds a column, of an array or an int."""
        group, inside = _divmod(column, self.group_width)
        return group * self.group_chunks + _divmod(inside, COLUMNS)[0]

    def steps_before(self, chunk: Array) -> Array:
        """K steps of all chunks before this one; a chunk's last step may be padded with zeros."""
        group, inside = _divmod(chunk, self.group_chunks)
        return group * self._group_steps + inside * STEPS

    def place(self, step: Array) -> tuple[Array, Array]:
        """The chunk of a K step, and which of the chunk's steps it is."""
        group, step = _divmod(step, self._group_steps)
        return group * self.group_chunks + lax.div(step, jnp.int32(STEPS)), lax.rem(step, jnp.int32(STEPS))

    @property
    def _group_steps(self) -> int:
        return -(-self.group_width // DEPTH)


def _divmod(x: Any, n: int) -> tuple[Any, Any]:
    """For x >= 0; rounding towards minus infinity would cost a kernel more."""
    if isinstance(x, int):
        return divmod(x, n)
    divisor = jnp.broadcast_to(jnp.int32(n), x.shape)
    return lax.div(x, divisor), lax.rem(x, divisor)


@dataclass(frozen=True)
class Head:
    """How a kernel finds the head's rows for a chunk: in the user's array, or in a copied slice `[chunks · 256, D]`."""

    vocabulary: Vocabulary
    layout: Literal["vd", "dv"]
    copied: bool

    def row(self, first_chunk: Array, chunk: Array) -> Array:
        """Where chunk `chunk` of a slice that begins with `first_chunk` stands in the weight."""
        return chunk * COLUMNS if self.copied else self.vocabulary.start(first_chunk + chunk)
