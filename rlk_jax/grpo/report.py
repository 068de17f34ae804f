"""The picture of a run: reward, KL and clip fraction over GRPO steps."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

_PANELS = {"reward": "mean reward", "kl": "KL to reference", "clip_fraction": "clip fraction"}
_WINDOW = 20
"""How many steps a moving average spans."""


def plot_report(metrics: Path, picture: Path) -> None:
    """Plot the GRPO steps of a metrics file as a PNG: single steps are pale, their moving average is dark."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [line for line in lines if line["phase"] == "grpo"]
    steps = np.array([row["step"] for row in rows])
    figure, axes = plt.subplots(len(_PANELS), 1, sharex=True, figsize=(8, 8), layout="constrained")
    for axis, (name, label) in zip(axes, _PANELS.items(), strict=True):
        values = np.array([row[name] for row in rows], float)  # None becomes NaN, which is a gap
        window = min(_WINDOW, len(values))
        axis.plot(steps, values, color="tab:blue", alpha=0.3)
        axis.plot(steps[window - 1 :], np.convolve(values, np.full(window, 1 / window), "valid"), color="tab:blue")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_title(f"rlk grpo (pale: each step, dark: mean of the last {_WINDOW})")
    axes[-1].set_xlabel("step")
    figure.savefig(picture, dpi=120)
    plt.close(figure)
