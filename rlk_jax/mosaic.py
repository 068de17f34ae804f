"""The ops by Pallas Mosaic GPU kernels for Hopper, which are imported when one of them is traced."""

import functools

from pallas_kernels.hopper.tiles import Machine
from rlk_jax import hopper
from rlk_jax._gemm import Gemm
from rlk_jax._logits import RowKernels, by_kernels
from rlk_jax._problem import LinearLogpFunctions, LogpFunctions


def _kernels() -> hopper.Kernels:
    from pallas_kernels.mosaic import head_kernels as kernels

    return hopper.Kernels(
        partials=kernels.partials,
        fold_chunks=kernels.fold_chunks,
        fold_groups=kernels.fold_groups,
        coefficients=kernels.coefficients,
        dlogits=kernels.dlogits,
        dlogits_from_kept_exponentials=kernels.dlogits_from_kept_exponentials,
        add_hidden_gradient=kernels.add_hidden_gradient,
        store_weight_gradient=kernels.store_weight_gradient,
        column_sums=kernels.column_sums,
        gemm=kernels.gemm,
    )


def linear_logp(machine: Machine | None = None) -> LinearLogpFunctions:
    """The implementation for one machine; None for the GPU that JAX sees."""
    return hopper.linear_logp(_kernels, machine)


LINEAR_LOGP = linear_logp()


def det_gemm(machine: Machine | None = None) -> Gemm:
    """The implementation for one machine; None for the GPU that JAX sees."""
    return hopper.det_gemm(_kernels, machine)


DET_GEMM = det_gemm()


def _row_kernels(machine: Machine | None) -> RowKernels:
    from pallas_kernels.mosaic import logits

    here = machine or hopper.default_machine()
    return RowKernels(
        functools.partial(logits.statistics, machine=here), functools.partial(logits.gradients, machine=here)
    )


def logp(machine: Machine | None = None) -> LogpFunctions:
    """The implementation for one machine; None for the GPU that JAX sees."""
    return by_kernels(functools.partial(_row_kernels, machine))


LOGP = logp()
