"""`rlk prompts arithmetic`: a prompts file of sums for `rlk grpo --model`, one JSON object a line."""

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from string import Formatter
from typing import Any

from rlk_jax.grpo.config import BadInput

_LARGEST_OPERAND = 10**9
"""So that `random.sample` can count the sums."""
_MOST_UNASKED = 1000
"""How many sums are written where --count is not given and there are so many."""


@dataclass(frozen=True)
class Sums:
    """Which sums are asked, and how."""

    count: int | None
    """How many; None for `_MOST_UNASKED`, or all where there are fewer."""
    min_operand: int
    max_operand: int
    seed: int
    template: str
    plain: bool
    """Whether a prompt is a text instead of a chat of one message."""

    def __post_init__(self) -> None:
        if self.min_operand > self.max_operand:
            raise BadInput(f"--min-operand {self.min_operand} is greater than --max-operand {self.max_operand}")
        if max(-self.min_operand, self.max_operand) > _LARGEST_OPERAND:
            raise BadInput(f"operands must be within -{_LARGEST_OPERAND}..{_LARGEST_OPERAND}")
        if self.count is not None and self.count < 1:
            raise BadInput(f"--count must be at least 1, got {self.count}")
        if self.count is not None and self.count > self.available:
            operands = f"{self.min_operand}..{self.max_operand}"
            raise BadInput(f"--count {self.count} is more than the {self.available} sums of operands in {operands}")
        _check_template(self.template)

    @property
    def available(self) -> int:
        """How many sums there are, where a + b and b + a are one."""
        operands = self.max_operand - self.min_operand + 1
        return operands * (operands + 1) // 2

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows, in an order that the seed draws. a + b and b + a are one sum and come in one of the two orders, so
        that rows cut off for evaluation ask no sum of the others.
        """
        draw = random.Random(self.seed)
        count = min(_MOST_UNASKED, self.available) if self.count is None else self.count
        for place in draw.sample(range(self.available), count):
            a, b = (self.min_operand + x for x in draw.sample(_low_and_high(place), 2))
            question = self.template.format(a=a, b=b)
            prompt = question if self.plain else [{"role": "user", "content": question}]
            yield {"prompt": prompt, "answer": str(a + b), "a": a, "b": b}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `prompts`, with a parser for each kind of prompts."""
    description = "Write prompts with answers as JSON lines, for rlk grpo --prompts."
    kinds = subparsers.add_parser("prompts", help=description, description=description)
    described = "Distinct sums of two numbers, with their answers."
    parser = kinds.add_subparsers(required=True).add_parser("arithmetic", help=described, description=described)
    count_help = f"how many sums (default: {_MOST_UNASKED}, or all where there are fewer)"
    parser.add_argument("--count", type=int, help=count_help)
    parser.add_argument("--min-operand", type=int, default=0, help="smallest operand (default: %(default)s)")
    parser.add_argument("--max-operand", type=int, default=99, help="largest operand (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sums and their order (default: %(default)s)")
    question = "What is {a} + {b}? Answer with the number only."
    parser.add_argument("--template", default=question, help="the question (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="prompts are texts, not chats for the model's template")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the rows. Raises BadInput for sums that cannot be asked."""
    for row in Sums(**{option.name: getattr(options, option.name) for option in fields(Sums)}).rows():
        print(json.dumps(row))
    return 0


def _low_and_high(place: int) -> tuple[int, int]:
    """The pair (low, high) of numbers from 0 on at this place, in the order of high, and of low for equal ones."""
    high = (math.isqrt(8 * place + 1) - 1) // 2
    return place - high * (high + 1) // 2, high


def _check_template(template: str) -> None:
    """Raise BadInput where a template is not for a sum of {a} and {b}."""
    try:
        named = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        if named == {"a", "b"}:
            template.format(a=1, b=1)
            return
        reason = f"it has {', '.join(f'{{{x}}}' for x in sorted(named)) or 'neither'}"
    except (ValueError, LookupError) as error:
        reason = str(error)
    raise BadInput(f"--template must have {{a}} and {{b}} where the operands stand: {reason}")
