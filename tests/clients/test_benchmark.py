"""The benchmark of Tunix's learner: its figures are there, and its mismatch is what separates sampling and training."""

import json
import math

import pytest

pytest.importorskip("tunix", reason="Tunix has an environment of its own: make test-tunix")

from benchmarks import tunix
from benchmarks.tunix_cases import CANDIDATES, DECODER, STOCK, Case

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
TINY = Case(32, 1, 300, 2, 2, 4)


def check(row: tunix.Row, rollouts: int) -> None:
    assert row.status == "pass" and len(row.losses) == 2 * (rollouts + 1) and all(map(math.isfinite, row.losses))
    assert row.rollout_ms > 0 and row.update_ms > 0 and row.memory_mib is None
    assert row.ratio_min <= 1 <= row.ratio_max
    assert math.isclose(row.mismatch, max(-math.log(row.ratio_min), math.log(row.ratio_max)))


def test_a_decoder_has_no_mismatch_and_stock_has_one():
    stock, decoder = (tunix.measure_here(TINY, candidate, 1) for candidate in (STOCK, DECODER))
    for row in (stock, decoder):
        check(row, 1)
    assert stock.mismatch > 0
    assert decoder.mismatch == 0 and decoder.ratio_min == decoder.ratio_max == 1


def test_what_cannot_run_says_why():
    assert tunix.measure_here(TINY, "other", 1).status == (
        "not available: candidates are stock, linear_logp, decoder, got 'other'."
    )


@pytest.mark.full
def test_the_command(tmp_path):
    """In `make test`, test_a_decoder_has_no_mismatch_and_stock_has_one has two candidates in one process."""
    out, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    assert tunix.main(["--smoke", "--json", str(out), "--plot", str(plot)]) == 0
    rows = [tunix.Row(**row) for row in json.loads(out.read_text())["rows"]]
    assert [row.candidate for row in rows] == list(CANDIDATES) and plot.stat().st_size > 0
    for row in rows:
        check(row, 1)
