"""linear_logp's and det_gemm's implementations by kernels, as pytest parameters."""

import pytest

from pallas_kernels.cuda import build
from pallas_kernels.triton import call

needs_cuda = pytest.mark.skipif(build.why_missing() is not None, reason=str(build.why_missing()))
needs_triton = pytest.mark.skipif(call.why_missing() is not None, reason=str(call.why_missing()))
HEAD_KERNELS = ("mosaic", pytest.param("triton", marks=needs_triton), pytest.param("cuda", marks=needs_cuda))
"""linear_logp's implementations by kernels that run on Hopper; Triton's run elsewhere too."""
every_implementation = pytest.mark.parametrize("implementation", ["mosaic", pytest.param("cuda", marks=needs_cuda)])
