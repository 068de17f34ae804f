"""What a device lacks for each kind of kernels, and which devices a kind is meant for."""

from collections.abc import Callable

import jax

from pallas_kernels.cuda import build
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.triton import call
from rlk_jax.core.dispatch import CallFacts, Device


def is_hopper(device: Device) -> bool:
    """Whether it is an NVIDIA GPU of compute capability 9.0."""
    return device.compute_capability == "9.0"


def is_ampere_or_later(device: Device) -> bool:
    """Whether it is an NVIDIA GPU of Ampere's compute capability or a later one."""
    major = (device.compute_capability or "").partition(".")[0]
    return major.isdecimal() and int(major) >= 8


def is_meant_for_triton(device: Device) -> bool:
    """Whether Triton's kernels are what should run on this device.

    On Hopper they are not: Mosaic's come first there, and refuse the same arguments.
    """
    return is_ampere_or_later(device) and not is_hopper(device)


def default_machine() -> Machine:
    """The GPU that programs are traced for; an H200 where JAX sees no GPU (compiling ahead of time)."""
    return Machine(getattr(jax.devices()[0], "core_count", None) or Machine().sm_count)


def hopper_obstacles(facts: CallFacts) -> list[str]:
    """Why kernels for Hopper cannot run on the device of this call."""
    found = facts.device.compute_capability
    return (
        [] if is_hopper(facts.device) else [f"needs compute capability 9.0 (Hopper), not {found or facts.device.kind}"]
    )


def with_cuda_library(obstacles: Callable[[CallFacts], list[str]]) -> Callable[[CallFacts], list[str]]:
    """`obstacles`, and why the compiled CUDA kernels cannot be loaded on this machine where it finds none.

    Looking for a compiler starts a process, so it comes last.
    """

    def found(facts: CallFacts) -> list[str]:
        if reasons := obstacles(facts):
            return reasons
        missing = build.why_missing() or build.driver_too_old()
        return [missing] if missing else []

    return found


def triton_obstacles(facts: CallFacts) -> list[str]:
    """Why Triton's kernels cannot run on the device of this call."""
    reasons = []
    if not is_ampere_or_later(facts.device):
        found = facts.device.compute_capability or facts.device.kind
        reasons.append(f"needs an NVIDIA GPU of compute capability 8.0 or later, not {found}")
    missing = call.why_missing()
    if missing:
        reasons.append(missing)
    return reasons
