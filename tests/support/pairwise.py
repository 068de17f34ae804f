"""A part of many configurations in which every pair of their options still occurs."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairs(options: Mapping[str, Any]) -> frozenset[tuple[str, ...]]:
    """All options of a configuration, as text, and all pairs of them: an option alone is a pair with itself."""
    texts = sorted(f"{name}={value}" for name, value in options.items())
    return frozenset(itertools.combinations_with_replacement(texts, 2))


def cover(configurations: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of configurations that together have every pair of options that any of them has.

    The next one is always the first of those that add most pairs, so that the same configurations give the same cover.
    """
    held, chosen = [pairs(options) for options in configurations], []
    missing = frozenset().union(*held)
    while missing:
        chosen.append(max(range(len(held)), key=lambda i: len(held[i] & missing)))
        missing -= held[chosen[-1]]
    return sorted(chosen)
