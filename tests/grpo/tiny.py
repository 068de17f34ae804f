"""A job that is small enough for a test, and ways to run it."""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlk_jax.core import program_cache
from rlk_jax.grpo import job, text_steps
from rlk_jax.grpo.command import add_parser
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.kept_programs import KeptProgram
from rlk_jax.grpo.layers import Layers
from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.run_folder import RunFolder, open_checkpoints, restore_latest_checkpoint
from rlk_jax.grpo.sft import steps as sft_steps
from rlk_jax.grpo.steps import Metrics, TrainingSteps, TrainState, build_steps, make_mesh
from rlk_jax.grpo.tasks import Task, load_task
from rlk_jax.grpo.vocabulary import VOCAB_SIZE
from tests.support import helpers
from tests.support.snippets import ROOT

COMMAND = [sys.executable, "-m", "rlk_jax.cli", "grpo"]
SIZES: dict[str, Any] = {
    "width": 8,
    "layers": 1,
    "heads": 2,
    "max_operand": 4,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
}

SUMS = str(Path(__file__).with_name("sums.jsonl"))
"""Sums behind up to 12 spaces. They are too hard to be learnt by heart: where gradients vanish, Adam enlarges rounding.
"""
MIXED: dict[str, Any] = {"prompts": SUMS, "vocab_size": 300, "learning_rate": 1e-3, "warmup_learning_rate": 1e-2}
"""Prompts of mixed lengths, and a vocabulary larger than the characters. The learning rate of GRPO is small: on some
CPUs the trained weights lie where the KL, quadratic in a step, carries what Adam enlarges.
"""
RICH: dict[str, Any] = {
    **MIXED,
    "mesh": "data=2,tensor=2",
    "micro_batches": 2,
    "packing": True,
    "rollout_buckets": 2,
}
"""`MIXED` with every option that cuts a batch, a row or a head. Several files test its programs: one compilation serves
them all where JAX keeps a cache on disk, as in `make test`.
"""

LEARNING: dict[str, Any] = {
    "warmup_steps": 40,
    "grpo_steps": 6,
    "checkpoint_every": 21,
    "demonstration_errors": 0.0,
    "warmup_learning_rate": 1e-2,
    "learning_rate": 1e-3,
}
"""Changes by which a policy has learnt enough to be right now and then when GRPO begins."""


WIDTH, HEADS = 16, 2


@functools.partial(nnx.jit, static_argnums=0)
def decoder(kind: Layers) -> Decoder:
    """Two layers of random weights, which one program draws."""
    return Decoder(VOCAB_SIZE, WIDTH, 2, HEADS, kind=kind, rngs=nnx.Rngs(0))


def _values(**changes: Any) -> dict[str, Any]:
    """The fields of a small configuration. A prompts file excludes the fields of the arithmetic."""
    values = {**SIZES, "warmup_steps": 3, "grpo_steps": 2, **changes}
    arithmetic_fields = ("max_operand", "demonstration_errors") if "prompts" in changes else ()
    return {name: x for name, x in values.items() if name not in arithmetic_fields}


def config(**changes: Any) -> GrpoConfig:
    return GrpoConfig(**_values(**changes))


def options(**changes: Any) -> list[str]:
    """The command-line options that give `config(**changes)`."""
    values = _values(**changes)
    flags = {name: "--" + name.replace("_", "-") for name in values}
    return [flags[name] if value is True else f"{flags[name]}={value}" for name, value in values.items()]


_shared: dict[tuple[GrpoConfig, str], TrainingSteps] = {}


def shared_steps(config: GrpoConfig, task: Task, mesh: Mesh) -> TrainingSteps:
    """`build_steps`, but runs of this process that differ in their numbers of steps only share compiled programs."""
    ran = {"warmup_steps": 0, "grpo_steps": 1, "checkpoint_every": 1, "prompts": None, "max_prompt_tokens": None}
    programs = replace(config, **ran, vocab_size=task.vocab_size), task.digests["prompts_digest"]
    if programs not in _shared:
        _shared[programs] = build_steps(config, task, mesh)
    return _shared[programs]


_kept: dict[Hashable, KeptProgram] = {}


def _shared_program(function: Callable[..., Any], key: Hashable, states: Sequence[Any], named: Any) -> KeptProgram:
    new, made_from = KeptProgram(function, key, states, named), (function.__qualname__, repr(key), named)
    return new if program_cache.folder() is not None else _kept.setdefault(made_from, new)


@contextmanager
def shared_programs() -> Iterator[None]:
    """Within it, runs of a given model whose programs have the same key, by which the disk would know them, trace them
    once in this process. A test that keeps programs on disk shares none.
    """
    with (
        mock.patch.object(text_steps, "KeptProgram", _shared_program),
        mock.patch.object(sft_steps, "KeptProgram", _shared_program),
    ):
        yield


def forget_programs() -> None:
    """Have all programs built again."""
    _shared.clear()
    _kept.clear()


def documented_files(page: str) -> set[str]:
    """The names that a page of docs/ gives to what a run writes: those in the first column of its table of files."""
    _, table = re.split(r"^\| file.*\n.*\n", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    rows = table.partition("\n\n")[0].splitlines()
    return {name for row in rows for name in re.findall(r"`([\w.]+)/?`", row.split("|")[1])}


def run_here(*arguments: str | Path, build: Callable[..., TrainingSteps] = shared_steps) -> int:
    """`rlk grpo` in this process, with the programs that `build` makes in the place of `build_steps`; returns its exit
    status.
    """
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["grpo", *map(str, arguments)])
    with mock.patch.object(job, "build_steps", build), shared_programs():
        return parsed.run(parsed)


def stand_in_steps(config: GrpoConfig, task: Task, mesh: Mesh) -> TrainingSteps:
    """Programs that are compiled in no time, for a test that is not about what they compute."""
    zeros = {"weight": jnp.zeros(4)}
    names = ("loss", "reward", "kl", "clip_fraction", "tokens")
    well = {"nonfinite_updates": 0, "nonfinite_sequence": -1, "nonfinite_token": -1}

    def initial_state() -> TrainState:
        return TrainState(zeros, zeros, zeros)

    def start_grpo(state: TrainState) -> TrainState:
        return state._replace(reference=state.params)

    def grpo_step(state: TrainState, step: jax.Array) -> tuple[TrainState, Metrics]:
        params = jax.tree.map(lambda x: jnp.cos(x + step), state.params)
        return state._replace(params=params), {**dict.fromkeys(names, params["weight"].sum()), **well}

    def warmup_step(state: TrainState, step: jax.Array) -> tuple[TrainState, Metrics]:
        return grpo_step(state, step + config.seed)

    def heldout_rewards(params: Any) -> Metrics:
        return {"sampled": params["weight"].mean(), "greedy": params["weight"].max()}

    functions = initial_state, start_grpo, warmup_step, grpo_step, heldout_rewards
    everywhere = NamedSharding(mesh, PartitionSpec())
    return TrainingSteps(*(jax.jit(x, out_shardings=everywhere) for x in functions))


def lose_the_end(folder: RunFolder, steps: int) -> None:
    """Delete the last checkpoint and the summary of a finished run of so many steps, as if it had been killed before
    it wrote them.
    """
    shutil.rmtree(folder.checkpoints / str(steps))
    folder.summary.unlink()


def run_apart(environment: Mapping[str, str]) -> Callable[..., int]:
    """A function like `run_here` whose runs are each in a process of their own."""
    return lambda *arguments: (
        subprocess.run([*COMMAND, *map(str, arguments)], env=environment, stdout=subprocess.DEVNULL).returncode
    )


def final_state(folder: RunFolder, **changes: Any) -> tuple[TrainState, int]:
    """The newest checkpoint of a run of `config(**changes)`, and its step."""
    chosen = config(**changes)
    steps = shared_steps(chosen, load_task(chosen), make_mesh(chosen))
    with open_checkpoints(folder) as checkpoints:
        return restore_latest_checkpoint(checkpoints, steps.initial_state)


def tuned(folder: RunFolder) -> dict[str, bytes]:
    """What XLA chose by timing for the programs of a run. On a CPU it times nothing."""
    files = folder.programs.glob("xla_gpu_per_fusion_autotune_cache_dir/**/*")
    return {str(path): path.read_bytes() for path in files if path.is_file()}


def assert_resumes(folder: RunFolder, run: Callable[..., int], **changes: Any) -> None:
    """A run by `run` that goes on from a checkpoint within GRPO ends with the same state and files, to the bit."""
    changes = {**LEARNING, **changes}
    command = [*options(**changes), "--out", folder.path]
    assert run(*command) == 0
    (state, done), *files = final_state(folder, **changes), folder.metrics.read_bytes(), folder.summary.read_bytes()
    assert done == files[0].count(b"\n") == 46
    lose_the_end(folder, steps=46)
    before, done = final_state(folder, **changes)
    assert done == 42
    for other in (before.params, state.reference):  # If parameters did not move, nothing could go wrong.
        moved = jax.tree.map(lambda x, y: bool((x != y).any()), state.params, other)
        assert all(jax.tree.leaves(moved))
    choices = tuned(folder)
    assert run(*command, "--resume") == 0
    assert tuned(folder) == choices
    helpers.assert_same_bits(final_state(folder, **changes)[0], state)
    assert [folder.metrics.read_bytes(), folder.summary.read_bytes()] == files


def environment(compile_cache: Path) -> dict[str, str]:
    """The environment of `rlk grpo` in its own process: a CPU, and one compilation cache for all runs of a test, or of
    all tests where one is set already.
    """
    cache = {"JAX_COMPILATION_CACHE_DIR": str(compile_cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**cache, **os.environ, "JAX_PLATFORMS": "cpu"}
