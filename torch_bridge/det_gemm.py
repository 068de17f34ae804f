"""det_gemm for tensors: a matrix product whose rows have the same bits in any batch, in forward and backward."""

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch import Tensor

import rlk_jax
from torch_bridge import _calls, _exchange, _flops, _inputs, _padding
from torch_bridge._programs import Op


def det_gemm(
    a: Tensor,
    b: Tensor,
    *,
    transpose_b: bool = False,
    out_dtype: torch.dtype | None = None,
    accumulate_into: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Matrix product whose rows keep their bits whatever else is in the batch; `rlk_jax.det_gemm` for tensors.

        C = A·B, or accumulate_into + A·B;   dA = dC·Bᵀ,   dB = Aᵀ·dC

    Args:
      a: `[*lead, M, K]`, bfloat16 or float16; under autocast a and b are cast to autocast's dtype.
      b: `[K, N]`, or `[N, K]` with `transpose_b` (Hugging Face's weights), in a's dtype. Neither a contiguous b nor a
        transposed view of one is copied.
      transpose_b: whether b is stored as `[N, K]`.
      out_dtype: bfloat16, float16 or float32; None means a's dtype, or float32 with `accumulate_into`.
      accumulate_into: float32 `[*lead, M, N]` that the sums start from. It is not written to.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here.

    Returns:
      C `[*lead, M, N]` in out_dtype.

    Raises:
      ValueError: for every argument that does not fit, in rlk_jax's words, before anything runs.
      RuntimeError: for second derivatives. Torch's own errors pass through.

    Gradients flow to a and b, in their dtypes, and to accumulate_into; a gradient that is not needed costs no work.

    Same bits: the results have the bits of `rlk_jax.det_gemm` on the same arrays. The rows of zeros that pad M to a
    bucket change no bit.
    """
    _inputs.check_tensors(a=a, b=b, accumulate_into=accumulate_into)
    a, b = _inputs.autocast(a, b)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise ValueError(f"out_dtype must be a torch.dtype or None, got {out_dtype!r}.")
    dtype: Any = out_dtype and _exchange.DTYPES.get(out_dtype, out_dtype)
    tensors = {"a": a, "b": b, "accumulate_into": accumulate_into}
    _inputs.check_static("det_gemm", tensors, transpose_b=transpose_b, out_dtype=dtype, implementation=implementation)
    if out_dtype is None:
        out_dtype = a.dtype if accumulate_into is None else torch.float32
    if _inputs.is_transposed(b):
        b, transpose_b = b.t(), not transpose_b
    needs = _inputs.needs(a, b, accumulate_into)
    return _det_gemm(a, b, accumulate_into, transpose_b, out_dtype, implementation, needs)[0]


def _run(a: Any, b: Any, accumulate_into: Any, **options: Any) -> tuple[jax.Array, ...]:
    return (rlk_jax.det_gemm(a, b, accumulate_into=accumulate_into, **options),)


_OP = Op("det_gemm", _run, differentiable=3)


def _output(a: Tensor, b: Tensor, transpose_b: bool, dtype: torch.dtype) -> _calls.Output:
    return _calls.Output((*a.shape[:-1], b.shape[0 if transpose_b else 1]), dtype)


def _kernel(
    a: Tensor,
    b: Tensor,
    accumulate_into: Tensor | None,
    transpose_b: bool,
    out_dtype: torch.dtype,
    implementation: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """C, and the handle for the backward."""
    padding = _padding.flat(a.shape[:-1])
    options = (
        ("transpose_b", transpose_b),
        ("out_dtype", _exchange.DTYPES[out_dtype]),
        ("implementation", implementation),
    )

    def rows(x: Tensor) -> jax.Array:
        return padding.rows(x, 0.0, columns=1)

    call = _calls.Call(_OP, padding, options, (rows, _exchange.lend, rows), rows)
    c, handle = call.forward([a, b, accumulate_into], lambda: (), needs, [_output(a, b, transpose_b, out_dtype)])
    return c, handle


def _fake(
    a: Tensor, b: Tensor, accumulate_into: Tensor | None, transpose_b: bool, out_dtype: torch.dtype, *_: Any
) -> Any:
    return _calls.fake([_output(a, b, transpose_b, out_dtype)], a.device)


# The gradient of a or b is a product with the other one, so a backward reads a for dB and b for dA.
_det_gemm = _calls.as_torch_op(
    "det_gemm",
    _kernel,
    _fake,
    [0, 1, 2],
    saved=lambda needs: [needs[1], needs[0], False],
    flops=_flops.product_flops,
)
