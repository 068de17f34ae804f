"""Ctrl-C and SIGTERM as a request that the run answers where it can. Imports neither jax nor flax."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class StopRequest:
    """The signal that asked the run to stop, once there is one."""

    signal: int | None = None


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; the second one ends the process at once.

    A request and not KeyboardInterrupt, which JAX swallows when it is raised inside one of its callbacks.
    """
    request = StopRequest()

    def ask(number: int, _: Any) -> None:
        request.signal = number
        for name in previous:
            signal.signal(name, signal.SIG_DFL)
        os.write(2, b"\nstopping as soon as it is safe; once more stops at once\n")  # print is not safe in a handler

    previous = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
