"""What jax.export needs to know of the ops: the trees that they return, and the kernels that they call."""

import jax.export


def exportable[T: type](result: T) -> T:
    """The class of named tuples `result`, which an exported program may return. A loader must import it first."""
    jax.export.register_namedtuple_serialization(result, serialized_name=f"rlk_jax.{result.__name__}")
    return result


def export_checks() -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """The checks that jax.export must skip to take a program with the kernels of `mosaic`, `triton` or `cuda`.

        jax.export.export(function, disabled_checks=rlk_jax.export_checks())

    JAX promises for none of these kernels that a later version can still run them: export and load with the same
    jaxlib. Programs of the other implementations export without.
    """
    from pallas_kernels.cuda.build import TARGETS

    names = ("mosaic_gpu_v2", "triton_kernel_call", "triton_kernel_call_ffi", *TARGETS)
    return tuple(map(jax.export.DisabledSafetyCheck.custom_call, names))
