"""A job small enough for a test, and ways to run it."""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rlk_jax.grpo.command import add_parser
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.run_folder import RunFolder

COMMAND = [sys.executable, "-m", "rlk_jax.cli", "grpo"]
SIZES: dict[str, Any] = {
    "width": 8,
    "layers": 1,
    "heads": 2,
    "max_operand": 4,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
}


def config(**changes: Any) -> GrpoConfig:
    return GrpoConfig(**{**SIZES, "warmup_steps": 3, "grpo_steps": 2, **changes})


def options(**changes: Any) -> list[str]:
    """The command-line options that give `config(**changes)`."""
    values = {**SIZES, "warmup_steps": 3, "grpo_steps": 2, **changes}
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


def environment(compile_cache: Path) -> dict[str, str]:
    """For `rlk grpo` in its own process: CPU, and one compilation cache for all runs of a test, if not of all tests."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(compile_cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**cache, **os.environ, "JAX_PLATFORMS": "cpu"}
