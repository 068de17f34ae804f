"""The command line: `rlk doctor` says what would run here and why, `rlk check` whether it is right, `rlk check-tp`
whether tensor parallelism is, `rlk grpo` trains, `rlk build-cuda` compiles.
"""

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

from pallas_kernels.cuda import build
from pallas_kernels.triton import call as triton_call
from rlk_jax import build_cuda
from rlk_jax.checker import check_tp
from rlk_jax.checker import command as check_command
from rlk_jax.grpo import command as grpo_command

PACKAGES = (
    *("jax", "jaxlib", "jaxtyping", "numpy", "rich"),
    *("flax", "optax", "orbax-checkpoint", "matplotlib"),
    *("jax-triton", "triton", "torch"),
)
TYPICAL = {
    "linear_logp": "bfloat16, D = 4096, V = 151936",
    "det_gemm": "bfloat16, K = 4096, N = 4096",
    **dict.fromkeys(("logp", "ratio_kl", "grpo_loss"), "bfloat16, V = 151936"),
}
"""The call that `rlk doctor` speaks of, for each op."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; argparse ends bad usage with status 2."""
    parser = argparse.ArgumentParser(prog="rlk", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what runs on this machine, and why the rest does not")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of tables")
    doctor.set_defaults(run=lambda options: _doctor(as_json=options.json))
    check_command.add_parser(commands)
    check_tp.add_parser(commands)
    grpo_command.add_parser(commands)
    build_cuda.add_parser(commands)
    options = parser.parse_args(argv)
    return options.run(options)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    """What JAX finds; raises RuntimeError where it cannot start."""
    import jax

    try:
        return [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in jax.devices()]
    except Exception as problem:
        # Plugins fail in their own ways, a bare AssertionError among them.
        raise RuntimeError(f"JAX cannot start a backend here: {problem or type(problem).__name__}") from problem


def report() -> dict[str, Any]:
    """Versions, what CUDA and Triton kernels are built with or lack, devices, and per op the implementation that would
    run on a typical bfloat16 call and why no other.

    Where JAX has no backend there is an "error" in the place of devices and ops.
    """
    versions = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("rlk-jax", *PACKAGES)},
        "cuda": build.why_missing() or build.state(),
        "triton": triton_call.why_missing() or triton_call.pair(),
    }
    try:
        return {**versions, "devices": _devices(), "ops": _decisions()}
    except RuntimeError as problem:
        return {**versions, "error": str(problem)}


def _decisions() -> dict[str, dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from rlk_jax.dispatch import explain

    def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    logits, ids, row = of(8, 512, 151936), of(8, 512, dtype=jnp.int32), of(8, 512, dtype=jnp.float32)
    typical = {
        "linear_logp": (of(4096, 4096), of(151936, 4096), of(4096, dtype=jnp.int32)),
        "det_gemm": (of(4096, 4096), of(4096, 4096)),
        "logp": (logits, ids),
        "ratio_kl": (logits, logits, ids, ids, row),
        "grpo_loss": (logits, logits, ids, row, of(8, dtype=jnp.float32), ids),
    }
    options: dict[str, Any] = {"grpo_loss": {"samples_per_prompt": 8}}
    return {op: explain(op, *arguments, **options.get(op, {})).to_dict() for op, arguments in typical.items()}


def _doctor(as_json: bool) -> int:
    found = report()
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        print()
        return 1 if "error" in found else 0
    from rich.console import Console
    from rich.table import Table

    machine = Table("what", "found", title="this machine")
    machine.add_row("python", found["python"])
    for name, version in found["packages"].items():
        machine.add_row(name, version or "not installed")
    machine.add_row("CUDA kernels", found["cuda"])
    machine.add_row("Triton kernels", found["triton"])
    for device in found.get("devices", ()):
        machine.add_row(f"device {device['id']}", f"{device['platform']}: {device['kind']}")
    console = Console()
    console.print(machine)
    if "error" in found:
        print(f"rlk doctor: {found['error']}", file=sys.stderr)
        return 1
    for op, decision in found["ops"].items():
        table = Table("implementation", "runs", "reason", title=f"{op} ({TYPICAL[op]})")
        table.add_row(decision["choice"], "yes", "the choice: fastest that runs here")
        for name, reasons in decision["reasons"].items():
            table.add_row(name, "by name" if name in decision["by_name"] else "no", "; ".join(reasons))
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
