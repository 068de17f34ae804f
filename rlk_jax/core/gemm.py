"""How the two matrices of a product are stored: each plain or transposed."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GemmLayout:
    """How the operands of C = A·B are stored, and the dtype that C is rounded to."""

    a_transposed: bool
    """A is stored `[K, M]` instead of `[M, K]`."""
    b_transposed: bool
    """B is stored `[N, K]` instead of `[K, N]`."""
    out_dtype: Any

    def sizes(self, a: Any, b: Any) -> tuple[int, int, int]:
        """M, K and N of these operands."""
        m, k = a.shape[::-1] if self.a_transposed else a.shape
        return m, k, b.shape[0 if self.b_transposed else 1]
