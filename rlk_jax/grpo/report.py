"""The picture of a run: what was measured over the steps of its last phase, a panel for each metric."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

_PANELS = {
    "grpo": {
        "reward": "mean reward",
        "completion_length": "completion length in tokens",
        "entropy": "entropy in nats",
        "kl": "KL to reference",
        "teacher_kl": "divergence from the teacher",
        "clip_fraction": "clip fraction",
        "mismatch": "mismatch",
    },
    "sft": {"loss": "loss in nats", "heldout_loss": "loss of held-out rows in nats"},
}
"""Titles of the panels of a phase, by metric, in their order."""
_WINDOW = 20
"""How many steps a moving average spans."""
_PANEL_SIZE = (4.4, 3.0)
"""Width and height of a panel in inches."""
_DOTS_PER_INCH = 120


def plot_report(metrics: Path, picture: Path, phase: str = "grpo") -> None:
    """Plot the steps of a phase of a metrics file as a PNG: single steps are pale, their moving average is dark.
    Mismatch has no average: each step counts, and the title of its panel says the largest.
    """
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [line for line in lines if line["phase"] == phase]
    steps = np.array([row["step"] for row in rows])
    names = panels(rows, phase)
    height, width = panel_grid(len(names))
    size = (width * _PANEL_SIZE[0], height * _PANEL_SIZE[1])
    figure, axes = plt.subplots(height, width, squeeze=False, figsize=size, layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        values = np.array([row.get(name) for row in rows], float)  # None becomes NaN, which is a gap
        draw = {"mismatch": _draw_mismatch, "heldout_loss": _draw_single_values}.get(name, _draw_metric)
        draw(axis, steps, values, _PANELS[phase][name])
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    figure.suptitle(f"rlk {phase} (pale: each step, dark: mean of the last {_WINDOW})")
    figure.savefig(picture, dpi=_DOTS_PER_INCH)
    plt.close(figure)


def panels(rows: Sequence[Mapping[str, float | None]], phase: str = "grpo") -> list[str]:
    """The metrics that get a panel: those that at least one row has a number for."""
    return [name for name in _PANELS[phase] if any(row.get(name) is not None for row in rows)]


def panel_grid(count: int) -> tuple[int, int]:
    """How many rows and columns of panels hold so many of them in a picture that is wider than high."""
    columns = 2 if count == 4 else min(count, 3)
    return math.ceil(count / columns), columns


def _draw_metric(axis: Axes, steps: np.ndarray, values: np.ndarray, title: str) -> None:
    window = min(_WINDOW, len(values))
    axis.plot(steps, values, color="tab:blue", alpha=0.3, marker=_marker(values))
    averages = np.convolve(values, np.full(window, 1 / window), "valid")
    axis.plot(steps[window - 1 :], averages, color="tab:blue", marker=_marker(averages))
    axis.set_title(title)


def _draw_mismatch(axis: Axes, steps: np.ndarray, values: np.ndarray, title: str) -> None:
    # A line at 0 lies on the edge of the panel, where half of it would be cut off.
    axis.step(steps, values, where="mid", color="tab:blue", linewidth=1, marker=_marker(values), clip_on=False)
    axis.set_ylim(bottom=0)
    axis.set_title(f"{title} (largest: {np.nanmax(values):.1g})")


def _draw_single_values(axis: Axes, steps: np.ndarray, values: np.ndarray, title: str) -> None:
    """What some steps have measured, and others have not."""
    measured = ~np.isnan(values)
    axis.plot(steps[measured], values[measured], color="tab:blue", marker=".")
    axis.set_title(title)


def _marker(values: np.ndarray) -> str:
    """Dots where there are few values: a line through a single one would not be seen."""
    return "." if len(values) <= _WINDOW else ""
