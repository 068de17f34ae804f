"""A part of many configurations in which every pair of their options still occurs, or every pair with one of them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairs(options: Mapping[str, Any], name: str | None = None) -> frozenset[tuple[str, ...]]:
    """All pairs of a configuration's options, as text: an option alone is a pair with itself. With a name, those alone
    that have this option.
    """
    if name is not None:
        return frozenset((f"{name}={options[name]}", f"{other}={value}") for other, value in options.items())
    texts = sorted(f"{name}={value}" for name, value in options.items())
    return frozenset(itertools.combinations_with_replacement(texts, 2))


def cover(configurations: Sequence[Mapping[str, Any]], name: str | None = None) -> list[int]:
    """The numbers of configurations that together have all `pairs` that any of them has.

    The next one is always the first of those that add most pairs, so that the same configurations give the same cover.
    """
    held, chosen = [pairs(options, name) for options in configurations], []
    missing = frozenset().union(*held)
    while missing:
        chosen.append(max(range(len(held)), key=lambda i: len(held[i] & missing)))
        missing -= held[chosen[-1]]
    return sorted(chosen)
