"""Interruption and resume of `rlk grpo`: bit for bit, and only of the same run."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rlk_jax.core import program_cache
from rlk_jax.grpo import run_folder, trainer
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.steps import build_steps
from rlk_jax.grpo.stopping import stop_on_signal
from tests.grpo import tiny
from tests.grpo.prompts import write as write_prompts
from tests.support import helpers

SHORT = {"warmup_steps": 20, "grpo_steps": 20, "checkpoint_every": 7}
LONG = {"warmup_steps": 300, "grpo_steps": 300, "checkpoint_every": 70}
"""Runs to interrupt; a long one takes its time, in which a signal from another process arrives."""


def interruptions(phase_steps: int) -> tuple[int, int]:
    """After how many steps to interrupt the warm start, and after how many GRPO; drawn anew in every run of a test."""
    draw = random.Random()
    steps = draw.randint(1, phase_steps // 2), phase_steps + draw.randint(1, phase_steps // 2)
    print("interrupting after steps {} and {}".format(*steps))
    return steps


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def break_a_line(folder: RunFolder) -> None:
    """Leave the metrics as if the run had been killed after its checkpoint, in the middle of a line."""
    with folder.metrics.open("a") as file:
        file.write('{"step": ')


def assert_same_end(broken: RunFolder, unbroken: RunFolder, **changes) -> None:
    (state, step), (expected, expected_step) = (tiny.final_state(folder, **changes) for folder in (broken, unbroken))
    assert step == expected_step == 2 * changes["warmup_steps"]
    helpers.assert_same_bits(state, expected)
    for file in ("metrics", "summary", "config"):
        assert getattr(broken, file).read_bytes() == getattr(unbroken, file).read_bytes()


def test_interrupted_in_both_phases_and_resumed_equals_the_unbroken_run(tmp_path, monkeypatch):
    """SIGINT in the warm start, SIGTERM in GRPO, at random steps: same parameters, metrics and summary, bit for bit."""
    unbroken, broken = RunFolder(tmp_path / "unbroken"), RunFolder(tmp_path / "broken")
    first, second = interruptions(SHORT["warmup_steps"])
    changes = {**tiny.RICH, **SHORT}
    start = [*tiny.options(**changes), "--out"]
    signals, on_host = {first: signal.SIGINT, second: signal.SIGTERM}, trainer.to_floats

    def measured(metrics):
        """Called once for every step, after which it is logged."""
        step = lines_in(broken.metrics) + 1
        if step in signals:
            os.kill(os.getpid(), signals.pop(step))
        return on_host(metrics)

    assert tiny.run_here(*start, unbroken.path) == 0
    monkeypatch.setattr(trainer, "to_floats", measured)
    assert tiny.run_here(*start, broken.path) == 128 + signal.SIGINT
    assert lines_in(broken.metrics) == first
    assert tiny.run_here(*start, broken.path, "--resume") == 128 + signal.SIGTERM
    assert lines_in(broken.metrics) == second
    break_a_line(broken)
    assert tiny.run_here(*start, broken.path, "--resume") == 0
    assert_same_end(broken, unbroken, **changes)


def run_interrupted(command: list[str], environment: dict[str, str], folder: RunFolder, at: int, number: int) -> int:
    """Send a signal once `at` steps are logged; returns the exit status."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while lines_in(folder.metrics) < at and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(number)
        return process.wait()
    finally:
        process.kill()


@pytest.mark.full
def test_processes_interrupted_in_both_phases_and_resumed_equal_the_unbroken_one(tmp_path):
    """In `make test` the test above does this in its own process, and
    test_another_process_goes_on_with_the_bits_of_the_first resumes in another one.
    """
    environment = tiny.environment(tmp_path / "cache")
    unbroken, broken = RunFolder(tmp_path / "unbroken"), RunFolder(tmp_path / "broken")
    phase_steps = LONG["warmup_steps"]
    first, second = interruptions(phase_steps)
    start = [*tiny.COMMAND, *tiny.options(**LONG), "--out"]
    resume = [*start, str(broken.path), "--resume"]

    def break_and_resume() -> None:
        status = run_interrupted([*start, str(broken.path)], environment, broken, first, signal.SIGINT)
        assert status == 128 + signal.SIGINT
        assert first <= lines_in(broken.metrics) < phase_steps
        status = run_interrupted(resume, environment, broken, second, signal.SIGTERM)
        assert status == 128 + signal.SIGTERM
        assert second <= lines_in(broken.metrics) < 2 * phase_steps
        break_a_line(broken)
        subprocess.run(resume, env=environment, check=True, stdout=subprocess.DEVNULL)

    with ThreadPoolExecutor(2) as pool:
        broken_run = pool.submit(break_and_resume)
        subprocess.run([*start, str(unbroken.path)], env=environment, check=True, stdout=subprocess.DEVNULL)
        broken_run.result()
    assert_same_end(broken, unbroken, **LONG)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """A user's own prompts."""
    return Path(shutil.copy(tiny.SUMS, tmp_path_factory.mktemp("prompts") / "mine.jsonl"))


def rich_options(prompts: Path, **changes) -> list[str]:
    """The options of the run in `finished`, or of one that differs from it."""
    return tiny.options(**{**tiny.LEARNING, **tiny.RICH, "prompts": prompts, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prompts) -> RunFolder:
    """A finished run on a user's own prompts; the tests that resume it change no file of it."""
    folder = RunFolder(tmp_path_factory.mktemp("run") / "out")
    assert tiny.run_here(*rich_options(prompts), "--out", folder.path) == 0
    return folder


def test_another_process_goes_on_with_the_bits_of_the_first(finished, prompts, tmp_path):
    """From a checkpoint within GRPO, on a mesh that shards the head."""
    environment = tiny.environment(tmp_path / "cache") | {"JAX_NUM_CPU_DEVICES": str(jax.device_count())}
    run, apart = tiny.run_apart(environment), RunFolder(tmp_path / "out")
    shutil.copytree(finished.path, apart.path)
    tiny.lose_the_end(apart, steps=46)
    assert run(*rich_options(prompts), "--out", apart.path, "--resume") == 0
    for file in ("metrics", "summary"):
        assert getattr(apart, file).read_bytes() == getattr(finished, file).read_bytes()
    changes = {**tiny.LEARNING, **tiny.RICH, "prompts": prompts}
    states = [tiny.final_state(folder, **changes) for folder in (apart, finished)]
    assert states[0][1] == 46
    helpers.assert_same_bits(states[0][0], states[1][0])


@pytest.mark.full
def test_a_run_that_is_packed_and_sharded_ends_with_its_bits_after_a_resume(tmp_path):
    """In `make test`, the test above catches other bits after a resume in another process, and
    test_interrupted_in_both_phases_and_resumed_equals_the_unbroken_run after one in the same process.
    """
    tiny.assert_resumes(RunFolder(tmp_path / "out"), tiny.run_here, **tiny.RICH)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"compute_dtype": "bfloat16", "invariant": True},
        {"micro_batches": 2, "packing": True, "rollout_buckets": 2, "mesh": "data=2,tensor=2"},
    ],
    ids=str,
)
def test_runs_of_every_kind_end_with_their_bits_after_a_resume(tmp_path, changes):
    """In `make test`, test_another_process_goes_on_with_the_bits_of_the_first catches other bits after a resume; a
    checkpoint of invariant layers holds no more than another.
    """
    if "packing" in changes:
        changes = {**changes, "prompts": write_prompts(tmp_path / "mixed.jsonl", longest=20)}
    tiny.assert_resumes(RunFolder(tmp_path / "out"), tiny.run_here, **changes)


@pytest.fixture
def tuned(monkeypatch):
    """Runs keep their programs, as on a GPU, and use no cache that tests share."""
    shared = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(run_folder, "_tunes_programs", lambda: True)
    yield
    jax.config.update("jax_compilation_cache_dir", shared)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("build", [tiny.stand_in_steps, pytest.param(build_steps, marks=pytest.mark.full)])
def test_each_run_of_a_process_keeps_its_programs_and_resumes_with_them(tmp_path, capsys, tuned, build):
    """With the programs of a run in `make test-full`, and in `make test` with others of the same names."""
    command, folders = tiny.options(checkpoint_every=2), [RunFolder(tmp_path / name) for name in "ab"]
    for folder in folders:
        assert tiny.run_here(*command, "--out", folder.path, build=build) == 0
        assert len(list(folder.programs.glob("jit_grpo_step-*-cache"))) == 1
    assert jax.config.jax_compilation_cache_dir is None
    folder = folders[0]
    files = {path.name for path in folder.programs.glob("*-cache")}
    for is_gone in (False, True):
        tiny.lose_the_end(folder, steps=5)
        if is_gone:
            shutil.rmtree(folder.programs)
        capsys.readouterr()
        assert tiny.run_here(*command, "--out", folder.path, "--resume", build=build) == 0
        assert ("warning: no " in capsys.readouterr().err) == is_gone
        assert is_gone or {path.name for path in folder.programs.glob("*-cache")} == files


def test_a_run_keeps_its_programs_after_torch_bridge_has_shared_a_cache(tmp_path, tuned, monkeypatch):
    """That cache is evicted, and is no user's; afterwards it is in use again."""
    monkeypatch.setenv("RLK_CACHE", str(tmp_path / "shared"))
    before = program_cache.xla_cache()
    program_cache.share_xla_cache(SimpleNamespace(platform="gpu"))
    shared, folder = program_cache.xla_cache(), RunFolder(tmp_path / "run")
    try:
        assert shared.folder == str(tmp_path / "shared" / "xla")
        with folder.keep_programs():
            assert program_cache.xla_cache() == (str(folder.programs), 0, -1, shared.of_xla)
        assert program_cache.xla_cache() == shared
    finally:
        program_cache.use_xla_cache(before)


def test_first_signal_asks_and_the_second_one_kills():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signal() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_finished_run_resumes_to_the_same_summary(finished, prompts):
    before = finished.summary.read_bytes()
    assert tiny.run_here(*rich_options(prompts), "--out", finished.path, "--resume") == 0
    assert finished.summary.read_bytes() == before


@pytest.mark.parametrize(("field", "value"), [("seed", 5), ("beta", 0.5), ("mesh", "data=2,tensor=1")])
def test_resume_with_another_configuration_names_the_field(finished, prompts, capsys, field, value):
    before = json.loads(finished.config.read_text())[field]
    assert tiny.run_here(*rich_options(prompts, **{field: value}), "--out", finished.path, "--resume") == 2
    expected = f"rlk grpo: error: cannot resume {finished.path}: --{field} was {before!r}, now {value!r}\n"
    assert capsys.readouterr().err == expected


def test_everything_that_has_changed_is_named(finished, prompts, capsys):
    given = rich_options(prompts, seed=5, beta=0.5)
    assert tiny.run_here(*given, "--out", finished.path, "--resume") == 2
    assert capsys.readouterr().err.endswith(": --seed was 0, now 5; --beta was 0.01, now 0.5\n")


def test_the_same_prompts_may_lie_elsewhere(finished, prompts, tmp_path):
    moved = shutil.copy(prompts, tmp_path / "moved.jsonl")
    assert tiny.run_here(*rich_options(moved), "--out", finished.path, "--resume") == 0


def test_resume_with_changed_prompts_is_an_error(finished, prompts, capsys):
    text = prompts.read_text()
    prompts.write_text(text.replace('"8"', '"9"'))
    try:
        assert tiny.run_here(*rich_options(prompts), "--out", finished.path, "--resume") == 2
    finally:
        prompts.write_text(text)
    assert f": the run began with other rows of {prompts}" in capsys.readouterr().err
