"""Real processes over jax.distributed on the loopback device have the bits of one process, and one rank's mistake gives
all of them one message.
"""

import argparse
import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from rlk_jax import linear_logp
from rlk_jax.checker import check_tp
from rlk_jax.checker import processes as checker_processes
from rlk_jax.checker.processes import Finished, free_port, run_together
from tests.support import helpers, rank


def processes(*tasks: str, count: int) -> list[Finished]:
    coordinator = f"127.0.0.1:{free_port()}"
    ranks = (["-m", "tests.support.rank", coordinator, str(count), str(index), *tasks] for index in range(count))
    return run_together(list(ranks), timeout_s=helpers.HANG_S)


MISTAKES = {
    "bad target": "ValueError: target_ids out of range: expected [0, 999], got [",
    "wrong bias": "ValueError: bias must have V=1024 elements, got shape (960,)",
    "wrong shard": "ValueError: bias must have V=512 elements, got shape (1024,)",
    "wrong dtype": "ValueError: the processes call linear_logp differently: ",
    "temperature": "ValueError: the processes call linear_logp differently: ",
    "validate": "ValueError: the processes call linear_logp differently: ",
    "mask": "ValueError: the processes call linear_logp differently: ",
    "mask without targets": "ValueError: target_ids must be allowed: they are not in rows 0 to 11 of the flat tokens.",
    "cut masks": "ValueError: validate=True reads allowed_ids and allowed_mask in arrays of one process alone.",
    "unknown option": "ValueError: TypeError: vocab_parallel.linear_logp() got an unexpected keyword argument ",
    "bare": "ValueError: target_ids out of range: expected [0, 999], got [-7, ",
    "grad outside jit": "ValueError: target_ids out of range: expected [0, 999], got [",
    "token axes": "ValueError: the processes call linear_logp differently: ",
    "layout": "ValueError: the processes call linear_logp differently: ",
    "temperatures": "ValueError: the processes call linear_logp differently: ",
    "cut temperatures": "ValueError: temperature must be positive and finite, got values in [",
    "temperatures cut otherwise": "ValueError: validate=True needs a temperature that lies as target_ids do",
    "strict": "ValueError: RLK_STRICT=1: 2 shards of 500 columns do not end where",
    "bare, implementation": "ValueError: implementation must be one of ",
}
"""Tasks of tests/support/rank.py in which one process makes a mistake, and the message that all processes raise."""
UNCAUGHT = "bad target"
RIGHT = ("none", "cut tokens")
"""Tasks in which no process makes a mistake."""


@pytest.fixture(scope="module")
def two_processes() -> list[Finished]:
    """Two processes that do the tasks without a mistake and go from one mistake to the next: after each one, both have
    left the call that raised. Nobody catches the last error.
    """
    return processes(*RIGHT, *MISTAKES, UNCAUGHT, count=2)


@pytest.fixture(scope="module")
def four_processes() -> list[Finished]:
    """Four processes that do the tasks without a mistake."""
    return processes(*RIGHT, count=4)


# Two processes catch in `make test` what is wrong with processes; degrees of 4 and 8 have test_vocab_parallel.py.
FINISHED = ["two_processes", pytest.param("four_processes", marks=pytest.mark.full)]


@pytest.mark.parametrize("finished", FINISHED)
def test_processes_have_the_bits_of_one(finished, request):
    expected = rank.hashes(
        helpers.make(rank.CASE, jax.numpy.bfloat16), Mesh(np.asarray(jax.devices("cpu")[:1]), ("tp",))
    )
    for process in request.getfixturevalue(finished):
        printed = dict(line.split() for line in process.stdout.splitlines() if line.split()[0] in expected)
        assert printed == expected, process.stderr


@pytest.mark.parametrize("finished", FINISHED)
def test_tokens_that_lie_over_processes(finished, request):
    """Ids are cut and temperatures are whole: each process checks the tokens that it holds."""
    p = helpers.make(rank.CASE, jax.numpy.bfloat16)
    options = {"temperature": rank.TEMPERATURES, "implementation": "deterministic"}
    logp = np.asarray(linear_logp(p.hidden, p.weight, p.target_ids, **options))
    for process in request.getfixturevalue(finished):
        assert f"cut {hashlib.sha256(logp.tobytes()).hexdigest()}" in process.stdout, process.stderr


@pytest.mark.parametrize("task", MISTAKES)
def test_one_rank_s_mistake_raises_its_message_in_all(task, two_processes):
    for process in two_processes:
        said = dict(kv for line in process.stdout.splitlines() if line[:1] == "{" for kv in json.loads(line).items())
        assert MISTAKES[task] in said.get(task, ""), process.stderr


def test_one_rank_s_mistake_ends_all(two_processes):
    """An error that nobody catches ends every process by itself, without a signal."""
    for process in two_processes:
        assert process.code == 1, (process.code, process.stderr)
        assert MISTAKES[UNCAUGHT] in process.stderr


@pytest.mark.full
def test_processes_without_a_mistake_end(four_processes):
    """In `make test`, test_local_processes (test_check_tp.py) catches processes that do not end."""
    assert [process.code for process in four_processes] == [0] * 4


def test_a_check_with_other_options_in_one_process_ends_both():
    parser = argparse.ArgumentParser()
    check_tp.add_parser(parser.add_subparsers())
    options = vars(parser.parse_args(["check-tp", "--tokens", "8", "--hidden-size", "8", "--vocab-size", "64"]))
    given = {name: x for name, x in options.items() if name != "run"} | {
        "coordinator": f"127.0.0.1:{free_port()}",
        "process_count": 2,
    }
    commands = [
        ["-m", "rlk_jax.checker.check_tp", json.dumps({**given, "process_id": i, "run_stress": bool(i)})]
        for i in range(2)
    ]
    for process in run_together(commands, timeout_s=helpers.HANG_S):
        assert process.code == 2 and "the processes were started with different options" in process.stderr


def test_a_hanging_process_is_killed_after_another_fails(monkeypatch):
    monkeypatch.setattr(checker_processes, "_GRACE_S", 1.0)
    finished = run_together(
        [["-c", "raise SystemExit(3)"], ["-c", "import time; time.sleep(600)"]], timeout_s=helpers.HANG_S
    )
    assert [process.code for process in finished] == [3, -9]


def test_a_terminated_check_leaves_no_process_behind():
    command = [sys.executable, "-m", "rlk_jax.cli", "check-tp", "--processes", "2", "--tokens", "7919"]
    check = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def children() -> list[bytes]:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # Any process may end before it is read.
                lines.append(path.read_bytes())
        return [line for line in lines if b"rlk_jax.checker.check_tp" in line and b"7919" in line]

    until = time.monotonic() + helpers.HANG_S
    while len(children()) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    check.send_signal(signal.SIGTERM)
    assert check.wait(helpers.HANG_S) == 128 + signal.SIGTERM
    assert not children()
