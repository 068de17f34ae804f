"""The text of a kernel, which is the same wherever the kernel is lowered.

JAX names a kernel by a hash of its text. The runtime compiles a kernel once for each such name, and keeps it for the
whole process; JAX's compilation cache finds a program by a hash of all its text. But JAX 0.11 writes a name for dumps
into the text of each kernel, with the number of kernels that the process has lowered. No text came twice then: a
program that was made again compiled all its kernels again and left 10 MiB in the process, and the cache knew a program
only in a process that had lowered the same kernels before it.
"""

from typing import Any

from jax.experimental.mosaic.gpu import core

_DUMP_NAME = "mosaic_gpu.dump_basename"


def take_out_dump_names() -> None:
    """Make Pallas lower the kernels of this process, whoever wrote them, without their names for dumps.

    The compiler gives a kernel without one another when it dumps it. A JAX that lowers them elsewhere is left as it is;
    tests/pallas_kernels/mosaic/test_kernel_text.py says so.
    """
    lower = getattr(core, "_mosaic_gpu_lowering_rule", None)
    if lower is None:
        return

    def lower_without_name(*operands: Any, module: Any, **options: Any) -> Any:
        if _DUMP_NAME in module.operation.attributes:
            del module.operation.attributes[_DUMP_NAME]
        return lower(*operands, module=module, **options)

    core._mosaic_gpu_lowering_rule = lower_without_name
