"""How far rollouts are from training: python -m benchmarks.mismatch --help.

This benchmark runs the steps of `rlk grpo` with stock layers in float32 and in bfloat16, and with invariant layers. The
mismatch of a step is the largest |log-prob of the training pass − log-prob recorded while decoding|; both are of the
same weights.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.table import Table

from benchmarks import common
from benchmarks.argument_types import positive
from rlk_jax.grpo import GrpoConfig
from rlk_jax.grpo.steps import build_steps, make_mesh
from rlk_jax.grpo.tasks import load_task

JOB: dict[str, Any] = {"max_operand": 9, "updates_per_rollout": 1}
WARMUP = 30
"""The supervised steps before the first step of GRPO."""
SMOKE: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2, "prompts_per_step": 4, "samples_per_prompt": 4}
KINDS: dict[str, dict[str, Any]] = {
    "stock, float32": {},
    "stock, bfloat16": {"compute_dtype": "bfloat16"},
    "invariant, bfloat16": {"compute_dtype": "bfloat16", "invariant": True},
}


@dataclass(frozen=True)
class Row:
    """One step of GRPO; the ratios and the clip fraction are those of its only update."""

    kind: str
    status: str
    step: int | None = None
    mismatch: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    clip_fraction: float | None = None


def measure(kind: str, steps: int, warmup: int, sizes: dict[str, Any]) -> list[Row]:
    """The rows of one kind of decoder, or the one row that says why it failed."""
    print(f"measuring {kind} …", file=sys.stderr)
    rows = common.attempt(functools.partial(_grpo_steps, kind, steps, warmup, sizes))
    return [Row(kind, rows.status)] if isinstance(rows, common.Failure) else rows


def _grpo_steps(kind: str, steps: int, warmup: int, sizes: dict[str, Any]) -> list[Row]:
    """`steps` steps of GRPO after `warmup` supervised ones."""
    config = GrpoConfig(**JOB, **KINDS[kind], **sizes)
    programs, rows = build_steps(config, load_task(config), make_mesh(config)), []
    state = programs.initial_state()
    for step in range(warmup):
        state, _ = programs.warmup_step(state, step)
    state = programs.start_grpo(state)
    for step in range(warmup, warmup + steps):
        state, metrics = programs.grpo_step(state, step)
        names = "mismatch", "ratio_min", "ratio_max", "clip_fraction"
        rows.append(Row(kind, "pass", step, **{name: float(metrics[name]) for name in names}))
    return rows


def _show(rows: Sequence[Row]) -> None:
    table = Table("decoder", "steps", "mismatch from", "to", "ratio from", "to", "clip fraction")
    for kind in KINDS:
        own = [r for r in rows if r.kind == kind]
        if own[0].status != "pass":
            table.add_row(kind, "", own[0].status)
            continue
        mismatches = [r.mismatch for r in own if r.mismatch is not None]
        smallest = min(r.ratio_min for r in own if r.ratio_min is not None)
        largest = max(r.ratio_max for r in own if r.ratio_max is not None)
        clipped = max(r.clip_fraction for r in own if r.clip_fraction is not None)
        figures = (
            *(f"{x:.1e}" if x else "0" for x in (min(mismatches), max(mismatches))),
            f"{smallest:.6g}",
            f"{largest:.6g}",
        )
        table.add_row(kind, str(len(own)), *figures, f"{clipped:.3f}")
    common.show(f"rollout and training, {jax.devices()[0].device_kind}", table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mismatch", description=__doc__)
    parser.add_argument("--steps", type=positive, default=10, help="steps of GRPO (default: %(default)s)")
    common.add_outputs(parser)
    options = parser.parse_args(argv)
    run = (1, 0, SMOKE) if options.smoke else (options.steps, WARMUP, {})
    rows = [row for kind in KINDS for row in measure(kind, *run)]
    _show(rows)
    if options.json:
        common.write(options.json, "mismatch", argv, rows, timing="not timed")
    common.plot(options.plot, ((r.kind, f"step {r.step}", r.mismatch) for r in rows), "mismatch")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
