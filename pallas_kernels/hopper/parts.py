"""Float32 matrices as the sum of two bfloat16 ones, which is what tensor cores multiply.

A product of two such matrices is the sum of three: low·high, high·low and high·high. What is left out, low·low, is
2^-18 of the product.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


class Parts(NamedTuple):
    """A float32 matrix as the sum of `high` and `low`, bfloat16 each, to about 2^-17 of each element.

    Fields may also be references to such matrices.
    """

    high: Any
    low: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix that this is."""
        return jnp.dtype(jnp.float32)


Matrix = Any
"""A 16-bit matrix, or a float32 one in `Parts`, which Mosaic's kernels alone take."""


def parts_of(matrix: Any) -> tuple[Any, ...]:
    """The 16-bit matrices that a matrix is the sum of: itself, or its two parts."""
    return tuple(matrix) if isinstance(matrix, Parts) else (matrix,)


def leading_parts(matrix: Any, count: int) -> Any:
    """The matrix, or its high part alone where one part is enough."""
    return matrix.high if count == 1 and isinstance(matrix, Parts) else matrix


def split(x: Array, *, in_kernel: bool = False) -> Parts:
    """Float32 values in two parts.

    What bfloat16 would round to infinity is in the low part as far as it is beyond bfloat16's range. An infinity or NaN
    is the low part of ±1, so that its products with finite parts of one sign or another are those in float32: as a high
    part it would be multiplied by parts of both signs. What kernels split is infinite in gradients alone, whose high
    part may be taken without the low one: there it is NaN, as its product with a column of both signs is in float32.
    """
    limit = jnp.where(jnp.abs(x) < jnp.inf, _LARGEST, jnp.nan if in_kernel else 1.0)
    high = jnp.minimum(jnp.maximum(x, -limit), limit)
    if in_kernel:
        # The barrier makes one instruction round two values.
        rounded = lax.optimization_barrier(high.astype(jnp.bfloat16))
        return Parts(rounded, (x - rounded.astype(jnp.float32)).astype(jnp.bfloat16))
    # XLA may leave out two conversions in a row, but not this.
    high = lax.reduce_precision(high, 8, 7)
    return Parts(high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16))


def in_parts(values: Array, dtype: Any) -> tuple[Array, ...]:
    """For kernels: float32 values rounded to a 16-bit dtype, or in two parts for float32."""
    return tuple(split(values, in_kernel=True)) if dtype == jnp.float32 else (values.astype(dtype),)


def whole(parts: Any) -> Array:
    """The float32 values whose parts are given."""
    first, *others = (x.astype(jnp.float32) for x in parts)
    return first + others[0] if others else first


def new_matrix(shape: tuple[int, int], dtype: Any) -> Any:
    """Memory for a matrix of a 16-bit dtype, or for the two parts of a float32 one."""
    if dtype != jnp.float32:
        return lax.empty(shape, dtype)
    return Parts(lax.empty(shape, jnp.bfloat16), lax.empty(shape, jnp.bfloat16))
