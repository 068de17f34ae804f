"""What a configuration names, read from its files and bound into the steps of a run."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax

from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.sft.config import SftConfig
from rlk_jax.grpo.sft.steps import build_sft_steps
from rlk_jax.grpo.sft.task import SftTask, load_sft_task
from rlk_jax.grpo.shortage import shortage_is_bad_input
from rlk_jax.grpo.steps import RunSteps, build_steps, make_mesh
from rlk_jax.grpo.tasks import Task, load_task
from rlk_jax.grpo.text_steps import build_text_steps
from rlk_jax.grpo.text_task import TextTask, load_text_task


class Job(NamedTuple):
    """A run that has not begun."""

    config: GrpoConfig | SftConfig
    task: Task | TextTask | SftTask
    steps: RunSteps


def load_job(config: GrpoConfig | SftConfig, devices: Sequence[jax.Device] | None = None) -> Job:
    """The job of a configuration on the first of these devices, or of JAX's. Raises BadInput, which says what cannot be
    read or cannot work.
    """
    mesh = make_mesh(config, devices)
    task: Task | TextTask | SftTask
    build: Callable[[], RunSteps]
    if isinstance(config, SftConfig):
        task = rows = load_sft_task(config)
        build = functools.partial(build_sft_steps, config, rows, mesh)
    elif config.model is None:
        task = load_task(config)
        config = replace(config, vocab_size=task.vocab_size)  # The folder keeps it, whatever the default becomes.
        build = functools.partial(build_steps, config, task, mesh)
    else:
        task = text = load_text_task(config)
        build = functools.partial(build_text_steps, config, text, mesh)
    with shortage_is_bad_input(task.longest.advice):
        return Job(config, task, build())
