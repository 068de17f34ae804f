"""The memory that the programs of a run need, compared with what is free before the first step."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.steps import Jitted, TrainingSteps, TrainState
from rlk_jax.grpo.stopping import StopRequest
from rlk_jax.grpo.usage import gib

_MEMINFO = Path("/proc/meminfo")


class _Planned(NamedTuple):
    """A program that a run will call, with the shapes of its arguments."""

    name: str
    program: Jitted
    arguments: tuple[Any, ...]


def check_memory(config: GrpoConfig, steps: TrainingSteps, done: int, stop: StopRequest) -> None:
    """Compile the programs that a run calls after `done` steps, until it is asked to stop.

    JAX keeps what it has compiled, so the run compiles none of them again. Raises MemoryError for a program that needs
    more than is free. Where either is unknown, one warning says that nothing was checked.
    """
    created = steps.initial_state.lower()
    state = created.out_info
    free = free_memory(list(jax.tree.leaves(state)[0].sharding.device_set))
    states = created.compile().memory_analysis()
    if free is None or states is None:
        print("rlk grpo: warning: it is unknown here whether the run fits into memory", file=sys.stderr)
        return
    _check_fits("the policy with its optimizer", states.output_size_in_bytes + states.temp_size_in_bytes, free)
    for planned in _planned(config, steps, state, done):
        if stop.signal is None:
            needed = planned.program.lower(*planned.arguments).compile().memory_analysis()
            _check_fits(planned.name, _size_beside(states.output_size_in_bytes, needed), free)


def _planned(config: GrpoConfig, steps: TrainingSteps, state: TrainState, done: int) -> list[_Planned]:
    """The programs that a run calls after `done` steps, in their order."""
    planned = [_Planned("the evaluation", steps.heldout_rewards, (state.params,))]
    if done < config.total_steps:
        planned.insert(0, _Planned("a GRPO step", steps.grpo_step, (state, 0)))
    if done <= config.warmup_steps:
        planned.insert(0, _Planned("the start of GRPO", steps.start_grpo, (state,)))
    if done < config.warmup_steps:
        planned.insert(0, _Planned("a warm-up step", steps.warmup_step, (state, 0)))
    return planned


def _size_beside(states: int, needed: Any) -> int:
    """Bytes that a program needs while all states are kept; its arguments are states, or parts of them."""
    results = needed.output_size_in_bytes - needed.alias_size_in_bytes
    return states + results + needed.temp_size_in_bytes + needed.generated_code_size_in_bytes


def _check_fits(name: str, size: int, free: int) -> None:
    if size > free:
        raise MemoryError(f"{name} needs about {gib(size)} on a device, and {gib(free)} are free")


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
