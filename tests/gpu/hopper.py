"""The implementations of ops by kernels, as pytest parameters."""

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.cuda import build
from pallas_kernels.triton import call

needs_cuda = pytest.mark.skipif(build.why_missing() is not None, reason=str(build.why_missing()))
needs_triton = pytest.mark.skipif(call.why_missing() is not None, reason=str(call.why_missing()))
HEAD_KERNELS = ("mosaic", pytest.param("triton", marks=needs_triton), pytest.param("cuda", marks=needs_cuda))
"""The implementations of linear_logp and linear_kl by kernels that run on Hopper; Triton's run elsewhere too."""
every_implementation = pytest.mark.parametrize("implementation", ["mosaic", pytest.param("cuda", marks=needs_cuda)])


def by_kernels_and_dtype(*mosaics_alone: Any) -> pytest.MarkDecorator:
    """Parameters `kernels` and `dtype`: all kernels with both 16-bit dtypes, and `mosaic` with others besides."""
    found = []
    for entry in HEAD_KERNELS:
        name, marks = (entry, ()) if isinstance(entry, str) else (entry.values[0], entry.marks)
        for dtype in (jnp.bfloat16, jnp.float16, *(mosaics_alone if name == "mosaic" else ())):
            found.append(pytest.param(name, dtype, marks=marks, id=f"{name}-{jnp.dtype(dtype).name}"))
    return pytest.mark.parametrize(("kernels", "dtype"), found)
