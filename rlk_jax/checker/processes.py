"""Run several Python processes on this machine together, as the ranks of one JAX program, and leave none behind."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GRACE_S = 15.0
"""Seconds that the other processes get after the first failure to end by themselves, because then they say why."""
_POLL_S = 0.05
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class Finished:
    """One process that has ended. Its exit code is negative where a signal ended it."""

    code: int
    stdout: str
    stderr: str
    killed: bool = False
    """Whether `run_together` killed it, because time was up or because it still ran long after another one failed."""


def free_port() -> int:
    """A port of the loopback device that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_together(arguments: Sequence[Sequence[str]], *, timeout_s: float) -> list[Finished]:
    """Run `python *arguments[i]` for every i at once, and kill those that have not ended after `timeout_s` seconds.

    After the first failure the others have 15 seconds left, because a rank that waits for a dead rank waits for ever.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [(Path(folder, f"{i}.out"), Path(folder, f"{i}.err")) for i in range(len(arguments))]
        started = [_start(command, *paths) for command, paths in zip(arguments, logs, strict=True)]
        try:
            _wait(started, time.monotonic() + timeout_s)
        finally:
            left = [process.poll() is None for process in started]
            for process in started:
                process.kill()
                process.wait()
        return [
            Finished(process.returncode, out.read_text(errors="replace"), err.read_text(errors="replace"), killed)
            for process, (out, err), killed in zip(started, logs, left, strict=True)
        ]


def _start(arguments: Sequence[str], stdout: Path, stderr: Path) -> subprocess.Popen[bytes]:
    """Start one process, whose output goes to these files."""
    with stdout.open("wb") as out, stderr.open("wb") as err:
        # Python's fault handler prints where a process dies in native code.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        return subprocess.Popen([sys.executable, *arguments], stdout=out, stderr=err, env=environment)


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait until all have ended, or until the deadline. A failure brings the deadline nearer."""
    failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if not failed and any(codes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
