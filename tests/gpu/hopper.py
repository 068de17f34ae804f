"""linear_logp's and det_gemm's implementations for Hopper, as pytest parameters."""

import pytest

from pallas_kernels.cuda import build

needs_cuda = pytest.mark.skipif(build.why_missing() is not None, reason=str(build.why_missing()))
every_implementation = pytest.mark.parametrize("implementation", ["mosaic", pytest.param("cuda", marks=needs_cuda)])
