"""The learning bar: GRPO raises the exact-answer reward on held-out prompts, and nothing but its signal does."""

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.steps import build_steps, make_mesh
from rlk_jax.grpo.tasks import load_task
from rlk_jax.grpo.trainer import to_floats
from tests.grpo import tiny

CONTROL = "--shuffle-advantages"
MOST_BEFORE, LEAST_GAIN, MOST_CONTROL_GAIN = 0.6, 0.25, 0.05

SMALL: dict[str, Any] = {
    "layers": 1,
    "max_operand": 29,
    "warmup_steps": 600,
    "grpo_steps": 50,
    "warmup_learning_rate": 4e-3,
    "learning_rate": 5e-4,
}
"""A policy that learns sums in a quarter of the time that the default one takes."""

Summary = dict[str, dict[str, float]]


def print_header() -> None:
    columns = ("sampled before", "after", "greedy before", "after")
    print(f"\n{'seed':>4s} {'advantages':>20s} " + " ".join(f"{column:>14s}" for column in columns))


def print_row(flag: str, seed: int, summary: Summary, started: float) -> None:
    cells = " ".join(f"{summary[when][how]:14.3f}" for how in ("sampled", "greedy") for when in ("before", "after"))
    print(f"{seed:4d} {flag or 'grpo':>20s} {cells} {time.monotonic() - started:6.0f} s")


def assert_learns_if_it_should(flag: str, seed: int, summary: Summary) -> None:
    before, after = summary["before"]["sampled"], summary["after"]["sampled"]
    assert before <= MOST_BEFORE, f"seed {seed} {flag} starts too high: {before:.3f}"
    if flag == CONTROL:
        assert after - before < MOST_CONTROL_GAIN, f"seed {seed}, shuffled: {before:.3f} to {after:.3f}"
    else:
        assert after - before >= LEAST_GAIN, f"seed {seed}: {before:.3f} to {after:.3f}"


@pytest.mark.learning
def test_grpo_learns_and_its_shuffled_control_does_not():
    """Both go on from one warm start, for as many GRPO steps as reach the bar with room to spare: a small policy learns
    sums of small numbers.
    """
    configs = {flag: GrpoConfig(**SMALL, shuffle_advantages=flag == CONTROL) for flag in ("", CONTROL)}
    programs = {flag: build_steps(config, load_task(config), make_mesh(config)) for flag, config in configs.items()}
    config, started = configs[""], time.monotonic()
    state = programs[""].initial_state()
    for step in range(config.warmup_steps):
        state, _ = programs[""].warmup_step(state, step)
    warm = jax.device_get(state)
    before = to_floats(programs[""].heldout_rewards(state.params))
    print_header()
    for flag, steps in programs.items():
        state = steps.start_grpo(warm)
        for step in range(config.warmup_steps, config.total_steps):
            state, _ = steps.grpo_step(state, step)
        summary = {"before": before, "after": to_floats(programs[""].heldout_rewards(state.params))}
        print_row(flag, config.seed, summary, started)
        assert_learns_if_it_should(flag, config.seed, summary)


@pytest.mark.full
@pytest.mark.learning
def test_the_command_learns_with_every_seed_and_its_shuffled_controls_do_not(tmp_path):
    """In `make test`, the test above catches steps that do not learn, or that learn from nothing, with one seed and a
    small policy, and test_resume.py runs the command.
    """
    environment = tiny.environment(tmp_path / "cache")

    def train(job: tuple[str, int]) -> Summary:
        flag, seed = job
        out, started = tmp_path / f"seed{seed}{flag}", time.monotonic()
        command = [*tiny.COMMAND, f"--seed={seed}", "--out", str(out), *([flag] if flag else [])]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(Path(out, "summary.json").read_text())
        print_row(flag, seed, summary, started)
        return summary

    print_header()
    jobs = [(flag, seed) for flag in ("", CONTROL) for seed in (0, 1, 2)]
    with ThreadPoolExecutor(2) as pool:
        summaries = dict(zip(jobs, pool.map(train, jobs), strict=True))
    for (flag, seed), summary in summaries.items():
        assert_learns_if_it_should(flag, seed, summary)
