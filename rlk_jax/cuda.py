"""linear_logp and det_gemm by the CUDA C++ kernels for Hopper."""

from typing import TYPE_CHECKING

from pallas_kernels.cuda import build
from rlk_jax import hopper

if TYPE_CHECKING:
    from rlk_jax.dispatch import Problem


def _kernels() -> hopper.Kernels:
    from pallas_kernels.cuda import kernels

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


LINEAR_LOGP = hopper.linear_logp(_kernels)
DET_GEMM = hopper.det_gemm(_kernels)


def _no_library() -> list[str]:
    missing = build.why_missing() or build.driver_too_old()
    return [missing] if missing else []


def cannot_run(problem: "Problem") -> list[str]:
    """Reasons why no kernel runs on this device; only where all else fits is it worth looking for a compiler."""
    return hopper.needs_hopper(problem) or _no_library()


def why_not(problem: "Problem") -> list[str]:
    """Reasons why linear_logp's kernels cannot run this problem."""
    return hopper.why_not(problem) or _no_library()
