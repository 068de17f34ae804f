"""The ops over logits on Hopper, by Pallas Mosaic GPU kernels, which are imported when one of them is traced."""

import functools

from pallas_kernels.hopper.tiles import Machine
from rlk_jax.core.devices import default_machine
from rlk_jax.ops.logits.options import LogitsFunctions
from rlk_jax.ops.logits.row_kernels import RowKernels, by_kernels


def _kernels(machine: Machine | None) -> RowKernels:
    from pallas_kernels.mosaic import logits

    here = machine or default_machine()
    return RowKernels(
        functools.partial(logits.statistics, machine=here), functools.partial(logits.gradients, machine=here)
    )


def mosaic(machine: Machine | None = None) -> LogitsFunctions:
    """The implementation for one machine; None for the GPU that JAX sees."""
    return by_kernels(functools.partial(_kernels, machine))
