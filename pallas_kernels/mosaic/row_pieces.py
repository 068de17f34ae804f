"""How the kernels over materialised logits read a row: in pieces of as many columns as one load of all threads holds,
with the words that say which of them are allowed.

A row that does not begin aligned is read in a line of several rows that does, or by way of shared memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.allowed import bits_of_pieces
from pallas_kernels.hopper.tiles import THREADS
from pallas_kernels.mosaic.launch import all_threads

Array = jax.Array
Ref = Any
_LOAD_BYTES = 16
"""Bytes that one thread loads at a time where rows are aligned to them."""
_GROUP = 32
"""Pieces that share words of allowed columns. Those of a step are in one group."""
_SLOTS = 2
"""Steps of a row that shared memory holds."""


@dataclass(frozen=True)
class Reader:
    """How a row is read in pieces, with `vector` neighbouring columns in each thread."""

    vector: int

    @property
    def piece(self) -> int:
        """Columns of a piece."""
        return THREADS * self.vector

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.piece,), vec_size=self.vector)

    def load(self, lines_gmem: Ref, line: Array, start: Any) -> Array:
        """The piece that begins at column `start` of a line."""
        return plgpu.load(lines_gmem.at[line, pl.ds(start, self.piece)], layout=self.layout, optimized=False)

    def load_from(self, columns_smem: Ref, start: Any) -> Array:
        """The piece that begins at place `start` of a step in shared memory."""
        return plgpu.load(columns_smem.at[pl.ds(start, self.piece)], layout=self.layout, optimized=False)

    def words(self, words_gmem: Ref | None, row: Array, number: Any) -> Array | None:
        """The words of `bits_of_pieces` that have a row's piece of this number; None where all columns are allowed."""
        if words_gmem is None:
            return None
        return self.load(words_gmem, row, lax.div(jnp.int32(number), jnp.int32(_GROUP)) * self.piece)

    def columns(self, start: Any) -> Array:
        """The column numbers of the piece that begins at column `start`."""
        return plgpu.broadcasted_iota(jnp.int32, (self.piece,), 0, layout=self.layout) + start

    def full(self, value: Any) -> Array:
        """A piece that holds `value` in every column."""
        return plgpu.layout_cast(jnp.full((self.piece,), value, jnp.float32), self.layout)


def reader_of(size: int, dtype: Any) -> Reader:
    """The reader of the widest pieces that fit into rows of `size` columns and that every row begins aligned to."""
    vector = math.gcd(size, widest(dtype))
    while THREADS * vector > size:
        vector //= 2
    return Reader(vector)


def widest(dtype: Any) -> int:
    """The most columns that one thread can load at a time."""
    return _LOAD_BYTES // jnp.dtype(dtype).itemsize


def widened(logits: Array) -> Array:
    """The logits, padded to at least one column for each thread."""
    return jnp.pad(logits, ((0, 0), (0, max(0, THREADS - logits.shape[1]))))


def is_set(words: Array, number: Any) -> Array:
    """Whether bit `number`, modulo 32, is set in each of the words."""
    return (words & jnp.left_shift(jnp.int32(1), lax.rem(jnp.int32(number), jnp.int32(_GROUP)))) != 0


@dataclass(frozen=True)
class Lines:
    """Rows of `size` columns seen as lines of `rows` rows each, so that each begins aligned for the reader `wide`."""

    size: int
    rows: int
    wide: Reader

    @property
    def narrow(self) -> Reader | None:
        """The reader for the ends of rows where rows do not begin aligned themselves, else None."""
        return Reader(1) if self.rows > 1 else None

    def place(self, row: Array) -> tuple[Array, Array]:
        """The line that holds a row, and the row's first column there."""
        return lax.div(row, jnp.int32(self.rows)), lax.rem(row, jnp.int32(self.rows)) * self.size

    def cut(self, logits: Array) -> Array:
        """The logits in the shape of lines."""
        return logits.reshape(logits.shape[0] // self.rows, self.rows * self.size)


def lines_of(count: int, size: int, dtype: Any) -> Lines:
    """The lines with the widest pieces. Rows that are short or do not fill whole lines are lines of their own."""
    vector = widest(dtype)
    rows = vector // math.gcd(size, vector)
    if rows > 1 and (count % rows or size < (THREADS + 1) * vector):
        return Lines(size, 1, reader_of(size, dtype))
    return Lines(size, rows, Reader(vector) if rows > 1 else reader_of(size, dtype))


@dataclass(frozen=True)
class StepRing:
    """Brings the steps of a row that does not begin aligned into shared memory.

    A copy begins at the last aligned column before a step, and threads skip the columns in between. Each thread thus
    reads the same columns of a step as from a row that begins aligned.
    """

    steps: int
    columns: int
    """Columns of a step."""
    widest: int
    """Columns that copies are aligned to."""
    dtype: Any

    @property
    def scratch(self) -> tuple[Any, Any]:
        smem = plgpu.SMEM((_SLOTS, self.columns + self.widest), self.dtype)
        return smem, plgpu.Barrier(num_arrivals=1, num_barriers=_SLOTS)

    def fold[Carry](
        self,
        line_gmem: Ref,
        start: Array,
        read: Callable[[Any, Ref, Array], Any],
        add: Callable[[Any, Carry, Any], Carry],
        carry: Carry,
        slots_smem: Ref,
        full_barriers: Ref,
    ) -> Carry:
        """Fold the steps i of the row that begins at column `start` of a line: carry = add(i, carry, read(i, slot,
        shift)).

        `read` loads a step whose first column is at place `shift` of its slot in shared memory.
        """
        shift = lax.rem(start, jnp.int32(self.widest))

        def slot_of(i: Any) -> Array:
            return lax.rem(jnp.int32(i), jnp.int32(_SLOTS))

        def fetch(i: Any) -> None:
            columns = pl.ds(start - shift + i * self.columns, self.columns + self.widest)
            source, target, barrier = line_gmem.at[columns], slots_smem.at[slot_of(i)], full_barriers.at[slot_of(i)]
            plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        def step(i: Array, carry: Carry) -> Carry:
            plgpu.barrier_wait(full_barriers.at[slot_of(i)])
            found = read(i, slots_smem.at[slot_of(i)], shift)
            all_threads()

            @pl.when(i + _SLOTS < self.steps)
            def _() -> None:
                fetch(i + _SLOTS)

            return add(i, carry, found)

        for i in range(min(_SLOTS, self.steps)):
            fetch(i)
        return lax.fori_loop(0, self.steps, step, carry)


class WordsOfLines(NamedTuple):
    """The words of `bits_of_pieces` for each row's wide pieces, behind which is the one that the row ends with, and for
    the narrow pieces at its start and end, or None where rows begin aligned.
    """

    wide: Any
    narrow: Any


def words_of_lines(lines: Lines, allowed: Array) -> WordsOfLines:
    """The words of what is allowed to rows that are cut into lines."""
    wide, size = lines.wide, lines.size

    def starts(begin: int) -> list[int]:
        """Those of the wide pieces of a row that begins at this column of its line."""
        end = (begin + size) // wide.vector * wide.vector - begin
        pieces = [-begin % wide.vector + i * wide.piece for i in range(size // wide.piece)]
        return [*pieces, *([end - wide.piece] if lines.rows > 1 or size % wide.piece else [])]

    of_rows = [bits_of_pieces(allowed[i :: lines.rows], starts(i * size), wide.piece) for i in range(lines.rows)]
    if lines.narrow is None:
        return WordsOfLines(of_rows[0], None)
    ends, narrow = [0, size - THREADS], lines.narrow
    whole = jnp.stack(of_rows, axis=1).reshape(len(allowed), -1)
    return WordsOfLines(whole, bits_of_pieces(allowed, ends, narrow.piece))
