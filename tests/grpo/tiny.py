"""A job small enough for a test, and ways to run it."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from rlk_jax.grpo.command import add_parser
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.run_folder import RunFolder, open_checkpoints, restore_latest_checkpoint
from rlk_jax.grpo.steps import TrainState, build_steps, make_mesh
from rlk_jax.grpo.tasks import load_task
from tests.support import helpers

COMMAND = [sys.executable, "-m", "rlk_jax.cli", "grpo"]
SIZES: dict[str, Any] = {
    "width": 8,
    "layers": 1,
    "heads": 2,
    "max_operand": 4,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
}

LEARNING: dict[str, Any] = {
    "warmup_steps": 40,
    "grpo_steps": 6,
    "checkpoint_every": 21,
    "demonstration_errors": 0.0,
    "warmup_learning_rate": 1e-2,
    "learning_rate": 1e-3,
}
"""Changes that make a policy right now and then when GRPO begins."""


def _values(**changes: Any) -> dict[str, Any]:
    """Prompts of one's own have no operands and no wrong demonstrations."""
    values = {**SIZES, "warmup_steps": 3, "grpo_steps": 2, **changes}
    of_arithmetic = ("max_operand", "demonstration_errors") if "prompts" in changes else ()
    return {name: x for name, x in values.items() if name not in of_arithmetic}


def config(**changes: Any) -> GrpoConfig:
    return GrpoConfig(**_values(**changes))


def options(**changes: Any) -> list[str]:
    """The command-line options that give `config(**changes)`."""
    values = _values(**changes)
    flags = {name: "--" + name.replace("_", "-") for name in values}
    return [flags[name] if value is True else f"{flags[name]}={value}" for name, value in values.items()]


def run_here(*arguments: str | Path) -> int:
    """`rlk grpo` in this process; its exit status."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["grpo", *map(str, arguments)])
    return parsed.run(parsed)


def lose_the_end(folder: RunFolder, steps: int) -> None:
    """Of a finished run of so many steps: its last checkpoint and summary, as if it had been killed before them."""
    shutil.rmtree(folder.checkpoints / str(steps))
    folder.summary.unlink()


def run_apart(environment: Mapping[str, str]) -> Callable[..., int]:
    """As `run_here`, each in a process of its own."""
    return lambda *arguments: (
        subprocess.run([*COMMAND, *map(str, arguments)], env=environment, stdout=subprocess.DEVNULL).returncode
    )


def final_state(folder: RunFolder, **changes: Any) -> tuple[TrainState, int]:
    """The newest checkpoint of such a run, and its step."""
    chosen = config(**changes)
    steps = build_steps(chosen, load_task(chosen), make_mesh(chosen))
    with open_checkpoints(folder) as checkpoints:
        return restore_latest_checkpoint(checkpoints, steps.initial_state())


def tuned(folder: RunFolder) -> dict[str, bytes]:
    """What XLA chose by timing for the programs of a run; on a CPU it times nothing."""
    files = folder.programs.glob("xla_gpu_per_fusion_autotune_cache_dir/**/*")
    return {str(path): path.read_bytes() for path in files if path.is_file()}


def assert_resumes(folder: RunFolder, run: Callable[..., int], **changes: Any) -> None:
    """A run by `run`, and again from its checkpoint within GRPO: the same state and files, to the bit."""
    changes = {**LEARNING, **changes}
    command = [*options(**changes), "--out", folder.path]
    assert run(*command) == 0
    (state, done), *files = final_state(folder, **changes), folder.metrics.read_bytes(), folder.summary.read_bytes()
    assert done == files[0].count(b"\n") == 46
    lose_the_end(folder, steps=46)
    before, done = final_state(folder, **changes)
    assert done == 42
    for other in (before.params, state.reference):  # or there would be nothing to go wrong
        moved = jax.tree.map(lambda x, y: bool((x != y).any()), state.params, other)
        assert all(jax.tree.leaves(moved))
    choices = tuned(folder)
    assert run(*command, "--resume") == 0
    assert tuned(folder) == choices
    helpers.assert_same_bits(final_state(folder, **changes)[0], state)
    assert [folder.metrics.read_bytes(), folder.summary.read_bytes()] == files


def environment(compile_cache: Path) -> dict[str, str]:
    """For `rlk grpo` in its own process: CPU, and one compilation cache for all runs of a test, if not of all tests."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(compile_cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**cache, **os.environ, "JAX_PLATFORMS": "cpu"}
