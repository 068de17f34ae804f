"""What a user must do next: each fault of a machine that costs speed or memory, with the command that mends it."""

import importlib.metadata
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
from packaging.requirements import Requirement

from rlk_jax.core import gpu_memory, program_cache
from rlk_jax.core.packages import installed_version

_OLDEST_DRIVER = {"13": 580, "12": 525}
"""The oldest driver for each CUDA that JAX's plugins are made for."""


class Advice(NamedTuple):
    """One fault, as a sentence, and the command that mends it."""

    fault: str
    mend: str


@dataclass(frozen=True)
class Machine:
    """The facts that advice depends on."""

    gpus: tuple[str, ...]
    """NVIDIA's names of its GPUs here, whether JAX sees them or not."""
    driver: str | None
    """The version of NVIDIA's driver; None where there is none."""
    platforms: frozenset[str]
    """What kinds of devices JAX found; none where it could not start."""
    packages: Mapping[str, str | None]
    """The versions of packages, None for one that is not installed."""
    environment: Mapping[str, str]
    keeps_programs: bool
    """Whether programs of `rlk_jax` are kept on disk."""
    xla_cache: str | None
    """Where JAX keeps what XLA compiles for programs of the user's own."""


def this_machine(platforms: frozenset[str]) -> Machine:
    """The machine that this runs on, where JAX has found devices of these kinds."""
    gpus, driver = _nvidia_gpus()
    plugins = (f"jax-cuda{major}-plugin" for major in _OLDEST_DRIVER)
    names = {"jax", "torch", *plugins, *(x.name for x in _requirements())}
    return Machine(
        gpus,
        driver,
        platforms,
        {name: installed_version(name) for name in sorted(names)},
        dict(os.environ),
        program_cache.folder() is not None,
        jax.config.jax_compilation_cache_dir,
    )


def _nvidia_gpus() -> tuple[tuple[str, ...], str | None]:
    """The names of NVIDIA's GPUs, and the version of their driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), None
    rows = [line.split(", ", 1) for line in printed.splitlines() if ", " in line]
    return tuple(name for _, name in rows), rows[0][0] if rows else None


def advice(machine: Machine) -> list[Advice]:
    """What a user of this machine must do, the most urgent first; an empty list where nothing is left to do."""
    return [*_of_the_gpu(machine), *_of_versions(machine), *_of_memory(machine), *_of_caches(machine)]


def _of_the_gpu(machine: Machine) -> Iterator[Advice]:
    """Whether JAX uses the GPU that is here, and if not, why."""
    if not machine.gpus or "gpu" in machine.platforms:
        return
    chosen = machine.environment.get("JAX_PLATFORMS", "")
    plugin = next((major for major in _OLDEST_DRIVER if machine.packages.get(f"jax-cuda{major}-plugin")), None)
    if chosen and not {"cuda", "gpu"} & set(chosen.split(",")):
        yield Advice(f"JAX_PLATFORMS={chosen} hides the {machine.gpus[0]} from JAX.", "unset JAX_PLATFORMS")
    elif plugin is None:
        yield Advice(
            f"This machine has a {machine.gpus[0]}, and JAX is installed without CUDA.",
            f'pip install "jax[cuda13]=={machine.packages["jax"]}"',
        )
    elif machine.driver is not None and int(machine.driver.split(".")[0]) < _OLDEST_DRIVER[plugin]:
        yield Advice(
            f"The driver {machine.driver} is older than JAX's plugin for CUDA {plugin} needs.",
            f"install NVIDIA's driver {_OLDEST_DRIVER[plugin]} or a later one",
        )
    else:
        yield Advice(
            f"JAX has a plugin for CUDA {plugin}, and does not see the {machine.gpus[0]}.",
            "python -c \"import jax; jax.devices('cuda')\"",
        )


def _of_versions(machine: Machine) -> Iterator[Advice]:
    """Which installed packages are older or newer than those that `rlk_jax` is tested with."""
    for requirement in _requirements():
        version = machine.packages.get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            range_ = f"{requirement.name}{requirement.specifier}"
            yield Advice(f"{requirement.name} {version} is not one of {range_}.", f'pip install "{range_}"')


def _requirements() -> list[Requirement]:
    """The packages and versions that `rlk_jax` and its extras ask for, each once; of a source tree that is not
    installed, none are known.
    """
    try:
        lines = importlib.metadata.requires("rlk-jax") or ()
    except importlib.metadata.PackageNotFoundError:
        lines = ()
    found = {(x.name, str(x.specifier)): x for x in map(Requirement, lines)}
    return [found[key] for key in sorted(found)]


def _of_memory(machine: Machine) -> Iterator[Advice]:
    """Whether JAX takes memory that torch needs."""
    has_both = "gpu" in machine.platforms and machine.packages.get("torch") is not None
    if has_both and gpu_memory.is_taken_at_start(machine.environment):
        share = gpu_memory.fraction(machine.environment)
        yield Advice(
            f"JAX takes {share:.0%} of the GPU when it starts, and torch is left the rest, unless torch_bridge is "
            "imported before.",
            f"export {gpu_memory.PREALLOCATE}=false",
        )


def _of_caches(machine: Machine) -> Iterator[Advice]:
    """Whether a second process is spared the compiling that the first has done."""
    if not machine.keeps_programs:
        is_off = machine.environment.get("RLK_CACHE", "").lower() == "off"
        mend = "unset RLK_CACHE" if is_off else "export RLK_CACHE=/a/folder JAX_ENABLE_COMPILATION_CACHE=1"
        yield Advice("torch_bridge and rlk grpo compile anew in each process: their programs are not kept.", mend)
    if "gpu" in machine.platforms and machine.xla_cache is None:
        yield Advice(
            "A trainer of your own in JAX compiles anew in each process: JAX keeps nothing on disk.",
            "export JAX_COMPILATION_CACHE_DIR=~/.cache/jax",
        )
