"""`rlk doctor` reports this machine, and every command refuses bad usage."""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import rlk_jax
from pallas_kernels.cuda import build
from pallas_kernels.triton import call
from rlk_jax import cli, dispatch
from rlk_jax.commands import doctor


def test_doctor_json_names_a_choice_and_a_reason_for_each_other(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["jax"] and found["devices"][0]["platform"] == "cpu"
    for op in dispatch.TABLE:
        decision = found["ops"][op]
        names = [row.name for row in dispatch.TABLE[op]]
        assert decision["choice"] == ("xla" if "xla" in names else "deterministic")
        assert set(decision["reasons"]) == set(dispatch.IMPLEMENTATIONS) - {decision["choice"]}
        assert all(decision["reasons"].values())


@pytest.mark.parametrize("missing", [None, "needs a pair"])
def test_doctor_names_the_pair_of_triton_and_its_bridge(missing, capsys, monkeypatch):
    monkeypatch.setattr(call, "why_missing", lambda: missing)
    monkeypatch.setattr(call, "_version", {"jax-triton": "0.3.1", "triton": "3.6.0"}.get)
    monkeypatch.setattr(doctor, "installed_version", {"triton": "3.6.0"}.get)
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["triton"] == (missing or "jax-triton 0.3.1 with triton 3.6.0")
    install = 'pip install "rlk-jax[triton]" "jax-triton<0.4"'
    assert found["needs"]["Triton kernels"] == (install if missing else None)


@pytest.mark.parametrize("missing", [None, "needs nvcc"])
def test_doctor_names_what_the_cuda_kernels_are_built_with(missing, capsys, monkeypatch):
    monkeypatch.setattr(build, "why_missing", lambda: missing)
    monkeypatch.setattr(build, "state", lambda: "built with nvcc 13.0.88")
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cuda"] == (missing or "built with nvcc 13.0.88")


def test_doctor_says_which_commands_are_ready(capsys, monkeypatch):
    for package in ("optax", "trl", "tunix"):
        monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    extras = {"rlk grpo, rlk sft": "grpo", "torch_bridge in TRL": "clients", "rlk_jax.clients.tunix": "tunix"}
    for part, extra in extras.items():
        assert re.search(rf'{part} +│ no: pip install "rlk-jax\[{extra}\]"', printed)
    assert re.search(r"rlk generate +│ yes", printed)


def test_doctor_prints_tables(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in ("this machine", *dispatch.TABLE, *dispatch.IMPLEMENTATIONS, "by name"):
        assert word in printed


@pytest.mark.parametrize("arguments", [[], ["paint"], ["doctor", "--colour"]])
def test_bad_usage_exits_2_with_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("rlk")


def test_the_version_is_the_installed_one(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"rlk {importlib.metadata.version('rlk-jax')}\n" == f"rlk {rlk_jax.__version__}\n"


def test_a_source_tree_that_is_not_installed_says_so(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    before = dict(vars(rlk_jax))
    monkeypatch.setattr(importlib.metadata, "version", version)
    try:
        assert importlib.reload(rlk_jax).__version__ == "unknown: not installed"
    finally:
        vars(rlk_jax).update(before)


@pytest.mark.parametrize(
    ("command", "unknown", "hint"),
    [
        ("grpo", "--steps 3", " (did you mean --grpo-steps?)"),
        ("sft", "--grpo-steps=3", " (did you mean --steps?)"),
        ("check", "--chek-grad", " (did you mean --check-grad?)"),
        ("check", "mine:good", " (did you mean --candidate mine:good?)"),
        ("check", "reference", " (did you mean --candidate reference?)"),
        ("check", "logp", " (did you mean --op logp?)"),
        ("doctor", "x", ""),
    ],
)
def test_an_unknown_option_is_refused_by_its_command(command, unknown, hint, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, *unknown.split()])
    error = capsys.readouterr().err
    assert error.startswith(f"usage: rlk {command} ")
    assert error.endswith(f"rlk {command}: error: unrecognized arguments: {unknown}{hint}\n")


@pytest.mark.parametrize(
    "command", ["doctor", "check", "check-tp", "grpo", "sft", "prompts", "import-model", "generate"]
)
def test_every_option_says_what_it_does(command, capsys, monkeypatch):
    """An option of whose help nothing but its default is left has none."""
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    options = re.findall(r"^  (-[^\n]*)", re.sub(r"\n {3,}(?=\S)", "  ", capsys.readouterr().out), re.MULTILINE)
    assert options and not [x for x in options if not re.search(r" {2}(?!\(default)\S", x)]


@pytest.mark.parametrize(
    ("given", "hint"),
    [("gernerate", "generate"), ("check --op linear_lopg", "linear_logp"), ("check --input-mode hugh", "huge")],
)
def test_a_word_that_is_no_choice_is_refused_with_the_one_most_like_it(given, hint, capsys):
    with pytest.raises(SystemExit):
        cli.main(given.split())
    assert capsys.readouterr().err.endswith(f") (did you mean {hint}?)\n")


@pytest.mark.parametrize("command", ["doctor", "doctor --json", "check --list", "prompts arithmetic", "--help"])
def test_a_reader_that_is_gone_ends_a_command_quietly(command, capfd, monkeypatch):
    """With the status of a process which SIGPIPE has ended. What could not be written is no error later on, either."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(command.split()) == 141
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["doctor", "prompts arithmetic"])
def test_a_full_disk_is_one_line(command, capfd, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(command.split()) == 2
    name = command.partition(" ")[0]
    assert capfd.readouterr() == ("", f"rlk {name}: error: [Errno 28] No space left on device\n")


def test_the_command_is_installed():
    rlk = pathlib.Path(sys.executable).parent / "rlk"
    assert "doctor" in subprocess.run([rlk, "--help"], capture_output=True, text=True, check=True).stdout


def test_doctor_survives_a_backend_that_does_not_start():
    """One process prints tables and then JSON. Its exit status has a digit for each of them."""
    code = "import sys; from rlk_jax.cli import main; sys.exit(10 * main(['doctor']) + main(['doctor', '--json']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 11 and "Traceback" not in done.stderr
    tables, found = done.stdout[: done.stdout.index("{")], json.loads(done.stdout[done.stdout.index("{") :])
    assert "jaxlib" in tables and "No fault" not in tables
    assert re.search(r"rlk doctor: JAX cannot start a backend here: \w", done.stderr), "the error or its type is named"
    assert found["packages"]["jaxlib"] and "JAX cannot start a backend here" in found["error"]
    assert found["advice"][0]["mend"] == "unset JAX_PLATFORMS" and found["error"] in found["advice"][0]["fault"]


@pytest.mark.parametrize("command", ["check --op logp", "grpo --out run --grpo-steps 1"])
def test_a_backend_that_does_not_start_is_one_line(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rlk_jax.cli", *command.split()],
        env={**os.environ, "JAX_PLATFORMS": "nonsense", "PYTHONPATH": str(pathlib.Path(rlk_jax.__file__).parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    said = "JAX cannot start a backend here: Unable to initialize backend 'nonsense': "
    assert re.fullmatch(rf"rlk \w+: error: {said}.*; rlk doctor says what mends it\n", done.stderr)


@pytest.mark.parametrize(
    ("of_jax", "raised", "is_hidden"),
    [
        (AssertionError(), AssertionError(), True),
        (AssertionError(), RuntimeError("a bug"), False),
        (None, AssertionError(), False),
        (None, RuntimeError("a bug"), False),
    ],
)
def test_only_a_backend_that_does_not_start_hides_a_traceback(of_jax, raised, is_hidden, capsys, monkeypatch):
    def devices() -> list:
        if of_jax is not None:
            raise of_jax
        return []

    def fail(options: object) -> int:
        raise raised

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(cli.check, "run", fail)
    if is_hidden:
        assert cli.main(["check"]) == 2
        message = "JAX cannot start a backend here: AssertionError; rlk doctor says what mends it"
        assert capsys.readouterr().err == f"rlk check: error: {message}\n"
    else:
        with pytest.raises(type(raised)):
            cli.main(["check"])
