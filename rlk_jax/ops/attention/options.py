"""What a call of attention carries: its arrays, its options, and what every implementation takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Array = jax.Array


class AttentionInputs(NamedTuple):
    """One call's arrays as the user shaped them: query `[B, T, H, E]`, key `[B, S, G, E]`, value `[B, S, G, F]`, start
    `[]`, padding `[B]` or None, segment_starts `[B, T]` or None.
    """

    query: Any
    key: Any
    value: Any
    start: Any
    padding: Any
    segment_starts: Any


@dataclass(frozen=True)
class AttentionOptions:
    """The options of one call as the user gave them: every static keyword of `attention`, which documents them."""

    scale: float | None = None
    sliding_window: int | None = None
    logit_softcap: float | None = None
    validate: bool | None = None
    implementation: str | None = None


@dataclass(frozen=True)
class AttentionConfig:
    """The static facts of one call that an implementation is compiled for."""

    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    value_size: int
    """Columns of a value."""
    holds_several: bool
    """Whether a row of the batch may hold several sequences."""
    is_whole: bool
    """Whether every row is known to be one whole sequence: it begins in slot 0 and has a query for each slot."""


class Places(NamedTuple):
    """Where queries and their sequences are among the slots, in range whatever the caller gave.

    first_slots, int32 `[B]` where a row holds one sequence and `[B, T]` where it may hold several: the first slot of
    the sequence of each query. A query before it is padding. is_good `[B]`: whether the caller's values were in range.
    """

    first_slots: Array
    is_good: Array


class Operands(NamedTuple):
    """query `[B, T, H, E]`, key `[B, S, G, E]`, value `[B, S, G, F]`, all of one 16-bit dtype, and their places.

    start, int32 `[]`, is the slot of the first query.
    """

    query: Array
    key: Array
    value: Array
    start: Any
    places: Places

    @property
    def group_heads(self) -> int:
        """How many query heads share a key head."""
        return self.query.shape[2] // self.key.shape[2]


@dataclass(frozen=True)
class Needs:
    """Which operands need a gradient; the others cost no work."""

    query: bool
    key: bool
    value: bool


class Gradients(NamedTuple):
    """Gradients in their operands' shapes and dtypes; None where none is needed."""

    query: Array | None
    key: Array | None
    value: Array | None


@dataclass(frozen=True)
class AttentionFunctions:
    """One implementation. `forward` gives the output `[B, T, H, F]` in query's dtype, and a tree of arrays `[B, ...]`
    that `gradients` is given along with the output's upstream gradient. In rows of the batch whose places are not good,
    the output is NaN, and so is the gradient of what queries see there.
    """

    forward: Callable[[AttentionConfig, Operands], tuple[Array, Any]]
    gradients: Callable[[AttentionConfig, Needs, Operands, Any, Array], Gradients]


def by_key_head(x: Array, groups: int) -> Array:
    """`[B, T, H, E]` as `[B, T, G, H / G, E]`: query heads by the key head that they share, in order."""
    return x.reshape(*x.shape[:2], groups, -1, x.shape[3])
