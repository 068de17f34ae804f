"""Products of two matrices, each plain or transposed, as every op and implementation writes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.tiles import Machine
from rlk_jax.core.devices import default_machine
from rlk_jax.core.fixed_order import BLOCK_COLUMNS, BLOCK_ROWS, DEPTH_MULTIPLE, fma_chain
from rlk_jax.core.transforms import as_replicated, fusion_barrier

Array = jax.Array
WeightLayout = Literal["vd", "dv"]
"""How a head is stored: `[V, D]` or `[D, V]`."""


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


class Gemm(Protocol):
    """One way to multiply: start + A·B `[M, N]` in the layout's dtype, on one device.

    start is float32 `[M, N]` or None. No dimension is 0.
    """

    def __call__(self, layout: GemmLayout, a: Array, b: Array, start: Array | None, /) -> Array: ...


class GemmKernel(Protocol):
    """A kernel for Hopper, whichever language it is written in; its docstring says what it computes."""

    def __call__(
        self,
        a: Array,
        b: Array,
        start: Array | None,
        /,
        *,
        a_transposed: bool,
        b_transposed: bool,
        out_dtype: Any,
        machine: Machine,
    ) -> Array: ...


def by_kernel(
    kernel: Callable[[], GemmKernel],
    machine: Machine | None,
    layout: GemmLayout,
    a: Array,
    b: Array,
    start: Array | None,
    /,
) -> Array:
    """The product by a kernel for Hopper, on one machine; None for the GPU that JAX sees."""
    product = kernel()(
        *fusion_barrier(as_replicated((a, b, start))),
        a_transposed=layout.a_transposed,
        b_transposed=layout.b_transposed,
        out_dtype=layout.out_dtype,
        machine=machine or default_machine(),
    )
    return fusion_barrier(product)


def fixed_order_gemm(layout: GemmLayout, a: Array, b: Array, start: Array | None) -> Array:
    """The product in blocks of 64 × 256, K padded to a multiple of 64: each element is one chain over ascending k.

    It is slow, and has the same bits on any device. Products of two 16-bit numbers are exact in float32, so that a step
    rounds once, whether it is fused or not.
    """
    m, k, n = layout.sizes(a, b)
    rows, columns, depth = -m % BLOCK_ROWS, -n % BLOCK_COLUMNS, -k % DEPTH_MULTIPLE
    a = a if layout.a_transposed else a.T
    b = b.T if layout.b_transposed else b
    a = jnp.pad(a.astype(jnp.float32), ((0, depth), (0, rows))).reshape(k + depth, -1, BLOCK_ROWS)
    b = jnp.pad(b.astype(jnp.float32), ((0, depth), (0, columns))).reshape(k + depth, -1, BLOCK_COLUMNS)
    start = jnp.zeros((m, n), jnp.float32) if start is None else start
    start = jnp.pad(start, ((0, rows), (0, columns))).reshape(-1, BLOCK_ROWS, b.shape[1], BLOCK_COLUMNS)
    b = b.swapaxes(0, 1)

    def of_rows(block: tuple[Array, Array]) -> Array:
        a, start = block
        return lax.map(lambda x: fma_chain(a, *x), (b, start.swapaxes(0, 1)))

    blocks = lax.map(of_rows, (a.swapaxes(0, 1), start))
    return blocks.swapaxes(1, 2).reshape(m + rows, n + columns)[:m, :n].astype(layout.out_dtype)


def plain_gemm(layout: GemmLayout, a: Array, b: Array, start: Array | None) -> Array:
    """The product of float32-upcast operands, rounded once: the gold standard of the tests. It stays this plain."""
    a = (a.T if layout.a_transposed else a).astype(jnp.float32)
    b = (b.T if layout.b_transposed else b).astype(jnp.float32)
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (product if start is None else start + product).astype(layout.out_dtype)


def common_dtype(a: Array, b: Array) -> jnp.dtype:
    """The dtype that a product of both runs in: their own, or float32 where they differ."""
    return a.dtype if a.dtype == b.dtype else jnp.dtype(jnp.float32)


def wide_product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """XLA's product over an axis of each, accumulated and given in float32; float32 operands run in full precision
    rather than TF32.
    """
    dtype = common_dtype(a, b)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
