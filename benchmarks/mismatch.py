"""How far rollouts are from training: python -m benchmarks.mismatch --help.

Runs `rlk grpo`'s steps with stock layers in float32 and in bfloat16, and with invariant layers. Mismatch is the largest
|log-prob of the training pass − log-prob recorded while decoding| of a step, both of the same weights.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.table import Table

from benchmarks import common
from rlk_jax.grpo import GrpoConfig
from rlk_jax.grpo.steps import build_steps, make_mesh
from rlk_jax.grpo.tasks import task_of

JOB: dict[str, Any] = {"max_operand": 9, "updates_per_rollout": 1}
WARMUP = 30
SMOKE: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2, "prompts_per_step": 4, "samples_per_prompt": 4}
KINDS: dict[str, dict[str, Any]] = {
    "stock, float32": {},
    "stock, bfloat16": {"compute_dtype": "bfloat16"},
    "invariant, bfloat16": {"compute_dtype": "bfloat16", "invariant": True},
}


@dataclass(frozen=True)
class Row:
    """One step of GRPO; all but the mismatch is of its only update."""

    kind: str
    step: int
    mismatch: float
    ratio_min: float
    ratio_max: float
    clip_fraction: float


def measure(kind: str, steps: int, warmup: int, sizes: dict[str, Any]) -> list[Row]:
    """The steps behind a warm start."""
    print(f"measuring {kind} …", file=sys.stderr)
    config = GrpoConfig(**JOB, **KINDS[kind], **sizes)
    programs, rows = build_steps(config, task_of(config), make_mesh(config)), []
    state = programs.initial_state()
    for step in range(warmup):
        state, _ = programs.warmup_step(state, step)
    state = programs.start_grpo(state)
    for step in range(warmup, warmup + steps):
        state, metrics = programs.grpo_step(state, step)
        names = "mismatch", "ratio_min", "ratio_max", "clip_fraction"
        rows.append(Row(kind, step, **{name: float(metrics[name]) for name in names}))
    return rows


def _show(rows: Sequence[Row]) -> None:
    table = Table("decoder", "steps", "mismatch from", "to", "ratio from", "to", "clip fraction")
    for kind in KINDS:
        own = [r for r in rows if r.kind == kind]
        mismatches, smallest = [r.mismatch for r in own], min(r.ratio_min for r in own)
        largest, clipped = max(r.ratio_max for r in own), max(r.clip_fraction for r in own)
        figures = (
            *(f"{x:.1e}" if x else "0" for x in (min(mismatches), max(mismatches))),
            f"{smallest:.6g}",
            f"{largest:.6g}",
        )
        table.add_row(kind, str(len(own)), *figures, f"{clipped:.3f}")
    common.show(f"rollout and training, {jax.devices()[0].device_kind}", table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mismatch", description=__doc__)
    parser.add_argument("--steps", type=common.positive, default=10, help="of GRPO (default: %(default)s)")
    common.add_outputs(parser)
    options = parser.parse_args(argv)
    run = (1, 0, SMOKE) if options.smoke else (options.steps, WARMUP, {})
    rows = [row for kind in KINDS for row in measure(kind, *run)]
    _show(rows)
    if options.json:
        common.write(options.json, "mismatch", argv, rows, timing="not timed")
    if options.plot:
        panels = {kind: {f"step {r.step}": r.mismatch for r in rows if r.kind == kind} for kind in KINDS}
        common.plot(options.plot, panels, "mismatch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
