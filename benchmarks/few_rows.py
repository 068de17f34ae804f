"""Kernel times of det_gemm at few rows beside cuBLAS: python -m benchmarks.few_rows --help.

A decode step multiplies few rows by every matrix of a model. The matrices are those of the two decoders of
benchmarks.invariance: a layer's are stored [K, N], and the head, which is the embedding, [N, K]. "cuBLAS" is XLA's own
dot on the same arrays, with XLA's Triton kernels off. Such a product is shorter than its launch, so that its time on
the clock is that of launches. Here it is the time that its kernels run on the GPU, a second kernel that adds up parts
of K included, as JAX's profiler has it from CUPTI. A program multiplies by several matrices in turn, so that no product
finds its own in the L2 cache where all of them together are larger. "speed" is the time of cuBLAS over that of
det_gemm.
"""

import argparse
import functools
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks import common, programs
from benchmarks.argument_types import positive
from benchmarks.decoder import DecoderSizes
from benchmarks.invariance import CASES, SMOKE_CASE
from rlk_jax import det_gemm

ROWS = (1, 8, 16, 64)
CUBLAS, OURS = "cuBLAS", "mosaic"
_SMOKE, _HEAD = "smoke", "head"
_TIMING = "time of kernels by JAX's profiler, median of programs, of each the mean over its products"
_MOST_BYTES = 2**29
"""The bytes that the matrices of one program have together, about; there are two at least and eight at most."""


@dataclass(frozen=True)
class Row:
    """One candidate's product of so many rows by one matrix."""

    decoder: str
    matrix: str
    m: int
    k: int
    n: int
    implementation: str
    status: str
    us: float | None = None
    speed: float | None = None
    """The time of cuBLAS over that of this candidate."""
    terabytes_per_second: float | None = None
    """The matrix's bytes over the time."""


def matrices(sizes: DecoderSizes) -> dict[str, tuple[int, int]]:
    """K and N of the matrices of a decoder, by name."""
    return {**sizes.matrices, _HEAD: (sizes.width, sizes.vocab)}


def _candidates(*, transpose_b: bool) -> dict[str, tuple[Callable[..., jax.Array], dict[str, Any] | None]]:
    """Each candidate's product, and what it is compiled with."""
    contracts = (((1,), (1 if transpose_b else 0,)), ((), ()))
    name = OURS if jax.default_backend() == "gpu" else "deterministic"
    dot = functools.partial(jax.lax.dot_general, dimension_numbers=contracts)
    return {
        CUBLAS: (dot, programs.cublas_alone()),
        name: (functools.partial(det_gemm, transpose_b=transpose_b, implementation=name), None),
    }


def kernel_microseconds(run: Callable[[], Any], rounds: int) -> float:
    """The median over runs of the time that their kernels take on the GPU; 0 where there is none."""
    jax.block_until_ready(run())
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(run())
            (trace,) = Path(folder).rglob("*.xplane.pb")
            planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
        lines = [x for plane in planes if plane.name.startswith("/device:GPU") for x in plane.lines]
        events = [event for line in lines if line.name.startswith("Stream") for event in line.events]
        found.append(sum(event.duration_ns for event in events) / 1e3)
    return statistics.median(found)


def measure(decoder: str, matrix: str, m: int, k: int, n: int, rounds: int) -> list[Row]:
    """The rows of both candidates."""
    is_head = matrix == _HEAD
    count = min(8, max(2, _MOST_BYTES // (2 * k * n)))
    keys = jax.random.split(jax.random.key(0), count + 1)
    shape = (n, k) if is_head else (k, n)
    bs = tuple((jax.random.normal(key, shape) * k**-0.5).astype(jnp.bfloat16) for key in keys[1:])
    a = jax.random.normal(keys[0], (m, k), jnp.bfloat16)

    def timed(product: Callable[..., jax.Array], options: dict[str, Any] | None) -> float:
        compiled = programs.chain(lambda b, a: product(a, b), bs, a, compiler_options=options)
        return kernel_microseconds(lambda: compiled(bs, a), rounds) / count

    candidates = _candidates(transpose_b=is_head)
    found = {name: common.attempt(functools.partial(timed, *x)) for name, x in candidates.items()}

    def row(name: str, us: float | common.Failure) -> Row:
        case = decoder, matrix, m, k, n, name
        if isinstance(us, common.Failure):
            return Row(*case, us.status)
        baseline = found[CUBLAS]
        speed = None if isinstance(baseline, common.Failure) or not us else baseline / us
        return Row(*case, "pass", us, speed, 2e-6 * k * n / us if us else None)

    return [row(*x) for x in found.items()]


def _show(rows: Sequence[Row]) -> None:
    table = Table("decoder", "matrix", "M,K,N", "implementation", "time", "speed", "TB/s")
    for r in rows:
        time = r.status if r.us is None else f"{r.us:.2f} µs"
        ratios = ("" if x is None else f"{x:.2f}" for x in (r.speed, r.terabytes_per_second))
        table.add_row(r.decoder, r.matrix, f"{r.m},{r.k},{r.n}", r.implementation, time, *ratios)
    common.show(f"few rows, bfloat16, {jax.devices()[0].device_kind}; speed of {CUBLAS} = 1", table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.few_rows", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=3, help="programs that are traced")
    options = common.add_outputs(parser).parse_args(argv)
    if not options.smoke:
        common.require_gpu("--smoke has small ones")
    sizes = {_SMOKE: SMOKE_CASE.sizes} if options.smoke else {name: case.sizes for name, case in CASES.items()}
    rows: list[Row] = []
    for name, m in itertools.product(sizes, ROWS[:2] if options.smoke else ROWS):
        print(f"measuring {name}, {m} rows …", file=sys.stderr)
        for matrix, (k, n) in matrices(sizes[name]).items():
            rows += measure(name, matrix, m, k, n, 1 if options.smoke else options.rounds)
        if options.json:
            common.write(options.json, "few_rows", argv, rows, _TIMING)
    _show(rows)
    bars = ((f"{r.decoder}: {r.matrix}", f"{r.m} rows", r.speed) for r in rows if r.implementation != CUBLAS)
    common.plot(options.plot, bars, f"speed, {CUBLAS} of the same run = 1")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
