"""Ctrl-C and SIGTERM as a request to stop, which the run answers between two steps. Imports neither jax nor flax."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class StopRequest:
    """The signal that asked the run to stop; None as long as there was none."""

    signal: int | None = None


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request to stop; the second one ends the process at once.

    It raises no KeyboardInterrupt, because JAX swallows one that is raised inside one of its callbacks.
    """
    request = StopRequest()

    def request_stop(number: int, _: Any) -> None:
        request.signal = number
        for name in previous:
            signal.signal(name, signal.SIG_DFL)
        os.write(2, b"\nstopping as soon as it is safe; once more stops at once\n")  # print is not safe here.

    previous = {name: signal.signal(name, request_stop) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
