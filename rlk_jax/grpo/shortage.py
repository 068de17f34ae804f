"""Running out of memory is bad input: one line says so, names the longest prompt and the options that help."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

from rlk_jax.grpo.config import BadInput

_SHOWN_CHARACTERS = 20
"""So many characters of a long text are shown."""


class Longest(NamedTuple):
    """The longest prompt and the longest answer of a task. All others are padded to them."""

    prompt: str
    answer: str


@contextmanager
def shortage_is_bad_input(longest: Longest) -> Iterator[None]:
    """Turn an error for want of memory, on the host or on a device, into BadInput."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise BadInput(_shortage(str(error) or "the host has no more", longest)) from error


def _shortage(reason: str, longest: Longest) -> str:
    prompt, answer = longest
    start = repr(prompt[:_SHOWN_CHARACTERS]) + ("…" if len(prompt) > _SHOWN_CHARACTERS else "")
    return (
        f"out of memory: {reason.partition('\n')[0]}; the longest prompt has {len(prompt)} tokens ({start}), the "
        f"longest answer {len(answer)}; --max-prompt-tokens (of a prompts file), --micro-batches, --rollout-buckets "
        "and --prompts-per-step make a step smaller, --vocab-size, --width and --layers the policy"
    )
