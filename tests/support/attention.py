"""Problems of attention, what the op and its float64 definition give for them, and checks of the op's bits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax.checker.gold import attention_gold
from rlk_jax.ops.attention.api import attention
from tests.support.helpers import assert_same_bits


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
    """The definition in float64."""
    expected = attention_gold(*problem, **case.call_options())
    return Found(expected.output, expected.query, expected.key, expected.value)


def placed(problem: Problem, at: int, slots: int, batch: int = 1, row: int = 0, seed: int = 7) -> Problem:
    """The sequence of a problem of one row at slots `at`, …, among large other numbers."""
    rng = np.random.default_rng(seed)

    def put(x: jax.Array) -> jax.Array:
        around = (1e4 * rng.standard_normal((batch, slots, *x.shape[2:]))).astype(x.dtype)
        around[row, at : at + x.shape[1]] = x[0]
        return jnp.asarray(around)

    return Problem(*map(put, problem))


def check_bits_alone_in_a_batch_and_behind_padding(
    alone: Case, dtype: Any, implementation: str, places: Sequence[tuple[int, int, int]]
) -> None:
    """A sequence has the bits of being alone behind so many slots of padding, in so many slots, in a row of three."""
    problem, length = make(alone, dtype), alone.length
    expected = found(alone, problem, implementation)
    for before, slots, row in places:
        padding = tuple(before if i == row else i for i in range(3))
        case = replace(alone, batch=3, length=slots, slots=slots, padding=padding)
        actual = found(case, placed(problem, before, slots, batch=3, row=row), implementation)
        own = slice(before, before + length)
        assert_same_bits([x[row, own] for x in actual[:2]], [x[0] for x in expected[:2]])
        if slots == before + length:
            assert_same_bits([x[row, own] for x in actual[2:]], [x[0] for x in expected[2:]])


def check_bits_packed(alone: Case, dtype: Any, implementation: str, offsets: Sequence[int], behind: int = 12) -> None:
    """A sequence has the bits of being alone between two others, from any slot on; at least `behind` slots follow."""
    problem, length = make(alone, dtype), alone.length
    expected = found(alone, problem, implementation)
    slots = max(offsets) + length + behind
    for before in offsets:
        starts = (*(0,) * before, *(before,) * length, *(before + length,) * (slots - before - length))
        case = replace(alone, length=slots, slots=slots, segment_starts=(starts,))
        actual = found(case, placed(problem, before, slots), implementation)
        assert_same_bits([x[0, before : before + length] for x in actual], [x[0] for x in expected])


def check_query_gradients_in_parts(
    alone: Case, dtype: Any, implementation: str, parts: Sequence[int], slots: int
) -> None:
    """The gradients of queries that come in parts of such sizes have the bits of all at once."""
    problem, at = make(alone, dtype), 0
    whole = found(alone, problem, implementation).query
    key, value = (jnp.pad(x, ((0, 0), (0, slots - x.shape[1]), (0, 0), (0, 0))) for x in problem[1:3])
    for size in parts:
        own = slice(at, at + size)
        part = Problem(problem.query[:, own], key, value, problem.upstream[:, own])
        case = replace(alone, length=size, slots=slots, start=at)
        assert_same_bits(found(case, part, implementation).query, whole[:, own])
        at += size


def check_bits_in_parts(
    alone: Case, dtype: Any, implementation: str, parts: Sequence[Sequence[int]], slots: int
) -> None:
    """Queries that come in parts of such sizes, over a cache with NaN behind them, have the bits of all at once."""
    query, key, value, _ = make(alone, dtype)
    options = {"implementation": implementation, **alone.options}
    whole = attention(query, key, value, **options)
    part = jax.jit(lambda q, k, v, start: attention(q, k, v, start=start, **options))

    def cache(x: jax.Array, count: int) -> jax.Array:
        return jnp.full((1, slots, *x.shape[2:]), jnp.nan, x.dtype).at[:, :count].set(x[:, :count])

    for sizes in parts:
        at = 0
        for size in sizes:
            own, end = slice(at, at + size), at + size
            assert_same_bits(part(query[:, own], cache(key, end), cache(value, end), at), whole[:, own])
            at = end


def check_places_that_do_not_fit(case: Case, dtype, implementation: str) -> None:
    """Rows of the batch whose places do not fit have NaN outputs and NaN gradients of queries; others are as ever."""
    query, key, value, _ = make(case, dtype)
    batch, length = query.shape[:2]

    def loss(query, options):
        output = attention(query, key, value, implementation=implementation, **options)
        return output.astype(jnp.float32).sum(), output

    @jax.jit
    def spoilt(start, **places):
        gradient, output = jax.grad(loss, has_aux=True)(query, {"start": start, **places})
        return [jnp.isnan(x).all(axis=(1, 2, 3)) for x in (output, gradient)], jnp.isnan(output).any(axis=(1, 2, 3))

    def check(expected, start, **places):
        for found in jax.tree.leaves(spoilt(start, **places)):
            np.testing.assert_array_equal(found, expected)

    negative = jnp.zeros((batch, length), int).at[1, 0].set(-1)
    check([True, False], 0, padding=jnp.array([key.shape[1] + 1, 0]))
    check([False, True], 0, segment_starts=negative)
    for start in (-1, key.shape[1] - length + 1):
        check([True, True], start, padding=jnp.array([0, 0]))
        check([True, True], start, segment_starts=jnp.zeros_like(negative))
