"""Benchmarks run end to end on a tiny shape and say what could not run."""

import dataclasses
import json

import pytest

from benchmarks import linear_logp
from benchmarks.common import Launch


@pytest.mark.parametrize("density", ["1", "0.5"])
def test_smoke(tmp_path, capsys, density):
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--smoke", "--implementations", "mosaic,xla,deterministic,naive,torch eager,quack (mean loss)"]
    arguments += ["--mask-density", density, "--json", str(out), "--plot", str(picture)]
    assert linear_logp.main(arguments) == 0
    record = json.loads(out.read_text())
    status = {(r["implementation"], r["what"]): r["status"] for r in record["rows"]}
    passes = {"forward", "forward+backward", "frozen head"}
    passes |= {"masked loss"} if density == "0.5" else {"forward, entropy", "forward, bias", "forward, softcap"}
    for name in ("xla", "deterministic"):
        assert {what for n, what in status if n == name} == passes
    assert status["GEMM", "G"] == status["naive", "forward"] == status["xla", "forward"] == "pass"
    for name in ("mosaic", "torch eager", "quack (mean loss)"):
        assert status[name, ""].startswith("not available")
    assert record["command"].startswith("python -m benchmarks.linear_logp --smoke") and record["device"]
    assert picture.stat().st_size > 1000
    assert "of G" in capsys.readouterr().out


def test_a_pass_that_runs_out_of_memory_costs_its_own_row(monkeypatch):
    def exhausted():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    candidates = linear_logp.candidates

    def short(name, p):
        found = candidates(name, p)
        return found | {"forward": dataclasses.replace(found["forward"], launch=Launch(exhausted))}

    monkeypatch.setattr(linear_logp, "candidates", short)
    rows = linear_logp.measure("16,8,20", "float32", 1.0, ["naive"], 1, 0.0)
    status = {r.what: r.status.split(":")[0] for r in rows}
    assert status == {"G": "pass", "forward": "out of memory", "forward+backward": "pass", "frozen head": "pass"}


def test_half_of_the_tokens_count():
    problem = linear_logp.make("10,8,20", "float32", 0.5)
    assert problem.active.tolist() == [False] * 5 + [True] * 5
