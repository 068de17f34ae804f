"""Whole training steps in TRL, with torch_bridge in it and without: python -m benchmarks.trl --help.

GRPOTrainer, SFTTrainer and DistillationTrainer train on completions that were drawn before, since sampling would drown
the rest. The model has the sizes of a known one and random weights, or is read from a folder. All else is as in TRL:
activations are computed again in the backward. A step is all that the trainer does for one batch but sampling:
log-probs, loss, backward, AdamW. "core" is the part of it from the loss on. "head" is the time in the fused head,
forward and backward, from steps of their own that wait before and after it. Each candidate runs in a process of its
own. Memory is what the device has in use at the end, beyond what it had before: neither allocator gives back what
it once took. Beside it stands the most that torch's and JAX's allocators held for tensors and arrays, and "state", the
part of that which no head can spare: weights, their gradients and the optimizer's state.
"""

import argparse
import functools
import importlib
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table

from benchmarks import common, processes
from benchmarks.argument_types import batch_sizes, positive, some_of
from benchmarks.trl_steps import (
    BOTH,
    BRIDGE,
    LIGER,
    MODELS,
    QWEN,
    STOCK,
    TINY,
    TRAINERS,
    Case,
    Clock,
    device_bytes,
    installed,
    peaks,
    run,
    state_mib,
    timed_head,
)

CANDIDATES = (STOCK, BRIDGE, LIGER, BOTH)
_COMPLETIONS = "8x512,32x512"
_WARM_STEPS, _HEAD_STEPS = 2, 3


@dataclass(frozen=True)
class Row:
    """One candidate in one case. Losses and norms are those of each timed step."""

    trainer: str
    model: str
    sequences: int
    tokens: int
    candidate: str
    status: str
    step_ms: float | None = None
    core_ms: float | None = None
    head_ms: float | None = None
    torch_mib: float | None = None
    jax_mib: float | None = None
    device_mib: float | None = None
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    largest: int | None = None
    """The most sequences with which a step fits; None where they were not searched."""
    state_mib: float | None = None
    """What the trainer holds with any head: `state_mib` of trl_steps."""

    @property
    def allocators_mib(self) -> float | None:
        """What both allocators held at their peaks, together."""
        return None if self.torch_mib is None or self.jax_mib is None else self.torch_mib + self.jax_mib


def measure(case: Case, candidate: str, steps: int) -> Row:
    """The row of one candidate, from a process of its own: however that ends, the next has all memory."""
    key = case.trainer, case.model, case.sequences, case.tokens, candidate
    print(f"measuring {', '.join(map(str, key))} …", file=sys.stderr)
    row = processes.in_own_process(measure_here, case, candidate, steps)
    return Row(*key, row) if isinstance(row, str) else row


def measure_here(case: Case, candidate: str, steps: int) -> Row:
    """The row of one candidate, measured in this process; one that cannot run has a status that says why."""
    row = common.attempt(functools.partial(_measure, case, candidate, steps))
    key = case.trainer, case.model, case.sequences, case.tokens, candidate
    return Row(*key, row.status) if isinstance(row, common.Failure) else row


def _measure(case: Case, candidate: str, steps: int) -> Row:
    torch: Any = importlib.import_module("torch")
    before = device_bytes(torch)
    with tempfile.TemporaryDirectory() as folder, installed(candidate):
        timed, clock = run(case, candidate, folder, steps + _WARM_STEPS), Clock(torch)
        memory, state = peaks(torch, candidate, before), state_mib(timed)
        with timed_head(clock):
            run(case, candidate, folder, _HEAD_STEPS)
    logs = [x for x in timed.state.log_history if "grad_norm" in x][_WARM_STEPS:]
    return Row(
        case.trainer,
        case.model,
        case.sequences,
        case.tokens,
        candidate,
        "pass",
        statistics.median(timed.step_ms[_WARM_STEPS:]),
        statistics.median(timed.core_ms[_WARM_STEPS:]),
        clock.milliseconds / (_HEAD_STEPS - 1) if clock.calls else None,
        *memory,
        [x["loss"] for x in logs],
        [x["grad_norm"] for x in logs],
        state_mib=state,
    )


def _largest(case: Case, candidate: str) -> int:
    """The most sequences, doubled again and again from those of the case, with which a step still fits."""
    while measure(larger := replace(case, sequences=2 * case.sequences), candidate, 1).status == "pass":
        case = larger
    return case.sequences


def _show(rows: Sequence[Row]) -> None:
    case = "trainer", "model", "completions", "candidate"
    times = "step", "of stock", "core", "of stock", "head"
    memory = "memory", "of stock", "torch and JAX", "of stock", "state"
    table = Table(*case, *times, *memory, "largest batch", "loss", "gradient norm")
    of_stock = {(r.trainer, r.model, r.sequences, r.tokens): r for r in rows if r.candidate == STOCK}
    for r in rows:
        named = r.trainer, r.model, f"{r.sequences} × {r.tokens}", r.candidate
        if r.status != "pass":
            table.add_row(*named, r.status)
            continue
        stock = of_stock.get((r.trainer, r.model, r.sequences, r.tokens))
        table.add_row(
            *named,
            *common.beside(r.step_ms, None if stock is None else stock.step_ms, "ms"),
            *common.beside(r.core_ms, None if stock is None else stock.core_ms, "ms"),
            "" if r.head_ms is None else f"{r.head_ms:.1f} ms",
            *common.beside(r.device_mib, None if stock is None else stock.device_mib, "MiB"),
            *common.beside(r.allocators_mib, None if stock is None else stock.allocators_mib, "MiB"),
            "" if r.state_mib is None else f"{r.state_mib:.1f} MiB",
            "" if r.largest is None else str(r.largest),
            f"{r.losses[-1]:.6f}",
            f"{r.grad_norms[-1]:.5f}",
        )
    common.show("Steps of TRL's trainers; medians", table, width=240)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m benchmarks.trl", description=__doc__)
    options.add_argument("--trainers", type=some_of(TRAINERS), default=",".join(TRAINERS), help="comma-separated names")
    help_text = f"comma-separated: {', '.join(MODELS)}, or a checkpoint's folder (default: {QWEN})"
    options.add_argument("--models", type=some_of(MODELS, folders=True), help=help_text)
    help_text = f"sequences x tokens of a batch, comma-separated (default: {_COMPLETIONS})"
    options.add_argument("--completions", type=batch_sizes, help=help_text)
    options.add_argument(
        "--candidates", type=some_of(CANDIDATES), default=",".join(CANDIDATES), help="comma-separated names"
    )
    options.add_argument("--steps", type=positive, default=10, help="timed steps, whose median is printed")
    options.add_argument("--largest", action="store_true", help="search the largest batch that fits, too")
    return common.add_outputs(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Its exit status is 1 where no candidate could run or one failed in an unexpected way."""
    options = _options().parse_args(argv)
    common.share_gpu_with_torch()
    if not (options.smoke or options.models or options.completions):
        common.require_gpu(f"--smoke has small ones, and --models {TINY} --completions 4x8 names some")
    models, steps = options.models or [QWEN], options.steps
    batches = options.completions or batch_sizes(_COMPLETIONS)
    if options.smoke:
        models, batches, steps = [TINY], [(4, 8)], 2
    rows: list[Row] = []
    for trainer, model, batch in itertools.product(options.trainers, models, batches):
        case = Case(trainer, model, *batch)
        for candidate in options.candidates:
            row = measure(case, candidate, steps)
            if options.largest and row.status == "pass":
                row = replace(row, largest=_largest(case, candidate))
            rows.append(row)
            if options.json:
                common.write(options.json, "trl", argv, rows, "wall time of steps, median, a process per candidate")
    _show(rows)
    bars = ((f"{r.trainer}, {r.model}, {r.sequences} × {r.tokens}", r.candidate, r.step_ms) for r in rows)
    common.plot(options.plot, bars, "ms")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
