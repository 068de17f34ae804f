"""det_gemm on Hopper, by Mosaic's or CUDA's kernel, which is imported when it is traced."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax

from pallas_kernels.hopper.tiles import Machine
from rlk_jax.core.devices import default_machine
from rlk_jax.core.gemm import GemmLayout
from rlk_jax.core.transforms import as_replicated, fusion_barrier
from rlk_jax.ops.det_gemm.options import Gemm

Array = jax.Array


class GemmKernel(Protocol):
    """The kernel, whichever language it is written in; its docstring says what it computes."""

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


def _mosaic_kernel() -> GemmKernel:
    from pallas_kernels.mosaic.gemm import gemm

    return gemm


def _cuda_kernel() -> GemmKernel:
    from pallas_kernels.cuda.kernels import gemm

    return gemm


def mosaic(machine: Machine | None = None) -> Gemm:
    """The implementation by a Pallas Mosaic GPU kernel, for one machine; None for the GPU that JAX sees."""
    return functools.partial(_by_kernel, _mosaic_kernel, machine)


def cuda(machine: Machine | None = None) -> Gemm:
    """The implementation by a CUDA C++ kernel, for one machine; None for the GPU that JAX sees."""
    return functools.partial(_by_kernel, _cuda_kernel, machine)


def _by_kernel(
    kernel: Callable[[], GemmKernel],
    machine: Machine | None,
    layout: GemmLayout,
    a: Array,
    b: Array,
    start: Array | None,
    /,
) -> Array:
    product = kernel()(
        *fusion_barrier(as_replicated((a, b, start))),
        a_transposed=layout.a_transposed,
        b_transposed=layout.b_transposed,
        out_dtype=layout.out_dtype,
        machine=machine or default_machine(),
    )
    return fusion_barrier(product)
