"""The benchmark of TRL's whole steps: what it compares trains alike, and is what its names say."""

import json

import numpy as np
import pytest

from tests.support import helpers
from tests.support.tiny_trl import torch  # It skips where TRL is not installed.

assert torch is not None
from benchmarks import trl  # noqa: E402
from benchmarks.trl_steps import TINY, Case, _model  # noqa: E402


def test_steps_with_the_bridge_have_the_losses_of_stock():
    rows = [trl.measure_here(Case("grpo", TINY, 4, 8), candidate, 2) for candidate in (trl.STOCK, trl.BRIDGE)]
    assert [row.status for row in rows] == ["pass"] * 2
    for row in rows:
        assert len(row.losses) == len(row.grad_norms) == 2 and min(row.step_ms, row.core_ms, row.head_ms) > 0
    stock, bridge = (np.array([*row.losses, *row.grad_norms]) for row in rows)
    helpers.assert_error(np.abs(bridge - stock).max(), "trl_training", "float32", "forward")
    # A float32 parameter has its gradient and AdamW's two moments; AdamW counts steps besides.
    parameters = sum(x.numel() for x in _model(TINY).parameters())
    for row in rows:
        assert 16 * parameters <= row.state_mib * 2**20 < 16.5 * parameters


@pytest.mark.full
def test_the_command(tmp_path):
    """In `make test`, test_steps_with_the_bridge_have_the_losses_of_stock has steps of one trainer."""
    out = tmp_path / "rows.json"
    assert trl.main(["--smoke", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    for trainer in ("grpo", "sft", "distillation"):
        status = {row["candidate"]: row["status"] for row in rows if row["trainer"] == trainer}
        assert all(status.pop(x).startswith("not available") for x in ("liger", "bridge and liger"))
        assert set(status.values()) == {"pass"}
