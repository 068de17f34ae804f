"""The memory that the programs of a run need, compared with what is free before the first step."""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rlk_jax.core.kernel_compilation import compile_kernels, has_namesake
from rlk_jax.grpo.run_config import RunConfig
from rlk_jax.grpo.steps import Jitted, RunSteps, TrainState
from rlk_jax.grpo.stopping import StopRequest
from rlk_jax.grpo.usage import size_text

_MEMINFO = Path("/proc/meminfo")


class _Planned(NamedTuple):
    """A program that a run will call, with the shapes of its arguments. The first one is the states or part of them."""

    name: str
    program: Jitted
    arguments: tuple[Any, ...]


class ProgramMemory(NamedTuple):
    """What a program needs on each device, in bytes."""

    name: str
    arguments: int
    results: int
    """Those that do not take the place of arguments."""
    temporaries: int
    """Temporary arrays, and the program itself."""
    beside: int
    """States that it does not take, and that are kept."""

    @property
    def peak(self) -> int:
        """All that is on a device while the program runs."""
        return self.arguments + self.results + self.temporaries + self.beside


def check_memory(config: RunConfig, steps: RunSteps, done: int, stop: StopRequest) -> None:
    """Compile the programs that a run calls after `done` steps, until it is asked to stop.

    JAX keeps what it has compiled, so the run compiles none of them again. Raises MemoryError for a program that needs
    more than is free. Where either is unknown, one warning says that nothing was checked.
    """
    states = steps.initial_state.lower()
    free = free_memory(list(jax.tree.leaves(states.out_info)[0].sharding.device_set))
    for needed in program_memories(config, steps, states, done, stop):
        if needed is None or free is None:
            warn_unknown(config)
            return
        check_fits(needed, free)


def program_memories(
    config: RunConfig, steps: RunSteps, states: jax.stages.Lowered, done: int, stop: StopRequest
) -> Iterator[ProgramMemory | None]:
    """What each program needs that a run calls after `done` steps, as XLA analyses it; None where it does not.

    `states` is the program that makes them; it comes first. Each of the others is compiled as it comes, until the run
    is asked to stop.
    """
    state, kept = states.out_info, device_bytes(states.out_info)
    yield _memory("the policy with its optimizer", states, 0, 0)
    device = next(iter(jax.tree.leaves(state)[0].sharding.device_set))
    for name, program, arguments in _planned(config, steps, state, done):
        if stop.signal is None:
            lowered = program.lower(*arguments)
            if device.platform == "gpu" and not has_namesake(lowered.compiler_ir()):  # A resumed run finds it compiled.
                compile_kernels(lowered, device)
            yield _memory(name, lowered, device_bytes(arguments[0]), kept)


def _planned(config: RunConfig, steps: RunSteps, state: TrainState, done: int) -> list[_Planned]:
    """The programs that a run calls after `done` steps, in their order."""
    planned = []
    for phase in steps.phases(config):
        if phase.start is not None and done <= phase.begin:
            planned.append(_Planned(phase.start_title, phase.start, (state,)))
        if done < phase.end:
            planned.append(_Planned(phase.title, phase.step, (state, 0)))
    return [*planned, _Planned("the evaluation", steps.evaluation, (state.params,))]


def _memory(name: str, program: jax.stages.Lowered, taken: int, kept: int) -> ProgramMemory | None:
    """What a program needs that takes states of so many bytes, of all that are kept."""
    sizes = program.compile().memory_analysis()
    if sizes is None:
        return None
    arguments = sizes.argument_size_in_bytes
    return ProgramMemory(
        name,
        arguments,
        sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes,
        kept - min(taken, arguments),  # JAX does not pass on what a program never reads.
    )


def device_bytes(tree: Any) -> int:
    """The bytes of a tree of arrays, or of their shapes, on the device that they lie on, or on each of several."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def check_fits(needed: ProgramMemory, free: int) -> None:
    """Raises MemoryError for a program that needs more than is free."""
    if needed.peak > free:
        need, there = size_text(needed.peak), size_text(free)
        raise MemoryError(f"{needed.name} needs about {need} on a device, and {there} are free")


def warn_unknown(config: RunConfig) -> None:
    """Say that what programs need, or what is free, is not known."""
    print(f"rlk {config.name}: warning: it is unknown here whether the run fits into memory", file=sys.stderr)


def free_memory(devices: Sequence[jax.Device]) -> int | None:
    """The bytes that each of the devices has free; None where that is unknown. Devices of a CPU share its RAM."""
    if devices[0].platform == "cpu":
        available = _available_ram()
        return None if available is None else available // len(devices)
    counted = [device.memory_stats() for device in devices]
    if not all(stats and "bytes_limit" in stats for stats in counted):
        return None
    return min(stats["bytes_limit"] - stats["bytes_in_use"] for stats in counted if stats)


def _available_ram() -> int | None:
    """The bytes of RAM that new work can have, as Linux estimates it; None on other systems."""
    if not _MEMINFO.exists():
        return None
    lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    available = lines.get("MemAvailable")
    return None if available is None else int(available.removesuffix("kB")) * 1024
