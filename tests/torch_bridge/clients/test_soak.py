"""Long runs of TRL's trainer: what they draw and record, and that a few steps of them run."""

import json

import pytest

from tests.support.tiny_trl import torch  # It skips where TRL is not installed.

assert torch is not None
from benchmarks import soak, soak_trl  # noqa: E402
from torch_bridge import _programs  # noqa: E402


def test_lengths_have_the_same_spread_in_each_third_and_are_never_the_same():
    batches = soak_trl.batches(soak_trl.SOAK)
    steps = [[len(x) for x in next(batches)] for _ in range(soak_trl.SOAK.steps)]
    thirds = [steps[:100], steps[100:200], steps[200:]]
    caps = [[lengths[0] for lengths in third] for third in thirds]
    assert sorted(caps[0]) == sorted(caps[1]) == sorted(caps[2]) and caps[0] != caps[1] != caps[2]
    assert min(map(min, steps)) == 16 and max(map(max, steps)) == 512
    assert len(set(map(sum, steps))) > 200


def test_steps_at_the_limits_of_the_caches(monkeypatch):
    """Programs are dropped and made again. On disk there is room for those of one capacity."""
    monkeypatch.setattr(_programs, "_programs", type(_programs._programs)())
    monkeypatch.setattr(_programs, "_count", type(_programs._count)())
    row = soak.measure_here("limits", smoke=True)
    assert row.status == "pass"
    curves = row.curves
    assert max(curves["kept programs"]) == soak_trl.KEPT_WHEN_LIMITED < curves["programs"][-1] / 2
    assert 0 < max(curves["programs on disk MiB"]) == row.bounds["programs on disk MiB"]
    assert len(curves["step ms"]) == len(curves["host MiB"]) == soak_trl.SMOKE.steps


@pytest.mark.full
def test_the_command(tmp_path):
    """In `make test`, test_steps_at_the_limits_of_the_caches has steps of one run, and the tests of
    tests/test_benchmarks.py judge curves.
    """
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    assert soak.main(["--smoke", "--json", str(out), "--plot", str(picture)]) == 0
    rows = {row["what"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["bridge", "stock", "limits", "command"]
    assert {row["status"] for row in rows.values()} == {"pass"}
    assert rows["stock"]["curves"]["programs"][-1] == 0
    assert rows["bridge"]["curves"]["programs"][-1] == rows["bridge"]["bounds"]["programs"]
    assert picture.stat().st_size > 1000
