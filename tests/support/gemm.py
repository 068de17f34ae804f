"""What the tests of det_gemm share: random problems, their float64 gold, and the checks every implementation passes."""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax import det_gemm
from tests.support.helpers import assert_same_bits, assert_within_contract

DTYPES = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Case:
    """C `[*lead, m, n]` over k, with or without a C to start from."""

    name: str
    m: int
    k: int
    n: int
    transpose_b: bool = False
    lead: tuple[int, ...] = ()
    accumulates: bool = False
    out_dtype: Any = None
    integers: bool = False
    """Small ones, whose sums are exact: any order gives the same bits, a lost term does not."""

    def __str__(self) -> str:
        return self.name

    def result_dtype(self, dtype: Any) -> Any:
        return self.out_dtype or (jnp.float32 if self.accumulates else dtype)


class Problem(NamedTuple):
    """`g` is the upstream gradient of C."""

    a: jax.Array
    b: jax.Array
    start: jax.Array | None
    g: jax.Array


class Outputs(NamedTuple):
    c: Any
    d_a: Any
    d_b: Any
    d_start: Any


def make(case: Case, dtype: Any, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
        x = rng.integers(-2, 3, shape) if case.integers else rng.normal(size=shape) * scale
        return jnp.asarray(x, dtype)

    shape = (*case.lead, case.m, case.n)
    return Problem(
        a=draw((*case.lead, case.m, case.k), dtype),
        b=draw((case.n, case.k) if case.transpose_b else (case.k, case.n), dtype, max(case.k, 1) ** -0.5),
        start=draw(shape, jnp.float32) if case.accumulates else None,
        g=draw(shape, case.result_dtype(dtype)),
    )


def call(case: Case, p: Problem, implementation: str | None, **changes: Any) -> jax.Array:
    options = {"transpose_b": case.transpose_b, "out_dtype": case.out_dtype, "accumulate_into": p.start, **changes}
    return det_gemm(p.a, p.b, implementation=implementation, **options)


@functools.partial(jax.jit, static_argnums=(0, 2))
def outputs(case: Case, p: Problem, implementation: str | None) -> Outputs:
    """C and the gradients."""

    def run(a: jax.Array, b: jax.Array, start: jax.Array | None) -> jax.Array:
        return call(case, p._replace(a=a, b=b, start=start), implementation)

    c, pull_back = jax.vjp(run, p.a, p.b, p.start)
    return Outputs(c, *pull_back(p.g))


def gold(case: Case, p: Problem) -> Outputs:
    """In float64 NumPy; shares no code with the library."""
    a, b, g = (np.asarray(x, np.float64) for x in (p.a, p.b, p.g))
    start = None if p.start is None else np.asarray(p.start, np.float64)
    c = a @ (b.T if case.transpose_b else b)
    d_b = a.reshape(-1, case.k).T @ g.reshape(-1, case.n)
    return Outputs(
        c if start is None else start + c,
        g @ (b if case.transpose_b else b.T),
        d_b.T if case.transpose_b else d_b,
        None if start is None else g,
    )


def check_against_gold(case: Case, dtype: Any, implementation: str | None, exact_class: str) -> None:
    """`exact_class` is the contract's class of float32 results."""
    p = make(case, dtype)
    actual, expected = outputs(case, p, implementation), gold(case, p)
    is_exact = case.result_dtype(dtype) == jnp.float32
    assert actual.c.dtype == case.result_dtype(dtype)
    assert_within_contract(actual.c, expected.c, exact_class if is_exact else "det_gemm", dtype, "forward")
    for x, e in zip(actual[1:3], expected[1:3], strict=True):
        assert x.dtype == dtype
        assert_within_contract(x, e, "det_gemm", dtype, "gradient")
    if case.accumulates:
        assert_same_bits(actual.d_start, p.g.astype(jnp.float32))


def rows_of(p: Problem, index: Any) -> Problem:
    """The same problem with other rows, in another order."""
    return p._replace(a=p.a[index], g=p.g[index], start=None if p.start is None else p.start[index])


def check_rows(case: Case, dtype: Any, implementation: str | None, sizes: tuple[int, ...]) -> None:
    """Rows of C and dA do not depend on M, on their place or on their neighbours."""
    p = make(case, dtype)
    whole = outputs(case, p, implementation)
    for size in sizes:
        for index in (np.random.default_rng(size).permutation(case.m)[:size], np.arange(case.m - size, case.m)):
            part = outputs(replace(case, m=size), rows_of(p, index), implementation)
            assert_same_bits((part.c, part.d_a), (whole.c[index], whole.d_a[index]))


def check_cuts(case: Case, dtype: Any, implementation: str | None, cuts: tuple[int, ...]) -> None:
    """K cut at multiples of 64, and dB summed over blocks of rows cut there, rounded by the last part."""
    p = make(case, dtype)
    expected = outputs(case, p, implementation)
    parts = [slice(*x) for x in zip((0, *cuts), (*cuts, None), strict=True)]
    a, b = p.a, p.b.T if case.transpose_b else p.b

    def accumulated(x: jax.Array, y: jax.Array, cuts: list[slice], start: jax.Array | None, dtype: Any) -> jax.Array:
        """x·y over pieces of what is summed over."""
        for cut in cuts:
            out_dtype = dtype if cut is cuts[-1] else jnp.float32
            start = det_gemm(
                x[:, cut], y[cut], out_dtype=out_dtype, accumulate_into=start, implementation=implementation
            )
        return start

    assert_same_bits(accumulated(a, b, parts, p.start, case.result_dtype(dtype)), expected.c)
    d_b = accumulated(a.T, p.g.astype(dtype), parts, None, dtype)
    assert_same_bits(d_b.T if case.transpose_b else d_b, expected.d_b)


def check_appended_zero_rows(case: Case, dtype: Any, implementation: str | None, counts: tuple[int, ...]) -> None:
    p = make(case, dtype)
    expected = outputs(case, p, implementation).d_b
    for count in counts:
        behind = jax.tree.map(lambda x, count=count: jnp.pad(x, ((0, count), (0, 0))), (p.a, p.g))
        longer = p._replace(a=behind[0], g=behind[1])
        assert_same_bits(outputs(replace(case, m=case.m + count), longer, implementation).d_b, expected)


def check_empty(dtype: Any, implementation: str | None) -> None:
    """M, N or K of 0: empty, or zeros, or the C that was given; gradients too."""
    for m, k, n in ((0, 8, 5), (3, 0, 5), (3, 8, 0), (0, 0, 0)):
        for transpose_b in (False, True):
            for accumulates in (False, True):
                case = Case("empty", m, k, n, transpose_b, accumulates=accumulates)
                p = make(case, dtype)
                found = outputs(case, p, implementation)
                c = p.start if accumulates else jnp.zeros((m, n), dtype)
                assert_same_bits(
                    found, Outputs(c, jnp.zeros_like(p.a), jnp.zeros_like(p.b), p.g if accumulates else None)
                )
