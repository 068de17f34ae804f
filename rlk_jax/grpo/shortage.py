"""Running out of memory is bad input: one line says so, and what helps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

from rlk_jax.grpo.config import BadInput

_SHOWN_CHARACTERS = 20
"""So many characters of a long text are shown."""


class Longest(NamedTuple):
    """The longest prompt of a task, its tokens, and those of the longest completion. All others are padded to them."""

    prompt: str
    prompt_tokens: int
    completion_tokens: int
    remedies: str
    """The options that make a run smaller."""

    @property
    def advice(self) -> str:
        """What to do about a step of training that needs too much memory."""
        return (
            f"the longest prompt has {self.prompt_tokens} tokens ({start_of(self.prompt)}), the longest answer "
            f"{self.completion_tokens}; {self.remedies}"
        )


def start_of(text: str) -> str:
    """How a text begins, in quotes and in one line."""
    return repr(text[:_SHOWN_CHARACTERS]) + ("…" if len(text) > _SHOWN_CHARACTERS else "")


@contextmanager
def shortage_is_bad_input(advice: str) -> Iterator[None]:
    """Turn an error for want of memory, on the host or on a device, into BadInput."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = (str(error) or "the host has no more").partition("\n")[0]
        raise BadInput(f"out of memory: {reason}; {advice}") from error
