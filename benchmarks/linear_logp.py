"""Time and memory of linear_logp beside the bare GEMM: python -m benchmarks.linear_logp --help.

G is XLA's own GEMM [N, D] x [D, V] that writes logits in the input dtype. All candidates of a shape are timed in turn,
round after round, in one process, each back to back for half a second first; ratios are to G of the same rounds.
Memory is what the compiled program (or torch's allocator) takes beyond inputs and results.

With --mask-density below 1 that share of the tokens counts (whole prompts in front): "forward" and "forward+backward"
ignore the others by ignore_index, "masked loss" gives them upstream gradients of 0.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks import common, peers
from benchmarks.common import Launch
from rlk_jax import linear_logp

SHAPES = "4096,2048,131072;4096,4096,131072;8192,4096,151936;16384,2048,32768"
SMOKE_SHAPES = "64,32,1000"
IGNORED = -100


@dataclass(frozen=True)
class Row:
    """One candidate in one pass over one shape."""

    shape: str
    dtype: str
    mask_density: float
    implementation: str
    what: str
    status: str
    ms: float | None = None
    of_gemm: float | None = None
    tflops: float | None = None
    extra_mib: float | None = None


@dataclass(frozen=True)
class Candidate:
    launch: Launch
    gemms: int
    """Products [N, D] x [D, V] that the pass cannot do without; for the TFLOP/s."""
    extra_bytes: int | None


def naive(hidden: jax.Array, weight: jax.Array, target_ids: jax.Array, **options: Any) -> jax.Array:
    """What a trainer writes without this library."""
    return naive_of_logits(hidden @ weight.T, target_ids)


def naive_of_logits(logits: jax.Array, target_ids: jax.Array) -> jax.Array:
    """The same, where logits are there already."""
    ids = jnp.maximum(target_ids, 0)[:, None]
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), ids, axis=-1)[:, 0]
    return jnp.where(target_ids == IGNORED, 0, logp)


@dataclass(frozen=True)
class Problem:
    hidden: jax.Array
    weight: jax.Array
    target_ids: jax.Array
    bias: jax.Array
    upstream: jax.Array
    density: float

    @property
    def active(self) -> jax.Array:
        tokens = self.hidden.shape[0]
        return jnp.arange(tokens) >= tokens - round(self.density * tokens)


def make(shape: str, dtype: str, density: float) -> Problem:
    tokens, dim, vocab = map(int, shape.split(","))
    keys = jax.random.split(jax.random.key(0), 5)
    return Problem(
        jax.random.normal(keys[0], (tokens, dim), dtype),
        (jax.random.normal(keys[1], (vocab, dim)) / dim**0.5).astype(dtype),
        jax.random.randint(keys[2], (tokens,), 0, vocab),
        jax.random.normal(keys[3], (vocab,), dtype),
        jax.random.normal(keys[4], (tokens,)),
        density,
    )


def candidate(f: Callable[..., Any], gemms: int, *arguments: jax.Array) -> Candidate:
    """`f`, compiled for these arguments."""
    compiled = jax.jit(f).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    return Candidate(
        Launch(lambda: compiled(*arguments)), gemms, None if analysis is None else analysis.temp_size_in_bytes
    )


def candidates(name: str, p: Problem) -> dict[str, Candidate]:
    """The passes of one implementation; raises what it raises where it cannot run."""
    is_ours = name != "naive"
    masked: dict[str, Any] = {"ignore_index": IGNORED} if p.density < 1 else {}
    ids = jnp.where(p.active, p.target_ids, IGNORED) if masked else p.target_ids

    def logp(h: jax.Array, w: jax.Array, t: jax.Array, b: jax.Array | None = None, **options: Any) -> Any:
        return linear_logp(h, w, t, b, implementation=name, **options) if is_ours else naive(h, w, t)

    def gradient(argnums: tuple[int, ...], **options: Any) -> Callable[..., Any]:
        return jax.grad(lambda h, w, t, g: jnp.vdot(logp(h, w, t, **options), g), argnums)

    operands, g = (p.hidden, p.weight, ids), p.upstream
    found = {
        "forward": candidate(lambda h, w, t: logp(h, w, t, **masked), 1, *operands),
        "forward+backward": candidate(gradient((0, 1), **masked), 3, *operands, g),
        "frozen head": candidate(gradient((0,), **masked), 2, *operands, g),
    }
    if p.density < 1:
        zeroed = jnp.where(p.active, g, 0)
        found["masked loss"] = candidate(gradient((0, 1)), 3, p.hidden, p.weight, p.target_ids, zeroed)
    elif is_ours:
        found |= {
            "forward, entropy": candidate(lambda h, w, t: logp(h, w, t, return_entropy=True), 1, *operands),
            "forward, bias": candidate(logp, 1, *operands, p.bias),
            "forward, softcap": candidate(lambda h, w, t: logp(h, w, t, logit_softcap=30.0), 1, *operands),
        }
    return found


Passes = Callable[[str, Problem], dict[str, Candidate]]
"""The passes of one implementation by name; raises what it raises where it cannot run."""


def passes(name: str, p: Problem) -> dict[str, Candidate]:
    """Of an implementation or a peer."""
    return _peer(name, p) if name in peers.PEERS else candidates(name, p)


def _peer(name: str, p: Problem) -> dict[str, Candidate]:
    found = peers.launches(name, (p.hidden, p.weight, p.target_ids), p.upstream)
    extra = peers.extra_bytes(found, p.hidden.nbytes + p.weight.nbytes)
    gemms = {"forward": 1, "forward+backward": 3}
    return {what: Candidate(x, gemms[what], extra[what]) for what, x in found.items()}


def measure(
    passes_of: Passes,
    dtype: str,
    density: float,
    shape: str,
    implementations: Sequence[str],
    rounds: int,
    seconds: float,
) -> list[Row]:
    """All implementations on one shape; one that cannot run here says so in its status."""
    p = make(shape, dtype, density)
    found = {("GEMM", "G"): candidate(lambda h, w: h @ w.T, 1, p.hidden, p.weight)}
    rows = []
    for name in implementations:
        try:
            found |= {(name, what): x for what, x in passes_of(name, p).items()}
        except Exception as problem:
            rows.append(Row(shape, dtype, density, name, "", common.status(problem)))
    return rows + _timed(shape, dtype, density, found, rounds, seconds)


def _timed(
    shape: str,
    dtype: str,
    density: float,
    found: dict[tuple[str, str], Candidate],
    rounds: int,
    seconds: float,
) -> list[Row]:
    """A row for each candidate, by implementation and pass; `("GEMM", "G")` is among them. `found` loses those that
    fail.
    """
    rows = []
    for (name, what), x in list(found.items()):
        try:
            x.launch.wait(x.launch.start())
        except Exception as problem:
            rows.append(Row(shape, dtype, density, name, what, common.status(problem)))
            del found[name, what]
    launches = {f"{name}: {what}": x.launch for (name, what), x in found.items()}
    ms = common.milliseconds(launches, rounds, warm=seconds, timed=0.6 * seconds)
    gemm = ms["GEMM: G"]
    tokens, dim, vocab = map(int, shape.split(","))
    for (name, what), x in found.items():
        t = ms[f"{name}: {what}"]
        extra = None if x.extra_bytes is None else x.extra_bytes / 2**20
        tflops = x.gemms * 2 * tokens * dim * vocab / t / 1e9
        rows.append(Row(shape, dtype, density, name, what, "pass", t, t / gemm, tflops, extra))
    return rows


def _show(op: str, rows: Sequence[Row]) -> None:
    """The table of a run."""
    table = Table("N,D,V", "implementation", "pass", "time", "of G", "TFLOP/s", "memory")
    for r in rows:
        figures = ("", r.status, "", "")
        if r.status == "pass":
            memory = "" if r.extra_mib is None else f"{r.extra_mib:.0f} MiB"
            figures = (f"{r.ms:.3f} ms", f"{r.of_gemm:.3f}", f"{r.tflops:.0f}", memory)
        table.add_row(r.shape, r.implementation, r.what, *figures)
    device = jax.devices()[0].device_kind
    common.show(f"{op}, {rows[0].dtype}, mask density {rows[0].mask_density}, {device}", table)


def run(module: str, options: argparse.Namespace, argv: Sequence[str] | None, passes_of: Passes) -> int:
    """Measure as the options say; print, write and draw the rows."""
    fixed = passes_of, options.dtype, options.mask_density
    rows = common.measured(module, options, argv, SMOKE_SHAPES, functools.partial(measure, *fixed))
    _show(module, rows)
    if options.plot:
        panels: dict[str, dict[str, float]] = {}
        for r in sorted(rows, key=lambda r: r.what):
            if r.of_gemm is not None and r.what != "G":
                panels.setdefault(r.shape, {})[f"{r.what}: {r.implementation}"] = r.of_gemm
        common.plot(options.plot, panels, "time, in bare GEMMs of the same run")
    return common.exit_status(r.status for r in rows if r.what != "G")


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(
        "linear_logp", __doc__, shapes=SHAPES, implementations=",".join(("mosaic", "xla", "naive", *peers.PEERS))
    )
    return run("linear_logp", common.add_mask_density(parser).parse_args(argv), argv, passes)


if __name__ == "__main__":
    sys.exit(main())
