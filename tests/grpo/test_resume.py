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

import chex
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rlk_jax.grpo import run_folder
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.stopping import stop_on_signal
from tests.grpo import tiny
from tests.grpo.prompts import write as write_prompts

PHASE_STEPS = 300
LONG = {"warmup_steps": PHASE_STEPS, "grpo_steps": PHASE_STEPS, "checkpoint_every": 70}


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_interrupted(command: list[str], environment: dict[str, str], folder: RunFolder, at: int, number: int) -> int:
    """Send a signal once `at` steps are logged; the exit status."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while lines_in(folder.metrics) < at and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(number)
        return process.wait()
    finally:
        process.kill()


def test_interrupted_in_both_phases_and_resumed_equals_the_unbroken_run(tmp_path):
    """SIGINT in the warm start, SIGTERM in GRPO, at random steps: same parameters, metrics and summary, bit for bit."""
    environment = tiny.environment(tmp_path / "cache")
    unbroken, broken = RunFolder(tmp_path / "unbroken"), RunFolder(tmp_path / "broken")
    draw = random.Random()
    first, second = draw.randint(1, PHASE_STEPS // 2), PHASE_STEPS + draw.randint(1, PHASE_STEPS // 2)
    print(f"interrupting after steps {first} and {second}")
    start = [*tiny.COMMAND, *tiny.options(**LONG), "--out"]
    resume = [*start, str(broken.path), "--resume"]

    def break_and_resume() -> None:
        status = run_interrupted([*start, str(broken.path)], environment, broken, first, signal.SIGINT)
        assert status == 128 + signal.SIGINT
        assert first <= lines_in(broken.metrics) < PHASE_STEPS
        status = run_interrupted(resume, environment, broken, second, signal.SIGTERM)
        assert status == 128 + signal.SIGTERM
        assert second <= lines_in(broken.metrics) < 2 * PHASE_STEPS
        with broken.metrics.open("a") as file:  # as if killed after the checkpoint, in the middle of a line
            file.write('{"step": ')
        subprocess.run(resume, env=environment, check=True, stdout=subprocess.DEVNULL)

    with ThreadPoolExecutor(2) as pool:
        broken_run = pool.submit(break_and_resume)
        subprocess.run([*start, str(unbroken.path)], env=environment, check=True, stdout=subprocess.DEVNULL)
        broken_run.result()

    (state, step), (expected, expected_step) = (tiny.final_state(folder, **LONG) for folder in (broken, unbroken))
    assert step == expected_step == 2 * PHASE_STEPS
    chex.assert_trees_all_equal(state, expected)
    for file in ("metrics", "summary", "config"):
        assert getattr(broken, file).read_bytes() == getattr(unbroken, file).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"compute_dtype": "bfloat16", "invariant": True},
        {"micro_batches": 2, "packing": True, "rollout_buckets": 2, "mesh": "data=2,tensor=2"},
    ],
    ids=str,
)
def test_runs_of_every_kind_end_with_their_bits_after_a_resume(tmp_path, changes):
    if "packing" in changes:
        changes = {**changes, "prompts": write_prompts(tmp_path / "mixed.jsonl", longest=20)}
    tiny.assert_resumes(RunFolder(tmp_path / "out"), tiny.run_here, **changes)


@pytest.fixture
def tuned(monkeypatch):
    """As on a GPU, and without a cache that tests share."""
    shared = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(run_folder, "_tunes_programs", lambda: True)
    yield
    jax.config.update("jax_compilation_cache_dir", shared)
    compilation_cache.reset_cache()


def test_each_run_of_a_process_keeps_its_programs_and_resumes_with_them(tmp_path, capsys, tuned):
    command, folders = tiny.options(checkpoint_every=2), [RunFolder(tmp_path / name) for name in "ab"]
    for folder in folders:
        assert tiny.run_here(*command, "--out", folder.path) == 0
        assert len(list(folder.programs.glob("jit_grpo_step-*-cache"))) == 1
    assert jax.config.jax_compilation_cache_dir is None
    folder = folders[0]
    files = {path.name for path in folder.programs.glob("*-cache")}
    for is_gone in (False, True):
        tiny.lose_the_end(folder, steps=5)
        if is_gone:
            shutil.rmtree(folder.programs)
        capsys.readouterr()
        assert tiny.run_here(*command, "--out", folder.path, "--resume") == 0
        assert ("warning: no " in capsys.readouterr().err) == is_gone
        assert is_gone or {path.name for path in folder.programs.glob("*-cache")} == files


def test_first_signal_asks_and_the_second_one_kills():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signal() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """A user's own prompts."""
    path = tmp_path_factory.mktemp("prompts") / "reversed.jsonl"
    path.write_text("".join(f'{{"prompt": "{word}:", "answer": "{word[::-1]}"}}\n' for word in ("ab", "cd", "efg")))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prompts) -> RunFolder:
    """A finished run of five steps on them."""
    folder = RunFolder(tmp_path_factory.mktemp("run") / "out")
    assert tiny.run_here(*tiny.options(prompts=prompts), "--out", folder.path) == 0
    return folder


def test_a_finished_run_resumes_to_the_same_summary(finished, prompts):
    before = finished.summary.read_bytes()
    assert tiny.run_here(*tiny.options(prompts=prompts), "--out", finished.path, "--resume") == 0
    assert finished.summary.read_bytes() == before


@pytest.mark.parametrize(("field", "value"), [("seed", 5), ("beta", 0.5), ("mesh", "data=2,tensor=1")])
def test_resume_with_another_configuration_names_the_field(finished, prompts, capsys, field, value):
    before = json.loads(finished.config.read_text())[field]
    assert tiny.run_here(*tiny.options(prompts=prompts, **{field: value}), "--out", finished.path, "--resume") == 2
    expected = f"rlk grpo: error: cannot resume {finished.path}: {field} was {before!r}, now {value!r}\n"
    assert capsys.readouterr().err == expected


def test_the_same_prompts_may_lie_elsewhere(finished, prompts, tmp_path):
    moved = shutil.copy(prompts, tmp_path / "moved.jsonl")
    assert tiny.run_here(*tiny.options(prompts=moved), "--out", finished.path, "--resume") == 0


def test_resume_with_changed_prompts_is_an_error(finished, prompts, capsys):
    text = prompts.read_text()
    prompts.write_text(text.replace("efg", "efh"))
    try:
        assert tiny.run_here(*tiny.options(prompts=prompts), "--out", finished.path, "--resume") == 2
    finally:
        prompts.write_text(text)
    assert "prompts_digest was " in capsys.readouterr().err
