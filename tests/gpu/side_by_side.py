"""Runs the tests of this folder in many processes for a limited time: python -m tests.gpu.side_by_side --help.

A test spends most of its time compiling on the CPU, so that as many processes share a GPU as the machine has cores. A
process prints each failure when it happens; what the limit cuts off is listed as left, for another run. Tests of Triton
come last, since their kernels take longest to compile.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

_VERDICT = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)", re.MULTILINE)
_PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: processes that the limit ends print no summary. Each of them loads this as a plugin."""
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext[-2500:]}", flush=True)


def collected(arguments: Sequence[str]) -> list[str]:
    """The ids of the tests that pytest finds with these arguments, those of Triton last."""
    found = subprocess.run([*_PYTEST, "--collect-only", "-q", *arguments], capture_output=True, text=True)
    ids = [line for line in found.stdout.splitlines() if "::" in line]
    if not ids:
        raise SystemExit(f"pytest finds no tests: {found.stdout[-2000:]}{found.stderr[-2000:]}")
    return sorted(ids, key=lambda x: "triton" in x)


def run(ids: Sequence[str], processes: int, seconds: float) -> str:
    """What pytest prints of these tests, dealt in turn to so many processes that are ended after so many seconds."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_NUM_THREADS": "2"}
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(i) for i in range(min(processes, len(ids)))]
        begun = []
        for i, log in enumerate(logs):
            command = [*_PYTEST, "-v", "--tb=no", "-p", __spec__.name, *ids[i :: len(logs)]]
            with log.open("w") as out:
                begun.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        for process in begun:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        return "\n".join(log.read_text(errors="replace") for log in logs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.side_by_side", description=__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=500.0, help="the limit, for all tests together")
    options, arguments = parser.parse_known_args(argv)
    ids = collected(arguments or ["tests/gpu"])
    text = run(ids, options.processes, options.seconds)
    verdicts = dict(_VERDICT.findall(text))
    failed = [name for name, verdict in verdicts.items() if verdict in ("FAILED", "ERROR")]
    left = [name for name in ids if name not in verdicts]
    print(text)
    print(*(f"left: {name}" for name in left), *(f"FAILED: {name}" for name in failed), sep="\n")
    print(f"{len(ids)} tests: {dict(Counter(verdicts.values()))}, {len(left)} left")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
