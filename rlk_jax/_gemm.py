"""What every implementation of det_gemm takes: a product of two matrices, each stored either way round."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Array = jax.Array


class GemmInputs(NamedTuple):
    """One call's arrays as the user shaped them."""

    a: Any
    b: Any
    accumulate_into: Any


@dataclass(frozen=True)
class Form:
    """How the operands of C = A·B are stored, and what C is rounded to."""

    a_transposed: bool
    """`[K, M]` in the place of `[M, K]`."""
    b_transposed: bool
    """`[N, K]` in the place of `[K, N]`."""
    out_dtype: Any

    def sizes(self, a: Any, b: Any) -> tuple[int, int, int]:
        """M, K and N."""
        m, k = a.shape[::-1] if self.a_transposed else a.shape
        return m, k, b.shape[0 if self.b_transposed else 1]


Gemm = Callable[[Form, Array, Array, Array | None], Array]
"""`[M, N]` in the form's dtype: start + A·B, where start is float32 `[M, N]` or None and no dimension is 0."""
