"""What a run shows: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rlk_jax.grpo.run_folder import RunFolder

PLAIN_LINE_EVERY = 50
_SHOWN = {
    "loss": "loss {:.3f}",
    "reward": "reward {:.3f}",
    "kl": "KL {:.3f}",
    "clip_fraction": "clip {:.3f}",
    "ratio_max": "ratio {:.2f}",
    "mismatch": "mismatch {:.1g}",
}


class ShowStep(Protocol):
    """Show that `done` steps are finished and what the last one measured."""

    def __call__(self, done: int, phase: str, metrics: Mapping[str, float]) -> None: ...


@contextmanager
def progress(console: Console, start: int, total: int) -> Iterator[ShowStep]:
    """A function to call after every step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)

    def show(done: int, phase: str, metrics: Mapping[str, float]) -> None:
        numbers = " ".join(text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics)
        bar.update(task, completed=done, description=f"{phase} {numbers}")
        if not console.is_terminal and (done % PLAIN_LINE_EVERY == 0 or done in (start + 1, total)):
            console.print(f"{phase} step {done}/{total} {numbers}", highlight=False, soft_wrap=True)

    with bar:
        task = bar.add_task("compiling", total=total, completed=start)
        yield show


def final_table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """Held-out rewards before and after GRPO."""
    table = Table("held-out reward", "before", "after", "gain")
    for name in before:
        table.add_row(name, f"{before[name]:.3f}", f"{after[name]:.3f}", f"{after[name] - before[name]:+.3f}")
    return table


def print_files(console: Console, folder: RunFolder) -> None:
    """Where the run's files are."""
    for name in ("report", "metrics", "summary", "checkpoints"):
        console.print(f"{name}: {getattr(folder, name)}", highlight=False, soft_wrap=True)
