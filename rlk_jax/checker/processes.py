"""Several processes of one JAX program on this machine: started together, watched, and none left behind."""

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
"""After the first failure, for the others to fail by themselves: their messages say more than a signal."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Finished:
    """One process that has ended, by itself or by a signal (a negative code)."""

    code: int
    stdout: str
    stderr: str
    killed: bool = False
    """By us: it had not ended when time was up, or long after another one had failed."""


def free_port() -> int:
    """A port of the loopback device that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_together(arguments: Sequence[Sequence[str]], *, timeout_s: float) -> list[Finished]:
    """Runs `python *arguments[i]` for every i at once; what has not ended by itself in time is killed.

    Once one has failed, the others have a quarter of a minute left: a rank that waits for a dead one waits for ever.
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
    with stdout.open("wb") as out, stderr.open("wb") as err:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen([sys.executable, *arguments], stdout=out, stderr=err, env=environment)


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended, or the deadline, which a failure brings nearer."""
    failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if not failed and any(codes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
