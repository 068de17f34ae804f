"""The learning bar: GRPO raises the exact-answer reward on held-out prompts, and nothing but its signal does."""

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.grpo import tiny

CONTROL = "--shuffle-advantages"
MOST_BEFORE, LEAST_GAIN, MOST_CONTROL_GAIN = 0.6, 0.25, 0.05


@pytest.mark.learning
@pytest.mark.parametrize(
    ("seeds", "steps"), [((0,), 60), pytest.param((0, 1, 2), 200, marks=pytest.mark.full)], ids=str
)
def test_grpo_learns_and_its_shuffled_control_does_not(tmp_path, seeds, steps):
    """`make test` has one seed and its control, in as many GRPO steps as reach the same bar with room to spare."""
    environment = tiny.environment(tmp_path / "cache")

    def train(job: tuple[str, int]) -> dict[str, dict[str, float]]:
        flag, seed = job
        out, started = tmp_path / f"seed{seed}{flag}", time.monotonic()
        command = [
            *tiny.COMMAND,
            f"--seed={seed}",
            f"--grpo-steps={steps}",
            "--out",
            str(out),
            *([flag] if flag else []),
        ]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(Path(out, "summary.json").read_text())
        cells = " ".join(f"{summary[when][how]:14.3f}" for how in ("sampled", "greedy") for when in ("before", "after"))
        print(f"{seed:4d} {flag or 'grpo':>20s} {cells} {time.monotonic() - started:6.0f} s")
        return summary

    columns = ("sampled before", "after", "greedy before", "after")
    print(f"\n{'seed':>4s} {'advantages':>20s} " + " ".join(f"{column:>14s}" for column in columns))
    jobs = [(flag, seed) for flag in ("", CONTROL) for seed in seeds]
    with ThreadPoolExecutor(2) as pool:
        summaries = dict(zip(jobs, pool.map(train, jobs), strict=True))

    for (flag, seed), summary in summaries.items():
        before, after = summary["before"]["sampled"], summary["after"]["sampled"]
        assert before <= MOST_BEFORE, f"seed {seed} {flag} starts too high: {before:.3f}"
        if flag == CONTROL:
            assert after - before < MOST_CONTROL_GAIN, f"seed {seed}, shuffled: {before:.3f} to {after:.3f}"
        else:
            assert after - before >= LEAST_GAIN, f"seed {seed}: {before:.3f} to {after:.3f}"
