"""Time of torch_bridge.linear_logp beside the JAX op and torch's own: python -m benchmarks.torch_bridge --help.

The first shape is so small that a GPU is done before the host has launched: its times are the host's, a call. On the
others "over jax" is what a bridge leaves the GPU waiting: both run the same programs. Memory is what JAX's and torch's
allocators hold at most beyond inputs and results. All candidates of a shape are timed in turn, round after round, each
back to back for half a second first.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks import common, peers
from benchmarks.common import Launch
from rlk_jax import linear_logp

SHAPES = "8,64,1000;4096,4096,131072"
SMOKE_SHAPES = "8,16,100"
BUDGET = 256 * 2**20
JAX, COMPILED = "jax", "torch.compile"
BRIDGES = {"bridge": False, "bridge validate": True}
"""Whether they validate."""
LEAST = "autograd and DLPack"
"""What any bridge does; `_least`."""
ONE_THREAD = " in one thread"
"""There torch's autograd runs the backward where it was asked for it."""
OURS = (*BRIDGES, "bridge" + ONE_THREAD, LEAST, LEAST + ONE_THREAD, JAX)
"""What needs no peer."""


@dataclass(frozen=True)
class Row:
    """One candidate in one pass over one shape."""

    shape: str
    dtype: str
    candidate: str
    what: str
    status: str
    ms: float | None = None
    over_jax_us: float | None = None
    of_compile: float | None = None
    extra_mib: float | None = None


@dataclass(frozen=True)
class Candidate:
    launch: Launch
    extra_bytes: int | None


@dataclass(frozen=True)
class Problem:
    """Tensors, and the same memory as arrays."""

    tensors: tuple[Any, ...]
    upstream: Any
    arrays: tuple[jax.Array, ...]
    array_upstream: jax.Array


def make(shape: str, dtype: str) -> Problem:
    torch: Any = importlib.import_module("torch")
    tokens, dim, vocab = map(int, shape.split(","))
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if jax.default_backend() == "gpu":  # Which starts JAX: of several GPUs it leaves the last one current.
        torch.cuda.set_device(0)
    torch.manual_seed(0)

    def normal(*size: int, **options: Any) -> Any:
        return torch.randn(size, device=device, **options)

    kind = getattr(torch, dtype)
    ids = torch.randint(vocab, (tokens,), device=device)
    tensors = (normal(tokens, dim, dtype=kind), normal(vocab, dim, dtype=kind) * dim**-0.5, ids)
    upstream = normal(tokens)
    hidden, weight, ids, g = (jax.dlpack.from_dlpack(x) for x in (*tensors[:2], ids.int(), upstream))
    return Problem(tensors, upstream, (hidden, weight, ids), g)


def _peak_bytes(launch: Launch) -> int | None:
    """What both allocators hold at most, beyond what they held before; None where JAX does not tell.

    JAX's peak is that of the process: whatever asks for more must be measured before.
    """
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats is None:
        return None
    held = stats["bytes_in_use"]
    of_torch = peers.peak_bytes(launch)
    return of_torch + device.memory_stats()["peak_bytes_in_use"] - held


def _in_one_thread(launch: Launch) -> Launch:
    torch: Any = importlib.import_module("torch")

    def start() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return launch.start()

    return replace(launch, start=start)


def _bridge(validate: bool, p: Problem) -> dict[str, Candidate]:
    bridge: Any = importlib.import_module("torch_bridge")
    loss = functools.partial(bridge.linear_logp, validate=validate, memory_budget=BUDGET)
    found = peers.both_passes(loss, p.tensors[:2], p.tensors[2], p.upstream)
    results = {"forward": p.upstream.nbytes, "forward+backward": sum(x.nbytes for x in p.tensors[:2])}
    peaks = {what: _peak_bytes(launch) for what, launch in found.items()}
    return {w: Candidate(x, None if (peak := peaks[w]) is None else peak - results[w]) for w, x in found.items()}


def _least(p: Problem) -> dict[str, Candidate]:
    """Two programs between tensors, of arrays made before: nothing is checked, imported, padded or put behind torch's
    stream, so that its results mean nothing on a GPU.
    """
    torch: Any = importlib.import_module("torch")
    hidden, weight, ids = p.arrays
    on_stream = {"stream": 1} if p.upstream.is_cuda else {}

    trees: list[Any] = []

    def logp(h: jax.Array, w: jax.Array, t: jax.Array) -> Any:
        out, pull_back = jax.vjp(lambda h, w: linear_logp(h, w, t, memory_budget=BUDGET), h, w)
        residuals, tree = jax.tree.flatten(pull_back)
        trees.append(tree)
        return out, residuals

    def gradients(residuals: Any, g: jax.Array) -> Any:
        return jax.tree.unflatten(trees[0], residuals)(g)

    forward = jax.jit(logp).lower(hidden, weight, ids).compile()
    pull_back = jax.jit(gradients).lower(forward(hidden, weight, ids)[1], p.array_upstream).compile()

    def export(x: Any) -> Any:
        return torch.utils.dlpack.from_dlpack(x.__dlpack__(**on_stream))

    class Least(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Any, w: Any) -> Any:
            out, ctx.residuals = forward(hidden, weight, ids)
            return export(out)

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            return tuple(map(export, pull_back(ctx.residuals, p.array_upstream)))

    found = peers.both_passes(lambda h, w, t: Least.apply(h, w), p.tensors[:2], p.tensors[2], p.upstream)
    return {what: Candidate(launch, None) for what, launch in found.items()}


def _jax(p: Problem) -> dict[str, Candidate]:
    def logp(h: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
        return linear_logp(h, w, t, memory_budget=BUDGET)

    def gradient(h: jax.Array, w: jax.Array, t: jax.Array, g: jax.Array) -> Any:
        return jax.grad(lambda h, w: jnp.vdot(logp(h, w, t), g), (0, 1))(h, w)

    def launch(f: Callable[..., Any], *arguments: jax.Array) -> Candidate:
        compiled = jax.jit(f).lower(*arguments).compile()
        return Candidate(Launch(lambda: compiled(*arguments)), None)

    return {
        "forward": launch(logp, *p.arrays),
        "forward+backward": launch(gradient, *p.arrays, p.array_upstream),
    }


def _peer(name: str, p: Problem) -> dict[str, Candidate]:
    found = peers.launches(name, p.arrays, p.array_upstream)
    extra = peers.extra_bytes(found, sum(x.nbytes for x in p.tensors[:2]))
    return {what: Candidate(x, extra[what]) for what, x in found.items()}


def _candidates(name: str, p: Problem) -> dict[str, Candidate]:
    """By pass."""
    base = name.removesuffix(ONE_THREAD)
    if base in BRIDGES:
        found = _bridge(BRIDGES[base], p)
    else:
        found = _least(p) if base == LEAST else _jax(p) if base == JAX else _peer(base, p)
    return found if base == name else {w: replace(x, launch=_in_one_thread(x.launch)) for w, x in found.items()}


def measure(dtype: str, shape: str, names: Sequence[str], rounds: int, seconds: float) -> list[Row]:
    """All candidates on one shape; one that cannot run here says so in its status."""
    p = make(shape, dtype)
    found: dict[tuple[str, str], Candidate] = {}
    rows: list[Row] = []
    # Bridges first: JAX's peak of memory is theirs alone then.
    for name in sorted(names, key=lambda name: name.removesuffix(ONE_THREAD) not in BRIDGES):
        try:
            found |= {(name, what): x for what, x in _candidates(name, p).items()}
        except Exception as problem:
            rows.append(Row(shape, dtype, name, "", common.status(problem)))
    launches = {f"{name}: {what}": x.launch for (name, what), x in found.items()}
    ms = common.milliseconds(launches, rounds, warm=seconds, timed=0.6 * seconds)
    for (name, what), x in found.items():
        t, jax_ms, compiled = (ms.get(f"{n}: {what}") for n in (name, JAX, COMPILED))
        assert t is not None
        over = None if jax_ms is None else 1e3 * (t - jax_ms)
        extra = None if x.extra_bytes is None else x.extra_bytes / 2**20
        rows.append(Row(shape, dtype, name, what, "pass", t, over, compiled and t / compiled, extra))
    return rows


def _print(rows: Sequence[Row], device: str) -> None:
    table = Table("N,D,V", "candidate", "pass", "time", "over jax", "of torch.compile", "memory")
    for r in rows:
        figures = ("", r.status, "", "")
        if r.ms is not None:
            figures = (
                f"{r.ms:.3f} ms",
                "" if r.over_jax_us is None else f"{r.over_jax_us:+.0f} µs",
                "" if r.of_compile is None else f"{r.of_compile:.3f}",
                "" if r.extra_mib is None else f"{r.extra_mib:.0f} MiB",
            )
        table.add_row(r.shape, r.candidate, r.what, *figures)
    common.show(f"torch_bridge.linear_logp, {rows[0].dtype}, {device}", table)


def main(argv: Sequence[str] | None = None) -> int:
    names = (*OURS, COMPILED, "liger triton (mean loss)", "cce")
    parser = common.parser("torch_bridge", __doc__, shapes=SHAPES, implementations=",".join(names))
    options = parser.parse_args(argv)
    rows = common.measured("torch_bridge", options, argv, SMOKE_SHAPES, functools.partial(measure, options.dtype))
    _print(rows, jax.devices()[0].device_kind)
    if options.plot:
        panels: dict[str, dict[str, float]] = {}
        for r in sorted(rows, key=lambda r: r.what):
            if r.ms is not None:
                panels.setdefault(r.shape, {})[f"{r.what}: {r.candidate}"] = r.ms
        common.plot(options.plot, panels, "milliseconds a call")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
