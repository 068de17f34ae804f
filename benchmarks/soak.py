"""Long runs, and whether what they hold stays the same: python -m benchmarks.soak --help.

"bridge" is 300 steps of TRL's GRPOTrainer with torch_bridge in it, on a model of two layers with Qwen2.5-0.5B's width
and head, and completions of 16 to 512 tokens. "stock" is the same without torch_bridge, for what rises in torch and TRL
themselves: in the first third, most batches have a shape that none has had. "limits" is 90 steps of "bridge" with
caches, in memory and on disk, that have room for the programs of one or two capacities of rows. "command" is 2000 GRPO
steps of `rlk grpo` on a CPU, on a tiny model. Each runs in a process of its own, with empty caches on disk.

A curve has a figure for each step, or for some steps of "command". A curve of memory (MiB) may rise from the middle
third of a run to the last by 1 %, in the mean, and step times by 10 %, in the median. One with a bound may not exceed
it: in "bridge", programs are bounded by capacities × directions. The exit status is 1 where a run fails, a curve rises
by more than it may or a bound is exceeded.
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Table

from benchmarks import common, processes, soak_trl
from benchmarks.argument_types import some_of
from benchmarks.soak_trl import resident_mib
from benchmarks.trl_steps import BRIDGE, STOCK

MOST_GROWTH = 1.01
"""The mean of a curve of memory in the last third of a run may be so many times that of the middle third."""
MOST_DRIFT = 1.10
"""The median of step times in the last third of a run may be so many times that of the middle third.

Steps of one program differ by several per cent with what else the host does: the median of a run without the bridge
has risen by 1.05. A search or a list that grows with the steps adds to each of them without an end.
"""
STEPS, SMOKE_STEPS = 2000, 6
SAMPLES = 200
"""How many samples are taken of the command, at most."""
SIZES = {"width": 8, "layers": 1, "heads": 2, "max-operand": 4, "prompts-per-step": 4, "samples-per-prompt": 4}

type Curves = dict[str, list[float]]
type Bounds = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One run."""

    what: str
    status: str
    seconds: float = 0.0
    curves: Curves = field(default_factory=dict)
    """What was read, by name and unit."""
    bounds: Bounds = field(default_factory=dict)
    """The most that curves may reach, by their names."""


def command(steps: int) -> tuple[Curves, Bounds]:
    """The curves of `rlk grpo` in a process of its own, which are read as its steps are logged."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        options = SIZES | {"warmup-steps": 1, "grpo-steps": steps, "out": out}
        arguments = [f"--{name}={x}" for name, x in options.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "rlk_jax.cli", "grpo", *arguments],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
        )
        try:
            curves = sampled(process, out / "metrics.jsonl", max(1, steps // SAMPLES))
        finally:
            process.kill()
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return curves, {}


def sampled(process: subprocess.Popen[bytes], metrics: Path, every: int) -> Curves:
    """Time and memory of a process that writes a line per step, about every so many steps, until it ends."""
    curves: Curves = {"step ms": [], "host MiB": []}
    last, began = 0, time.perf_counter()
    while process.poll() is None:
        time.sleep(0.002)
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if done < last + every:
            continue
        now = time.perf_counter()
        if last:  # The first steps compile.
            curves["step ms"].append(round(1e3 * (now - began) / (done - last), 3))
            curves["host MiB"].append(round(resident_mib(process.pid), 3))
        last, began = done, now
    return curves


def runs(*, smoke: bool) -> dict[str, Callable[[], tuple[Curves, Bounds]]]:
    """The runs by name."""
    job = soak_trl.SMOKE if smoke else soak_trl.SOAK
    return {
        "bridge": functools.partial(soak_trl.soak, job, BRIDGE),
        "stock": functools.partial(soak_trl.soak, job, STOCK),
        "limits": functools.partial(soak_trl.soak_at_limits, soak_trl.SMOKE if smoke else soak_trl.LIMITED),
        "command": functools.partial(command, SMOKE_STEPS if smoke else STEPS),
    }


def measure(what: str, *, smoke: bool) -> Row:
    """One run, in a process of its own."""
    print(f"measuring {what} …", file=sys.stderr)
    row = processes.in_own_process(measure_here, what, smoke)
    return Row(what, row) if isinstance(row, str) else row


def measure_here(what: str, smoke: bool) -> Row:
    """One run. What a run of a few steps holds is not judged: it has only begun."""
    began = time.perf_counter()
    found = common.attempt(runs(smoke=smoke)[what])
    if isinstance(found, common.Failure):
        return Row(what, found.status)
    row = Row(what, "pass", round(time.perf_counter() - began, 1), *found)
    faults = exceeded(row) + ([] if smoke else risen(row))
    return replace(row, status=f"failed: {'; '.join(faults)}") if faults else row


def thirds(name: str, values: Sequence[float]) -> list[float]:
    """Each third of a curve by its median where it is a time, else by its mean."""
    size = len(values) // 3
    average = statistics.median if name.endswith(" ms") else statistics.fmean
    return [average(values[i * size : (i + 1) * size]) for i in range(3)]


def most_rise(name: str) -> float | None:
    """How many times its middle third the last third of a curve may be; None where nothing is asked."""
    if name.endswith(" ms"):
        return MOST_DRIFT
    return MOST_GROWTH if name.endswith(" MiB") and "on disk" not in name else None


def risen(row: Row) -> list[str]:
    """The curves that rose by more than they may."""
    found = []
    for name, values in row.curves.items():
        _, middle, last = thirds(name, values)
        most = most_rise(name)
        if most is not None and last > most * middle:
            found.append(f"{name} rose from {middle:.1f} to {last:.1f}")
    return found


def exceeded(row: Row) -> list[str]:
    """The curves that exceeded their bounds."""
    found = {name: max(row.curves[name]) for name in row.bounds}
    return [f"{name} reached {x:g} of {row.bounds[name]:g}" for name, x in found.items() if x > row.bounds[name]]


def _show(rows: Sequence[Row]) -> None:
    ratios = "last of middle", "at most"
    table = Table("run", "curve", "first third", "middle third", "last third", *ratios, "most", "bound")
    for row in rows:
        table.add_row(row.what, row.status if row.status != "pass" else f"{row.seconds:.0f} s")
        for name, values in row.curves.items():
            averages = thirds(name, values)
            ratio = f"{averages[2] / averages[1]:.4f}" if averages[1] else ""
            rise = most_rise(name)
            at_most = "" if rise is None else f"{rise:.2f}"
            bound = f"{row.bounds[name]:g}" if name in row.bounds else ""
            table.add_row("", name, *(f"{x:.2f}" for x in averages), ratio, at_most, f"{max(values):.2f}", bound)
    common.show("Long runs: medians of times and means of the rest, by third", table)


def _plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw the curves, a panel each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(row.what, name, values) for row in rows for name, values in row.curves.items()]
    image, axes = pyplot.subplots(
        -(-len(panels) // 3), 3, figsize=(13, 0.8 * len(panels)), squeeze=False, constrained_layout=True
    )
    for axis, (what, name, values) in zip(axes.flat, panels, strict=False):
        axis.plot(values, linewidth=0.8)
        axis.set_title(f"{what}: {name}", fontsize=9)
        axis.tick_params(labelsize=7)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    image.savefig(path, dpi=120)
    pyplot.close(image)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Its exit status is 1 where no run passed, or one failed."""
    names = list(runs(smoke=True))
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = f"comma-separated: {', '.join(names)} (default: all)"
    options.add_argument("--what", type=some_of(names), help=help_text)
    parsed = common.add_outputs(options).parse_args(argv)
    common.share_gpu_with_torch()
    if not (parsed.smoke or parsed.what):
        common.require_gpu("--smoke has short runs, and --what command is one for a CPU")
    rows = []
    for what in parsed.what or names:
        rows.append(measure(what, smoke=parsed.smoke))
        if parsed.json:
            common.write(parsed.json, "soak", argv, rows, "a figure per step; a process per run")
    _show(rows)
    if parsed.plot:
        _plot(parsed.plot, rows)
    return common.exit_status(row.status for row in rows)


if __name__ == "__main__":
    sys.exit(main())
