"""Time and temporary memory of linear_logp against the naive definition: python -m benchmarks.linear_logp --help.

The implementations of a shape are timed in turn, round after round, in one process; figures are medians, compared as
ratios to "naive": JAX's own log_softmax over logits of the input dtype. Memory is what the compiled program allocates
for itself, beyond its inputs and outputs.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from rlk_jax import cli, linear_logp

DEFAULT_SHAPES = "8192,256,65536"
SMOKE_SHAPES = "64,32,1000"


@dataclass(frozen=True)
class Row:
    """One implementation on one shape; milliseconds, mebibytes."""

    shape: str
    dtype: str
    implementation: str
    status: str
    forward_ms: float | None = None
    both_ms: float | None = None
    both_ratio_to_naive: float | None = None
    temporary_mib: float | None = None
    temporary_of_logits: float | None = None
    """Temporary bytes of forward and backward over N·V·4, the bytes of float32 logits."""


@dataclass(frozen=True)
class Candidate:
    name: str
    forward: Any
    both: Any


def naive(hidden: jax.Array, weight: jax.Array, target_ids: jax.Array) -> jax.Array:
    """What a trainer writes without this library."""
    logits = (hidden @ weight.T).astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), target_ids[:, None], axis=-1)[:, 0]


def _function(name: str) -> Callable[..., jax.Array]:
    if name == "naive":
        return naive
    return lambda h, w, t: linear_logp(h, w, t, implementation=name)


def _compile(name: str, arguments: tuple[jax.Array, ...]) -> Candidate:
    logp = _function(name)
    both = jax.value_and_grad(lambda h, w, t: logp(h, w, t).sum(), argnums=(0, 1))
    return Candidate(name, *(jax.jit(f).lower(*arguments).compile() for f in (logp, both)))


def _milliseconds(function: Any, arguments: tuple[jax.Array, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return 1e3 * (time.perf_counter() - start)


def measure(shape: str, dtype: str, implementations: Sequence[str], rounds: int) -> list[Row]:
    """All implementations on one shape, "naive" among them; one that cannot run here says so in its status."""
    tokens, dim, vocab = map(int, shape.split(","))
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = (
        jax.random.normal(keys[0], (tokens, dim), dtype),
        (jax.random.normal(keys[1], (vocab, dim)) / dim**0.5).astype(dtype),
        jax.random.randint(keys[2], (tokens,), 0, vocab),
    )
    candidates, rows = [], []
    for name in ("naive", *implementations):
        try:
            candidates.append(_compile(name, arguments))
        except ValueError as problem:
            rows.append(Row(shape, dtype, name, f"not available: {problem}"))
    samples: dict[str, list[tuple[float, float]]] = {c.name: [] for c in candidates}
    for _ in range(rounds + 1):
        for c in candidates:
            samples[c.name].append((_milliseconds(c.forward, arguments), _milliseconds(c.both, arguments)))
    median = {name: [statistics.median(x) for x in zip(*s[1:], strict=True)] for name, s in samples.items()}
    for c in candidates:
        temporary = c.both.memory_analysis().temp_size_in_bytes
        rows.append(
            Row(
                shape,
                dtype,
                c.name,
                "pass",
                forward_ms=median[c.name][0],
                both_ms=median[c.name][1],
                both_ratio_to_naive=median[c.name][1] / median["naive"][1],
                temporary_mib=temporary / 2**20,
                temporary_of_logits=temporary / (4 * tokens * vocab),
            )
        )
    return rows


def _print(rows: Sequence[Row], device: str) -> None:
    table = Table("N,D,V", "implementation", "forward", "forward+backward", "of naive", "temporary", "of logits")
    for r in rows:
        if r.status != "pass":
            table.add_row(r.shape, r.implementation, r.status)
            continue
        table.add_row(
            r.shape,
            r.implementation,
            f"{r.forward_ms:.1f} ms",
            f"{r.both_ms:.1f} ms",
            f"{r.both_ratio_to_naive:.2f}x",
            f"{r.temporary_mib:.0f} MiB",
            f"{100 * (r.temporary_of_logits or 0):.1f} %",
        )
    console = Console()
    # A log file counts as 80 columns wide, which would cut the figures.
    console.width = max(console.width, 110)
    console.print(f"linear_logp, {rows[0].dtype}, {device}", table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear_logp", description=__doc__)
    parser.add_argument("--shapes", default=DEFAULT_SHAPES, help='"N,D,V;N,D,V;…"')
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--implementations", default="xla", help="comma-separated names of rlk_jax implementations")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds after one untimed")
    parser.add_argument("--json", type=Path, help="also write the rows with command, date, device and versions")
    parser.add_argument("--smoke", action="store_true", help="one tiny shape, one round")
    options = parser.parse_args(argv)
    shapes = SMOKE_SHAPES if options.smoke else options.shapes
    rounds = 1 if options.smoke else options.rounds
    rows = []
    for shape in shapes.split(";"):
        print(f"measuring {shape} …", file=sys.stderr)
        rows += measure(shape, options.dtype, options.implementations.split(","), rounds)
    device = jax.devices()[0].device_kind
    _print(rows, device)
    if options.json:
        record = {
            "command": "python -m benchmarks.linear_logp " + " ".join(argv if argv is not None else sys.argv[1:]),
            "date": datetime.date.today().isoformat(),
            "device": device,
            "packages": cli.report()["packages"],
            "rows": [asdict(r) for r in rows],
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
