"""det_gemm: a matrix product whose rows have the same bits in any batch, forward and backward."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from rlk_jax.core.checks import require_values
from rlk_jax.core.dispatch import CallFacts, choose, facts_of
from rlk_jax.ops.det_gemm.autodiff import product
from rlk_jax.ops.det_gemm.checks import check_call
from rlk_jax.ops.det_gemm.options import GemmInputs


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
      b: `[K, N]`, or `[N, K]` with `transpose_b` (Hugging Face's weights); of a's dtype. Neither layout is
        transposed in memory.
      transpose_b: b is stored `[N, K]`.
      out_dtype: bfloat16, float16 or float32; None for a's dtype, or for float32 beside `accumulate_into`. Sums run
        in float32 and are rounded once.
      accumulate_into: float32 `[*lead, M, N]` that the sums start from.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here
        (`rlk_jax.explain` tells).

    Returns:
      C `[*lead, M, N]` in out_dtype. Where M or N is 0, C is empty; where K is 0, C is accumulate_into, or zeros.

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and where no implementation that keeps
        the promise below can run: no other is substituted.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow to a and b, in their dtypes, and to accumulate_into; an operand that needs none costs no work.
    Gradients are products of the same kind, so they can be differentiated again. A float32 gradient of C is rounded to
    a's dtype first: tensor cores multiply 16-bit numbers.

    Same bits: the implementations that promise bits (docs/det_gemm.md lists them) give a row of C and of dA the same
    raw bits for any M, at any position and beside any rows. K cut at multiples of 64 and added up in order through
    `accumulate_into` gives the bits of the whole product. dB keeps its bits too when it is added up as
    `det_gemm(a_block.T, dc_block, accumulate_into=…)` over blocks of 64·i rows. Zero rows appended to a and dC change
    no bit of dB. docs/det_gemm.md has the whole contract.

    Source: RL-Kernel's det_gemm; batch invariance as in "Defeating Nondeterminism in LLM Inference" (Thinking Machines,
    2025), without its fixed tile.
    """
    inputs, layout = check_call(GemmInputs(a, b, accumulate_into), transpose_b=transpose_b, out_dtype=out_dtype)
    require_values(inputs)
    chosen = choose(facts_of("det_gemm", inputs, layout), implementation)
    shape = (*inputs.a.shape[:-1], inputs.b.shape[0 if transpose_b else 1])
    rows = math.prod(shape[:-1])
    a, b = jnp.asarray(inputs.a).reshape(rows, inputs.a.shape[-1]), jnp.asarray(inputs.b)
    start = None if inputs.accumulate_into is None else jnp.asarray(inputs.accumulate_into).reshape(rows, shape[-1])
    return product(chosen.functions, layout, a, b, start).reshape(shape)


def describe(arguments: Mapping[str, Any]) -> tuple[CallFacts, str | None]:
    """Check a call's arguments, by name. Returns the facts that dispatch decides by, and the implementation named."""
    given = dict(arguments)
    implementation = given.pop("implementation")
    inputs = GemmInputs(*(given.pop(name) for name in GemmInputs._fields))
    return facts_of("det_gemm", *check_call(inputs, **given)), implementation
