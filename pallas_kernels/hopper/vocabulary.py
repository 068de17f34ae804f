"""How the softmax's fixed tree cuts the columns of the head on Hopper: into groups, and each into chunks of 256.

A group's last chunk may be narrower, and the last groups may be short or empty. In memory that the kernels allocate (a
slice's gradients of logits, a copied slice of the head) every chunk has 256 places; places without a column hold zeros.
Products of float32 matrices have tiles of 128 columns. Their softmax has chunks of 128, two in the places of each 256.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.tiles import COLUMNS, DEPTH

Array = jax.Array


@dataclass(frozen=True)
class Vocabulary:
    """The sizes of the softmax's tree over one head."""

    size: int
    """Columns of the true vocabulary; the others are padding. Where only the device knows it, it is an upper bound."""
    groups: int
    group_width: int
    columns: int = COLUMNS
    """Columns of a chunk, 256 or 128."""

    def cut(self, columns: int) -> "Vocabulary":
        """The same with chunks of so many columns."""
        return replace(self, columns=columns)

    def chunks_in(self, wide: Any) -> Any:
        """How many chunks have the places of so many chunks of 256 columns."""
        return wide if self.columns == COLUMNS else wide * (COLUMNS // self.columns)

    @property
    def group_chunks(self) -> int:
        return self.chunks_in(-(-self.group_width // COLUMNS))

    @property
    def chunks(self) -> int:
        return self.groups * self.group_chunks

    @property
    def is_ragged(self) -> bool:
        """Whether some chunk is not full."""
        return self.group_width % COLUMNS != 0 or self.groups * self.group_width != self.size

    def start(self, chunk: Array) -> Array:
        """The first column of a chunk."""
        group, inside = _divmod(chunk, self.group_chunks)
        return group * self.group_width + inside * self.columns

    def width(self, chunk: Array, size: Any = None) -> Array:
        """How many columns a chunk has, 0 … `columns`. size is the true vocabulary where only the device knows it."""
        group, inside = _divmod(chunk, self.group_chunks)
        end = jnp.minimum((group + 1) * self.group_width, self.size if size is None else size)
        return jnp.clip(end - group * self.group_width - inside * self.columns, 0, self.columns)

    def chunk_of(self, column: Any) -> Any:
        """The chunk that holds a column; an array for an array, an int for an int."""
        group, inside = _divmod(column, self.group_width)
        return group * self.group_chunks + _divmod(inside, self.columns)[0]

    def steps_before(self, chunk: Array) -> Array:
        """How many K steps all chunks before this one take; a chunk's last step may be padded with zeros."""
        group, inside = _divmod(chunk, self.group_chunks)
        return group * self._group_steps + inside * (self.columns // DEPTH)

    @property
    def _group_steps(self) -> int:
        return -(-self.group_width // DEPTH)


def _divmod(x: Any, n: int) -> tuple[Any, Any]:
    """Quotient and remainder of x >= 0. For other x they round towards 0, which costs a kernel less than a floor."""
    if isinstance(x, int):
        return divmod(x, n)
    divisor = jnp.broadcast_to(jnp.int32(n), x.shape)
    return lax.div(x, divisor), lax.rem(x, divisor)


@dataclass(frozen=True)
class HeadAccess:
    """How a kernel finds a chunk of the head: in the user's array or, if `copied`, in a slice `[chunks · 256, D]`.

    Chunks are those of the vocabulary here, of 256 or 128 columns.
    """

    vocabulary: Vocabulary
    layout: Literal["vd", "dv"]
    copied: bool

    def row(self, first_chunk: Array, chunk: Array) -> Array:
        """The first row ("dv": column) in the weight of chunk `chunk` of a slice that begins at `first_chunk`."""
        return chunk * self.vocabulary.columns if self.copied else self.vocabulary.start(first_chunk + chunk)
