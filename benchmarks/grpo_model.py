"""Steps of `rlk grpo --model`, their parts, and their bits on several devices: python -m benchmarks.grpo_model --help.

A step is a rollout, the rewards of its completions and the updates on it. Rollouts are timed alone on held-out prompts,
of which as many are sampled at a time as in a step; the rest of a step is its update. Times are medians of steps behind
the first, which compiles. Memory is the highest that the process had on a device since it began. `--profile` prints
where the time of a step goes, by the program and the kernel, as JAX's profiler has it.

`--devices N` compares bits instead: of all states after so many steps on N devices along "data", and on one device that
takes the same rows as N micro-batches; beside it stands the distance to one undivided batch.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from benchmarks import common
from benchmarks.argument_types import output_path, positive
from rlk_jax.grpo import GrpoConfig
from rlk_jax.grpo.run_config import BadInput
from rlk_jax.grpo.steps import TrainingSteps, TrainState, make_mesh
from rlk_jax.grpo.text_steps import build_text_steps
from rlk_jax.grpo.text_task import load_text_task

_TIMING = "median of steps behind the first"
_SHOWN_KERNELS = 16


@dataclass(frozen=True)
class Row:
    """One figure of one kind of layers."""

    kind: str
    what: str
    value: float
    unit: str


@dataclass(frozen=True)
class Run:
    """A run that is built, and how many prompts a rollout and an evaluation have."""

    config: GrpoConfig
    steps: TrainingSteps
    rollouts_of_evaluation: int

    @property
    def kind(self) -> str:
        return "invariant" if self.config.invariant else "stock"

    def timed(self, state: TrainState, count: int) -> tuple[TrainState, list[Row]]:
        """So many steps, timed."""
        seconds, lines = [], []
        for step in range(count):
            start = time.perf_counter()
            state, metrics = self.steps.grpo_step(state, step)
            lines.append({name: float(x) for name, x in metrics.items()})
            seconds.append(time.perf_counter() - start)
        rollout = self._rollout_seconds(state)
        whole, tokens = statistics.median(seconds[1:]), statistics.mean(line["tokens"] for line in lines[1:])
        mismatch = max(line["mismatch"] for line in lines)
        rows = [
            Row(self.kind, "first step", seconds[0], "s"),
            Row(self.kind, "step", whole, "s"),
            Row(self.kind, "rollout", rollout, "s"),
            Row(self.kind, "update", whole - rollout, "s"),
            Row(self.kind, "step", tokens / whole, "tokens/s"),
            Row(self.kind, "rollout", tokens / rollout, "tokens/s"),
            Row(self.kind, "update", tokens / (whole - rollout), "tokens/s"),
            Row(self.kind, "mismatch", mismatch, "nat"),
        ]
        if (stats := jax.devices()[0].memory_stats()) is not None:
            rows.append(Row(self.kind, "peak memory", stats["peak_bytes_in_use"] / 2**30, "GiB"))
        return state, rows

    def _rollout_seconds(self, state: TrainState) -> float:
        self.steps.heldout_rewards(state.params)
        start = time.perf_counter()
        self.steps.heldout_rewards(state.params)
        return (time.perf_counter() - start) / self.rollouts_of_evaluation


def build(options: argparse.Namespace, **changes: Any) -> Run:
    """The run that the command line asks for."""
    config = GrpoConfig(
        model=str(options.model),
        prompts=str(options.prompts),
        reward="last_number",
        prompts_per_step=options.prompts_per_step,
        samples_per_prompt=options.samples,
        updates_per_rollout=1,
        max_new_tokens=options.new_tokens,
        learning_rate=2e-5,
        compute_dtype="bfloat16",
        invariant=options.kind == "invariant",
        remat=options.remat,
        **changes,
    )
    task = load_text_task(config)
    steps = build_text_steps(config, task, make_mesh(config))
    rows = config.prompts_per_step * config.samples_per_prompt
    return Run(config, steps, -(-8 * len(task.heldout.prompts) // rows))


def states_after(options: argparse.Namespace, **changes: Any) -> tuple[list[np.ndarray], int]:
    """All states of a run after its steps, and the bytes that a device has of them."""
    run = build(options, **changes)
    state = run.steps.initial_state()
    for step in range(options.steps):
        state, metrics = run.steps.grpo_step(state, step)
        shown = ", ".join(f"{name} {float(metrics[name]):g}" for name in ("loss", "reward", "mismatch"))
        print(f"{changes or 'one batch'}: step {step}: {shown}", file=sys.stderr)
    arrays = jax.tree.leaves(state)
    return [np.asarray(x) for x in arrays], sum(x.addressable_shards[0].data.nbytes for x in arrays)


def bits_rows(options: argparse.Namespace) -> list[Row]:
    """States on several devices beside those of micro-batches and of one batch."""
    count = options.devices
    many, held = states_after(options, mesh=f"data={count},tensor=1")
    one, whole = states_after(options, micro_batches=count)
    undivided, _ = states_after(options)
    different = sum(int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in zip(many, one, strict=True) if a.ndim)
    weights = [[x.astype("d") for x in states if x.ndim] for states in (many, undivided)]
    error = sum(((a - b) ** 2).sum() for a, b in zip(*weights, strict=True)) / sum((b**2).sum() for b in weights[1])
    return [
        Row(options.kind, f"bytes that differ between {count} devices and {count} micro-batches", different, "bytes"),
        Row(options.kind, "relative distance to one undivided batch", float(error) ** 0.5, ""),
        Row(options.kind, "states on a device, of those on one", held / whole, ""),
    ]


def profile_table(run: Callable[[], Any]) -> Table:
    """Where the time of a call goes on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    spent: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for plane in (x for x in planes if x.name.startswith("/device:GPU:0")):
        for line in (x for x in plane.lines if x.name.startswith("Stream")):
            for event in line.events:
                module = str(dict(event.stats).get("hlo_module", "")).removeprefix("jit_")
                key = module, re.sub(r"[_.]?\d+", "", event.name)[:60]
                spent[key] += event.duration_ns
                calls[key] += 1
    total = sum(spent.values())
    table = Table("program", "kernel", "calls", "ms", "share", title=f"GPU busy for {total / 1e6:.1f} ms")
    for key, ns in spent.most_common(_SHOWN_KERNELS):
        table.add_row(*key, str(calls[key]), f"{ns / 1e6:.2f}", f"{ns / total:.1%}")
    return table


def measure(options: argparse.Namespace) -> list[Row]:
    """The rows of a run. Raises BadInput for a model, prompts or a configuration that no run may have."""
    if options.devices is not None:
        return bits_rows(options)
    run = build(options)
    state, rows = run.timed(run.steps.initial_state(), options.steps)
    if options.profile:
        common.show("", profile_table(lambda: run.steps.grpo_step(state, options.steps)))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of rlk prompts arithmetic")
    parser.add_argument("--kind", choices=("invariant", "stock"), default="invariant")
    parser.add_argument("--prompts-per-step", type=positive, default=8)
    parser.add_argument("--samples", type=positive, default=8)
    parser.add_argument("--new-tokens", type=positive, default=512)
    parser.add_argument("--steps", type=positive, default=5)
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--devices", type=positive, help="compare bits of so many devices")
    parser.add_argument("--json", type=output_path, help="write the rows with command, date, device and versions")
    options = parser.parse_args(argv)
    try:
        rows = measure(options)
    except BadInput as problem:
        parser.error(str(problem))
    table = Table("layers", "what", "value", "unit")
    for row in rows:
        table.add_row(row.kind, row.what, f"{row.value:.6g}", row.unit)
    common.show("", table)
    if options.json:
        common.write(options.json, "grpo_model", argv, rows, _TIMING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
