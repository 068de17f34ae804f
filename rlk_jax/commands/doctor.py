"""`rlk doctor`: which implementation of each op would run on this machine, why the others would not, and what to do."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.cuda import build
from pallas_kernels.triton import call as triton_call
from rlk_jax.commands import import_model
from rlk_jax.commands.advice import advice, this_machine
from rlk_jax.core.backend import not_started, start_error
from rlk_jax.core.dispatch import TypicalCall
from rlk_jax.core.packages import MODEL_PACKAGES, install_command, installed_version, missing_packages
from rlk_jax.grpo.extras import TRAINER_PACKAGES
from rlk_jax.ops import OPS, explain

PACKAGES = (
    *("jax", "jaxlib", "jaxtyping", "numpy", "rich"),
    *("flax", "optax", "orbax-checkpoint", "matplotlib"),
    *("jax-triton", "triton", "torch"),
)
"""The packages whose versions are reported, apart from rlk-jax."""
NEEDS: dict[str, tuple[str, Sequence[str]]] = {
    "rlk check": ("", ()),
    "rlk grpo, rlk sft": ("grpo", TRAINER_PACKAGES),
    "rlk generate": ("grpo", MODEL_PACKAGES),
    "rlk import-model": ("import", import_model.IMPORT_PACKAGES),
    "torch_bridge": ("torch", ("torch", "flatbuffers")),
    "torch_bridge in TRL": ("clients", ("torch", "flatbuffers", "transformers", "trl", "peft", "gguf")),
    "rlk_jax.clients.tunix": ("tunix", (*TRAINER_PACKAGES, "tunix")),
}
"""For each part of the project, the extra that it needs, and the packages that must be there. Triton's kernels need a
pair of versions that fit, too, and are not in here."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor`."""
    parser = subparsers.add_parser("doctor", help="what runs on this machine, and why the rest does not")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=lambda options: run(as_json=options.json))


def report() -> dict[str, Any]:
    """Everything that `rlk doctor` prints: versions, what the CUDA and Triton kernels are built with or lack, what
    installs the extra of each part that is not ready, devices, for each op the implementation that would run its
    typical call, with the reasons why no other would, and advice.

    Where JAX has no backend, the report has an "error" instead of devices and ops.
    """
    versions = {
        "python": platform.python_version(),
        "packages": package_versions(),
        "cuda": build.why_missing() or build.state(),
        "triton": triton_call.why_missing() or triton_call.pair(),
        "needs": {**{name: _missing_extra(*needs) for name, needs in NEEDS.items()}, "Triton kernels": _missing_pair()},
    }
    error = start_error()
    found: dict[str, Any] = {
        **versions,
        **({"error": not_started(error)} if error else {"devices": _devices(), "ops": _decisions()}),
    }
    platforms = frozenset(x["platform"] for x in found.get("devices", ()))
    return {**found, "advice": [x._asdict() for x in advice(this_machine(platforms, found.get("error")))]}


def package_versions() -> dict[str, str | None]:
    """The versions of rlk-jax and of `PACKAGES`, None for those that are not installed."""
    return {name: installed_version(name) for name in ("rlk-jax", *PACKAGES)}


def run(as_json: bool) -> int:
    """Print the report. The exit status is 0, or 1 where JAX has no backend."""
    found = report()
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        print()
        return 1 if "error" in found else 0
    from rich.table import Table

    from rlk_jax.core.terminal import OutputConsole

    machine = Table("what", "found", title="this machine")
    machine.add_row("python", found["python"])
    for name, version in found["packages"].items():
        machine.add_row(name, version or "not installed")
    machine.add_row("CUDA kernels", found["cuda"])
    machine.add_row("Triton kernels", found["triton"])
    for device in found.get("devices", ()):
        machine.add_row(f"device {device['id']}", f"{device['platform']}: {device['kind']}")
    console = OutputConsole()
    if found["advice"]:
        faults = Table("what is wrong", "what mends it", title="what to do next")
        for row in found["advice"]:
            faults.add_row(row["fault"], row["mend"])
        console.print(faults)
    else:
        console.print("No fault was found on this machine.")
    ready = Table("what", "ready", title="what can be used")
    for name, install in found["needs"].items():
        ready.add_row(name, f"no: {install}" if install else "yes")
    console.print(ready)
    console.print(machine)
    if "error" in found:
        print(f"rlk doctor: {found['error']}", file=sys.stderr)
    for op, decision in found.get("ops", {}).items():
        table = Table("implementation", "runs", "reason", title=f"{op} ({typical_calls()[op].text})")
        table.add_row(decision["choice"], "yes", "the choice: fastest that runs here")
        for name, reasons in decision["reasons"].items():
            table.add_row(name, "by name" if name in decision["by_name"] else "no", "; ".join(reasons))
        console.print(table)
    return 1 if "error" in found else 0


def _missing_extra(extra: str, packages: Sequence[str]) -> str | None:
    """The command that installs an extra; None where all of these packages are there."""
    return install_command(extra) if missing_packages(packages) else None


def _missing_pair() -> str | None:
    """The command that installs what Triton's kernels need; None where it is there."""
    return triton_call.what_installs_a_pair(installed_version("triton")) if triton_call.why_missing() else None


def _devices() -> list[dict[str, Any]]:
    """The devices that JAX finds."""
    return [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in jax.devices()]


def typical_calls() -> dict[str, TypicalCall]:
    """The typical call of each op that has one, by the op's name."""
    return {name: op.typical for name, op in OPS.items() if op.typical is not None}


def _decisions() -> dict[str, dict[str, Any]]:
    """What dispatch decides about each op's typical call."""
    return {op: explain(op, *call.arguments, **call.options).to_dict() for op, call in typical_calls().items()}
