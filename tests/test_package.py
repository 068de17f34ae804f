"""What `import rlk_jax` brings and costs, and that the public names are documented."""

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

import rlk_jax
import rlk_jax.checker
import rlk_jax.grpo
import rlk_jax.models
import rlk_jax.nn
import torch_bridge
from rlk_jax.core.packages import MODEL_PACKAGES
from rlk_jax.grpo import extras
from torch_bridge import clients

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("package", [rlk_jax, rlk_jax.checker, rlk_jax.grpo, torch_bridge])
def test_public_names_are_documented(package):
    documented = "\n".join(p.read_text() for p in (ROOT / "docs").glob("*.md"))
    for name in package.__all__:
        assert f"`{name}" in documented or f"{package.__name__}.{name}" in documented, name
        assert getattr(package, name) is not None


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The modules that `import rlk_jax.grpo` brings, by one process for all of the tests below."""
    code = "import sys, rlk_jax.grpo; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", ["torch", "triton", "flax", "optax", "rich", "matplotlib"])
def test_import_stays_light(module, imported):
    assert "rlk_jax.grpo" in imported and module not in imported


def test_public_functions_have_no_private_parameters():
    """What only this project may give stands in a function of its own."""
    packages = (
        rlk_jax,
        rlk_jax.vocab_parallel,
        rlk_jax.checker,
        rlk_jax.grpo,
        rlk_jax.nn,
        rlk_jax.models,
        torch_bridge,
    )
    public = [getattr(package, name) for package in packages for name in package.__all__]
    assert torch_bridge.linear_logp in public and rlk_jax.vocab_parallel.linear_logp in public
    for x in (x for x in public if callable(x) and not (isinstance(x, type) and issubclass(x, Exception))):
        private = [name for name in inspect.signature(x).parameters if name.startswith("_")]
        assert not private, f"{x.__module__}.{x.__qualname__} has {private}"


def test_import_adds_little_to_jax_and_flax():
    """Counted in modules, which do not depend on the machine's load: fewer than half of what jax and flax bring."""
    code = "import sys, jax, flax; print(len(sys.modules)); import rlk_jax; print(len(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    count = [int(x) for x in printed.split()]
    assert count[1] < 1.5 * count[0]


def imported_packages(*rooms: str) -> set[str]:
    """The packages that the modules of these rooms import anywhere: none of Python's own, and none of this project."""
    found = set[str]()
    for path in (path for room in rooms for path in (ROOT / "rlk_jax" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0] for name in names}
    return found - sys.stdlib_module_names - {"rlk_jax", "pallas_kernels"}


def test_packages_that_commands_ask_for_are_those_of_the_extra():
    """The command checks all that its rooms import, and the extra brings all that it checks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain, grpo = (
        {re.match(r"[\w-]+", x)[0].replace("-", ".") for x in requirements}
        for requirements in (project["dependencies"], project["optional-dependencies"]["grpo"])
    )
    assert imported_packages("nn", "models") - plain == set(MODEL_PACKAGES)
    assert imported_packages("grpo") - plain < {x.partition(".")[0] for x in extras.TRAINER_PACKAGES}
    assert set(extras.TRAINER_PACKAGES) == grpo


def test_the_extra_brings_the_versions_of_trl_that_the_bridge_knows():
    """Others would be refused by `torch_bridge.install`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (trl,) = [x for x in map(Requirement, project["optional-dependencies"]["clients"]) if x.name == "trl"]
    taken = tuple(f"1.{minor}" for minor in range(100) if trl.specifier.contains(f"1.{minor}.0"))
    assert not trl.specifier.contains("2.0") and {taken} == {point.versions for point in clients.trl.PATCH_POINTS}


@pytest.mark.parametrize(("module", "missing"), [("rlk_jax.nn", "flax"), ("rlk_jax.models", "flax, tokenizers")])
def test_a_module_names_the_extra_that_it_needs(module, missing, monkeypatch):
    for name in [x for x in sys.modules if x.partition(".")[0] in ("flax", "tokenizers") or x.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("flax", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    message = f'{module} needs {missing}, of rlk-jax\'s extra `grpo`: pip install "rlk-jax[grpo]"'
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        importlib.import_module(module)


def test_kernels_and_ops_keep_their_rooms():
    """Kernels never import rlk_jax, rlk_jax never imports torch, and torch_bridge no kernels."""
    forbidden = {
        "torch_bridge": ("pallas_kernels",),
        "pallas_kernels": ("rlk_jax", "torch"),
        "rlk_jax": ("torch", "torch_bridge"),
    }
    for package, names in forbidden.items():
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not [x for x in imported if x.split(".")[0] in names], path


def test_no_registry_host_is_written_down():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        text = (ROOT / name).read_bytes().decode(errors="ignore")
        assert not re.search(r"https?://(?:[\w.-]*\.)?(?:pypi|pythonhosted|npmjs|debian)\.", text), name


def test_tolerances_live_in_the_contract():
    """No test compares floats within a number of its own."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert not re.search(r"\b(?:atol|rtol)=\s*[\d.]", path.read_text()), path
