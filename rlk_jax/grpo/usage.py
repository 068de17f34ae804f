"""Speed and memory of a run. They are printed only: in its files they would make equal runs differ."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Unit(NamedTuple):
    """A unit of memory."""

    name: str
    size: int
    """Its bytes."""

    def number(self, size: int) -> str:
        """Bytes as a number of this unit."""
        return f"{size / self.size:.2f}"


GIB = Unit("GiB", 2**30)
_UNITS = (GIB, Unit("MiB", 2**20), Unit("KiB", 2**10))


def unit_of(size: int) -> Unit:
    """The largest unit of which so many bytes are at least one; KiB for less."""
    return next((unit for unit in _UNITS if size >= unit.size), _UNITS[-1])


def size_text(size: int) -> str:
    """Bytes as text, in their own unit."""
    unit = unit_of(size)
    return f"{unit.number(size)} {unit.name}"


def peak_memory(devices: Iterable[jax.Device]) -> int | None:
    """The most bytes that one of the devices has held at a time; None where the backend does not count them, as on a
    CPU.
    """
    counted = [stats["peak_bytes_in_use"] for device in devices if (stats := device.memory_stats())]
    return max(counted, default=None)
