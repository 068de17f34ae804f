"""The custom_vjp of det_gemm, whose gradients are products of the same kind."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from rlk_jax.core import transforms
from rlk_jax.core.gemm import Gemm, GemmLayout

Array = jax.Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def product(gemm: Gemm, layout: GemmLayout, a: Array, b: Array, start: Array | None) -> Array:
    """start + A·B for 2-D operands stored as `layout` says, differentiable."""
    return _product(gemm, layout, *transforms.equally_varying((a, b, start)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(gemm: Gemm, layout: GemmLayout, a: Array, b: Array, start: Array | None) -> Array:
    """The product of operands that vary over the same mesh axes; under vmap, the batch of a is folded into its rows."""
    m, k, n = layout.sizes(a, b)
    if 0 in (m, k, n):
        zeros = jnp.zeros((m, n), jnp.float32)
        return transforms.varying_like((zeros if start is None else start).astype(layout.out_dtype), a)

    def of_rows(b: Array, rows: tuple[Array, Array | None]) -> Array:
        return transforms.varying_like(gemm(layout, rows[0], b, rows[1]), rows[0])

    return transforms.vmap_folds_rows(of_rows, outputs_are_rows=not layout.a_transposed)(b, (a, start))


def _product_fwd(gemm: Gemm, layout: GemmLayout, *primals: Any) -> tuple[Array, Any]:
    needed = transforms.needs_gradient(primals)
    needs_a, needs_b, _ = transforms.is_needed(needed)
    a, b, start = transforms.primal_values(primals)
    return _product(gemm, layout, a, b, start), (needed, a if needs_b else None, b if needs_a else None)


def _product_bwd(gemm: Gemm, layout: GemmLayout, saved: Any, upstream: Any) -> tuple[Any, ...]:
    """dA = dC·Bᵀ and dB = Aᵀ·dC; for an operand that is stored transposed, the transpose B·dCᵀ or dCᵀ·A."""
    needed, a, b = saved
    if isinstance(upstream, SymbolicZero):
        return None, None, None
    needs_a, needs_b, needs_start = transforms.is_needed(needed)
    dtype = next((x.dtype for x in (a, b) if x is not None), upstream.dtype)
    g, at, bt = upstream.astype(dtype), layout.a_transposed, layout.b_transposed
    of_same_kind, d_a, d_b = functools.partial(_product, gemm), None, None
    if needs_a and at:
        d_a = of_same_kind(GemmLayout(bt, True, dtype), b, g, None)
    elif needs_a:
        d_a = of_same_kind(GemmLayout(False, not bt, dtype), g, b, None)
    if needs_b and bt:
        d_b = of_same_kind(GemmLayout(True, at, dtype), g, a, None)
    elif needs_b:
        d_b = of_same_kind(GemmLayout(not at, False, dtype), a, g, None)
    return d_a, d_b, upstream.astype(jnp.float32) if needs_start else None


_product.defvjp(_product_fwd, _product_bwd, symbolic_zeros=True)
