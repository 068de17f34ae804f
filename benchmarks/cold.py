"""The first call of a process, and of the next one: python -m benchmarks.cold --help.

Each row is a process of its own, in pairs: the first finds empty caches, the second what the first has left on disk.
Both find Python's bytecode of all modules.
`linear_logp` and naive log-probs are one jitted program of values and gradients, by its stages; JAX's compilation cache
is on. Of `torch_bridge`, the seconds are of a first forward and backward, of those at a second capacity of rows, and of
one more call. Packages are imported one after the other.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.argument_types import output_path, shape_of, some_of

_SHAPE = "4096,2048,131072"
_TIMING = "wall time of one call each"


@dataclass(frozen=True)
class Row:
    """What one process took, in seconds by stage."""

    what: str
    caches: str
    seconds: dict[str, float]


class Stages:
    """The seconds of the stages of a process, one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, stage: str) -> None:
        """End a stage here; the next begins."""
        now = time.perf_counter()
        self.seconds[stage], self._last = now - self._last, now

    def imported(self, *packages: str) -> None:
        """Import packages, each as a stage."""
        for package in packages:
            importlib.import_module(package)
            self.done(f"import {package}")


def jitted(n: int, dim: int, vocab: int, *, naive: bool, stages: Stages) -> None:
    """Values and gradients in JAX."""
    stages.imported("jax", "rlk_jax")
    import jax
    import jax.numpy as jnp

    import rlk_jax

    hidden, weight = jnp.zeros((n, dim), jnp.bfloat16), jnp.zeros((vocab, dim), jnp.bfloat16)
    ids = jax.block_until_ready(jnp.zeros(n, jnp.int32))

    def logps(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        if not naive:
            return rlk_jax.linear_logp(hidden, weight, ids).sum()
        found = jax.nn.log_softmax((hidden @ weight.T).astype(jnp.float32))
        return jnp.take_along_axis(found, ids[:, None], 1).sum()

    stages.done("start")
    traced = jax.jit(jax.value_and_grad(logps, (0, 1))).trace(hidden, weight)
    stages.done("trace")
    lowered = traced.lower()
    stages.done("lower")
    compiled = lowered.compile()
    stages.done("compile")
    jax.block_until_ready(compiled(hidden, weight))
    stages.done("run")


def bridged(n: int, dim: int, vocab: int, *, stages: Stages) -> None:
    """Values and gradients in PyTorch."""
    stages.imported("torch", "jax", "torch_bridge")
    import torch

    import torch_bridge

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.zeros((vocab, dim), dtype=torch.bfloat16, device=device, requires_grad=True)

    def call(rows: int) -> None:
        hidden = torch.zeros((rows, dim), dtype=torch.bfloat16, device=device, requires_grad=True)
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        found = torch_bridge.linear_logp(hidden, weight, ids)
        assert isinstance(found, torch.Tensor)
        found.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    stages.done("start")
    for stage, rows in (("first", n), ("new capacity", n // 2), ("again", n)):
        call(rows)
        stages.done(stage)


CASES: dict[str, Callable[..., None]] = {
    "linear_logp": lambda *shape, stages: jitted(*shape, naive=False, stages=stages),
    "naive": lambda *shape, stages: jitted(*shape, naive=True, stages=stages),
    "torch_bridge": bridged,
}


def child(what: str, shape: Sequence[int]) -> None:
    """Print the seconds of this process as JSON."""
    stages = Stages()
    CASES[what](*shape, stages=stages)
    print(json.dumps(stages.seconds))


def measure(what: str, shape: Sequence[int]) -> list[Row]:
    """Two processes, one after the other, with caches of their own.

    A process before them leaves Python's bytecode of all modules, which installed packages have.
    """
    with tempfile.TemporaryDirectory() as folder:
        bytecode, unread, read = (Path(folder) / name for name in ("bytecode", "unread", "read"))
        in_process(what, shape, bytecode, unread)
        rows = []
        for state in ("empty", "full"):
            print(f"measuring {what}, {state} caches …", file=sys.stderr)
            rows.append(Row(what, state, in_process(what, shape, bytecode, read)))
    return rows


def in_process(what: str, shape: Sequence[int], bytecode: Path, caches: Path) -> dict[str, float]:
    """The seconds of a process that keeps bytecode, and what it compiles, in these folders."""
    chosen = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
    environment = {name: x for name, x in os.environ.items() if name not in chosen}
    environment |= {"PYTHONPYCACHEPREFIX": str(bytecode), "RLK_CACHE": str(caches)}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if what != "torch_bridge":
        environment["JAX_COMPILATION_CACHE_DIR"] = str(caches / "jax")
    command = [sys.executable, "-m", "benchmarks.cold", "--child", what, "--shape", ",".join(map(str, shape))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{what}: {run.stderr}")
    seconds: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return seconds


def table(rows: Sequence[Row]) -> Table:
    """Seconds by process and stage; `all` has what follows the imports."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row.seconds))
    shown = Table("what", "caches", *stages, "all")
    for row in rows:
        cells = (f"{row.seconds[stage]:.2f}" if stage in row.seconds else "" for stage in stages)
        total = sum(x for stage, x in row.seconds.items() if not stage.startswith("import"))
        shown.add_row(row.what, row.caches, *cells, f"{total:.2f}")
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=shape_of("N,D,V"), help=f"N,D,V (default: {_SHAPE})")
    parser.add_argument(
        "--what", type=some_of(CASES), default=",".join(CASES), help="comma-separated: " + ", ".join(CASES)
    )
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=output_path, help="write the rows with command, date, device and versions")
    options = parser.parse_args(argv)
    if options.child is not None:
        child(options.child, options.shape)
        return 0
    from benchmarks import common  # It imports JAX, which a child measures.

    if options.shape is None:
        common.require_gpu("--shape names a smaller one")
    shape = options.shape or shape_of("N,D,V")(_SHAPE)
    rows = [row for what in options.what for row in measure(what, shape)]
    common.show("", table(rows))
    if options.json:
        common.write(options.json, "cold", argv, rows, _TIMING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
