"""A run from start, or from its last checkpoint, to its report: phases, checkpoints, interruption."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console

from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.display import final_table, print_files, progress
from rlk_jax.grpo.report import plot_report
from rlk_jax.grpo.run_folder import RunFolder, open_checkpoints, restore_latest, save, write_json
from rlk_jax.grpo.steps import Metrics, Steps, TrainState


@dataclass
class StopRequest:
    """The signal that asked the run to stop, once there is one."""

    signal: int | None = None


def train(config: GrpoConfig, steps: Steps, folder: RunFolder, console: Console) -> int:
    """Run what is left of the job and write its report; the exit status: 0, or 128 + signal when interrupted."""
    with stop_on_signal() as stop:
        state = run_steps(config, steps, folder, console, stop)
        if stop.signal:
            console.print("stopped; the same command with --resume, not --overwrite, continues", soft_wrap=True)
            return 128 + stop.signal
        before = to_floats(steps.heldout_rewards(state.reference))
        after = to_floats(steps.heldout_rewards(state.params))
        write_json(folder.summary, {"before": before, "after": after})
        plot_report(folder.metrics, folder.report)
    console.print(final_table(before, after))
    print_files(console, folder)
    return 0


def run_steps(config: GrpoConfig, steps: Steps, folder: RunFolder, console: Console, stop: StopRequest) -> TrainState:
    """Both phases from the newest checkpoint on, until the last step or a request to stop; the state is then saved."""
    with open_checkpoints(folder) as checkpoints:
        state, start = restore_latest(checkpoints, steps.initial_state())
        with folder.metrics_after(start) as log, progress(console, start, config.total_steps) as show:
            for step in range(start, config.total_steps):
                if step == config.warmup_steps:
                    state = steps.start_grpo(state)
                phase = "warmup" if step < config.warmup_steps else "grpo"
                program = steps.warmup_step if phase == "warmup" else steps.grpo_step
                state, measured = program(state, step)
                metrics = to_floats(measured)
                log.write(json.dumps({"step": step, "phase": phase, **metrics}) + "\n")
                log.flush()
                done = step + 1
                show(done, phase, metrics)
                stopping = stop.signal is not None  # read once: a signal that comes later finishes one more step
                if stopping or done % config.checkpoint_every == 0 or done == config.total_steps:
                    save(checkpoints, done, state)
                if stopping:
                    break
    return state


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; the second one ends the process at once."""
    request = StopRequest()

    def ask(number: int, _: Any) -> None:
        request.signal = number
        for name in previous:
            signal.signal(name, signal.SIG_DFL)
        os.write(2, b"\nstopping after this step; once more stops at once\n")  # print is not safe in a handler

    previous = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)


def to_floats(metrics: Metrics) -> dict[str, float]:
    """Metrics on the host."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}
