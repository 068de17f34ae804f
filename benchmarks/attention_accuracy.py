"""Errors of attention's outputs and gradients: python -m benchmarks.attention_accuracy --help.

An error is the relative norm ‖found − exact‖ / ‖exact‖; what is exact comes from the definition in float64 and JAX's
gradients of it. "peaked" data has queries so large that one weight of a row is much larger than the others.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from benchmarks import common
from benchmarks.argument_types import some_of
from benchmarks.attention_peers import CUDNN, IN_JAX, Attend, Sizes, attend_by
from rlk_jax.core.dispatch import IMPLEMENTATIONS

SIZES = Sizes(2, 1024, 1024, 16, 4, 128)
SMOKE_SIZES = Sizes(1, 16, 16, 4, 2, 16)
PEAKS = {"plain": 1.0, "peaked": 12.0}
"""What the queries of each kind of data are multiplied by."""
RESULTS = ("output", "d_query", "d_key", "d_value")


@dataclass(frozen=True)
class Row:
    """The errors of one implementation on one kind of data."""

    dtype: str
    implementation: str
    data: str
    status: str
    output: float | None = None
    d_query: float | None = None
    d_key: float | None = None
    d_value: float | None = None


class Problem(NamedTuple):
    """The arrays of a causal call on whole sequences, and an upstream gradient of its output."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    upstream: jax.Array


def make_problem(sizes: Sizes, dtype: str, peak: float) -> Problem:
    """Random arrays."""
    keys = jax.random.split(jax.random.key(1), 4)

    def draw(which: int, heads: int) -> jax.Array:
        return jax.random.normal(keys[which], (sizes.batch, sizes.length, heads, sizes.size), dtype)

    query = (peak * draw(0, sizes.heads)).astype(dtype)
    return Problem(query, draw(1, sizes.groups), draw(2, sizes.groups), draw(3, sizes.heads))


def output_and_gradients(attend: Attend) -> Callable[[Problem], list[np.ndarray]]:
    """A function that returns the output and the gradients of query, key and value, in float64."""

    @jax.jit
    def run(problem: Problem) -> Any:
        output, pull_back = jax.vjp(attend, *problem[:3])
        return output, *pull_back(problem.upstream)

    return lambda problem: [np.asarray(x, np.float64) for x in run(problem)]


def definition(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """softmax(query·keyᵀ / √E)·value over the keys up to a query's own."""
    batch, length, groups, size = key.shape
    by_group = query.reshape(batch, length, groups, -1, size)
    scores = jnp.einsum("btgre,bsge->bgrts", by_group, key) * size**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bgrts,bsge->btgre", weights, value).reshape(query.shape)


def exact(problems: Sequence[Problem]) -> list[list[np.ndarray]]:
    """The output of `definition` and JAX's own gradients of it, in float64."""
    with jax.enable_x64(True):
        found = output_and_gradients(definition)
        return [found(Problem(*(jnp.asarray(np.asarray(x, np.float64)) for x in problem))) for problem in problems]


def measure(dtype: str, implementations: Sequence[str], sizes: Sizes) -> list[Row]:
    """The errors of all implementations; one that cannot run here has a status that says why."""
    problems = [make_problem(sizes, dtype, peak) for peak in PEAKS.values()]
    expected = exact(problems)

    def errors(name: str) -> list[Row]:
        found = output_and_gradients(attend_by(name, sizes, None))
        pairs = [zip(found(problem), e, strict=True) for problem, e in zip(problems, expected, strict=True)]
        return [
            Row(dtype, name, data, "pass", *(_relative_error(*x) for x in pair))
            for data, pair in zip(PEAKS, pairs, strict=True)
        ]

    rows = []
    for name in implementations:
        print(f"measuring {name} …", file=sys.stderr)
        found = common.attempt(functools.partial(errors, name))
        rows += [Row(dtype, name, "", found.status)] if isinstance(found, common.Failure) else found
    return rows


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def _show(rows: Sequence[Row], sizes: Sizes) -> None:
    table = Table("data", "implementation", "output", "dQ", "dK", "dV")
    for r in rows:
        errors = [x for name in RESULTS if (x := getattr(r, name)) is not None]
        table.add_row(r.data, r.implementation, *(f"{x:.2e}" for x in errors) if errors else (r.status,))
    shape = ",".join(map(str, sizes))
    common.show(f"errors of attention, {rows[0].dtype}, B,T,S,H,G,E = {shape}, {jax.devices()[0].device_kind}", table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_accuracy", description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=common.DTYPES[:2])
    names = some_of((*IMPLEMENTATIONS, *IN_JAX))
    parser.add_argument("--implementations", type=names, default=f"mosaic,{CUDNN}", help="comma-separated names")
    options = common.add_outputs(parser).parse_args(argv)
    sizes = SMOKE_SIZES if options.smoke else SIZES
    rows = measure(options.dtype, options.implementations, sizes)
    _show(rows, sizes)
    if options.json:
        common.write(options.json, "attention_accuracy", argv, rows, timing="not timed")
    bars = ((r.data, f"{name}: {r.implementation}", getattr(r, name)) for r in rows for name in RESULTS)
    common.plot(options.plot, bars, "relative error")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
