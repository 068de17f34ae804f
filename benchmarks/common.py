"""What the benchmarks share: options, candidates that may fail, timing, the record of a run, tables and plots."""

import argparse
import datetime
import functools
import gc
import json
import os
import random
import re
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# NVLink multicast can put a shared host's GPUs out of service. This must be set before JAX starts NCCL.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
from rich.table import Table

from benchmarks import processes
from benchmarks.argument_types import fraction, output_path, positive, shapes_of, some_of
from rlk_jax.commands import doctor
from rlk_jax.core.dispatch import IMPLEMENTATIONS
from rlk_jax.core.gpu_memory import PREALLOCATE
from rlk_jax.core.packages import installed_version
from rlk_jax.core.terminal import OutputConsole


def share_gpu_with_torch() -> None:
    """Make JAX take GPU memory only as it needs it, unless the user has set `PREALLOCATE`.

    Every benchmark that may run torch beside JAX calls this first, before JAX's backend starts. Otherwise JAX takes
    75 % of each GPU at its start, and candidates on torch run out of memory on what is left.
    """
    os.environ.setdefault(PREALLOCATE, "false")


@dataclass(frozen=True)
class Launch:
    """Something to time: `start()` begins one run and returns what `wait` waits for."""

    start: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready


@dataclass(frozen=True)
class Candidate:
    """One pass of one implementation or peer, ready to be timed."""

    launch: Launch
    extra_bytes: int | None = None
    """Memory beyond inputs and results; None where it is not known."""
    work: int = 1
    """What the pass cannot do without, in the benchmark's own unit: matrix products, or reads and writes of logits."""


def compiled_candidate(f: Callable[..., Any], *arguments: jax.Array, work: int = 1) -> Candidate:
    """`f`, compiled for these arguments, with the temporary bytes of its program."""
    compiled = jax.jit(f).lower(*arguments).compile()
    return Candidate(Launch(lambda: compiled(*arguments)), temporary_bytes(compiled), work)


def temporary_bytes(compiled: Any) -> int | None:
    """The bytes that a compiled program takes beyond inputs and results; None where its backend does not tell."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def budget_for_all(tokens: int, weight: Any) -> int:
    """A memory budget in bytes that holds the exponentials of so many tokens over a head `[V, D]`, and a tenth more.

    Beside a float32 head they are in two parts, and take half of the budget.
    """
    return (8 if weight.dtype == "float32" else 2) * tokens * weight.shape[0] * 11 // 10


DTYPES = ("bfloat16", "float16", "float32")
PEERS_AND_CLIENTS = (
    *("cut-cross-entropy", "liger-kernel", "quack-kernels", "flash-attn", "flash-attn-3", "flash-attn-4"),
    *("trl", "transformers", "accelerate", "datasets", "peft", "verl", "google-tunix"),
)
"""The packages that are measured or train here and that `rlk doctor` does not know."""


def parser(
    module: str,
    description: str | None,
    *,
    shapes: str,
    implementations: str,
    sizes: str = "N,D,V",
    dtypes: Sequence[str] = DTYPES,
    known: Iterable[str] = IMPLEMENTATIONS,
) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes. `sizes` names the numbers of a shape; `shapes` are those
    that a GPU measures unless others are asked for. `implementations` are the names that are measured by default, and
    `known` are others that may be asked for.
    """
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    options.add_argument("--shapes", type=shapes_of(sizes), help=f'"{sizes};{sizes};…" (default: {shapes})')
    options.set_defaults(shapes_of_gpu=shapes)
    options.add_argument("--dtype", default=dtypes[0], choices=dtypes)
    names = some_of((*known, *implementations.split(",")))
    options.add_argument("--implementations", type=names, default=implementations, help="comma-separated names")
    options.add_argument("--rounds", type=positive, default=5, help="interleaved rounds; figures are their medians")
    return add_outputs(options)


def asked_shapes(options: argparse.Namespace, smoke_shapes: str) -> list[str]:
    """The shapes of a run with the options of `parser`: those of --smoke, those named, or else those of a GPU."""
    if not (options.smoke or options.shapes):
        require_gpu("--smoke has small ones, and --shapes names others")
    return (smoke_shapes if options.smoke else options.shapes or options.shapes_of_gpu).split(";")


def require_gpu(ways: str) -> None:
    """End with status 2 where there is no GPU for what a benchmark measures unless it is asked for something else.
    `ways` says what that may be.

    A process of its own looks, because JAX in this one would take memory of the GPU from the processes of candidates.
    """
    if processes.in_own_process(jax.default_backend) == "cpu":
        print(f"no GPU here: these sizes take hours on a CPU; {ways}", file=sys.stderr)
        raise SystemExit(2)


def add_outputs(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    options.add_argument("--json", type=output_path, help="write the rows with command, date, device and versions")
    options.add_argument("--plot", type=output_path, help="draw the rows as a PNG")
    options.add_argument("--smoke", action="store_true", help="one tiny case, one short round")
    return options


def add_mask_density(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    options.add_argument("--mask-density", type=fraction, default=1.0, help="fraction of the tokens that count")
    return options


_OUT_OF_MEMORY = re.compile("out.of.memory|failed to allocate", re.IGNORECASE)
_CANNOT_RUN = (ImportError, NotImplementedError, RuntimeError, ValueError)
"""How ops and peers say that they do not support a device, a shape or an option, or are not installed."""
_UNSUPPORTED_BY_XLA = ("RESOURCE_EXHAUSTED", "UNIMPLEMENTED")
_FAILED = "failed"


def status_of(error: Exception) -> str:
    """Why a candidate has no figures, for its row: the kind of the error and the first line of its text.

    The expected kinds are "out of memory" and "not available" (a type of `_CANNOT_RUN`). "failed" is every other error:
    a type that no op raises to say that it cannot run, or a failure inside XLA or a kernel. It may be a bug of ours.
    """
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0][:160]
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return f"out of memory: {line}"
    in_xla = isinstance(error, jax.errors.JaxRuntimeError) and not text.startswith(_UNSUPPORTED_BY_XLA)
    if isinstance(error, _CANNOT_RUN) and not in_xla:
        return f"not available: {line}"
    return f"{_FAILED}: {type(error).__name__}: {line}"


def exit_status(statuses: Iterable[str]) -> int:
    """The exit status of a benchmark: 1 where no candidate could run, or where one failed in an unexpected way."""
    found = list(statuses)
    return int("pass" not in found or any(x.startswith(_FAILED) for x in found))


@dataclass(frozen=True)
class Failure:
    """What `attempt` returns for a candidate that raised; `status` is for its row."""

    status: str


def attempt[T](action: Callable[[], T]) -> T | Failure:
    """The result of `action`, or a `Failure` where it raises an `Exception`.

    Every benchmark builds and times its candidates through this function, so that one that fails costs its own row
    only, whenever it fails. No error is hidden: where the status says "failed", the traceback goes to stderr and the
    benchmark ends with status 1. Memory that the failed action held is given back before this function returns.
    """
    try:
        return action()
    except Exception as error:
        failure = Failure(status_of(error))
        if failure.status.startswith(_FAILED):
            traceback.print_exc()
    # Only here is the error gone, and with it the frames that held the action's arrays and tensors.
    _give_back_memory()
    return failure


def _give_back_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _seconds_per_run(launch: Launch, times: int) -> float:
    start, last = time.perf_counter(), None
    for _ in range(times):
        last = launch.start()
    launch.wait(last)
    return (time.perf_counter() - start) / times


def milliseconds[K](
    candidates: dict[K, Candidate], rounds: int, *, warm: float, timed: float
) -> tuple[dict[K, float], dict[K, str]]:
    """The time of each candidate that ran through, and the status of each that failed meanwhile.

    A time is the median over interleaved rounds; in each, a candidate runs for `warm` seconds back to back and then for
    `timed` seconds on the clock. This is wall time of back-to-back runs: the chip slows under sustained load, and short
    runs would flatter it. Each round has an order of its own: what follows a candidate that leaves the chip cool runs
    faster for longer than the warm-up. All are warmed once before the first round: an H200's first second under load
    can be a tenth slower.

    A candidate that fails is removed from `candidates`, its memory is given back, and the others go on being timed.
    """
    once: dict[K, float] = {}
    samples: dict[K, list[float]] = {key: [] for key in candidates}
    failed: dict[K, str] = {}

    def run_for(seconds: float, key: K) -> float:
        return _seconds_per_run(candidates[key].launch, max(1, int(seconds / once[key])))

    def warm_up(key: K) -> None:
        _seconds_per_run(candidates[key].launch, 1)
        once[key] = max(_seconds_per_run(candidates[key].launch, 1), 1e-6)
        run_for(warm, key)

    def sample(key: K) -> None:
        run_for(warm, key)
        samples[key].append(run_for(timed, key))

    def drop_if_it_fails(step: Callable[[K], None], key: K) -> None:
        outcome = attempt(functools.partial(step, key))
        if isinstance(outcome, Failure):
            failed[key] = outcome.status
            del candidates[key], samples[key]
            _give_back_memory()

    for key in list(candidates):
        drop_if_it_fails(warm_up, key)
    for i in range(rounds):
        for key in random.Random(i).sample(list(candidates), len(candidates)):
            print(f"\rround {i + 1} of {rounds}: {_label(key):40s}", end="", file=sys.stderr, flush=True)
            drop_if_it_fails(sample, key)
    print(file=sys.stderr)
    return {key: 1e3 * statistics.median(x) for key, x in samples.items()}, failed


def _label(key: object) -> str:
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)


@dataclass(frozen=True)
class Figures:
    """The figures of one candidate: its time, and the work and memory of `Candidate`."""

    ms: float
    work: int
    extra_mib: float | None


type Builders[K] = Mapping[K, Callable[[], Candidate | Mapping[K, Candidate]]]
"""Functions that each build the candidate of their key, or several candidates by key."""


def measure_candidates[K](builders: Builders[K], rounds: int, seconds: float) -> tuple[dict[K, Figures], dict[K, str]]:
    """Build all candidates and time them in turn, each after `seconds` of warm-up.

    Returns the figures of the candidates that ran through, and the statuses of those that failed: under the builder's
    key where the builder raised, else under the candidate's own.
    """
    candidates, failed = _build(builders)
    known = {key: (x.work, None if x.extra_bytes is None else x.extra_bytes / 2**20) for key, x in candidates.items()}
    ms, failed_while_timed = milliseconds(candidates, rounds, warm=seconds, timed=0.6 * seconds)
    return {key: Figures(x, *known[key]) for key, x in ms.items()}, failed | failed_while_timed


def _build[K](builders: Builders[K]) -> tuple[dict[K, Candidate], dict[K, str]]:
    candidates: dict[K, Candidate] = {}
    failed: dict[K, str] = {}
    for key, build in builders.items():
        built = attempt(build)
        if isinstance(built, Failure):
            failed[key] = built.status
        else:
            candidates |= {key: built} if isinstance(built, Candidate) else built
    return candidates, failed


def measure_shapes[Row](
    module: str,
    options: argparse.Namespace,
    argv: Sequence[str] | None,
    smoke_shapes: str,
    measure: Callable[[str, Sequence[str], int, float], list[Row]],
) -> list[Row]:
    """The rows of all shapes, from `measure(shape, implementations, rounds, seconds)`.

    The JSON file is written after each shape, so that a run that is cut off keeps its rows.
    """
    rounds, seconds = (1, 0.0) if options.smoke else (options.rounds, 0.5)
    rows: list[Row] = []
    for shape in asked_shapes(options, smoke_shapes):
        print(f"measuring {shape} …", file=sys.stderr)
        rows += measure(shape, options.implementations, rounds, seconds)
        if options.json:
            write(options.json, module, argv, rows)
    return rows


def beside(figure: float | None, stock: float | None, unit: str) -> tuple[str, str]:
    """A figure for a table, and its ratio to stock's."""
    if figure is None:
        return "", ""
    return f"{figure:.1f} {unit}", f"{figure / stock:.3f}" if stock else ""


def show(title: str, table: Table, *, width: int = 120) -> None:
    """Print a table at least `width` columns wide: a log file counts as 80 columns, which would cut the figures."""
    console = OutputConsole()
    console.width = max(console.width, width)
    console.print(title, table)


def recorded_versions() -> dict[str, str | None]:
    """The versions of the packages that `rlk doctor` knows, and of those of `PEERS_AND_CLIENTS` that are installed."""
    found = {name: installed_version(name) for name in PEERS_AND_CLIENTS}
    return doctor.package_versions() | {name: version for name, version in found.items() if version is not None}


def write(
    path: Path,
    module: str,
    argv: Sequence[str] | None,
    rows: Sequence[Any],
    timing: str = "back-to-back wall time, median of interleaved rounds, each in another order",
) -> None:
    """Write a run as JSON: its command, date, device, versions and rows."""
    record = {
        "command": f"python -m benchmarks.{module} " + shlex.join(argv if argv is not None else sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "timing": timing,
        "packages": recorded_versions(),
        "rows": [asdict(r) for r in rows],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def plot(path: Path | None, bars: Iterable[tuple[str, str, float | None]], label: str) -> None:
    """Draw horizontal bars with their figures into a PNG, where a path is given.

    A bar is its panel, its name and its figure; one that has no figure is left out.
    """
    if path is None:
        return
    panels: dict[str, dict[str, float]] = {}
    for panel, name, figure in bars:
        if figure is not None:
            panels.setdefault(panel, {})[name] = figure
    if not panels:
        print(f"nothing to draw in {path}", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max(len(x) for x in panels.values())
    image, axes = pyplot.subplots(
        -(-len(panels) // 2), 2, figsize=(13, len(panels) * (0.5 + 0.11 * most)), squeeze=False, constrained_layout=True
    )
    for axis, (title, values) in zip(axes.flat, panels.items(), strict=False):
        axis.bar_label(axis.barh(list(values)[::-1], list(values.values())[::-1]), fmt=" %.2f", fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.margins(x=0.1, y=0.01)
        axis.set_xlabel(label, fontsize=8)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    image.savefig(path, dpi=120)
    pyplot.close(image)
