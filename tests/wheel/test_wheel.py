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

ROOT = pathlib.Path(__file__).parents[2]
BUILT = ROOT / ".wheel"
PACKAGES = ("rlk_jax", "pallas_kernels", "torch_bridge")
PYTHONS = ("3.12", "3.13")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PUBLIC = """
import importlib
for package in ("rlk_jax", "rlk_jax.checker", "rlk_jax.grpo", "rlk_jax.models", "rlk_jax.nn", "torch_bridge"):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    print(module.__file__)
"""


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
        [program, *command[1:]], cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=600
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
    """CUDA sources, and the contracts of the checker."""
    kinds = {pathlib.Path(name).suffix for name in wheel if name.startswith("pallas_kernels/cuda/")}
    assert {".cu", ".cuh"} <= kinds
    assert {"rlk_jax/checker/contract.json", "rlk_jax/checker/rl_kernel.json"} <= wheel


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


@pytest.mark.parametrize("python", PYTHONS)
def test_a_missing_extra_is_one_line(python, tmp_path):
    folder = environment("base", python)
    command = run(folder, "rlk", "grpo", "--out", "run", cwd=tmp_path)
    assert command.returncode == 2 and "the command needs flax, " in command.stderr
    assert len(command.stderr.splitlines()) == 1
    models = run(folder, "python", "-c", "import rlk_jax.models", cwd=tmp_path)
    assert models.stderr.splitlines()[-1].startswith("ImportError: rlk_jax.models needs flax, safetensors, ")
    bridge = run(folder, "python", "-c", "import torch_bridge", cwd=tmp_path)
    assert bridge.stderr.splitlines()[-1] == (
        'ImportError: torch_bridge needs PyTorch, of rlk-jax\'s extra `torch`: pip install "rlk-jax[torch]"'
    )


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
