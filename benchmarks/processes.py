"""Benchmarks whose candidates run in processes of their own: JAX and torch keep the memory that they once took."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def in_own_process[T](function: Callable[..., T], *arguments: Any) -> T | str:
    """What `function` returns in a new process, or how the process died."""
    processes = multiprocessing.get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    child = processes.Process(target=_send, args=(sender, function, *arguments), daemon=True)
    child.start()
    sender.close()  # The child now holds the only sender: if it dies, `recv` raises EOFError.
    try:
        found: T | None = receiver.recv()
    except EOFError:
        found = None
    child.join()
    return f"died: exit code {child.exitcode}" if found is None else found


def _send(sender: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    sender.send(function(*arguments))
