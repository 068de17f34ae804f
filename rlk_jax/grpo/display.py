"""What a run prints: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from rlk_jax.core.terminal import OutputConsole
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.samples import gain_text
from rlk_jax.grpo.usage import Throughput, peak_memory, size_text

PLAIN_LINE_EVERY = 50
_SHOWN = {
    "loss": "loss {:.3f}",
    "heldout_loss": "held out {:.3f}",
    "reward": "reward {:.3f}",
    "completion_length": "length {:.1f}",
    "truncated": "at limit {:.0%}",
    "entropy": "entropy {:.3f}",
    "kl": "KL {:.3f}",
    "teacher_kl": "teacher {:.3f}",
    "clip_fraction": "clip {:.3f}",
    "ratio_max": "ratio {:.2f}",
    "mismatch": "mismatch {:.1g}",
    "nonfinite_updates": "skipped {:.0f}",
}
"""How metrics are shown. A count of 0 is not."""


class ShowStep(Protocol):
    """Show that `done` steps are finished and what the last one measured."""

    def __call__(self, done: int, phase: str, metrics: Mapping[str, float]) -> None: ...


@contextmanager
def progress(console: OutputConsole, start: int, total: int, throughput: Throughput) -> Iterator[ShowStep]:
    """Yields a function to call after every step: it shows the step and adds its tokens to the throughput."""
    numbers_wrap = TextColumn("{task.description}", table_column=Column())
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), numbers_wrap)
    bar = Progress(*columns, console=console, disable=not console.is_terminal)

    def show(done: int, phase: str, metrics: Mapping[str, float]) -> None:
        throughput.add(phase, metrics["tokens"], time.monotonic())
        shown = [text.format(metrics[name]) for name, text in _SHOWN.items() if _is_shown(name, metrics)]
        numbers = " ".join(shown + _usage_texts(throughput, phase))
        bar.update(task, completed=done, description=f"{phase} {numbers}")
        if not console.is_terminal and (done % PLAIN_LINE_EVERY == 0 or done in (start + 1, total)):
            console.print(f"{phase} step {done}/{total} {numbers}", highlight=False, soft_wrap=True)

    with bar:
        task = bar.add_task("compiling", total=total, completed=start)
        yield show


def _is_shown(name: str, metrics: Mapping[str, float]) -> bool:
    return name in metrics and (name != "nonfinite_updates" or metrics[name] > 0)


def _usage_texts(throughput: Throughput, phase: str) -> list[str]:
    """Texts of a phase's speed and of the peak memory, as far as they are known."""
    texts = []
    if phase in throughput.per_second:
        texts.append(f"{throughput.per_second[phase]:.0f} tokens/s")
    if (memory := peak_memory(jax.local_devices())) is not None:
        texts.append(f"peak {size_text(memory)}")
    return texts


def print_usage(console: OutputConsole, throughput: Throughput) -> None:
    """Print a table of the phases' speeds, and the peak memory so far; nothing where no phase had a second step."""
    if not throughput.per_second:
        return
    table = Table("phase", "tokens/s")
    for phase, speed in throughput.per_second.items():
        table.add_row(phase, f"{speed:.0f}")
    console.print(table)
    if (memory := peak_memory(jax.local_devices())) is not None:
        console.print(f"peak memory of a device: {size_text(memory)}", highlight=False)


def final_table(measured: str, before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """What was measured on held-out rows, before and after training."""
    table = Table(measured, "before", "after", "change")
    for name in before:
        table.add_row(name, f"{before[name]:.3f}", f"{after[name]:.3f}", gain_text(before[name], after[name]))
    return table


def print_files(console: OutputConsole, folder: RunFolder) -> None:
    """Print where the files of the run are."""
    for name in ("report", "page", "metrics", "completions", "summary", "checkpoints"):
        if (path := getattr(folder, name)).exists():
            console.print(f"{name}: {path}", highlight=False, soft_wrap=True)
