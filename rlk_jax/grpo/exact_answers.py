"""The built-in reward functions, which compare completions with the column `answer`."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple

from rlk_jax.grpo.json_lines import JSON_KINDS

_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
"""Digits, with thousands commas and decimals; a sign belongs to them where it does not follow a word or a number."""


class BuiltIn(NamedTuple):
    """A reward function of this package."""

    function: Callable[..., list[float]]
    read_answer: Callable[[Any], Any]
    """Makes of a row's answer what completions are compared with. Raises ValueError where the answer is none."""


def exact(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    """1 for each completion that is the answer, both without the white space around them; 0 for others."""
    return [float(text.strip() == _answer_text(own)) for text, own in zip(completions, answer, strict=True)]


def last_number(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    """1 for each completion whose last number is the last one of the answer; 0 for others. 43 and 43.0 are equal."""
    return [float(_last_number_in(text) == _answer_number(own)) for text, own in zip(completions, answer, strict=True)]


def _answer_text(answer: Any) -> str:
    """An answer as a text without the white space around it."""
    if isinstance(answer, bool) or not isinstance(answer, str | Real):
        kind = JSON_KINDS.get(type(answer), type(answer).__name__)
        raise ValueError(f'"answer" must be a string or a number, got {kind}')
    text = str(answer).strip()
    if isinstance(answer, Real) and not Decimal(text).is_finite():
        raise ValueError(f'"answer" must be finite, got {text}')
    if not text:
        raise ValueError('"answer" must not be empty')
    return text


def _answer_number(answer: Any) -> Decimal:
    """An answer as a number: a JSON number itself, the last number of a text."""
    text = _answer_text(answer)
    number = _last_number_in(text) if isinstance(answer, str) else Decimal(text)
    if number is None:
        raise ValueError('"answer" holds no number')
    return number


def _last_number_in(text: str) -> Decimal | None:
    """The last number of a text, exactly as it is written, or None where there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


BUILT_INS = {"exact": BuiltIn(exact, _answer_text), "last_number": BuiltIn(last_number, _answer_number)}
"""The built-in reward functions, by the name that stands for each in `--reward`."""
