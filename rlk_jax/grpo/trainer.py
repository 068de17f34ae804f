"""Runs a job from its start, or from its last checkpoint, to its report: phases, checkpoints and interruption."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from rlk_jax.core.terminal import OutputConsole
from rlk_jax.grpo import faults
from rlk_jax.grpo.display import final_table, print_files, print_usage, progress
from rlk_jax.grpo.memory import check_memory
from rlk_jax.grpo.report import plot_report
from rlk_jax.grpo.report_page import write_report_page
from rlk_jax.grpo.run_config import BadInput, Diverged, RunConfig
from rlk_jax.grpo.run_folder import RunFolder, open_checkpoints, restore_latest_checkpoint, save_checkpoint, write_json
from rlk_jax.grpo.samples import append_samples, cut_after, read_samples, samples_table
from rlk_jax.grpo.steps import Metrics, RunSteps, TrainState
from rlk_jax.grpo.stopping import StopRequest
from rlk_jax.grpo.usage import Throughput

BEFORE = -1
"""The step of completions of held-out prompts that were drawn before training."""
SHOWN_SAMPLES = 3
"""So many completions of a step are printed."""


def train(config: RunConfig, steps: RunSteps, folder: RunFolder, console: OutputConsole, stop: StopRequest) -> int:
    """Run what is left of the job and write its report. Returns the exit status: 0, or 128 + signal if interrupted."""
    throughput = Throughput()
    state, done = run_steps(config, steps, folder, console, stop, throughput)
    if stop.signal is None:
        before = measured_before(folder, steps, state)
        after = to_floats(steps.evaluation(state.params))
    print_usage(console, throughput)
    if stop.signal is not None:
        return say_stopped(console, stop.signal, is_saved=done > 0)
    keep_samples(folder, steps, done)
    write_json(folder.summary, {"before": before, "after": after})
    plot_report(folder.metrics, folder.report, config.name)
    console.print(final_table(config.measured, before, after))
    if folder.completions.exists():
        write_page(config, folder, before, after)
    if config.save_hf is not None and steps.save_hf is not None:
        steps.save_hf(state.params, config.save_hf)
        console.print(f"trained model: {config.save_hf}", highlight=False, soft_wrap=True)
    print_files(console, folder)
    return 0


def run_steps(
    config: RunConfig,
    steps: RunSteps,
    folder: RunFolder,
    console: OutputConsole,
    stop: StopRequest,
    throughput: Throughput,
) -> tuple[TrainState, int]:
    """Run all phases from the newest checkpoint on, until the last step or a request to stop. Returns the last state,
    which is saved, and the number of steps done.

    Raises MemoryError, before the first step, where a program needs more memory than there is. Raises Diverged for an
    update that is not finite, unless the run skips those; it is neither logged nor saved.
    """
    phases = steps.phases(config)
    with open_checkpoints(folder) as checkpoints:
        with console.status("compiling"):
            check_memory(config, steps, checkpoints.latest_step() or 0, stop)
        state, done = restore_latest_checkpoint(checkpoints, steps.initial_state)
        if steps.load_teacher is not None and state.teacher is None:
            state = state._replace(teacher=steps.load_teacher())
        cut_after(folder.completions, done or BEFORE)
        with folder.metrics_after(done) as log, progress(console, done, config.total_steps, throughput) as show:
            while done < config.total_steps and stop.signal is None:
                phase = next(x for x in phases if done < x.end)
                if done == phase.begin and phase.start is not None:
                    state = phase.start(state)
                if done == phases[-1].begin and config.model is not None:
                    # Its reference may be dropped, so it is evaluated now.
                    write_json(folder.before, to_floats(steps.evaluation(state.params)))
                    keep_samples(folder, steps, BEFORE)
                with what_is_done_saved(folder, checkpoints, done, state):
                    state, measured = phase.step(state, done)
                metrics = to_floats(measured)
                if config.evaluates(done + 1):
                    metrics |= {f"heldout_{name}": x for name, x in to_floats(steps.evaluation(state.params)).items()}
                line = faults.logged(metrics, done, phase.name, skips=config.skip_nonfinite)
                log.write(json.dumps({"step": done, "phase": phase.name, **line}) + "\n")
                log.flush()
                if steps.drawn and config.shows(done):
                    console.print(samples_table(steps.drawn[:SHOWN_SAMPLES], console.width))
                keep_samples(folder, steps, done)
                done += 1
                show(done, phase.name, metrics)
                if done % config.checkpoint_every == 0:
                    save_finite(checkpoints, done, state)
        if done and checkpoints.latest_step() != done:
            save_finite(checkpoints, done, state)
    return state, done


@contextmanager
def what_is_done_saved(
    folder: RunFolder, checkpoints: ocp.CheckpointManager, done: int, state: TrainState
) -> Iterator[None]:
    """A context for a step that a reward may end, before the step changes the state: the steps before it are saved
    then, and the run may go on with another source of its rewards.
    """
    try:
        yield
    except BadInput as error:
        if not done:
            raise
        if checkpoints.latest_step() != done:
            save_finite(checkpoints, done, state)
        folder.release_reward()
        raise BadInput(f"{error}; --resume goes on from step {done} once that is mended") from error


def keep_samples(folder: RunFolder, steps: RunSteps, step: int) -> None:
    """Write the completions that were drawn since the last call, as those of this step."""
    if steps.drawn:
        append_samples(folder.completions, (sample._replace(step=step) for sample in steps.drawn))
        steps.drawn.clear()


def measured_before(folder: RunFolder, steps: RunSteps, state: TrainState) -> dict[str, float]:
    """What held-out rows gave before training: numbers of a given model were measured then, and the built-in policy
    has a reference that is as it was.
    """
    if state.reference is None or folder.before.exists():
        return json.loads(folder.before.read_text())
    return to_floats(steps.evaluation(state.reference))


def write_page(config: RunConfig, folder: RunFolder, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Write the page of a run of a given model."""
    samples = read_samples(folder.completions)
    changed = {x.name: getattr(config, x.name) for x in fields(config) if getattr(config, x.name) != x.default}
    write_report_page(
        folder.page,
        title=f"rlk {config.name}: {Path(config.model or '').name}",
        facts={name: str(value) for name, value in changed.items()},
        summary={"before": before, "after": after},
        picture=folder.report,
        before=[x for x in samples if x.step == BEFORE],
        after=[x for x in samples if x.step == config.total_steps],
    )


def save_finite(checkpoints: ocp.CheckpointManager, done: int, state: TrainState) -> None:
    """Save a state if its parameters are finite, else raise Diverged. Metrics do not show it: they are those before the
    last update.
    """
    if not faults.is_finite(state.params):
        raise Diverged(f"training diverged: parameters are not finite after step {done - 1}")
    save_checkpoint(checkpoints, done, state.saved)


def say_stopped(console: OutputConsole, number: int, *, is_saved: bool) -> int:
    """Print how to continue, or that nothing was saved. Returns the exit status of a process stopped by this signal."""
    if is_saved:
        console.print("stopped; the same command with --resume, not --overwrite, continues", soft_wrap=True)
    else:
        console.print("stopped before the first step; nothing was saved", soft_wrap=True)
    return 128 + number


def to_floats(metrics: Metrics) -> dict[str, float]:
    """Metrics as Python floats on the host."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}
