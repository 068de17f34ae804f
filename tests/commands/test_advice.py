"""`rlk doctor` says what a user must do next, each fault with the command that mends it."""

import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlk_jax import cli, dispatch
from rlk_jax.commands import advice as module
from rlk_jax.commands.advice import Machine, advice
from rlk_jax.core import program_cache
from rlk_jax.core.packages import installed_version

PACKAGES = {"jax": "0.11.2", "jaxlib": "0.11.2", "torch": "2.11.0", "jax-cuda13-plugin": "0.11.2"}
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
HEALTHY = Machine(("NVIDIA H200",), "580.95.05", frozenset({"gpu"}), PACKAGES, SHARED, True, "/cache")
BLIND = replace(HEALTHY, platforms=frozenset({"cpu"}))


def without_plugin(machine):
    return replace(machine, packages={**PACKAGES, "jax-cuda13-plugin": None})


def for_cuda_12(machine):
    return replace(machine, packages={**PACKAGES, "jax-cuda13-plugin": None, "jax-cuda12-plugin": "0.11.2"})


def plugin_of(machine, version):
    return replace(machine, packages={**PACKAGES, "jax-cuda13-plugin": version})


def lacking_triton(**packages):
    return replace(HEALTHY, lacks_triton="NVIDIA A100", packages={**PACKAGES, **packages})


def variables(machine, **environment):
    return replace(machine, environment={**SHARED, **environment})


NO_GPU = Machine((), None, frozenset({"cpu"}), PACKAGES, {}, True, None)
NOT_STARTED = replace(NO_GPU, platforms=frozenset(), error="JAX cannot start a backend here: AssertionError")
FRACTIONS = {"XLA_CLIENT_MEM_FRACTION": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}
FAULTS = {
    "a backend that is not here": (
        variables(NOT_STARTED, JAX_PLATFORMS="cuda"),
        "With JAX_PLATFORMS=cuda, JAX cannot start a backend here: AssertionError.",
        "unset JAX_PLATFORMS",
    ),
    "a backend that hides a GPU, and is not here": (
        variables(replace(NOT_STARTED, gpus=HEALTHY.gpus), JAX_PLATFORMS="nonsense"),
        "With JAX_PLATFORMS=nonsense, JAX cannot start",
        "unset JAX_PLATFORMS",
    ),
    "two names of backends": (
        variables(NOT_STARTED, JAX_PLATFORMS="cpu", JAX_PLATFORM_NAME="cuda"),
        "With JAX_PLATFORMS=cpu and JAX_PLATFORM_NAME=cuda, JAX cannot start",
        "unset JAX_PLATFORMS JAX_PLATFORM_NAME",
    ),
    "no backend": (NOT_STARTED, "JAX cannot start a backend here: AssertionError.", "import jax; jax.devices()"),
    "no GPU is visible": (variables(BLIND, CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES= hides", "unset CUDA_V"),
    "a negative GPU": (variables(BLIND, CUDA_VISIBLE_DEVICES="-1"), "CUDA_VISIBLE_DEVICES=-1 hides", "unset CUDA_V"),
    "another GPU": (variables(BLIND, CUDA_VISIBLE_DEVICES="1,0"), "CUDA_VISIBLE_DEVICES=1,0 hides", "unset CUDA_V"),
    "JAX's own list": (variables(BLIND, JAX_CUDA_VISIBLE_DEVICES="3"), "JAX_CUDA_VISIBLE_DEVICES=3", "unset JAX_CUDA"),
    "JAX's older variable": (variables(BLIND, JAX_PLATFORM_NAME="cpu"), "JAX_PLATFORM_NAME=cpu hides", "unset JAX_PL"),
    "the CPU before the GPU": (variables(BLIND, JAX_PLATFORMS="cpu,cuda"), "JAX_PLATFORMS=cpu,cuda hides", "unset JAX"),
    "a GPU that is visible and not seen": (
        variables(BLIND, CUDA_VISIBLE_DEVICES="0,9", JAX_CUDA_VISIBLE_DEVICES="all", JAX_PLATFORMS="cuda,cpu"),
        "JAX has a plugin for CUDA 13, and does not see the NVIDIA H200",
        "jax.devices('cuda')",
    ),
    "a GPU that is visible by its id": (variables(BLIND, CUDA_VISIBLE_DEVICES="GPU-8f2"), "does not see", "'cuda'"),
    "a plugin of before": (
        plugin_of(BLIND, "0.10.0"),
        "JAX does not use jax-cuda13-plugin 0.10.0: its version is not that of jaxlib 0.11.2.",
        'pip install "jax[cuda13]==0.11.2"',
    ),
    "a plugin of before, with a GPU that is seen": (plugin_of(HEALTHY, "0.10.0"), "plugin 0.10.0", "jax[cuda13]=="),
    "a driver of no known age": (replace(BLIND, driver="[N/A]"), "does not see the NVIDIA H200", "jax.devices('cuda')"),
    "a share that is no number": (
        variables(BLIND, XLA_PYTHON_CLIENT_MEM_FRACTION="abc"),
        "JAX cannot start on the NVIDIA H200: XLA_PYTHON_CLIENT_MEM_FRACTION=abc is not a number.",
        "unset XLA_PYTHON_CLIENT_MEM_FRACTION",
    ),
    "two shares": (variables(BLIND, **FRACTIONS), "are both set", "unset XLA_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_"),
    "a folder that takes no file": (
        replace(HEALTHY, unwritable={"RLK_CACHE": "/x cannot be written: Not a directory"}),
        "/x cannot be written: Not a directory.",
        "export RLK_CACHE=/a/folder",
    ),
    "no CUDA in JAX": (
        without_plugin(BLIND),
        "has a NVIDIA H200, and JAX is installed without CUDA",
        'pip install "jax[cuda13]==0.11.2"',
    ),
    "a hidden GPU": (replace(BLIND, environment={"JAX_PLATFORMS": "cpu"}), "JAX_PLATFORMS=cpu hides", "unset JAX_P"),
    "an old driver": (replace(BLIND, driver="570.1"), "570.1 is older than JAX's plugin for CUDA 13", "driver 580"),
    "a very old driver": (for_cuda_12(replace(BLIND, driver="515.2")), "plugin for CUDA 12 needs", "driver 525"),
    "a GPU that JAX does not see": (BLIND, "does not see the NVIDIA H200", "jax.devices('cuda')"),
    "a version of before": (
        replace(HEALTHY, packages={**PACKAGES, "jax": "0.10.0"}),
        "jax 0.10.0 is not one of jax<0.13,>=0.11.2",
        'pip install "jax<0.13,>=0.11.2"',
    ),
    "an extra's version": (replace(HEALTHY, packages={**PACKAGES, "torch": "2.4.0"}), "torch 2.4.0", "torch>=2.11"),
    "memory that torch needs": (replace(HEALTHY, environment={}), "JAX takes 75% of the GPU", "PREALLOCATE=false"),
    "less memory": (replace(HEALTHY, environment={"XLA_CLIENT_MEM_FRACTION": ".5"}), "takes 50%", "PREALLOCATE=false"),
    "no kernels of Triton's": (
        lacking_triton(triton=None),
        "On the NVIDIA A100, xla runs where Triton's kernels should: they need jax-triton 0.3.1 with triton 3.6, or",
        'pip install "rlk-jax[triton]" "jax-triton>=0.4"',
    ),
    "a triton that torch pins": (lacking_triton(triton="3.6.0"), "they need jax-triton", '"jax-triton<0.4"'),
    "an old triton": (lacking_triton(triton="3.5.1"), "they need jax-triton", '"jax-triton>=0.4"'),
    "no programs on disk": (
        replace(HEALTHY, keeps_programs=False, environment={**SHARED, "RLK_CACHE": "OFF"}),
        "their programs are not kept",
        "unset RLK_CACHE",
    ),
    "no folder for programs": (replace(HEALTHY, keeps_programs=False), "their programs are not kept", "RLK_CACHE=/a"),
    "no cache of XLA's": (replace(HEALTHY, xla_cache=None), "JAX keeps nothing on disk", "JAX_COMPILATION_CACHE_DIR="),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_and_what_mends_it(name):
    machine, fault, mend = FAULTS[name]
    (found,) = advice(machine)
    assert fault in found.fault and found.fault.endswith(".") and mend in found.mend


@pytest.mark.parametrize(
    "machine",
    [
        HEALTHY,
        replace(HEALTHY, packages={"jax": "0.12.1"}, environment={}),
        replace(HEALTHY, environment={"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
        variables(NO_GPU, JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES=""),
        for_cuda_12(HEALTHY),
        plugin_of(HEALTHY, "0.11.2.dev20261129"),
        replace(HEALTHY, driver="[N/A]"),
        variables(NO_GPU, XLA_PYTHON_CLIENT_MEM_FRACTION="abc"),
    ],
    ids=[
        *("all is well", "without torch", "another allocator", "no GPU", "CUDA 12"),
        *("a nightly plugin", "a driver of no known age", "a share of no GPU"),
    ],
)
def test_nothing_is_left_to_do(machine):
    assert advice(machine) == []


def test_this_machine_is_described(monkeypatch):
    """A stand-in for nvidia-smi has two GPUs, and one that fails has none."""
    printed = "580.95.05, NVIDIA H200\n580.95.05, NVIDIA H200\n"
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, printed))
    machine = module.this_machine(frozenset({"gpu"}))
    assert machine.gpus == ("NVIDIA H200",) * 2 and machine.driver == "580.95.05"
    assert machine.packages["jax"] == installed_version("jax") and "jax-cuda12-plugin" in machine.packages

    def fail(*_, **__):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(module.subprocess, "run", fail)
    assert module.this_machine(frozenset()).gpus == () and module.this_machine(frozenset()).driver is None


@pytest.mark.parametrize(
    ("capability", "missing", "is_lacking"),
    [
        ("8.0", "needs a pair", True),
        ("8.9", "needs a pair", True),
        ("8.0", None, False),
        ("9.0", "needs a pair", False),
    ],
)
def test_a_gpu_that_lacks_kernels_of_triton(capability, missing, is_lacking, monkeypatch):
    """On Hopper they are not what should run."""
    monkeypatch.setattr(module, "device_of", lambda arrays: dispatch.Device("gpu", "NVIDIA A100", capability))
    monkeypatch.setattr(module.call, "why_missing", lambda: missing)
    assert module.this_machine(frozenset({"gpu"})).lacks_triton == ("NVIDIA A100" if is_lacking else None)


def test_all_that_stands_before_a_gpu_is_said_at_once():
    found = advice(variables(without_plugin(BLIND), JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES=""))
    mends = ["unset JAX_PLATFORMS", "unset CUDA_VISIBLE_DEVICES", 'pip install "jax[cuda13]==0.11.2"']
    assert [x.mend for x in found] == mends


@pytest.mark.parametrize("variable", ["RLK_CACHE", "HOME"])
def test_a_cache_that_cannot_be_written(variable, tmp_path, monkeypatch):
    """Nothing is left where a folder was tried."""
    (tmp_path / "file").touch()
    for name in ("RLK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    fault = module.this_machine(frozenset({"cpu"})).unwritable["RLK_CACHE"]
    assert fault == f"{program_cache.folder()} cannot be written: Not a directory"
    assert [x.name for x in tmp_path.iterdir()] == ["file"]
    monkeypatch.setenv("RLK_CACHE", str(tmp_path / "cache"))
    assert "RLK_CACHE" not in module.this_machine(frozenset({"cpu"})).unwritable
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("folder", "is_fault"), [("/proc/nothing", True), ("gs://bucket", False), (None, False)])
def test_a_cache_of_jax_that_cannot_be_written(folder, is_fault, tmp_path, monkeypatch):
    monkeypatch.setenv("RLK_CACHE", str(tmp_path))
    monkeypatch.chdir("/proc")  # Nothing can be written here, where a URL taken for a path would lie.
    monkeypatch.setattr(module, "jax", SimpleNamespace(config=SimpleNamespace(jax_compilation_cache_dir=folder)))
    fault = {"JAX_COMPILATION_CACHE_DIR": "/proc/nothing cannot be written: No such file or directory"}
    assert module.this_machine(frozenset({"cpu"})).unwritable == (fault if is_fault else {})


@pytest.mark.parametrize("has_fault", [True, False])
def test_doctor_prints_it_first(has_fault, capsys, monkeypatch):
    found = [module.Advice("The disk is full.", "rm x")] if has_fault else []
    monkeypatch.setattr("rlk_jax.commands.doctor.advice", lambda machine: found)
    assert cli.main(["doctor"]) == 0
    first = capsys.readouterr().out.partition("what can be used")[0]
    assert ("The disk is full." in first and "rm x" in first) if has_fault else "No fault was found" in first


def test_doctor_prints_text_as_it_is(capsys, monkeypatch):
    """rich would drop what it reads as markup, and draw what it reads as an emoji."""
    fault, mend, missing = "The driver is [N/A] :x:.", 'pip install "jax[cuda13]==0.11.2"', "there is no [red]nvcc[/]"
    monkeypatch.setenv("COLUMNS", "200")  # No cell is wrapped.
    monkeypatch.setattr("rlk_jax.commands.doctor.advice", lambda machine: [module.Advice(fault, mend)])
    monkeypatch.setattr("pallas_kernels.cuda.build.why_missing", lambda: missing)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert fault in printed and mend in printed and f"│ {missing} " in printed


def test_a_source_tree_that_is_not_installed(monkeypatch):
    """Whoever sets PYTHONPATH to the tree has advice too, but on the versions of packages."""

    def requires(name: str) -> None:
        raise module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.importlib.metadata, "requires", requires)
    machine = module.this_machine(frozenset({"cpu"}))
    assert machine.packages["jax"] == installed_version("jax")
    assert not any("is not one of" in x.fault for x in advice(machine))
