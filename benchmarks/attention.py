"""Time and memory of attention beside cuDNN's: python -m benchmarks.attention --help.

A shape B,T,S,H,G,E is B sequences of S tokens, whose last T are queries, with H query heads over G key heads of E
columns. Where T is 1 it is decoding; else it is the causal forward, and "forward+backward", which gives the output and
the gradients of query, key and value. Shapes of at least 8 sliding windows are measured under one, too; "of whole" is
the time over that without a window.

"cudnn" and "jax xla" are jax.nn.dot_product_attention; "speed" is the time of cudnn over that of a candidate, in the
same rounds. TFLOP/s count 4·B·H·E per query and key that it sees, and 3.5 times as much with the backward. Memory is
what a program takes beyond inputs and results, also in float32 numbers per query and head. A pass that is too short to
hide its launch is timed as a chain of up to 8 calls in one program, each with another query.

Decoding is timed in a program of 32 steps, one after the other, which take turns at caches of 256 MB together or more.
It is charged with one read of all keys and values; "of copy" is the bandwidth of these bytes over that of a copy (the
faster of memcpy and XLA's negation, bytes read and written) in the same rounds.

benchmarks.attention_accuracy has the errors.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from rich.table import Table

from benchmarks import common, peers, programs
from benchmarks.argument_types import positive
from benchmarks.attention_peers import CUDNN, IN_TORCH, JAX_PALLAS, PEERS, Attend, Sizes, attend_by, flash_attention
from benchmarks.common import Candidate, Launch, temporary_bytes
from rlk_jax.core.dispatch import IMPLEMENTATIONS

_TRAINING = "8,1024,1024,16,4,128;2,4096,4096,16,4,128;1,16384,16384,16,4,128"
_HEAD_SIZES = ";".join(f"2,4096,4096,16,4,{size}" for size in (64, 256, 80, 96, 192))
_DECODING = "64,1,4096,16,4,128;64,1,1024,16,4,128;1,1,32768,16,4,128"
SHAPES = f"{_TRAINING};{_HEAD_SIZES};{_DECODING}"
SMOKE_SHAPES = "1,16,16,4,2,16;2,1,24,4,2,16"
FORWARD, BOTH, DECODE, COPY = "forward", "forward+backward", "decode", "copy"
_WINDOWED = ", windowed"
"""The end of the names of passes under a sliding window."""
MOST_CALLS = 8
"""The calls of the longest chain."""
_STEPS = 32
"""Steps of a program that decodes."""
ROTATED = 2**28
"""The bytes that caches have together, so that no step finds its own in the L2 cache. There are 8 caches at most."""


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
    """The time of cuDNN over that of this candidate."""
    of_whole: float | None = None
    tflops: float | None = None
    gb_per_second: float | None = None
    of_copy: float | None = None
    extra_mib: float | None = None
    extra_per_row: float | None = None
    """float32 numbers of memory for each query and head."""


class Inputs(NamedTuple):
    """The arrays of one shape: a query for each call of a chain, keys and values that decoding takes in turn, and an
    upstream gradient of the output.
    """

    queries: tuple[jax.Array, ...]
    caches: tuple[tuple[jax.Array, jax.Array], ...]
    upstream: jax.Array


def make_inputs(sizes: Sizes, dtype: str) -> Inputs:
    """Random arrays."""
    calls = 1 if sizes.is_decoding else _calls(sizes.flops(None))
    caches = 1
    while sizes.is_decoding and caches < 8 and caches * sizes.cache_bytes < ROTATED:
        caches *= 2
    keys = iter(jax.random.split(jax.random.key(0), calls + 2 * caches + 1))

    def draw(slots: int, heads: int) -> jax.Array:
        return jax.random.normal(next(keys), (sizes.batch, slots, heads, sizes.size), dtype)

    queries = tuple(draw(sizes.length, sizes.heads) for _ in range(calls))
    key_values = [(draw(sizes.slots, sizes.groups), draw(sizes.slots, sizes.groups)) for _ in range(caches)]
    return Inputs(queries, tuple(key_values), draw(sizes.length, sizes.heads))


def _calls(flops: float) -> int:
    """How many calls of so many operations hide their launch, at 700 TFLOP/s."""
    return programs.calls_to_hide_a_launch(flops / 7e14, MOST_CALLS)


def passes_of(sizes: Sizes, window: int) -> dict[str, int | None]:
    """The passes over a shape by name, and the sliding window of each."""
    if sizes.is_decoding:
        return {DECODE: None}
    whole: dict[str, int | None] = {FORWARD: None, BOTH: None}
    return whole | ({what + _WINDOWED: window for what in whole} if sizes.length >= 8 * window else {})


def _flops(sizes: Sizes, what: str, window: int | None) -> float:
    return sizes.flops(window) * (3.5 if what.startswith(BOTH) else 1)


def candidate_of(name: str, what: str, window: int | None, sizes: Sizes, inputs: Inputs) -> Candidate:
    """One pass of an implementation or of a peer; `work` counts its calls. Raises what that raises if it cannot run."""
    if name in IN_TORCH:
        return _torch_candidate(flash_attention(name, sizes, window), what, inputs)
    if name == JAX_PALLAS:
        inputs = jax.tree.map(lambda x: x.astype(jnp.float16), inputs)
    attend = attend_by(name, sizes, window)
    if what == DECODE:
        return _decoding(attend, inputs)
    queries = inputs.queries[: _calls(_flops(sizes, what, window))]
    arguments = (*inputs.caches[0], inputs.upstream)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, _: jax.Array) -> Any:
        return attend(query, key, value)

    def both(query: jax.Array, key: jax.Array, value: jax.Array, upstream: jax.Array) -> Any:
        output, pull_back = jax.vjp(attend, query, key, value)
        return output, pull_back(upstream)

    function = both if what.startswith(BOTH) else forward
    alone = compiled = programs.chain(function, queries, *arguments)
    if len(queries) > 1:
        alone = programs.chain(function, queries[:1], *arguments)
    return Candidate(Launch(lambda: compiled(queries, *arguments)), temporary_bytes(alone), len(queries))


def _decoding(attend: Attend, inputs: Inputs) -> Candidate:
    """Steps one after the other: the output of one is the query of the next."""

    def run(query: jax.Array, caches: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
        def steps(query: jax.Array, _: None) -> tuple[jax.Array, None]:
            for cache in caches:
                # Every step waits for its query, or XLA would compute some of it before the loop.
                query, cache = lax.optimization_barrier((query, cache))
                query = attend(query, *cache)
            return query, None

        return lax.scan(steps, query, None, length=_STEPS // len(caches))[0]

    arguments = inputs.queries[0], inputs.caches
    compiled = jax.jit(run).lower(*arguments).compile()
    return Candidate(Launch(lambda: compiled(*arguments)), temporary_bytes(compiled), _STEPS)


def _torch_candidate(attend: Attend, what: str, inputs: Inputs) -> Candidate:
    torch: Any = importlib.import_module("torch")
    query, caches, upstream = jax.tree.map(torch.from_dlpack, (inputs.queries[0], inputs.caches, inputs.upstream))
    if what == DECODE:
        return Candidate(_captured(attend, query, caches), work=_STEPS)
    launch = peers.both_passes(attend, (query, *caches[0]), upstream)[what.removesuffix(_WINDOWED)]
    gradients = sum(x.nbytes for x in (query, *caches[0])) if what.startswith(BOTH) else 0
    return Candidate(launch, peers.extra_bytes(launch, query.nbytes + gradients))


def _captured(attend: Attend, query: Any, caches: Sequence[Any]) -> Launch:
    """The steps of `_decoding` as a CUDA graph, so that Python's own time is not in them."""
    torch: Any = importlib.import_module("torch")

    def steps() -> Any:
        last = query
        for i in range(_STEPS):
            last = attend(last, *caches[i % len(caches)])
        return last

    steps()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    return Launch(graph.replay, lambda _: torch.cuda.synchronize())


def measure(
    dtype: str, window: int, shape: str, implementations: Sequence[str], rounds: int, seconds: float
) -> list[Row]:
    """The rows of all implementations in every pass over one shape; one that cannot run has a status that says why."""
    sizes = Sizes(*map(int, shape.split(",")))
    inputs, passes = make_inputs(sizes, dtype), passes_of(sizes, window)
    copied = jnp.zeros(sizes.cache_bytes * len(inputs.caches) // 2, jnp.bfloat16)
    builders: dict[tuple[str, str], Callable[[], Candidate]] = {
        (name, what): functools.partial(candidate_of, name, what, passes[what], sizes, inputs)
        for what in passes
        for name in (CUDNN, *implementations)
    }
    if sizes.is_decoding:
        builders |= {(name, COPY): build for name, build in programs.copies(copied).items()}
    found, failed = common.measure_candidates(builders, rounds, seconds)
    us = {key: 1e3 * x.ms / (1 if key[1] == COPY else x.work) for key, x in found.items()}
    moved = {DECODE: sizes.cache_bytes, COPY: 2 * copied.nbytes}
    rates = {key: 1e-3 * moved[key[1]] / x for key, x in us.items() if key[1] in moved}
    copy_rate = max((x for (_, what), x in rates.items() if what == COPY), default=None)

    def row(name: str, what: str) -> Row:
        own, rate, extra = us[name, what], rates.get((name, what)), found[name, what].extra_mib
        baseline, whole = us.get((CUDNN, what)), us.get((name, what.removesuffix(_WINDOWED)))
        return Row(
            *(shape, dtype, name, what, "pass", own),
            speed=None if baseline is None else baseline / own,
            of_whole=own / whole if whole and what.endswith(_WINDOWED) else None,
            tflops=1e-6 * _flops(sizes, what, passes[what]) / own if what in passes else None,
            gb_per_second=rate,
            of_copy=None if rate is None or copy_rate is None else rate / copy_rate,
            extra_mib=extra,
            extra_per_row=None if extra is None else extra * 2**18 / (sizes.batch * sizes.length * sizes.heads),
        )

    return [Row(shape, dtype, *key, status) for key, status in failed.items()] + [row(*key) for key in found]


def _show(rows: Sequence[Row]) -> None:
    table = Table(
        *("B,T,S,H,G,E", "pass", "implementation", "time", "speed", "of whole"),
        *("TFLOP/s", "GB/s", "of copy", "memory", "a query and head"),
    )
    shapes = list(dict.fromkeys(r.shape for r in rows))
    for r in sorted(rows, key=lambda r: (shapes.index(r.shape), r.what)):
        figures: tuple[str, ...] = (r.status,)
        if r.status == "pass":
            figures = (
                f"{r.us:.1f} µs",
                *("" if x is None else f"{x:.3f}" for x in (r.speed, r.of_whole)),
                *("" if x is None else f"{x:.0f}" for x in (r.tflops, r.gb_per_second)),
                "" if r.of_copy is None else f"{r.of_copy:.3f}",
                "" if r.extra_mib is None else f"{r.extra_mib:.1f} MiB",
                "" if r.extra_per_row is None else f"{r.extra_per_row:.1f}",
            )
        table.add_row(r.shape, r.what, r.implementation, *figures)
    title = f"attention, {rows[0].dtype}, {jax.devices()[0].device_kind}; speed of {CUDNN} = 1"
    common.show(title, table, width=170)


def main(argv: Sequence[str] | None = None) -> int:
    common.share_gpu_with_torch()
    names = ",".join(("mosaic", *(x for x in PEERS if x != CUDNN)))
    dtypes = common.DTYPES[:2]
    parser = common.parser(
        "attention",
        __doc__,
        shapes=SHAPES,
        implementations=names,
        sizes="B,T,S,H,G,E",
        dtypes=dtypes,
        known=(*IMPLEMENTATIONS, *PEERS),
    )
    parser.add_argument("--window", type=positive, default=1024, help="tokens of a sliding window")
    options = parser.parse_args(argv)
    fixed = options.dtype, options.window
    rows = common.measure_shapes("attention", options, argv, SMOKE_SHAPES, functools.partial(measure, *fixed))
    _show(rows)
    bars = ((r.shape, f"{r.what}: {r.implementation}", r.of_copy if r.speed is None else r.speed) for r in rows)
    common.plot(options.plot, bars, f"speed, {CUDNN} of the same run = 1; without it, that of a copy")
    return common.exit_status(r.status for r in rows if r.implementation in options.implementations)


if __name__ == "__main__":
    sys.exit(main())
