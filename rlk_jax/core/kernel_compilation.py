"""Mosaic kernels of a program, compiled side by side: XLA compiles those of one program one after the other.

JAX's runtime keeps each compiled kernel for the whole process, by a hash of its text. A program whose kernels were
compiled before, in whatever program, finds them there, and waits for those that another thread is compiling. So
kernels may begin as soon as they are lowered, while Python lowers the rest of their program.
"""

import functools
import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as jax_config

from rlk_jax.core.dispatch import log

_TARGET = "mosaic_gpu_v2"
"""The custom call of Mosaic's kernels."""
_compilations: dict[tuple[bytes, jax.Device], Future[None]] = {}
"""The kernels whose compilation has begun, by hash and device."""


def begin_kernels(held: Any, device: jax.Device) -> list[Future[None]]:
    """Begin to compile each kernel that an operation of MLIR holds alone, all at once, for a device."""
    found = {x["kernel_hash"].value_bytes: x for x in _kernels(held.operation)}
    for name, kernel in found.items():
        if (name, device) not in _compilations:
            attributes = {x.name: _value(x.attr) for x in kernel}
            _compilations[name, device] = _threads().submit(_compile_alone, attributes, device)
    return [_compilations[name, device] for name in found]


def begin_while_lowering(module: Any, part: Any, device: jax.Device) -> None:
    """`begin_kernels` for a program that is being lowered, and for a part that may join its module later.

    Nothing begins where JAX's cache may hold the program, or where threads can no longer be started: at the end of a
    process the program compiles its kernels itself.
    """
    if has_namesake(module):
        return
    try:
        for held in (module, part):
            begin_kernels(held, device)
    except RuntimeError as error:
        log.warning("rlk_jax: kernels are compiled one after the other: %s", error)


def has_namesake(module: Any) -> bool:
    """Whether JAX's compilation cache, where one is set, has a program of the name that a module of MLIR has."""
    path, name = jax.config.jax_compilation_cache_dir, module.operation.attributes["sym_name"].value
    return bool(jax.config.jax_enable_compilation_cache and path and any(Path(path).glob(f"{name}-*-cache")))


def compile_kernels(lowered: jax.stages.Lowered, device: jax.Device) -> None:
    """Compile each kernel of a program alone, all at once, before the program is compiled.

    The kernels of a program are then compiled in the time of the slowest of them, on a machine of as many cores. The
    program's bits are the same: it takes the kernels that it would have compiled. A kernel that cannot be compiled
    alone is left to its program, and the log says so.
    """
    if error := next(filter(None, (x.exception() for x in begin_kernels(lowered.compiler_ir(), device))), None):
        log.warning("rlk_jax: kernels are compiled one after the other: %s", error)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "rlk_jax kernels")


def _kernels(operation: Any) -> Iterator[Any]:
    """The attributes of each call of a kernel in an operation of MLIR, and in all that it holds."""
    for region in operation.regions:
        for block in region:
            for held in block:
                attributes = held.operation.attributes
                if "call_target_name" in attributes and attributes["call_target_name"].value == _TARGET:
                    yield attributes["mhlo.backend_config"]
                yield from _kernels(held.operation)


def _value(attribute: Any) -> Any:
    """An attribute as `jax.ffi.ffi_call` takes it: strings as bytes, which need not be text."""
    return attribute.value_bytes if hasattr(attribute, "value_bytes") else attribute.value


def _compile_alone(kernel: dict[str, Any], device: jax.Device) -> None:
    """Compile a program that would call the kernel with a number. It never runs, and no cache on disk has it."""
    call = jax.ffi.ffi_call(_TARGET, (), has_side_effect=True)

    def rlk_jax_kernel(x: jax.Array) -> Any:
        return call(x, **kernel)

    given = jax.ShapeDtypeStruct((), jnp.int32, sharding=jax.sharding.SingleDeviceSharding(device))
    lowered = jax.jit(rlk_jax_kernel).trace(given).lower(lowering_platforms=("cuda",))
    with jax_config.persistent_cache_min_compile_time_secs(math.inf):
        lowered.compile()
