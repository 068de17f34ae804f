"""The gold standard of the tests: the plain product of float32-upcast operands. It stays this plain."""

import jax
import jax.numpy as jnp

from rlk_jax.core.gemm import GemmLayout

Array = jax.Array


def reference(layout: GemmLayout, a: Array, b: Array, start: Array | None) -> Array:
    """start + A·B on float32-upcast operands, rounded once."""
    a = (a.T if layout.a_transposed else a).astype(jnp.float32)
    b = (b.T if layout.b_transposed else b).astype(jnp.float32)
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (product if start is None else start + product).astype(layout.out_dtype)
