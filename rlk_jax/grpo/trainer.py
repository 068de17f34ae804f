"""Runs a job from its start, or from its last checkpoint, to its report: phases, checkpoints and interruption."""

import json

import jax
import orbax.checkpoint as ocp
from rich.console import Console

from rlk_jax.grpo import faults
from rlk_jax.grpo.config import Diverged, GrpoConfig
from rlk_jax.grpo.display import final_table, print_files, print_usage, progress
from rlk_jax.grpo.memory import check_memory
from rlk_jax.grpo.report import plot_report
from rlk_jax.grpo.run_folder import RunFolder, open_checkpoints, restore_latest_checkpoint, save_checkpoint, write_json
from rlk_jax.grpo.steps import Metrics, TrainingSteps, TrainState
from rlk_jax.grpo.stopping import StopRequest
from rlk_jax.grpo.usage import Throughput


def train(config: GrpoConfig, steps: TrainingSteps, folder: RunFolder, console: Console, stop: StopRequest) -> int:
    """Run what is left of the job and write its report. Returns the exit status: 0, or 128 + signal if interrupted."""
    throughput = Throughput()
    state, done = run_steps(config, steps, folder, console, stop, throughput)
    policies = () if stop.signal is not None else (state.reference, state.params)
    rewards = [to_floats(steps.heldout_rewards(policy)) for policy in policies]
    print_usage(console, throughput)
    if stop.signal is not None:
        return say_stopped(console, stop.signal, is_saved=done > 0)
    before, after = rewards
    write_json(folder.summary, {"before": before, "after": after})
    plot_report(folder.metrics, folder.report)
    console.print(final_table(before, after))
    print_files(console, folder)
    return 0


def run_steps(
    config: GrpoConfig,
    steps: TrainingSteps,
    folder: RunFolder,
    console: Console,
    stop: StopRequest,
    throughput: Throughput,
) -> tuple[TrainState, int]:
    """Run both phases from the newest checkpoint on, until the last step or a request to stop. Returns the last state,
    which is saved, and the number of steps done.

    Raises MemoryError, before the first step, where a program needs more memory than there is. Raises Diverged for an
    update that is not finite, unless the run skips those; it is neither logged nor saved.
    """
    with open_checkpoints(folder) as checkpoints:
        with console.status("compiling"):
            check_memory(config, steps, checkpoints.latest_step() or 0, stop)
        state, done = restore_latest_checkpoint(checkpoints, steps.initial_state())
        with folder.metrics_after(done) as log, progress(console, done, config.total_steps, throughput) as show:
            while done < config.total_steps and stop.signal is None:
                if done == config.warmup_steps:
                    state = steps.start_grpo(state)
                phase = "warmup" if done < config.warmup_steps else "grpo"
                program = steps.warmup_step if phase == "warmup" else steps.grpo_step
                state, measured = program(state, done)
                metrics = to_floats(measured)
                line = faults.logged(metrics, done, phase, skips=config.skip_nonfinite)
                log.write(json.dumps({"step": done, "phase": phase, **line}) + "\n")
                log.flush()
                done += 1
                show(done, phase, metrics)
                if done % config.checkpoint_every == 0:
                    save_finite(checkpoints, done, state)
        if done and checkpoints.latest_step() != done:
            save_finite(checkpoints, done, state)
    return state, done


def save_finite(checkpoints: ocp.CheckpointManager, done: int, state: TrainState) -> None:
    """Save a state if its parameters are finite, else raise Diverged. Metrics do not show it: they are those before the
    last update.
    """
    if not faults.is_finite(state.params):
        raise Diverged(f"training diverged: parameters are not finite after step {done - 1}")
    save_checkpoint(checkpoints, done, state)


def say_stopped(console: Console, number: int, *, is_saved: bool) -> int:
    """Print how to continue, or that nothing was saved. Returns the exit status of a process stopped by this signal."""
    if is_saved:
        console.print("stopped; the same command with --resume, not --overwrite, continues", soft_wrap=True)
    else:
        console.print("stopped before the first step; nothing was saved", soft_wrap=True)
    return 128 + number


def to_floats(metrics: Metrics) -> dict[str, float]:
    """Metrics as Python floats on the host."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}
