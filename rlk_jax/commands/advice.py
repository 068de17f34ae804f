"""What a user must do next: each fault of a machine that costs speed or memory, with the command that mends it.

Each check below is a function that yields what it finds; `advice` has the list of them.
"""

import importlib.metadata
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jax
from packaging.requirements import Requirement

from pallas_kernels.cuda import build
from pallas_kernels.triton import call
from rlk_jax.core import gpu_memory, program_cache
from rlk_jax.core.devices import is_meant_for_triton
from rlk_jax.core.dispatch import device_of
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
    unwritable: Mapping[str, str] = field(default_factory=dict)
    """For each variable that names a cache's folder: which folder cannot be written, and why."""
    error: str | None = None
    """The sentence that says why JAX could not start, without its full stop; None where it has started."""
    lacks_triton: str | None = None
    """The GPU that JAX uses where Triton's kernels are meant for it and cannot run; None anywhere else."""

    @property
    def has_unseen_gpu(self) -> bool:
        """Whether there is a GPU here that JAX does not use."""
        return bool(self.gpus) and "gpu" not in self.platforms

    @property
    def cuda(self) -> str | None:
        """The version of CUDA that JAX's plugin is made for; None where there is no plugin."""
        return next((major for major in _OLDEST_DRIVER if self.packages.get(_plugin(major))), None)


def this_machine(platforms: frozenset[str], error: str | None = None) -> Machine:
    """The machine that this runs on, where JAX has found devices of these kinds, or has not started."""
    gpus, driver = _nvidia_gpus()
    names = {"jax", "jaxlib", "torch", "triton", *map(_plugin, _OLDEST_DRIVER), *(x.name for x in _requirements())}
    return Machine(
        gpus,
        driver,
        platforms,
        {name: installed_version(name) for name in sorted(names)},
        dict(os.environ),
        program_cache.folder() is not None,
        jax.config.jax_compilation_cache_dir,
        _unwritable(),
        error,
        _lacks_triton() if error is None else None,
    )


def _plugin(major: str) -> str:
    """The name of JAX's plugin for a version of CUDA."""
    return f"jax-cuda{major}-plugin"


def _nvidia_gpus() -> tuple[tuple[str, ...], str | None]:
    """The names of NVIDIA's GPUs, and the version of their driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), None
    rows = [line.split(", ", 1) for line in printed.splitlines() if ", " in line]
    return tuple(name for _, name in rows), rows[0][0] if rows else None


def _lacks_triton() -> str | None:
    device = device_of(())
    return device.kind if is_meant_for_triton(device) and call.why_missing() is not None else None


def _unwritable() -> dict[str, str]:
    """The caches whose folder takes no file. What is not on this disk, as gs://, is not tried."""
    folders = {"RLK_CACHE": program_cache.folder(), "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    here = {name: folder for name, folder in folders.items() if folder is not None and "://" not in str(folder)}
    found = {name: (folder, build.why_unwritable(Path(folder))) for name, folder in here.items()}
    return {name: f"{folder} cannot be written: {why}" for name, (folder, why) in found.items() if why is not None}


def advice(machine: Machine) -> list[Advice]:
    """What a user of this machine must do, the most urgent first; an empty list where nothing is left to do."""
    causes = (_of_the_start, _of_variables, _of_a_missing_plugin, _of_the_plugins_version, _of_the_driver, _of_memory)
    found = [x for check in causes for x in check(machine)]
    if machine.has_unseen_gpu and not found:
        fault = f"JAX has a plugin for CUDA {machine.cuda}, and does not see the {machine.gpus[0]}."
        found.append(Advice(fault, "python -c \"import jax; jax.devices('cuda')\""))
    return [*found, *_of_triton(machine), *_of_versions(machine), *_of_caches(machine)]


def _of_the_start(machine: Machine) -> Iterator[Advice]:
    """Why JAX cannot start, and which variables have chosen what it starts with."""
    if machine.error is None:
        return
    chosen = {name: machine.environment[name] for name in _BACKENDS if machine.environment.get(name)}
    if chosen:
        said = " and ".join(f"{name}={value}" for name, value in chosen.items())
        yield Advice(f"With {said}, {machine.error}.", f"unset {' '.join(chosen)}")
    else:
        yield Advice(f"{machine.error}.", 'python -c "import jax; jax.devices()"')


def _of_variables(machine: Machine) -> Iterator[Advice]:
    """Which variables hide the GPU that is here."""
    if not machine.has_unseen_gpu:
        return
    for name, hides in _HIDES.items():
        value = machine.environment.get(name)
        is_said = name in _BACKENDS and machine.error is not None
        if value is not None and hides(value, len(machine.gpus)) and not is_said:
            yield Advice(f"{name}={value} hides the {machine.gpus[0]} from JAX.", f"unset {name}")


def _prefers_another(backends: str, gpus: int) -> bool:
    """Whether the first of these backends, which is the one that JAX uses, is not CUDA."""
    return backends.split(",")[0] not in ("", "cuda", "gpu")


def _lists_no_gpu(devices: str, gpus: int) -> bool:
    """Whether these devices are none of so many GPUs: CUDA reads them up to the first that is not there."""
    first = devices.split(",")[0].strip()
    return not first.startswith(("GPU-", "MIG-")) and first not in map(str, range(gpus))


_BACKENDS = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
"""The variables that choose JAX's backends."""
_HIDES: dict[str, Callable[[str, int], bool]] = {
    **dict.fromkeys(_BACKENDS, _prefers_another),
    "CUDA_VISIBLE_DEVICES": _lists_no_gpu,
    "JAX_CUDA_VISIBLE_DEVICES": lambda devices, gpus: devices != "all" and _lists_no_gpu(devices, gpus),
}
"""The variables that can hide GPUs, each with whether a value hides all of so many."""


def _of_a_missing_plugin(machine: Machine) -> Iterator[Advice]:
    """Whether JAX lacks a plugin for the GPU that is here."""
    if machine.has_unseen_gpu and machine.cuda is None:
        fault = f"This machine has a {machine.gpus[0]}, and JAX is installed without CUDA."
        yield Advice(fault, _install_plugin(machine, "13"))


def _of_the_plugins_version(machine: Machine) -> Iterator[Advice]:
    """Whether JAX's plugin is of another version than jaxlib."""
    if machine.cuda is None:
        return
    plugin, jaxlib = machine.packages[_plugin(machine.cuda)], machine.packages.get("jaxlib")
    if plugin and jaxlib and _numbers(plugin) != _numbers(jaxlib):
        fault = f"JAX does not use {_plugin(machine.cuda)} {plugin}: its version is not that of jaxlib {jaxlib}."
        yield Advice(fault, _install_plugin(machine, machine.cuda))


def _install_plugin(machine: Machine, cuda: str) -> str:
    """The command that installs JAX's plugin for a version of CUDA, beside the jax that is here."""
    return f'pip install "jax[cuda{cuda}]=={machine.packages["jax"]}"'


def _of_the_driver(machine: Machine) -> Iterator[Advice]:
    """Whether NVIDIA's driver is too old for the plugin. One whose version cannot be read may be of any age."""
    numbers = _numbers(machine.driver or "")
    if not (machine.has_unseen_gpu and machine.cuda and numbers):
        return
    oldest = _OLDEST_DRIVER[machine.cuda]
    if numbers[0] < oldest:
        yield Advice(
            f"The driver {machine.driver} is older than JAX's plugin for CUDA {machine.cuda} needs.",
            f"install NVIDIA's driver {oldest} or a later one",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, as JAX compares them; none where it begins with something else."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _of_memory(machine: Machine) -> Iterator[Advice]:
    """Whether JAX takes memory that torch needs, or is told to take what is no share of it."""
    try:
        share = gpu_memory.fraction(machine.environment)
    except ValueError as problem:
        if machine.gpus:
            chosen = [name for name in gpu_memory.FRACTIONS if machine.environment.get(name)]
            yield Advice(f"JAX cannot start on the {machine.gpus[0]}: {problem}.", f"unset {' '.join(chosen)}")
        return
    has_both = "gpu" in machine.platforms and machine.packages.get("torch") is not None
    if has_both and gpu_memory.is_taken_at_start(machine.environment):
        yield Advice(
            f"JAX takes {share:.0%} of the GPU when it starts, and torch is left the rest, unless torch_bridge is "
            "imported before.",
            f"export {gpu_memory.PREALLOCATE}=false",
        )


def _of_triton(machine: Machine) -> Iterator[Advice]:
    """Whether ops run by xla because a package of Triton's kernels is missing or of another version."""
    if machine.lacks_triton is not None:
        fault = f"On the {machine.lacks_triton}, xla runs where Triton's kernels should: they need {call.PAIRS}."
        yield Advice(fault, call.what_installs_a_pair(machine.packages.get("triton")))


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


def _of_caches(machine: Machine) -> Iterator[Advice]:
    """Whether a second process is spared the compiling that the first has done."""
    for name, fault in machine.unwritable.items():
        yield Advice(f"{fault}.", f"export {name}=/a/folder")
    if not machine.keeps_programs:
        is_off = build.is_cache_off(machine.environment)
        mend = "unset RLK_CACHE" if is_off else "export RLK_CACHE=/a/folder JAX_ENABLE_COMPILATION_CACHE=1"
        yield Advice("torch_bridge and rlk grpo compile anew in each process: their programs are not kept.", mend)
    if "gpu" in machine.platforms and machine.xla_cache is None:
        yield Advice(
            "A trainer of your own in JAX compiles anew in each process: JAX keeps nothing on disk.",
            "export JAX_COMPILATION_CACHE_DIR=~/.cache/jax",
        )
