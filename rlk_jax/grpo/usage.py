"""Speed and memory of a run: shown, and never written where equal runs give equal files."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import jax


@dataclass
class Throughput:
    """Active tokens per second of each phase, with all that it costs but its first step here, which compiles."""

    _started: dict[str, float] = field(default_factory=dict)
    _tokens: dict[str, float] = field(default_factory=dict)
    per_second: dict[str, float] = field(default_factory=dict)
    """Of phases with a second step."""

    def add(self, phase: str, tokens: float, now: float) -> None:
        """A step of so many tokens has ended `now`, in seconds."""
        if phase not in self._started:
            self._started[phase], self._tokens[phase] = now, 0.0
            return
        self._tokens[phase] += tokens
        self.per_second[phase] = self._tokens[phase] / (now - self._started[phase])


def peak_memory(devices: Iterable[jax.Device]) -> int | None:
    """The most bytes that one of the devices held at a time; None where the backend does not count, as on a CPU."""
    counted = [stats["peak_bytes_in_use"] for device in devices if (stats := device.memory_stats())]
    return max(counted, default=None)
