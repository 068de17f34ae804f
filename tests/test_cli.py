"""`rlk doctor`, and what every command does with bad usage."""

import json
import subprocess
import sys

import pytest

from rlk_jax import cli, dispatch


def test_doctor_json_names_xla_and_a_reason_for_each_other(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["jax"] and found["devices"][0]["platform"] == "cpu"
    for op in dispatch.TABLE:
        decision = found["ops"][op]
        assert decision["choice"] == "xla"
        assert set(decision["reasons"]) == set(dispatch.IMPLEMENTATIONS) - {"xla"}
        assert all(decision["reasons"].values())


def test_doctor_prints_tables(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in ("this machine", "linear_logp", *dispatch.IMPLEMENTATIONS, "by name"):
        assert word in printed


@pytest.mark.parametrize("arguments", [[], ["paint"], ["doctor", "--colour"]])
def test_bad_usage_exits_2_with_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("rlk")


def test_the_command_is_installed():
    rlk = [sys.executable, "-m", "rlk_jax.cli", "--help"]
    assert "doctor" in subprocess.run(rlk, capture_output=True, text=True, check=True).stdout
