"""det_gemm on Hopper, by Mosaic's or CUDA's kernel, which is imported when it is traced."""

import functools

from pallas_kernels.hopper.tiles import Machine
from rlk_jax.core.gemm import Gemm, GemmKernel, by_kernel


def _mosaic_kernel() -> GemmKernel:
    from pallas_kernels.mosaic.gemm import gemm

    return gemm


def _cuda_kernel() -> GemmKernel:
    from pallas_kernels.cuda.kernels import gemm

    return gemm


def mosaic(machine: Machine | None = None) -> Gemm:
    """The implementation by a Pallas Mosaic GPU kernel, for one machine; None for the GPU that JAX sees."""
    return functools.partial(by_kernel, _mosaic_kernel, machine)


def cuda(machine: Machine | None = None) -> Gemm:
    """The implementation by a CUDA C++ kernel, for one machine; None for the GPU that JAX sees."""
    return functools.partial(by_kernel, _cuda_kernel, machine)
