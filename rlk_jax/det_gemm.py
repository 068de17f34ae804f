"""det_gemm: a matrix product whose rows have the same bits in any batch, forward and backward."""

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from rlk_jax import _transforms, dispatch, validation
from rlk_jax._gemm import Form, Gemm


def det_gemm(
    a: Float[Array, "*lead M K"],
    b: Float[Array, "K N"] | Float[Array, "N K"],
    *,
    transpose_b: bool = False,
    out_dtype: DTypeLike | None = None,
    accumulate_into: Float32[Array, "*lead M N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*lead M N"]:
    """Matrix product whose rows keep their bits whatever else is in the batch.

        C = A·B, or accumulate_into + A·B;   dA = dC·Bᵀ,   dB = Aᵀ·dC

    Args:
      a: `[*lead, M, K]`, bfloat16 or float16.
      b: `[K, N]`, or `[N, K]` with `transpose_b` (Hugging Face's weights); of a's dtype. Neither is transposed in
        memory.
      transpose_b: b is stored `[N, K]`.
      out_dtype: bfloat16, float16 or float32; None for a's dtype, or for float32 beside `accumulate_into`. Sums run
        in float32 and are rounded once.
      accumulate_into: float32 `[*lead, M, N]` that the sums start from.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here
        (`rlk_jax.explain` tells).

    Returns:
      C `[*lead, M, N]` in out_dtype. Where M or N is 0 it is empty; where K is 0 it is accumulate_into, or zeros.

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and where no implementation that keeps
        the promise below can run. None that cannot is ever substituted.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow to a and b, in their dtypes, and to accumulate_into; an operand that needs none costs no work. They
    are products of the same kind, so they can be differentiated again. A float32 gradient of C is rounded to a's dtype
    first: tensor cores multiply 16-bit numbers.

    Same bits: `mosaic`, `cuda` and `deterministic` give a row of C and of dA the same raw bits for any M, at any
    position and beside any rows. K cut at multiples of 64 and added up in order through `accumulate_into` gives the
    bits of the whole; so does dB as `det_gemm(a_block.T, dc_block, accumulate_into=…)` over blocks of 64·i rows. Zero
    rows appended to a and dC change no bit of dB. docs/det_gemm.md has the whole contract.

    Source: RL-Kernel's det_gemm; batch invariance as in "Defeating Nondeterminism in LLM Inference" (Thinking Machines,
    2025), without its fixed tile.
    """
    inputs, form = validation.det_gemm(
        a, b, transpose_b=transpose_b, out_dtype=out_dtype, accumulate_into=accumulate_into
    )
    validation.require_values(inputs)
    chosen = dispatch.choose(dispatch.problem_of("det_gemm", inputs, form), implementation)
    shape = (*inputs.a.shape[:-1], inputs.b.shape[0 if transpose_b else 1])
    rows = math.prod(shape[:-1])
    a, b = jnp.asarray(inputs.a).reshape(rows, inputs.a.shape[-1]), jnp.asarray(inputs.b)
    start = None if inputs.accumulate_into is None else jnp.asarray(inputs.accumulate_into).reshape(rows, shape[-1])
    return _det_gemm(chosen.functions, form, a, b, start).reshape(shape)


def describe(*args: Any, **kwargs: Any) -> tuple[dispatch.Problem, str | None]:
    """What `dispatch` sees of the call `det_gemm(*args, **kwargs)`, and the implementation it names."""
    call = inspect.signature(det_gemm).bind(*args, **kwargs)
    call.apply_defaults()
    implementation = call.arguments.pop("implementation")
    return dispatch.problem_of("det_gemm", *validation.det_gemm(**call.arguments)), implementation


@functools.partial(jax.jit, static_argnums=(0, 1))
def _det_gemm(gemm: Gemm, form: Form, a: Array, b: Array, start: Array | None) -> Array:
    return _product(gemm, form, *_transforms.equally_varying((a, b, start)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(gemm: Gemm, form: Form, a: Array, b: Array, start: Array | None) -> Array:
    """start + A·B for 2-D operands stored as `form` says."""
    m, k, n = form.sizes(a, b)
    if 0 in (m, k, n):
        zeros = jnp.zeros((m, n), jnp.float32)
        return _transforms.varying_like((zeros if start is None else start).astype(form.out_dtype), a)

    def of_rows(b: Array, rows: tuple[Array, Array | None]) -> Array:
        return _transforms.varying_like(gemm(form, rows[0], b, rows[1]), rows[0])

    return _transforms.vmap_folds_rows(of_rows, outputs_are_rows=not form.a_transposed)(b, (a, start))


def _save(gemm: Gemm, form: Form, *primals: Any) -> tuple[Array, Any]:
    needed = _transforms.needs_gradient(primals)
    needs_a, needs_b, _ = _transforms.is_needed(needed)
    a, b, start = _transforms.primal_values(primals)
    return _product(gemm, form, a, b, start), (needed, a if needs_b else None, b if needs_a else None)


def _pull_back(gemm: Gemm, form: Form, saved: Any, upstream: Any) -> tuple[Any, ...]:
    """dA = dC·Bᵀ (of an A stored transposed, B·dCᵀ) and dB = Aᵀ·dC (dCᵀ·A): products of the same kind."""
    needed, a, b = saved
    if isinstance(upstream, SymbolicZero):
        return None, None, None
    needs_a, needs_b, needs_start = _transforms.is_needed(needed)
    dtype = next((x.dtype for x in (a, b) if x is not None), upstream.dtype)
    g, at, bt = upstream.astype(dtype), form.a_transposed, form.b_transposed
    product, d_a, d_b = functools.partial(_product, gemm), None, None
    if needs_a and at:
        d_a = product(Form(bt, True, dtype), b, g, None)
    elif needs_a:
        d_a = product(Form(False, not bt, dtype), g, b, None)
    if needs_b and bt:
        d_b = product(Form(True, at, dtype), g, a, None)
    elif needs_b:
        d_b = product(Form(not at, False, dtype), a, g, None)
    return d_a, d_b, upstream.astype(jnp.float32) if needs_start else None


_product.defvjp(_save, _pull_back, symbolic_zeros=True)
