"""det_gemm's kernel."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.tiles import gemm_plan
from pallas_kernels.mosaic.gemm import gemm
from tests.pallas_kernels.mosaic.configurations import MACHINE, Configuration


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One configuration of det_gemm's kernel, whose sizes pick the tile."""

    m: int
    n: int
    k: int
    a_transposed: bool = False
    b_transposed: bool = False
    accumulates: bool = False
    out_dtype: Any = jnp.bfloat16
    dtype: Any = jnp.bfloat16

    @property
    def plan(self) -> Any:
        options = {"a_transposed": self.a_transposed, "accumulates": self.accumulates}
        return gemm_plan(self.m, self.n, MACHINE.sm_count, **options)

    def configuration(self) -> Configuration:
        def run(a, b, start):
            options = {"a_transposed": self.a_transposed, "b_transposed": self.b_transposed}
            return gemm(a, b, start, **options, out_dtype=self.out_dtype, machine=MACHINE)

        a, b = (self.m, self.k), (self.k, self.n)
        shape = jax.ShapeDtypeStruct
        arguments = {
            "a": shape(a[::-1] if self.a_transposed else a, self.dtype),
            "b": shape(b[::-1] if self.b_transposed else b, self.dtype),
            "start": shape((self.m, self.n), jnp.float32) if self.accumulates else None,
        }
        # The sizes of C matter to the kernel by the tile alone.
        options = {name: value for name, value in dataclasses.asdict(self).items() if name not in ("m", "n")}
        dtypes = {name: jnp.dtype(options[name]).name for name in ("dtype", "out_dtype")}
        tile = self.plan.tile
        sizes = {"tile_rows": tile.rows, "tile_columns": tile.columns, "stages": tile.stages, "cluster": tile.cluster}
        plan = {**sizes, "step_depth": tile.depth, "swapped": self.plan.swapped}
        return Configuration({"kernel": "gemm", **plan, **options, **dtypes}, run, arguments)


def gemms() -> Iterator[Gemm]:
    """Every tile that is ever chosen, in every layout, with sums from 0 and from C, for each result dtype.

    K is long in some and short enough to be unrolled in others.
    """
    both, seen = (False, True), set()
    sizes = itertools.product((1, 12, 24, 64, 128, 1024), (4096, 8192, 14336))
    for (m, n), layout, accumulates, out_dtype in itertools.product(
        sizes, itertools.product(both, both), both, (jnp.bfloat16, jnp.float32)
    ):
        g = Gemm(m, n, 512, *layout, accumulates, out_dtype)
        key = (g.plan, layout, accumulates, out_dtype)
        if key not in seen:
            seen.add(key)
            yield g
    for (m, n), b_transposed in itertools.product(((1, 4096), (128, 14336), (4096, 4096)), both):
        for dtype in (jnp.bfloat16, jnp.float16):
            yield Gemm(m, n, 4096, b_transposed=b_transposed, out_dtype=dtype, dtype=dtype)
    yield Gemm(3, 5, 7)


def configurations() -> Iterator[Configuration]:
    """One for each of `gemms`."""
    return (g.configuration() for g in gemms())
