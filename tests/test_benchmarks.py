"""Benchmarks run end to end on a tiny shape and say what could not run."""

import json

from benchmarks import linear_logp


def test_smoke(tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert linear_logp.main(["--smoke", "--implementations", "xla,deterministic,mosaic", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    status = {r["implementation"]: r["status"] for r in record["rows"]}
    assert status["naive"] == status["xla"] == status["deterministic"] == "pass"
    assert status["mosaic"].startswith("not available")
    assert record["command"].startswith("python -m benchmarks.linear_logp --smoke") and record["device"]
    assert "of naive" in capsys.readouterr().out
