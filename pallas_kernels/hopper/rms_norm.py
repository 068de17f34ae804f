"""What the kernel of RMSNorm takes on Hopper, and in which blocks."""

from dataclasses import dataclass

from pallas_kernels.hopper.tiles import THREADS
from pallas_kernels.products import padded

_MOST_COLUMNS = 8192
"""A thread then holds 64 numbers of its row."""
_PIECE_BYTES, _MOST_PIECES = 16, 256
"""TMA copies pieces of a row of at least so many bytes, and at most so many pieces at once."""
_ROWS_IN_FLIGHT, _BLOCKS_OF_ONE_ROW = 4, 8
"""Rows that a block of threads loads at once, where every SM would have so many blocks of one row."""
_MOST_BYTES = 96 * 1024
"""Shared memory for the rows of a block, unless one row needs more."""


@dataclass(frozen=True)
class RowTile:
    """Rows as a warpgroup holds them: pieces of so many columns each, behind the row's own ones pieces of zeros."""

    pieces: int
    columns: int

    @property
    def size(self) -> int:
        """Columns of all pieces, a multiple of the threads of a warpgroup."""
        return self.pieces * self.columns


def row_tile(columns: int) -> RowTile:
    """The tile of rows of so many columns."""
    piece = next(width for width in (128, 64, 32, 16, 8, 4, 2, 1) if columns % width == 0)
    return RowTile(padded(columns, THREADS) // piece, piece)


def takes_rows(columns: int, itemsize: int) -> bool:
    """Whether the kernel normalises rows of so many numbers, of so many bytes each."""
    tile = row_tile(columns)
    fits = tile.columns * itemsize >= _PIECE_BYTES and tile.pieces <= _MOST_PIECES
    return columns <= _MOST_COLUMNS and fits


def block_rows(rows: int, row_bytes: int, sm_count: int) -> int:
    """How many rows a block of threads normalises, one after the other, of so many bytes of shared memory each. It
    changes no bit of a row.
    """
    if rows < sm_count * _BLOCKS_OF_ONE_ROW:
        return 1
    return max(1, min(_ROWS_IN_FLIGHT, _MOST_BYTES // row_bytes))
