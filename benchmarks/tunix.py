"""Rollouts and updates of Tunix's GRPOLearner, with rlk_jax in it and without: python -m benchmarks.tunix --help.

The candidates are "stock", Tunix's own Qwen3 with its vanilla rollout; "linear_logp", the same after `install_logps`;
and "decoder", a Qwen3 of `rlk_jax.models` with `DecoderRollout`, after `install_logps`, too. All have random weights in
float32, compute in bfloat16, and draw at a temperature of 1. Each rollout is trained on twice, by AdamW. Rewards are a
function of the tokens. Each candidate runs in a process of its own.

The mismatch is the largest |log-prob that training computes − log-prob that the token was drawn with| in the first
updates of rollouts, which are of the weights that sampled; the ratios are of these updates, too. By itself, Tunix's
learner computes the second log-prob again as training does, and sees no mismatch; here it is given those of the
rollout. Memory is the most that JAX held on a GPU.
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
from rich.table import Table

from benchmarks import common, processes
from benchmarks.argument_types import positive, shapes_of, some_of
from benchmarks.tunix_cases import CANDIDATES, STOCK, Case
from rlk_jax.grpo.usage import peak_memory

_MODEL, _BATCH = "width,layers,vocabulary", "prompts,samples,tokens"


@dataclass(frozen=True)
class Row:
    """One candidate in one case. Losses are those of each update."""

    model: str
    batch: str
    candidate: str
    status: str
    rollout_ms: float | None = None
    update_ms: float | None = None
    mismatch: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    memory_mib: float | None = None
    losses: list[float] = field(default_factory=list)


def measure(case: Case, candidate: str, rollouts: int) -> Row:
    """The row of one candidate, from a process of its own: however that ends, the next has all memory."""
    print(f"measuring {case.model}, {case.batch}, {candidate} …", file=sys.stderr)
    row = processes.in_own_process(measure_here, case, candidate, rollouts)
    return Row(case.model, case.batch, candidate, row) if isinstance(row, str) else row


def measure_here(case: Case, candidate: str, rollouts: int) -> Row:
    """The row of one candidate, measured in this process; one that cannot run has a status that says why."""
    row = common.attempt(functools.partial(_measure, case, candidate, rollouts))
    return Row(case.model, case.batch, candidate, row.status) if isinstance(row, common.Failure) else row


def _measure(case: Case, candidate: str, rollouts: int) -> Row:
    from benchmarks import tunix_steps  # It imports Tunix, which may not be installed.

    # The first rollout, and the first update, compile.
    cluster = tunix_steps.run(case, candidate, rollouts + 1)
    low, high = (
        tunix_steps.history(cluster, f"is_ratio/{end}")[:: tunix_steps.UPDATES_PER_ROLLOUT] for end in ("min", "max")
    )
    memory = peak_memory(jax.devices())
    return Row(
        case.model,
        case.batch,
        candidate,
        "pass",
        statistics.median(cluster.rollout_ms[1:]),
        statistics.median(cluster.update_ms[1:]),
        max(abs(math.log(ratio)) for ratio in (*low, *high)),
        min(low),
        max(high),
        None if memory is None else memory / 2**20,
        tunix_steps.history(cluster, "loss"),
    )


def _show(rows: Sequence[Row]) -> None:
    times = "rollout", "of stock", "update", "of stock"
    table = Table("model", "batch", "candidate", *times, "mismatch", "first ratios", "memory", "of stock", "last loss")
    of_stock = {(r.model, r.batch): r for r in rows if r.candidate == STOCK}
    for r in rows:
        named = r.model, r.batch, r.candidate
        if r.status != "pass":
            table.add_row(*named, r.status)
            continue
        stock = of_stock.get((r.model, r.batch))
        table.add_row(
            *named,
            *common.beside(r.rollout_ms, None if stock is None else stock.rollout_ms, "ms"),
            *common.beside(r.update_ms, None if stock is None else stock.update_ms, "ms"),
            f"{r.mismatch:.2g}",
            f"{r.ratio_min:.6g} to {r.ratio_max:.6g}",
            *common.beside(r.memory_mib, None if stock is None else stock.memory_mib, "MiB"),
            f"{r.losses[-1]:.6f}",
        )
    common.show("Rollouts and updates of Tunix's GRPOLearner; medians", table, width=180)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m benchmarks.tunix", description=__doc__)
    options.add_argument("--models", type=shapes_of(_MODEL), default="256,4,32768", help=f'"{_MODEL};…"')
    options.add_argument("--batches", type=shapes_of(_BATCH), default="4,4,32", help=f'"{_BATCH};…"')
    options.add_argument(
        "--candidates", type=some_of(CANDIDATES), default=",".join(CANDIDATES), help="comma-separated names"
    )
    options.add_argument("--rollouts", type=positive, default=5, help="timed rollouts, each trained on twice")
    return common.add_outputs(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Its exit status is 1 where no candidate could run or one failed in an unexpected way."""
    options = _options().parse_args(argv)
    common.share_gpu_with_torch()  # A candidate's process has the GPU beside this one.
    models, batches, rollouts = options.models, options.batches, options.rollouts
    if options.smoke:
        models, batches, rollouts = "32,1,64", "2,2,4", 1
    rows: list[Row] = []
    for model, batch in itertools.product(models.split(";"), batches.split(";")):
        case = Case(*map(int, f"{model},{batch}".split(",")))
        for candidate in options.candidates:
            rows.append(measure(case, candidate, rollouts))
            if options.json:
                common.write(options.json, "tunix", argv, rows, "wall time, median, a process per candidate")
    _show(rows)
    bars = (
        (f"{what}: {r.model}, {r.batch}", r.candidate, figure)
        for r in rows
        for what, figure in (("rollout", r.rollout_ms), ("update", r.update_ms))
    )
    common.plot(options.plot, bars, "ms")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
