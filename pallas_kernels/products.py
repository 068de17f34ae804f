"""What the kernels of matrix products take in every language."""

from typing import Any, NamedTuple


class LowRankTerm(NamedTuple):
    """What a low-rank term adds to a product with the head: further columns of hidden `[rows, r]`, and what multiplies
    them, `[V, r]` or `[r, V]`, stored and cut as the weight is. r is a multiple of 64 on Hopper, of 8 in Triton.
    """

    hidden: Any
    weight: Any


def padded(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below n."""
    return -(-n // multiple) * multiple
