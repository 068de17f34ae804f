"""`rlk grpo`: files, progress and errors, as a user meets them.

Most tests run the command in this process, with programs that are compiled once for all of them.
"""

import errno
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from rlk_jax import cli
from rlk_jax.grpo import trainer
from rlk_jax.grpo.config import BadInput, GrpoConfig
from rlk_jax.grpo.exact_answers import BUILT_INS
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.tasks import load_task
from tests.grpo import tiny


def rich_options(**changes) -> list[str]:
    """The options of `tiny.RICH`: their programs are shared by the tests of this file and others."""
    return tiny.options(**{**tiny.RICH, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    """A finished run of five steps on four devices."""
    folder = RunFolder(tmp_path_factory.mktemp("run") / "out")
    assert tiny.run_here(*rich_options(), "--out", folder.path) == 0
    return folder


def test_a_terminal_shows_that_a_run_is_loading(tmp_path, capsys, monkeypatch):
    """Before anything is read: the model is missing here."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    options = ["--model", str(tmp_path / "model"), "--prompts", "p.jsonl", "--reward", "exact"]
    for way in (["--out", tmp_path / "out"], ["--plan"]):
        assert tiny.run_here(*options, *way) == 2
        said = capsys.readouterr()
        assert "loading" in said.out and said.err.count("\n") == 1


def test_a_run_writes_its_files(finished):
    lines = [json.loads(line) for line in finished.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(5))
    assert [line["phase"] for line in lines] == ["warmup"] * 3 + ["grpo"] * 2
    assert lines[-1].keys() >= {
        "reward",
        "kl",
        "clip_fraction",
        "loss",
        "policy_loss",
        "ratio_min",
        "ratio_max",
        "first_clip_fraction",
        "first_ratio_min",
        "first_ratio_max",
        "mismatch",
    }
    summary = json.loads(finished.summary.read_text())
    assert summary["before"].keys() == summary["after"].keys() == {"sampled", "greedy"}
    assert matplotlib.image.imread(finished.report).std() > 0
    assert json.loads(finished.config.read_text())["mesh"] == "data=2,tensor=2"


@pytest.mark.parametrize("option", [{"max_operand": 5}, {"demonstration_errors": 0.9}])
def test_options_of_the_arithmetic_are_refused_beside_prompts(option):
    (name,) = option
    with pytest.raises(BadInput, match=f"^{name} is of the arithmetic prompts: it has no meaning beside prompts$"):
        GrpoConfig(prompts="mine.jsonl", **option)


def test_overwrite_starts_again_and_prints_plain_progress_and_the_table(finished, capsys):
    before = finished.metrics.read_bytes()
    assert tiny.run_here(*rich_options(), "--out", finished.path, "--overwrite") == 0
    assert finished.metrics.read_bytes() == before
    output = capsys.readouterr().out
    for expected in (
        "warmup step 1/5",
        "grpo step 5/5",
        " mismatch ",
        " tokens/s",
        "held-out reward",
        str(finished.report),
    ):
        assert expected in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_prompt": 1}, "--samples-per-prompt must be at least 2, got 1"),
        ({"seed": -1}, "--seed must be at least 0, got -1"),
        ({"seed": 2**32}, "--seed must be less than 4294967296, got 4294967296"),
        ({"warmup_steps": -1}, "--warmup-steps must be at least 0, got -1"),
        ({"grpo_steps": 0}, "--grpo-steps must be at least 1, got 0"),
        ({"prompts_per_step": 0}, "--prompts-per-step must be at least 1, got 0"),
        ({"updates_per_rollout": 0}, "--updates-per-rollout must be at least 1, got 0"),
        ({"micro_batches": 0}, "--micro-batches must be at least 1, got 0"),
        ({"micro_batches": 3}, "--micro-batches (3) must divide a device's 16 samples of a step"),
        (
            {"micro_batches": 16, "mesh": "data=2,tensor=1"},
            "--micro-batches (16) must divide a device's 8 samples of a step",
        ),
        ({"packing": True}, "--packing needs --micro-batches of at least 2: what it saves is whole parts of a batch"),
        ({"rollout_buckets": 0}, "--rollout-buckets must be at least 1, got 0"),
        ({"rollout_buckets": 5}, "--rollout-buckets (5) must divide a device's 16 samples of a step"),
        ({"checkpoint_every": 0}, "--checkpoint-every must be at least 1, got 0"),
        ({"max_operand": 3}, "--max-operand must be at least 4, got 3"),
        ({"max_operand": 1000}, "--max-operand must be less than 1000, got 1000"),
        ({"max_prompt_tokens": 9}, "--max-prompt-tokens is of a prompts file: it has no meaning without --prompts"),
        ({"prompts": "absent.jsonl", "max_prompt_tokens": 0}, "--max-prompt-tokens must be at least 1, got 0"),
        ({"vocab_size": 96}, "--vocab-size must be at least 97, got 96"),
        ({"layers": 0}, "--layers must be at least 1, got 0"),
        ({"heads": 0}, "--heads must be at least 1, got 0"),
        ({"learning_rate": 0}, "--learning-rate must be greater than 0, got 0.0"),
        ({"learning_rate": "nan"}, "--learning-rate must be finite, got nan"),
        ({"warmup_learning_rate": "inf"}, "--warmup-learning-rate must be finite, got inf"),
        ({"clip_eps": 0}, "--clip-eps must be greater than 0, got 0.0"),
        ({"beta": -0.1}, "--beta must be at least 0, got -0.1"),
        ({"beta": "inf"}, "--beta must be finite, got inf"),
        ({"beta": 1e39}, "--beta must be 0 or a positive finite number, got 1e+39."),
        ({"clip_eps": 1e300}, "--clip-eps must be 0 or a positive finite number, got 1e+300."),
        ({"loss_type": "beta"}, "'vespo'), got 'beta'."),  # A value that reads like a field is no option.
        ({"dual_clip": 1.1}, "--dual-clip must be above the clip range, which ends at 1.2, got 1.1."),
        ({"vocab_size": 2**31}, "--vocab-size must be less than 2147483648, got 2147483648"),
        ({"demonstration_errors": 1}, "--demonstration-errors must be less than 1, got 1.0"),
        ({"width": 9}, "--width must be an even multiple of --heads, got 9 and 2"),
        ({"width": 6}, "--width must be an even multiple of --heads, got 6 and 2"),
        ({"mesh": "data=2"}, "--mesh must read data=N,tensor=M with N, M at least 1, got 'data=2'"),
        ({"mesh": "data=0,tensor=1"}, "--mesh must read data=N,tensor=M with N, M at least 1, got 'data=0,tensor=1'"),
        ({"mesh": "data=²,tensor=1"}, "--mesh must read data=N,tensor=M with N, M at least 1, got 'data=²,tensor=1'"),
        ({"mesh": "data=٢,tensor=1"}, "--mesh must read data=N,tensor=M with N, M at least 1, got 'data=٢,tensor=1'"),
        ({"mesh": f"data={'1' * 5000},tensor=1"}, "--mesh must read data=N,tensor=M with N, M at least 1, got "),
        ({"mesh": "data=3,tensor=1"}, "--prompts-per-step (4) must be a multiple of the data axis (3)"),
        (
            {"mesh": "data=16,tensor=1", "prompts_per_step": 16},
            "--mesh data=16,tensor=1 needs 16 devices and there are 8",
        ),
        ({"mesh": "data=2,tensor=8"}, "--mesh data=2,tensor=8 needs 16 devices and there are 8"),
        ({"prompts": ""}, "cannot read file .: "),
        ({"prompts": "absent.jsonl"}, "cannot read file absent.jsonl: "),
        ({"implementation": "magic"}, "implementation"),
        ({"compute_dtype": "float16"}, "--compute-dtype must be float32 or bfloat16, got 'float16'"),
        ({"invariant": True}, "--invariant needs --compute-dtype bfloat16, got float32"),
        (
            {"invariant": True, "compute_dtype": "bfloat16", "implementation": "xla"},
            "--invariant: linear_logp promises no bits with --implementation='xla' here.",
        ),
    ],
)
def test_bad_option_is_one_line_and_status_2(tmp_path, capsys, options, message):
    assert tiny.run_here(*tiny.options(**options), "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("rlk grpo: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), np.float32("inf")])
def test_numbers_that_are_not_finite_are_refused(value):
    with pytest.raises(BadInput, match="learning_rate must be finite, got "):
        GrpoConfig(learning_rate=value)


def make_strange(folder: Path, kind: str) -> None:
    """Make an output folder that a command cannot use as it is."""
    if kind == "file":
        folder.write_text("")
        return
    folder.mkdir()
    if kind == "foreign":
        (folder / "thesis.tex").write_text("")
    if kind == "damaged":
        (folder / "config.json").write_text("{")
    if kind == "obstacle":
        (folder / "config.json").write_text('{"prompts_digest": ""}')
        (folder / "metrics.jsonl").mkdir()
    if kind == "no checkpoint":
        with started(folder):
            pass


def started(folder: Path) -> AbstractContextManager[None]:
    """A folder that a command has started and locked, before its first checkpoint."""
    task = load_task(tiny.config())
    return RunFolder(folder).start(tiny.config(vocab_size=task.vocab_size), task.digests, overwrite=False)


def test_help_names_every_form_of_a_reward(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        cli.main(["grpo", "--help"])
    shown = capsys.readouterr().out
    assert all(x in shown for x in ("module:function", "path/file.py:function", *BUILT_INS, "any columns that rewards"))


@pytest.mark.parametrize(
    ("kind", "flag", "message"),
    [
        ("file", "--overwrite", "out: File exists"),
        ("foreign", None, " holds no run of rlk grpo: --resume and --overwrite touch nothing else"),
        ("no checkpoint", None, " is not empty: its run has no checkpoint, --overwrite starts again"),
        ("foreign", "--overwrite", " holds no run of rlk grpo: --resume and --overwrite touch nothing else"),
        ("foreign", "--resume", " holds no run of rlk grpo"),
        ("damaged", "--overwrite", " holds no run of rlk grpo"),
        ("obstacle", "--overwrite", "cannot overwrite "),
        ("no checkpoint", "--resume", ": it has no checkpoint; --overwrite starts again"),
    ],
)
def test_strange_folder_is_left_alone(tmp_path, capsys, kind, flag, message):
    folder = tmp_path / "out"
    make_strange(folder, kind)
    files = sorted(tmp_path.rglob("*.*"))
    assert tiny.run_here(*tiny.options(), "--out", folder, *([flag] if flag else [])) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*.*")) == files


@pytest.mark.parametrize("name", ["out[a]", "a*/out", "what?"])
def test_a_folder_whose_checkpoints_could_not_be_read_is_refused(tmp_path, capsys, name):
    """What Orbax would take for a pattern. Nothing is made."""
    assert tiny.run_here(*rich_options(), "--out", tmp_path / name) == 2
    said = "--out: Orbax writes no checkpoints below a folder with *, ? or [ in its name, got"
    assert capsys.readouterr().err == f"rlk grpo: error: {said} {tmp_path / name}\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("flag", [[], ["--overwrite"], ["--resume"]])
def test_a_folder_is_of_one_process_at_a_time(tmp_path, capsys, flag):
    folder = tmp_path / "out"
    with started(folder):
        before = RunFolder(folder).config.read_bytes()
        assert tiny.run_here(*tiny.options(), "--out", folder, *flag) == 2
        assert capsys.readouterr().err == f"rlk grpo: error: {folder} is in use by another rlk grpo\n"
        assert RunFolder(folder).config.read_bytes() == before
    assert tiny.run_here(*rich_options(), "--out", folder, "--overwrite") == 0


def test_a_folder_that_cannot_be_locked_is_a_warning(tmp_path, capsys, monkeypatch):
    def refuse(folder: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with started(tmp_path / "out"):
        assert "out cannot be locked (No locks available): run no second rlk grpo in it\n" in capsys.readouterr().err


LIMITED = """
import resource, sys
from rlk_jax import cli
limit, *arguments = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
sys.exit(cli.main(arguments))
"""
"""A command that cannot write files of more than so many bytes, as on a disk that is full."""
NOTHING_KEPT = {"PYTHONDONTWRITEBYTECODE": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
"""An environment in which Python and JAX write no caches for other processes: the limit would cut them off."""
LIMITS = pytest.mark.parametrize(
    ("limit", "changes", "message"),
    [
        (10, {}, "[Errno 27] File too large"),
        (2500, {"warmup_steps": 40}, "[Errno 27] File too large"),
        (4000, {"checkpoint_every": 1}, "cannot write checkpoint "),
    ],
    ids=["config", "metrics", "checkpoint"],
)


@contextmanager
def limited_files(size: int):
    """While the context is open, this process writes no larger files, and JAX keeps no cache on disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    is_cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        jax.config.update("jax_enable_compilation_cache", is_cached)


@LIMITS
def test_files_that_cannot_be_written_are_one_line_and_status_2(tmp_path, capsys, finished, limit, changes, message):
    """The fixture `finished` has compiled the programs already."""
    out = RunFolder(tmp_path / "out")
    with limited_files(limit):
        assert tiny.run_here(*rich_options(**changes), "--out", out.path) == 2
    *others, line = capsys.readouterr().err.splitlines()
    assert line.startswith("rlk grpo: error: ") and message in line
    assert not others
    if "checkpoint" in message:  # Orbax has threads that still write, and end with the process only.
        return
    again = ["--overwrite"] if out.config.exists() else []
    assert tiny.run_here(*rich_options(**changes), "--out", out.path, *again) == 0


@pytest.mark.full
@LIMITS
def test_a_process_that_cannot_write_files_says_so_in_one_line(tmp_path, limit, changes, message):
    """In `make test` the test above writes the same files, within its own process."""
    out = RunFolder(tmp_path / "out")
    command = [sys.executable, "-c", LIMITED, str(limit), "grpo", *tiny.options(**changes), "--out", out.path]
    environment = tiny.environment(tmp_path / "cache") | NOTHING_KEPT
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    *others, line = ended.stderr.splitlines()
    assert line.startswith("rlk grpo: error: ") and message in line
    assert not others
    again = ["--overwrite"] if out.config.exists() else []
    assert tiny.run_here(*tiny.options(**changes), "--out", out.path, *again) == 0


UNWRITABLE = """
import resource, sys, time
from pathlib import Path
import jax.numpy as jnp
from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.run_folder import RunFolder, open_checkpoints, save_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    with open_checkpoints(RunFolder(Path(sys.argv[1]))) as checkpoints:
        save_checkpoint(checkpoints, 3, {f"leaf {i}": jnp.full((200, 200), i) for i in range(20)})
except BadInput as error:
    print(error, file=sys.stderr)
async def never_begun(): ...
never_begun()
time.sleep(1)
"""
"""Many writes that fail, most of them after the first failure has been raised, one that was never begun, as Orbax
leaves some, and time for them to say so.
"""


def test_nothing_is_said_of_a_failed_checkpoint_but_its_line(tmp_path):
    command, environment = [sys.executable, "-c", UNWRITABLE, tmp_path], {**os.environ, **NOTHING_KEPT}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    assert said.startswith(f"cannot write checkpoint {tmp_path}/checkpoints/3: ") and said.count("\n") == 1, said


def test_resume_and_overwrite_exclude_each_other(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        tiny.run_here("--out", tmp_path, "--resume", "--overwrite")
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_reader_that_is_gone_ends_a_run(tmp_path, capfd, monkeypatch):
    """Without a line of error, which rlk_jax.cli leaves out, too."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(BrokenPipeError):
            tiny.run_here(*tiny.options(), "--out", tmp_path / "out", build=tiny.stand_in_steps)
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # What is left in the buffer is written when it closes.
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("package", ["flax", "optax", "orbax", "matplotlib", "flatbuffers"])
def test_missing_package_says_what_to_install(capsys, monkeypatch, package):
    for name in list(sys.modules):
        if name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert tiny.run_here("--seed=-1") == 2  # What is wrong with the options can wait.
    missing = "orbax.checkpoint" if package == "orbax" else package
    needs = f'needs {missing}, of rlk-jax\'s extra `grpo`: pip install "rlk-jax[grpo]"'
    assert capsys.readouterr().err == f"rlk grpo: error: the command {needs}\n"


def test_losses_and_help_need_no_flax():
    code = (
        "import sys, rlk_jax.grpo, rlk_jax.grpo.command;"
        "assert not {'flax', 'optax', 'orbax', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


SIGNAL_AT_FIRST = """
import os, signal, sys
from rlk_jax import cli
event, name, *arguments = sys.argv[1:]
pending = [signal.SIGINT]
def hook(happened, details):
    if pending and happened == event and str(details[0]).endswith(name):
        os.kill(os.getpid(), pending.pop())
sys.addaudithook(hook)
sys.exit(cli.main(arguments))
"""
"""A command that gets SIGINT the first time that it imports, or opens, something whose name ends like this."""
_signal_at: list[tuple[str, str]] = []
"""The event and the end of a name at which this process sends itself SIGINT, once; empty at most times."""


def _send_signal(happened: str, details: tuple) -> None:
    if _signal_at and happened == _signal_at[0][0] and str(details[0]).endswith(_signal_at[0][1]):
        _signal_at.clear()
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def audited():
    """Python keeps an audit hook as long as the process lives."""
    sys.addaudithook(_send_signal)


@pytest.fixture
def signal_at(audited, monkeypatch):
    """Call it with an event and a name. The trainer is imported again, so that its import is an event, and the first
    one is put back everywhere.
    """

    def arm(event: str, name: str) -> None:
        monkeypatch.setattr("rlk_jax.grpo.trainer", trainer)
        monkeypatch.delitem(sys.modules, "rlk_jax.grpo.trainer")
        _signal_at.append((event, name))

    yield arm
    assert not _signal_at, "the event has happened"


def assert_nothing_was_saved(output: str, out: RunFolder) -> None:
    assert output == "stopped before the first step; nothing was saved\n"
    assert not out.metrics.exists() or not out.metrics.read_text()
    assert not list(out.path.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("event", "name"), [("import", "rlk_jax.grpo.trainer"), ("open", "config.json.new"), ("open", "metrics.jsonl")]
)
def test_signal_before_the_first_step_is_one_line_and_saves_nothing(tmp_path, capsys, signal_at, event, name):
    out = RunFolder(tmp_path / "out")
    signal_at(event, name)
    assert tiny.run_here(*rich_options(), "--out", out.path) == 128 + signal.SIGINT
    assert_nothing_was_saved(capsys.readouterr().out, out)


@pytest.mark.full
@pytest.mark.parametrize(
    ("event", "name"), [("import", "flax"), ("open", "config.json.new"), ("open", "metrics.jsonl")]
)
def test_signal_to_a_process_before_its_first_step_is_one_line_and_saves_nothing(tmp_path, event, name):
    """In `make test` the test above sends the same signals to its own process."""
    out = RunFolder(tmp_path / "out")
    command = [sys.executable, "-c", SIGNAL_AT_FIRST, event, name, "grpo", *tiny.options(), "--out", str(out.path)]
    ended = subprocess.run(command, env=tiny.environment(tmp_path / "cache"), capture_output=True, text=True)
    assert ended.returncode == 128 + signal.SIGINT
    assert "Traceback" not in ended.stderr
    assert_nothing_was_saved(ended.stdout, out)


def test_signal_before_a_resumed_run_goes_on_says_how_to(capsys, finished, signal_at):
    signal_at("import", "rlk_jax.grpo.trainer")
    assert tiny.run_here(*rich_options(), "--out", finished.path, "--resume") == 128 + signal.SIGINT
    assert capsys.readouterr().out == "stopped; the same command with --resume, not --overwrite, continues\n"


@pytest.mark.full
def test_signal_to_a_process_before_it_resumes_says_how_to(tmp_path, finished):
    """In `make test` the test above sends the same signal to its own process."""
    arguments = ["import", "flax", "grpo", *rich_options(), "--out", str(finished.path), "--resume"]
    environment = tiny.environment(tmp_path / "cache") | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", SIGNAL_AT_FIRST, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 128 + signal.SIGINT
    assert ended.stdout == "stopped; the same command with --resume, not --overwrite, continues\n"


def test_memory_is_printed_after_the_evaluation(tmp_path, monkeypatch):
    told, evaluated = [], trainer.to_floats
    monkeypatch.setattr(trainer, "print_usage", lambda *_: told.append("usage"))
    monkeypatch.setattr(trainer, "to_floats", lambda x: told.extend({"greedy"} & x.keys()) or evaluated(x))
    assert tiny.run_here(*rich_options(), "--out", tmp_path / "out") == 0
    assert told == ["greedy", "greedy", "usage"]


def test_signal_during_the_evaluation_is_answered_and_resume_finishes(tmp_path, capsys, monkeypatch):
    out, real, pending = RunFolder(tmp_path / "out"), trainer.to_floats, [signal.SIGINT]

    def interrupted(metrics):
        if "greedy" in metrics and pending:
            os.kill(os.getpid(), pending.pop())
        return real(metrics)

    monkeypatch.setattr(trainer, "to_floats", interrupted)
    assert tiny.run_here(*rich_options(), "--out", out.path) == 128 + signal.SIGINT
    assert "--resume, not --overwrite, continues" in capsys.readouterr().out
    assert not out.summary.exists()
    assert tiny.run_here(*rich_options(), "--out", out.path, "--resume") == 0
    assert out.summary.exists() and out.report.exists()


DIVERGENCES = {
    "grpo": ({"learning_rate": 1e300}, r"loss is (nan|inf) at step 3 \(grpo\), first at token 0 of sequence 0\n", 3),
    "warmup": (
        {"warmup_learning_rate": 1e300},
        r"loss is (nan|inf) at step 1 \(warmup\), first at token 0 of sequence 0\n",
        1,
    ),
    "parameters": (
        {"warmup_steps": 0, "grpo_steps": 1, "updates_per_rollout": 1, "learning_rate": 1e300},
        "parameters",
        1,
    ),
}
"""For each way to diverge: learning rates by which a run does, what its error says, and how many steps it logs."""


def assert_diverges(out: RunFolder, capsys, run, message: str, logged: int) -> None:
    assert run() == 1
    error = capsys.readouterr().err
    assert re.search("training diverged: " + message, error)
    assert error.count("\n") == 1
    lines = [json.loads(line) for line in out.metrics.read_text().splitlines()]
    assert len(lines) == logged
    assert all(math.isfinite(value) for line in lines for value in line.values() if not isinstance(value, str))


def diverging(kind: str):
    """A function like `tiny.shared_steps` whose programs return NaN where runs of this kind do."""

    def after_step(program, at: int, change):
        def changed(state, step):
            return change(*program(state, step)) if step == at else program(state, step)

        changed.lower = program.lower
        return changed

    def nan_parameters(state, metrics):
        return state._replace(params=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.params)), metrics

    def build(*arguments):
        steps = tiny.shared_steps(*arguments)
        fault = {"loss": jnp.inf, "nonfinite_updates": 1, "nonfinite_sequence": 0, "nonfinite_token": 0}
        warmup = after_step(steps.warmup_step, 1, lambda state, metrics: (state, {**metrics, **fault}))
        grpo = after_step(steps.grpo_step, 3, lambda state, metrics: (state, {**metrics, **fault}))
        changed = {"warmup_step": warmup} if kind == "warmup" else {"grpo_step": grpo}
        if kind == "parameters":
            changed = {"grpo_step": after_step(steps.grpo_step, 0, nan_parameters)}
        return replace(steps, **changed)

    return build


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_numbers_that_are_not_finite_end_a_run_with_one_line_and_status_1(tmp_path, capsys, kind):
    out, (changes, message, logged) = RunFolder(tmp_path / "out"), DIVERGENCES[kind]
    steps = {name: x for name, x in changes.items() if name in ("warmup_steps", "grpo_steps")}
    command = [*rich_options(**steps), "--out", out.path]
    assert_diverges(out, capsys, lambda: tiny.run_here(*command, build=diverging(kind)), message, logged)


@pytest.mark.full
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_divergence_is_one_line_and_status_1(tmp_path, capsys, kind):
    """In `make test` the test above has the programs return such numbers."""
    out, (changes, message, logged) = RunFolder(tmp_path / "out"), DIVERGENCES[kind]
    command = [*tiny.options(**changes), "--out", out.path]
    assert_diverges(out, capsys, lambda: tiny.run_here(*command), message, logged)


def test_overwrite_removes_a_link_to_checkpoints_and_the_programs_and_starts_again(tmp_path):
    out, kept = RunFolder(tmp_path / "out"), tmp_path / "kept"
    assert tiny.run_here(*rich_options(), "--out", out.path) == 0
    out.checkpoints.rename(kept)
    out.checkpoints.symlink_to(kept)
    (out.programs / "of a GPU").mkdir(parents=True)
    assert tiny.run_here(*rich_options(checkpoint_every=3), "--out", out.path, "--overwrite") == 0
    assert (kept / "5").is_dir()
    assert not out.checkpoints.is_symlink()
    assert not out.programs.exists()
    assert len(out.metrics.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("damage", "message"),
    [("checkpoints/5/default", "cannot read checkpoint "), ("metrics.jsonl", "metrics.jsonl does not have 5 lines")],
)
def test_damaged_run_is_one_line_on_resume(tmp_path, capsys, finished, damage, message):
    folder = tmp_path / "out"
    shutil.copytree(finished.path, folder)
    lost = folder / damage
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    assert tiny.run_here(*rich_options(), "--out", folder, "--resume") == 2
    error = capsys.readouterr().err
    assert str(folder) in error and message in error
    assert error.count("\n") == 1
