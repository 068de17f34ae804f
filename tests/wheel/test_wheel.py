"""The wheel and the sdist hold what users need and nothing else, and work where they alone are installed.

`make test-wheel` builds them, and installs the wheel into empty environments: `base-3.12` has no extra, `full-3.12` has
`grpo` and `torch`; where Python 3.13 is installed there are the same two of it.
"""

import os
import pathlib
import subprocess
import tarfile
import tomllib
import zipfile

import pytest

from tests.support.helpers import HANG_S

ROOT = pathlib.Path(__file__).parents[2]
BUILT = ROOT / ".wheel"
PACKAGES = ("rlk_jax", "pallas_kernels", "torch_bridge")
PYTHONS = ("3.12", "3.13")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PUBLIC = """
import importlib
rooms = ("checker", "dispatch", "grpo", "losses", "models", "nn", "vocab_parallel")
for package in ("rlk_jax", *(f"rlk_jax.{room}" for room in rooms), "torch_bridge"):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    print(module.__file__)
"""
"""It imports all that has public names but rlk_jax.clients.tunix, whose extra is in neither environment."""


def environment(kind: str, python: str) -> pathlib.Path:
    folder = BUILT / f"{kind}-{python}"
    if not folder.exists():
        pytest.skip(f"Python {python} is not installed here")
    return folder


def run(folder: pathlib.Path, *command: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """A command of an environment, in a folder where nothing of the repository is found."""
    variables = {name: x for name, x in os.environ.items() if not name.startswith(("PYTHON", "JAX", "RLK"))}
    variables |= {"JAX_PLATFORMS": "cpu", "RLK_CACHE": "off", "COLUMNS": "200"}
    program = folder / "bin" / command[0]
    return subprocess.run(
        [program, *command[1:]], cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=HANG_S
    )


@pytest.fixture(scope="module")
def wheel() -> set[str]:
    """The names of the files in the wheel."""
    (path,) = (BUILT / "dist").glob("*.whl")
    assert path.name == f"rlk_jax-{VERSION}-py3-none-any.whl"
    return set(zipfile.ZipFile(path).namelist())


def tracked(*folders: str) -> set[str]:
    """The files of these folders that git knows."""
    found = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(found.stdout.split("\n")) - {""}


def test_the_wheel_has_the_packages_and_nothing_else(wheel):
    info = f"rlk_jax-{VERSION}.dist-info"
    assert {name.partition("/")[0] for name in wheel} == {*PACKAGES, info}
    assert {name for name in wheel if not name.startswith(info)} == tracked(*PACKAGES)


def test_the_wheel_has_what_is_no_python(wheel):
    """CUDA sources, the contracts of the checker, and what tells type checkers that the packages have types."""
    kinds = {pathlib.Path(name).suffix for name in wheel if name.startswith("pallas_kernels/cuda/")}
    assert {".cu", ".cuh"} <= kinds
    assert {"rlk_jax/checker/contract.json", "rlk_jax/checker/rl_kernel.json"} <= wheel
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel


def test_the_sdist_has_what_a_wheel_is_built_from():
    (path,) = (BUILT / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.partition("/")[0] for name in names} == {
        *PACKAGES,
        *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", ".gitignore"),
    }
    assert tracked(*PACKAGES) <= names


@pytest.mark.parametrize("python", PYTHONS)
def test_the_base_needs_no_extra(python, tmp_path):
    """It has neither torch nor flax, says what runs, and checks an op."""
    folder = environment("base", python)
    imported = run(folder, "python", "-c", "import rlk_jax, sys; print(rlk_jax.__file__)", cwd=tmp_path)
    assert str(folder) in imported.stdout, imported.stderr
    for missing in ("torch", "flax", "optax"):
        assert run(folder, "python", "-c", f"import {missing}", cwd=tmp_path).returncode == 1
    doctor = run(folder, "rlk", "doctor", cwd=tmp_path)
    assert doctor.returncode == 0 and "linear_logp" in doctor.stdout, doctor.stderr
    check = run(folder, "rlk", "check", "--op", "logp", cwd=tmp_path)
    assert check.returncode == 0 and "suite=logp passed=True" in check.stdout, check.stdout + check.stderr


TRITON = "import jax.numpy as jnp, rlk_jax; rlk_jax.logp(jnp.ones((2, 8)), jnp.zeros(2, int), implementation='triton')"
WITHOUT_EXTRAS = {
    "grpo": (["rlk", "grpo", "--out", "run"], "rlk grpo: error: the command needs flax, "),
    "import": (["rlk", "import-model", "a.gguf", "model"], "rlk import-model: error: the command needs gguf, "),
    "models": (["python", "-c", "import rlk_jax.models"], "ImportError: rlk_jax.models needs flax, safetensors, "),
    "torch": (["python", "-c", "import torch_bridge"], "ImportError: torch_bridge needs PyTorch, "),
    "tunix": (
        ["python", "-c", "import rlk_jax.clients.tunix"],
        "ImportError: rlk_jax.clients.tunix needs google-tunix",
    ),
    "triton": (["python", "-c", TRITON], "ValueError: logp cannot run 'triton' here: "),
}
"""For each extra, and for a module of one: what fails where no extra is installed, and how its last line begins."""


@pytest.mark.parametrize("missing", WITHOUT_EXTRAS)
@pytest.mark.parametrize("python", PYTHONS)
def test_a_missing_extra_is_named_with_its_command(python, missing, tmp_path):
    (tmp_path / "a.gguf").touch()
    command, start = WITHOUT_EXTRAS[missing]
    failed = run(environment("base", python), *command, cwd=tmp_path)
    lines, extra = failed.stderr.splitlines(), "grpo" if missing == "models" else missing
    assert lines[-1].startswith(start) and f'pip install "rlk-jax[{extra}]"' in lines[-1]
    if command[0] == "rlk":
        assert failed.returncode == 2 and len(lines) == 1


@pytest.mark.parametrize("python", PYTHONS)
def test_a_trainer_library_that_is_missing_is_named_with_its_extra(python, tmp_path):
    folder = environment("full", python)
    failed = run(folder, "python", "-c", "import torch_bridge; torch_bridge.install('trl')", cwd=tmp_path)
    assert failed.stderr.splitlines()[-1].endswith('To install what it knows: pip install "rlk-jax[clients]"')


@pytest.mark.parametrize("python", PYTHONS)
def test_every_public_name_is_there(python, tmp_path):
    folder = environment("full", python)
    found = run(folder, "python", "-c", PUBLIC, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert all(line.startswith(str(folder)) for line in found.stdout.splitlines())


@pytest.mark.parametrize("python", PYTHONS)
def test_ten_steps_of_a_run(python, tmp_path):
    folder = environment("full", python)
    found = run(folder, "rlk", "grpo", "--out", "run", "--grpo-steps", "10", cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert (tmp_path / "run").is_dir() and "10" in found.stdout
