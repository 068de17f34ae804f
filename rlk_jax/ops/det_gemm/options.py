"""What a call of det_gemm carries, and what every implementation takes and gives."""

from typing import Any, NamedTuple, Protocol

import jax

from rlk_jax.core.gemm import GemmLayout

Array = jax.Array


class GemmInputs(NamedTuple):
    """One call's arrays as the user shaped them; accumulate_into may be None."""

    a: Any
    b: Any
    accumulate_into: Any


class Gemm(Protocol):
    """One implementation: start + A·B `[M, N]` in the layout's dtype.

    start is float32 `[M, N]` or None. No dimension is 0.
    """

    def __call__(self, layout: GemmLayout, a: Array, b: Array, start: Array | None, /) -> Array: ...
