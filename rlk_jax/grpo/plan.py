"""`--plan`: the memory that a run needs, by its compiled programs. Nothing is trained, or put on a device."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from rich.table import Table

from rlk_jax.core.absent_gpus import GPUS
from rlk_jax.core.dispatch import compiling_for
from rlk_jax.core.terminal import OutputConsole
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.job import Job, load_job
from rlk_jax.grpo.memory import ProgramMemory, check_fits, device_bytes, free_memory, program_memories, warn_unknown
from rlk_jax.grpo.run_config import BadInput
from rlk_jax.grpo.sft.config import SftConfig
from rlk_jax.grpo.shortage import shortage_is_bad_input
from rlk_jax.grpo.stopping import StopRequest
from rlk_jax.grpo.usage import size_text, unit_of

_STATES = {"params": "parameters", "reference": "reference", "opt_state": "optimizer", "teacher": "teacher"}
"""The states of a run as people call them."""


class Plan(NamedTuple):
    """What a run needs on each of its devices, in bytes."""

    devices: str
    """How many, and of what kind."""
    free: int | None
    """What each has free; None where that is unknown."""
    states: Mapping[str, int]
    """What is kept from step to step."""
    programs: Sequence[ProgramMemory]
    """As far as XLA analyses them."""

    @property
    def largest(self) -> ProgramMemory:
        """The program that needs most."""
        return max(self.programs, key=lambda program: program.peak)


def plan(config: GrpoConfig | SftConfig, device: str | None, console: OutputConsole, stop: StopRequest) -> int:
    """Print what a run needs on each of the devices here, or of GPUs of this name, and compare it with what they have.

    Returns the exit status: 0, or 128 + signal if interrupted. Raises BadInput for a run that does not fit.
    """
    with console.status("compiling"):
        job, made = make_plan(config, device, stop)
    if stop.signal is not None:
        return 128 + stop.signal
    _show(made, console)
    if made.free is None or not made.programs:
        warn_unknown(config)
        return 0
    with shortage_is_bad_input(job.task.longest.advice):
        check_fits(made.largest, made.free)
    return 0


def make_plan(config: GrpoConfig | SftConfig, device: str | None, stop: StopRequest) -> tuple[Job, Plan]:
    """The job of a configuration, and what its programs need that are compiled before the run is asked to stop."""
    count = math.prod(config.mesh_shape)
    if device is None:
        here = jax.devices()
        return _plan_for(config, here, free_memory(here[:count]), stop)
    if config.model is None:
        raise BadInput("--device is of a given model: it has no meaning without --model")
    try:
        memory = GPUS[device].usable_memory
    except ValueError as error:
        raise BadInput(str(error)) from error
    jax.config.update("jax_platforms", "cpu")  # JAX then asks for no driver, and takes no memory of a GPU.
    jax.config.update("jax_enable_compilation_cache", False)  # It cannot read programs of GPUs that are not here.
    try:
        named = GPUS[device].devices(count)
    except ValueError as error:
        raise BadInput(f"--device {device} {error}") from error
    with compiling_for(named[0]):
        return _plan_for(config, named, memory, stop)


def _plan_for(
    config: GrpoConfig | SftConfig, devices: Sequence[jax.Device], free: int | None, stop: StopRequest
) -> tuple[Job, Plan]:
    job = load_job(config, devices)
    with shortage_is_bad_input(job.task.longest.advice):
        begun = job.steps.initial_state.lower()
        programs = [x for x in program_memories(job.config, job.steps, begun, 0, stop) if x is not None]
    states = {name: device_bytes(tree) for name, tree in begun.out_info._asdict().items() if tree is not None}
    kind = f"{math.prod(config.mesh_shape)} x {devices[0].device_kind}"
    return job, Plan(kind, free, states, programs)


def _show(made: Plan, console: OutputConsole) -> None:
    """Print the tables of a plan, and its peak in the words of a run that ends."""
    unit = unit_of(max(sum(made.states.values()), *(x.peak for x in made.programs)))
    states = Table("states on a device", unit.name)
    for name, size in made.states.items():
        states.add_row(_STATES.get(name, name), unit.number(size))
    states.add_row("all", unit.number(sum(made.states.values())))
    console.print(states)
    if not made.programs:
        return
    programs = Table(f"{unit.name} on a device")
    for heading in ("arguments", "results", "temporary", "other states", "peak"):
        programs.add_column(heading, justify="right", no_wrap=heading != "other states")
    for program in made.programs:
        sizes = program.arguments, program.results, program.temporaries, program.beside, program.peak
        programs.add_row(program.name, *map(unit.number, sizes))
    console.print(programs)
    peak = f"peak memory of a device: {size_text(made.largest.peak)}"
    console.print(f"{peak}; {made.devices}", highlight=False, soft_wrap=True)
