"""Every static check of det_gemm and its message.

The docstring of a check says what must hold. Where it does not, the check raises ValueError before anything runs.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from rlk_jax.core.checks import FLOAT_DTYPES, as_array, check_devices, check_flag, no_explicit_axes, require
from rlk_jax.core.gemm import GemmLayout
from rlk_jax.ops.det_gemm.options import GemmInputs


def _checked_out_dtype(x: Any) -> np.dtype:
    try:
        dtype = np.dtype(x)
    except TypeError:
        dtype = None
    require(dtype in FLOAT_DTYPES, f"out_dtype must be bfloat16, float16 or float32, got {x!r}.")
    return dtype


def check_call(inputs: GemmInputs, *, transpose_b: bool, out_dtype: Any) -> tuple[GemmInputs, GemmLayout]:
    """All static checks of a call: its inputs as arrays, and how they are stored."""
    check_flag("transpose_b", transpose_b)
    start = None if inputs.accumulate_into is None else as_array("accumulate_into", inputs.accumulate_into)
    inputs = GemmInputs(as_array("a", inputs.a), as_array("b", inputs.b), start)
    a, b, start = inputs
    layout = "[N,K]" if transpose_b else "[K,N]"
    require(
        a.ndim >= 2 and b.ndim == 2,
        f"det_gemm_fwd: expect 2D [M,K]@{layout} (a may have leading dims), got shapes {a.shape} and {b.shape}.",
    )
    k, n = b.shape[::-1] if transpose_b else b.shape
    require(a.shape[-1] == k, f"det_gemm_fwd: K mismatch: a has {a.shape[-1]}, b as {layout} has {k}.")
    for name, x in (("a", a), ("b", b)):
        require(x.dtype in FLOAT_DTYPES[:2], f"{name} must be bfloat16 or float16, got {x.dtype}.")
    require(a.dtype == b.dtype, f"a dtype {a.dtype} must match b dtype {b.dtype}.")
    if start is not None:
        shape = (*a.shape[:-1], n)
        require(start.shape == shape, f"accumulate_into must have C's shape {shape}, got {start.shape}.")
        require(start.dtype == jnp.float32, f"accumulate_into must be float32, got {start.dtype}.")
    if out_dtype is None:
        out_dtype = a.dtype if start is None else jnp.float32
    no_explicit_axes("det_gemm", inputs)
    check_devices(inputs)
    return inputs, GemmLayout(False, transpose_b, _checked_out_dtype(out_dtype))


def check_gemm_dtype(dtype: Any) -> None:
    """`det_gemm` multiplies this dtype."""
    require(dtype in FLOAT_DTYPES[:2], f"dtype must be bfloat16 or float16, got {dtype!r}.")
