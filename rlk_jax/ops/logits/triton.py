"""The ops over logits in Triton, for NVIDIA GPUs from Ampere on. Kernels are imported when one of them is traced."""

from rlk_jax.ops.logits.row_kernels import RowKernels, by_kernels


def _kernels() -> RowKernels:
    from pallas_kernels.triton import rows

    return RowKernels(rows.statistics, rows.gradients)


TRITON = by_kernels(_kernels)
