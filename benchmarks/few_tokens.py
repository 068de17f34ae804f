"""Time of linear_logp for few tokens, as in decoding, beside the naive logits: python -m benchmarks.few_tokens --help.

"naive" is logits in the input dtype, their log_softmax in float32, and JAX's own gradient. Passes are measured as calls
of one program, and with --scan also as steps of a lax.scan of that length, one after the other. All candidates of a
size are timed in turn, round after round; ratios are to naive in the same rounds.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks import common
from benchmarks.argument_types import positive
from benchmarks.common import Candidate, compiled_candidate
from benchmarks.linear_logp import naive
from rlk_jax import linear_logp

TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024)
SHAPES = ";".join(f"{n},{head}" for head in ("4096,151936", "2048,128256") for n in TOKENS)
SMOKE_SHAPES = "8,32,1000"
NAIVE = "naive"


@dataclass(frozen=True)
class Row:
    """One candidate in one pass over one size; steps is the length of the scan, 1 for a call alone."""

    shape: str
    implementation: str
    what: str
    steps: int
    status: str
    us: float | None = None
    """Microseconds of one step."""
    of_naive: float | None = None


def passes(implementation: str) -> dict[str, Callable[..., Any]]:
    """The passes of an implementation, or of "naive", as functions of hidden, weight, target ids and upstream."""
    own = functools.partial(linear_logp, implementation=implementation)
    logp = naive if implementation == NAIVE else own

    def loss(h: jax.Array, w: jax.Array, t: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.vdot(logp(h, w, t), g)

    return {
        "forward": lambda h, w, t, g: logp(h, w, t),
        "forward+backward": jax.grad(loss, (0, 1)),
        "frozen head": jax.grad(loss, 0),
    }


def scanned(one: Callable[..., Any], steps: int) -> Callable[..., Any]:
    """`one` in a scan of so many steps, each of which waits for the results of the one before it."""

    def run(h: jax.Array, w: jax.Array, t: jax.Array, g: jax.Array) -> jax.Array:
        def step(so_far: jax.Array, _: None) -> tuple[jax.Array, None]:
            # The barrier keeps XLA from leaving out what no step reads.
            found = jax.lax.optimization_barrier(one(h + so_far.astype(h.dtype), w, t, g))
            return sum((jnp.ravel(x)[0].astype(jnp.float32) for x in jax.tree.leaves(found)), jnp.float32(0)) * 0, None

        return jax.lax.scan(step, jnp.float32(0), length=steps)[0]

    return run


def measure(
    lengths: Sequence[int], shape: str, implementations: Sequence[str], rounds: int, seconds: float
) -> list[Row]:
    """The rows of all implementations for one size "N,D,V"."""
    tokens, dim, vocab = map(int, shape.split(","))
    keys = jax.random.split(jax.random.key(0), 4)
    arguments = (
        jax.random.normal(keys[0], (tokens, dim), jnp.bfloat16),
        (jax.random.normal(keys[1], (vocab, dim)) / dim**0.5).astype(jnp.bfloat16),
        jax.random.randint(keys[2], (tokens,), 0, vocab),
        jax.random.normal(keys[3], (tokens,)),
    )

    def build(one: Callable[..., Any], steps: int) -> Candidate:
        return compiled_candidate(one if steps == 1 else scanned(one, steps), *arguments)

    builders = {
        (name, what, steps): functools.partial(build, one, steps)
        for name in implementations
        for what, one in passes(name).items()
        for steps in lengths
    }
    found, failed = common.measure_candidates(builders, rounds, seconds)
    rows = [Row(shape, *key, status) for key, status in failed.items()]
    for key, x in found.items():
        baseline = found.get((NAIVE, *key[1:]))
        rows.append(Row(shape, *key, "pass", 1e3 * x.ms / key[2], None if baseline is None else x.ms / baseline.ms))
    return rows


def _show(rows: Sequence[Row]) -> None:
    table = Table("N,D,V", "implementation", "pass", "steps", "time", "of naive")
    for r in rows:
        time = r.status if r.us is None else f"{r.us:.1f} µs"
        table.add_row(
            r.shape, r.implementation, r.what, str(r.steps), time, "" if r.of_naive is None else f"{r.of_naive:.2f}"
        )
    common.show(f"linear_logp for few tokens, {jax.devices()[0].device_kind}", table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(
        "few_tokens", __doc__, shapes=SHAPES, implementations=f"mosaic,{NAIVE}", dtypes=("bfloat16",)
    )
    parser.add_argument("--scan", type=positive, help="also measure steps of a scan of this length")
    options = parser.parse_args(argv)
    lengths = [1] if options.scan is None else [1, options.scan]
    rows = common.measure_shapes("few_tokens", options, argv, SMOKE_SHAPES, functools.partial(measure, lengths))
    _show(rows)
    bars = ((f"{r.what}, steps: {r.steps}", r.shape, r.of_naive) for r in rows if r.implementation != NAIVE)
    common.plot(options.plot, bars, "time, naive of the same run = 1")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
