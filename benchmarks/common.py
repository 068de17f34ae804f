"""What the benchmark modules share: options, interleaved timing, the record of a run, tables and plots."""

import argparse
import datetime
import json
import os
import random
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before JAX starts NCCL: multicast can put a shared host's GPUs out of service.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
from rich.console import Console
from rich.table import Table

from rlk_jax import cli


@dataclass(frozen=True)
class Launch:
    """Something to time: `start()` begins one run and returns what `wait` waits for."""

    start: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready


DTYPES = ("bfloat16", "float16", "float32")


def parser(
    module: str,
    description: str | None,
    *,
    shapes: str,
    implementations: str,
    sizes: str = "N,D,V",
    dtypes: Sequence[str] = DTYPES,
) -> argparse.ArgumentParser:
    """The options that every benchmark takes. `sizes` names the numbers of a shape."""
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    options.add_argument("--shapes", type=_shapes_of(sizes), default=shapes, help=f'"{sizes};{sizes};…"')
    options.add_argument("--dtype", default=dtypes[0], choices=dtypes)
    options.add_argument("--implementations", default=implementations, help="comma-separated names")
    options.add_argument("--rounds", type=positive, default=5, help="interleaved rounds; figures are their medians")
    return add_outputs(options)


def _shapes_of(sizes: str) -> Callable[[str], str]:
    a_shape = ",".join(["[1-9][0-9]*"] * len(sizes.split(",")))

    def checked(text: str) -> str:
        if not re.fullmatch(f"{a_shape}(;{a_shape})*", text):
            raise argparse.ArgumentTypeError(f'must be "{sizes};{sizes};…" of positive integers, got {text!r}')
        return text

    return checked


def positive(text: str) -> int:
    """An argument that counts something."""
    if not re.fullmatch("[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    share = float(text)  # argparse tells of what is no number
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return share


def add_outputs(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    options.add_argument("--json", type=Path, help="write the rows with command, date, device and versions")
    options.add_argument("--plot", type=Path, help="draw the rows as a PNG")
    options.add_argument("--smoke", action="store_true", help="one tiny case, one short round")
    return options


def add_mask_density(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    options.add_argument("--mask-density", type=_share, default=1.0, help="share of the tokens that count")
    return options


def _run(launch: Launch, times: int) -> float:
    start, last = time.perf_counter(), None
    for _ in range(times):
        last = launch.start()
    launch.wait(last)
    return (time.perf_counter() - start) / times


def milliseconds(launches: Mapping[str, Launch], rounds: int, *, warm: float, timed: float) -> dict[str, float]:
    """Median over interleaved rounds; in each, `warm` seconds back to back and then `timed` seconds on the clock.

    Wall time of back-to-back runs: the chip slows under sustained load, and short runs would flatter it. Each round
    has an order of its own: what follows a launch that leaves the chip cool runs faster for longer than the warm-up.
    All are warmed once before the first round: an H200's first second under load can be a tenth slower.
    """
    once: dict[str, float] = {}

    def run_for(seconds: float, name: str) -> float:
        return _run(launches[name], max(1, int(seconds / once[name])))

    for name, launch in launches.items():
        _run(launch, 1)
        once[name] = max(_run(launch, 1), 1e-6)
        run_for(warm, name)
    samples: dict[str, list[float]] = {name: [] for name in launches}
    for i in range(rounds):
        for name in random.Random(i).sample(list(launches), len(launches)):
            print(f"\rround {i + 1} of {rounds}: {name:40s}", end="", file=sys.stderr, flush=True)
            run_for(warm, name)
            samples[name].append(run_for(timed, name))
    print(file=sys.stderr)
    return {name: 1e3 * statistics.median(x) for name, x in samples.items()}


def measured[Row](
    module: str,
    options: argparse.Namespace,
    argv: Sequence[str] | None,
    smoke_shapes: str,
    measure: Callable[[str, Sequence[str], int, float], list[Row]],
) -> list[Row]:
    """The rows of all shapes, by `measure(shape, implementations, rounds, seconds)`; they are written after each."""
    rounds, seconds = (1, 0.0) if options.smoke else (options.rounds, 0.5)
    rows: list[Row] = []
    for shape in (smoke_shapes if options.smoke else options.shapes).split(";"):
        print(f"measuring {shape} …", file=sys.stderr)
        rows += measure(shape, options.implementations.split(","), rounds, seconds)
        if options.json:
            write(options.json, module, argv, rows)
    return rows


def exit_status(statuses: Iterable[str]) -> int:
    """Of a benchmark, by those of its candidates: 1 where none could run."""
    return int("pass" not in statuses)


def status(problem: Exception) -> str:
    """Why a candidate has no figures."""
    kind = "out of memory" if "out of memory" in str(problem).lower() else "not available"
    return f"{kind}: {str(problem).splitlines()[0][:160]}"


def show(title: str, table: Table, *, width: int = 120) -> None:
    """Print a table, and all of it into a log file, which counts as 80 columns wide and would cut the figures."""
    console = Console()
    console.width = max(console.width, width)
    console.print(title, table)


def write(
    path: Path,
    module: str,
    argv: Sequence[str] | None,
    rows: Sequence[Any],
    timing: str = "back-to-back wall time, median of interleaved rounds, each in another order",
) -> None:
    """A run as JSON: its command, date, device, versions and rows; after each shape, or one that is cut off is lost."""
    record = {
        "command": f"python -m benchmarks.{module} " + shlex.join(argv if argv is not None else sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "timing": timing,
        "packages": cli.report()["packages"],
        "rows": [asdict(r) for r in rows],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def plot(path: Path, panels: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Horizontal bars with their figures, a panel for each shape."""
    if not panels:
        print(f"nothing to draw in {path}", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = max(len(x) for x in panels.values())
    figure, axes = pyplot.subplots(
        -(-len(panels) // 2), 2, figsize=(13, len(panels) * (0.5 + 0.11 * bars)), squeeze=False, constrained_layout=True
    )
    for axis, (title, values) in zip(axes.flat, panels.items(), strict=False):
        axis.bar_label(axis.barh(list(values)[::-1], list(values.values())[::-1]), fmt=" %.2f", fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.margins(x=0.1, y=0.01)
        axis.set_xlabel(label, fontsize=8)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
