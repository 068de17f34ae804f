"""What processes say of a call before any of them goes on: a text of each, one message for all."""

import hashlib
from collections.abc import Callable, Sequence

TEXT_BYTES = 1024
"""Of what a process says; of more, the end is a hash, so that it differs where texts do."""


def encoded(text: str) -> bytes:
    """As many bytes for any text, for a collective."""
    data = text.encode()
    if len(data) > TEXT_BYTES:
        end = f" ... {hashlib.sha256(data).hexdigest()[:16]}".encode()
        data = data[: TEXT_BYTES - len(end)] + end
    return data.ljust(TEXT_BYTES, b"\0")


def decoded(data: bytes) -> str:
    """The text in what `encoded` gave."""
    return data.rstrip(b"\0").decode(errors="ignore")


def agreed[T](check: Callable[[], tuple[T, str]], everyone: Callable[[str], Sequence[str]]) -> tuple[T, Sequence[str]]:
    """What `check` found, and what each process said of it. `everyone` gives a process' text to all, in their order.

    Raises in every process the ValueError of the first of them whose check failed, whatever its error was: others must
    not wait for it.
    """
    found: list[T] = []
    problem: Exception | None = None
    try:
        own, text = check()
        found.append(own)
    except Exception as error:
        problem = error
        text = f"!{error}" if isinstance(error, ValueError) else f"!{type(error).__name__}: {error}"
    texts = everyone(text)
    failed = next((text[1:] for text in texts if text.startswith("!")), None)
    if isinstance(problem, ValueError) and str(problem) == failed:
        raise problem
    if failed is not None:
        raise ValueError(failed) from problem
    return found[0], texts


def require_same(texts: Sequence[str]) -> None:
    """ValueError where the processes' descriptions of their calls differ."""
    if len(set(texts)) > 1:
        raise ValueError("the processes call linear_logp differently: " + " | ".join(sorted(set(texts))))
