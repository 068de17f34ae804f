"""What the kernel of RMSNorm takes on Hopper."""

_MOST_COLUMNS = 8192
"""A thread then holds 64 numbers of its row."""
_ROW_BYTES = 16
"""TMA copies rows of a multiple of so many bytes."""


def takes_rows(columns: int, itemsize: int) -> bool:
    """Whether the kernel normalises rows of so many numbers, of so many bytes each."""
    return columns <= _MOST_COLUMNS and columns * itemsize % _ROW_BYTES == 0
