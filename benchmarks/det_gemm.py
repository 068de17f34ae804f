"""Time of det_gemm beside cuBLAS: python -m benchmarks.det_gemm --help.

"cuBLAS" is XLA's own dot on the same arrays, with XLA's Triton kernels off. A shape M,K,N is a forward A [M,K]·B [K,N]
and its gradients dA and dB. Up to 128 rows, where the weight's layout matters and gradients do not, it is the forward
alone, with B stored [K,N] and [N,K]. All candidates of a shape are timed in turn, round after round, each back to back
for half a second first. A product that is too short to hide its launch is timed as a chain of up to 32 products in one
program, each with another A or dC. "speed" is the time of cuBLAS for the same pass over a candidate's, in the same
rounds.

"triton persistent" is matmul_persistent of thinking-machines-lab/batch_invariant_ops, where that can be imported.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from rich.table import Table

from benchmarks import common, programs
from benchmarks.common import Candidate, Launch
from rlk_jax import det_gemm

TARGETS = ("4096,12288", "4096,4096", "4096,14336", "14336,4096", "4096,32000")
"""K,N of a decoder's qkv, o_proj, mlp_up, mlp_down and lm_head, in this order."""
SMALL = ("4096,4096", "4096,14336")
"""K,N of the shapes with few rows."""
SHAPES = ";".join(
    [f"{m},{x}" for m in (4096, 1024) for x in TARGETS] + [f"{m},{x}" for m in (128, 16, 1) for x in SMALL]
)
SMOKE_SHAPES = "200,64,96;3,64,96"
CUBLAS, TRITON = "cuBLAS", "triton persistent"
_FEW_ROWS = 128


@dataclass(frozen=True)
class Row:
    """One candidate in one pass over one shape."""

    shape: str
    dtype: str
    implementation: str
    what: str
    status: str
    us: float | None = None
    speed: float | None = None
    """The time of cuBLAS over that of this candidate."""
    tflops: float | None = None


@dataclass(frozen=True)
class Pass:
    """A product `x·y`, repeated for each x of `xs`; it contracts the dimensions `contracts` of x and y."""

    xs: tuple[jax.Array, ...]
    y: jax.Array
    contracts: tuple[int, int]
    ours: Callable[..., jax.Array]
    """The same product by `det_gemm`: it takes x, y and an implementation."""

    def by(self, implementation: str) -> Launch:
        """The pass by an implementation or a peer; raises what that raises where it cannot run."""
        if implementation == TRITON:
            return self._triton()
        is_cublas = implementation == CUBLAS
        product = self._dot if is_cublas else functools.partial(self.ours, implementation=implementation)
        options = programs.cublas_alone() if is_cublas else None
        compiled = programs.chain(product, self.xs, self.y, compiler_options=options)
        return Launch(lambda: compiled(self.xs, self.y))

    def _dot(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, (((self.contracts[0],), (self.contracts[1],)), ((), ())))

    def _triton(self) -> Launch:
        torch: Any = importlib.import_module("torch")
        matmul: Any = importlib.import_module("batch_invariant_ops.batch_invariant_ops").matmul_persistent
        if jax.default_backend() != "gpu":
            raise RuntimeError("measured on GPUs only")
        xs, y = [torch.from_dlpack(x) for x in self.xs], torch.from_dlpack(self.y)
        xs = [x if self.contracts[0] else x.T for x in xs]
        y = y.T if self.contracts[1] else y

        def start() -> Any:
            return [matmul(x, y) for x in xs]

        return Launch(start, lambda _: torch.cuda.synchronize())


def passes_of(shape: str, dtype: str) -> dict[str, Pass]:
    """The passes over random inputs for a shape "M,K,N", by name."""
    m, k, n = map(int, shape.split(","))
    # A product takes as long as its operations do at 700 TFLOP/s, or as reading B does at 4 TB/s.
    seconds = max(2 * m * k * n / 7e14, 2 * k * n / 4e12)
    keys = jax.random.split(jax.random.key(0), 2 * programs.calls_to_hide_a_launch(seconds) + 1)

    def draws(shape: tuple[int, int], which: int) -> tuple[jax.Array, ...]:
        return tuple(jax.random.normal(key, shape, dtype) for key in keys[which::2][: len(keys) // 2])

    b = (jax.random.normal(keys[-1], (k, n)) / k**0.5).astype(dtype)
    a, g = draws((m, k), 0), draws((m, n), 1)

    def d_a(g: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
        return jax.vjp(lambda a: det_gemm(a, b, **options), a[0])[1](g)[0]

    def d_b(a: jax.Array, g: jax.Array, **options: Any) -> jax.Array:
        return jax.vjp(lambda b: det_gemm(a, b, **options), b)[1](g)[0]

    def transposed(a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
        return det_gemm(a, b, transpose_b=True, **options)

    forward = Pass(a, b, (1, 0), det_gemm)
    if m <= _FEW_ROWS:
        return {"forward [K,N]": forward, "forward [N,K]": Pass(a, b.T.copy(), (1, 1), transposed)}
    return {"forward": forward, "dA": Pass(g, b, (1, 1), d_a), "dB": Pass(a, g[0], (0, 0), d_b)}


def measure(dtype: str, shape: str, implementations: Sequence[str], rounds: int, seconds: float) -> list[Row]:
    """The rows of all implementations in every pass over one shape; one that cannot run has a status that says why."""
    passes = passes_of(shape, dtype)

    def build(name: str, what: str) -> Candidate:
        return Candidate(passes[what].by(name))

    keys = [(name, what) for what in passes for name in (CUBLAS, *implementations)]
    builders = {key: functools.partial(build, *key) for key in keys}
    found, failed = common.measure_candidates(builders, rounds, seconds)
    rows = [Row(shape, dtype, *key, status) for key, status in failed.items()]
    m, k, n = map(int, shape.split(","))
    for (name, what), x in found.items():
        us, baseline = 1e3 * x.ms / len(passes[what].xs), found.get((CUBLAS, what))
        speed = None if baseline is None else baseline.ms / x.ms
        rows.append(Row(shape, dtype, name, what, "pass", us, speed, 2e-6 * m * k * n / us))
    return rows


def _print(rows: Sequence[Row], device: str) -> None:
    table = Table("M,K,N", "pass", "implementation", "time", "speed", "TFLOP/s")
    for r in sorted(rows, key=lambda r: [list(map(int, r.shape.split(","))), r.what], reverse=True):
        figures = (r.status, "", "")
        if r.status == "pass":
            figures = (f"{r.us:.1f} µs", "" if r.speed is None else f"{r.speed:.3f}", f"{r.tflops:.0f}")
        table.add_row(r.shape, r.what, r.implementation, *figures)
    common.show(f"det_gemm, {rows[0].dtype}, {device}; speed of {CUBLAS} = 1", table)


def main(argv: Sequence[str] | None = None) -> int:
    common.share_gpu_with_torch()
    parser = common.parser("det_gemm", __doc__, shapes=SHAPES, implementations=f"mosaic,{TRITON}", sizes="M,K,N")
    options = parser.parse_args(argv)
    rows = common.measure_shapes("det_gemm", options, argv, SMOKE_SHAPES, functools.partial(measure, options.dtype))
    _print(rows, jax.devices()[0].device_kind)
    compared = [r for r in rows if r.implementation != CUBLAS]
    bars = ((r.shape, f"{r.what}: {r.implementation}", r.speed) for r in compared)
    common.plot(options.plot, bars, "speed, cuBLAS of the same run = 1")
    return common.exit_status(r.status for r in compared)


if __name__ == "__main__":
    sys.exit(main())
