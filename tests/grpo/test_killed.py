"""Runs of `rlk grpo` that are killed, at whatever moment, and resumed: bit for bit those that were not."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from rlk_jax.grpo.run_folder import RunFolder
from tests.grpo import tiny
from tests.grpo.test_resume import assert_same_end, lines_in

STARTS, LATER, SAVES, COMPILES = "as it starts", "some steps later", "as it saves", "as it writes to a cache"
TEN = [STARTS, SAVES, LATER, COMPILES, LATER, LATER, SAVES, LATER, COMPILES, LATER]


def unfinished(folder: RunFolder) -> list[Path]:
    """Checkpoints that are being written, or whose writing was cut off."""
    return list(folder.checkpoints.glob("*tmp*"))


def wait_until(happens: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None and not happens():
        time.sleep(0.001)


def kill(moment: str, command: list[str], environment: dict[str, str], folder: RunFolder, draw: random.Random) -> None:
    """Start a process, and have it killed at such a moment."""
    later = lines_in(folder.metrics) + draw.randint(4, 9)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if moment == COMPILES:
            process.wait()  # It kills itself.
        elif moment == STARTS:
            time.sleep(draw.uniform(0, 5))
        else:
            wait_until(lambda: lines_in(folder.metrics) >= later, process)
            if moment == SAVES:
                wait_until(lambda: unfinished(folder), process)
            else:
                time.sleep(draw.uniform(0, 0.1))
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, moment


def how_to_go_on(folder: RunFolder) -> list[str]:
    if not folder.config.exists():
        return []
    has_saved = any(path.name.isdigit() for path in folder.checkpoints.glob("*"))
    return ["--resume" if has_saved else "--overwrite"]


@pytest.mark.parametrize(
    ("moments", "phase_steps"),
    [([SAVES], 10), pytest.param(TEN, 40, marks=pytest.mark.full)],
    ids=["once", "ten times"],
)
def test_a_run_that_was_killed_ends_with_the_bits_of_the_unbroken_one(tmp_path, moments, phase_steps):
    """In `make test` a process is killed once, as it saves; ten times are left to `make test-full`."""
    changes = {"warmup_steps": phase_steps, "grpo_steps": phase_steps, "checkpoint_every": 3}
    unbroken, broken = RunFolder(tmp_path / "unbroken"), RunFolder(tmp_path / "broken")
    start = [*tiny.options(**changes), "--out"]
    assert tiny.run_here(*start, unbroken.path) == 0
    draw = random.Random(43)
    environment = tiny.environment(tmp_path / "cache") | {"JAX_NUM_CPU_DEVICES": str(jax.device_count())}
    for i, moment in enumerate(moments):
        command = tiny.COMMAND
        if moment == COMPILES:  # Runs after this one find what it leaves there.
            environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / f"cache {i}")}
            command = [sys.executable, "-m", "tests.grpo.dies_in_cache", "grpo"]
        kill(moment, [*command, *start, str(broken.path), *how_to_go_on(broken)], environment, broken, draw)
        print(f"killed {moment}, after {lines_in(broken.metrics)} steps")
        assert moment != SAVES or unfinished(broken)
    assert tiny.run_here(*start, broken.path, *how_to_go_on(broken)) == 0
    assert_same_end(broken, unbroken, **changes)
    assert {path.name for path in broken.checkpoints.iterdir()} == {
        path.name for path in unbroken.checkpoints.iterdir()
    }
