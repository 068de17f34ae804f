"""Speed and memory of a run. They are printed only: in its files they would make equal runs differ."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import jax


@dataclass
class Throughput:
    """Active tokens per second of each phase. The time of checkpoints and display counts; the first step of a phase in
    this process does not, because it compiles.
    """

    _started: dict[str, float] = field(default_factory=dict)
    _tokens: dict[str, float] = field(default_factory=dict)
    per_second: dict[str, float] = field(default_factory=dict)
    """By phase; only phases that had a second step are in it."""

    def add(self, phase: str, tokens: float, now: float) -> None:
        """Count a step of so many tokens that ended at the time `now`, in seconds."""
        if phase not in self._started:
            self._started[phase], self._tokens[phase] = now, 0.0
            return
        self._tokens[phase] += tokens
        self.per_second[phase] = self._tokens[phase] / (now - self._started[phase])


def in_gib(size: int) -> str:
    """Bytes as a number of GiB, for a table that names the unit."""
    return f"{size / 2**30:.2f}"


def gib(size: int) -> str:
    """Bytes as text, in GiB."""
    return f"{in_gib(size)} GiB"


def peak_memory(devices: Iterable[jax.Device]) -> int | None:
    """The most bytes that one of the devices has held at a time; None where the backend does not count them, as on a
    CPU.
    """
    counted = [stats["peak_bytes_in_use"] for device in devices if (stats := device.memory_stats())]
    return max(counted, default=None)
