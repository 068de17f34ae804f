"""Problems of attention, and its definition and gradients in float64, written without the code under test."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax.ops.attention.api import attention


@dataclass(frozen=True)
class Case:
    """A problem by its sizes and options; `first_slots` says where the sequences of a row begin."""

    batch: int = 2
    length: int = 21
    slots: int = 40
    heads: int = 4
    groups: int = 2
    size: int = 24
    value_size: int = 16
    start: int = 0
    padding: tuple[int, ...] | None = None
    segment_starts: tuple[tuple[int, ...], ...] | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    peak: float = 1.0
    """What queries are multiplied by; large ones make peaked rows."""

    def call_options(self) -> dict[str, Any]:
        """The keywords of `attention` that say where sequences are, and the case's own options."""
        places: dict[str, Any] = {"start": self.start}
        if self.padding is not None:
            places["padding"] = jnp.asarray(self.padding)
        if self.segment_starts is not None:
            places["segment_starts"] = jnp.asarray(self.segment_starts)
        return {**places, **self.options}


class Problem(NamedTuple):
    """The arrays of a call, and an upstream gradient of its output."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    upstream: jax.Array


def make(case: Case, dtype: Any, seed: int = 0) -> Problem:
    """A random problem."""
    rng = np.random.default_rng(seed)

    def draw(slots: int, heads: int, size: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal((case.batch, slots, heads, size)), dtype)

    return Problem(
        draw(case.length, case.heads, case.size, case.peak),
        draw(case.slots, case.groups, case.size),
        draw(case.slots, case.groups, case.value_size),
        draw(case.length, case.heads, case.value_size),
    )


class Found(NamedTuple):
    """The output and the gradients of query, key and value."""

    output: Any
    query: Any
    key: Any
    value: Any


def found(case: Case, problem: Problem, implementation: str) -> Found:
    """What the op gives."""

    def of_arrays(*arrays: jax.Array) -> jax.Array:
        return attention(*arrays, implementation=implementation, **case.call_options())

    output, pull_back = jax.vjp(of_arrays, *problem[:3])
    return Found(output, *pull_back(problem.upstream))


def gold(case: Case, problem: Problem) -> Found:
    """The definition in float64, query by query."""
    query, key, value, upstream = (np.asarray(x, np.float64) for x in problem)
    options = case.options
    scale, cap = options.get("scale", case.size**-0.5), options.get("logit_softcap")
    window = options.get("sliding_window", case.slots)
    output = np.zeros(upstream.shape)
    d_query, d_key, d_value = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    for b, t, h in np.ndindex(*query.shape[:3]):
        slot, g = case.start + t, h // (case.heads // case.groups)
        first = 0 if case.padding is None else case.padding[b]
        first = first if case.segment_starts is None else case.segment_starts[b][t]
        seen = slice(max(first, slot - window + 1), slot + 1)
        keys, values = key[b, seen, g], value[b, seen, g]
        if not len(keys):
            continue
        scores = keys @ query[b, t, h] * scale
        slope = np.ones_like(scores)
        if cap is not None:
            slope = 1 - np.tanh(scores / cap) ** 2
            scores = cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        output[b, t, h] = weights @ values
        d_weights = values @ upstream[b, t, h]
        d_scores = weights * (d_weights - weights @ d_weights) * slope * scale
        d_query[b, t, h] = d_scores @ keys
        d_key[b, seen, g] += np.outer(d_scores, query[b, t, h])
        d_value[b, seen, g] += np.outer(weights, upstream[b, t, h])
    return Found(output, d_query, d_key, d_value)
