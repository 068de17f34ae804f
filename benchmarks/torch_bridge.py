"""Time of torch_bridge.linear_logp beside the JAX op and other torch code: python -m benchmarks.torch_bridge --help.

The first shape is so small that a GPU has finished before the host has launched the next call: its times are what a
call costs the host. On larger shapes "over jax" is the time for which the bridge leaves the GPU waiting, since bridge
and JAX op run the same programs, with a memory budget of 256 MiB. Two more rows are of the bridge with the default
budget, and with one that holds all exponentials. Memory is the most that JAX's and torch's allocators hold beyond
inputs and results. All candidates of a shape are timed in turn, round after round, each back to back for half a second
first.
"""

import functools
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks import common, peers
from benchmarks.common import Candidate, Launch, compiled_candidate
from rlk_jax import linear_logp

SHAPES = "8,64,1000;4096,4096,131072"
SMOKE_SHAPES = "8,16,100"
BUDGET = 256 * 2**20
"""The memory budget of all candidates of ours but `OTHER_BUDGETS`, in bytes."""
JAX, COMPILED = "jax", "torch.compile"
BRIDGE, VALIDATING = "bridge", "bridge validate"
DEFAULT_BUDGET, ALL_KEPT = OTHER_BUDGETS = "bridge default budget", "bridge all kept"
"""The bridge with the budget that a call has by default, and with one that holds all exponentials."""
BRIDGES = (BRIDGE, VALIDATING, *OTHER_BUDGETS)
"""The candidates that call torch_bridge, by how much memory they take."""
LEAST = "autograd and DLPack"
"""The work that no bridge can do without; see `_least`."""
ONE_THREAD = " in one thread"
"""The end of the names of candidates whose backward torch's autograd runs in the thread that calls it."""
OURS = (*BRIDGES, BRIDGE + ONE_THREAD, LEAST, LEAST + ONE_THREAD, JAX)
"""The candidates that need no other library than JAX and torch."""


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
class Inputs:
    """The tensors of one shape, and JAX arrays over the same memory."""

    tensors: tuple[Any, ...]
    upstream: Any
    arrays: tuple[jax.Array, ...]
    array_upstream: jax.Array


def make_inputs(shape: str, dtype: str) -> Inputs:
    """Random inputs for a shape "N,D,V"."""
    torch: Any = importlib.import_module("torch")
    tokens, dim, vocab = map(int, shape.split(","))
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if jax.default_backend() == "gpu":  # this call starts JAX, which leaves the last of several GPUs current
        torch.cuda.set_device(0)
    torch.manual_seed(0)

    def normal(*size: int, **options: Any) -> Any:
        return torch.randn(size, device=device, **options)

    kind = getattr(torch, dtype)
    ids = torch.randint(vocab, (tokens,), device=device)
    tensors = (normal(tokens, dim, dtype=kind), normal(vocab, dim, dtype=kind) * dim**-0.5, ids)
    upstream = normal(tokens)
    hidden, weight, ids, g = (jax.dlpack.from_dlpack(x) for x in (*tensors[:2], ids.int(), upstream))
    return Inputs(tensors, upstream, (hidden, weight, ids), g)


def _peak_bytes(launch: Launch) -> int | None:
    """The most that both allocators hold during a run, beyond what they held before; None where JAX does not tell.

    JAX reports the peak since the process began: candidates that take more memory must be measured later.
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


def budget_of(name: str, tokens: int, weight: jax.Array) -> int | None:
    """The memory budget of one of `BRIDGES` in bytes; None is the default one."""
    return {DEFAULT_BUDGET: None, ALL_KEPT: common.budget_for_all(tokens, weight)}.get(name, BUDGET)


def _bridge(name: str, inputs: Inputs) -> dict[str, Candidate]:
    """torch_bridge.linear_logp."""
    bridge: Any = importlib.import_module("torch_bridge")
    ids = inputs.tensors[2]
    budget = budget_of(name, len(ids), inputs.arrays[1])

    def loss(hidden: Any, weight: Any) -> Any:
        return bridge.linear_logp(hidden, weight, ids, validate=name == VALIDATING, memory_budget=budget)

    found = peers.both_passes(loss, inputs.tensors[:2], inputs.upstream)
    results = {"forward": inputs.upstream.nbytes, "forward+backward": sum(x.nbytes for x in inputs.tensors[:2])}
    peaks = {what: _peak_bytes(launch) for what, launch in found.items()}
    return {w: Candidate(x, None if (peak := peaks[w]) is None else peak - results[w]) for w, x in found.items()}


def _least(inputs: Inputs) -> dict[str, Candidate]:
    """The op's two programs as a torch autograd function over arrays made before, their results exported by DLPack.

    Nothing is checked, imported, padded or ordered behind torch's stream, so that on a GPU its results mean nothing.
    """
    torch: Any = importlib.import_module("torch")
    hidden, weight, ids = inputs.arrays
    on_stream = {"stream": 1} if inputs.upstream.is_cuda else {}

    trees: list[Any] = []

    def logp(h: jax.Array, w: jax.Array, t: jax.Array) -> Any:
        out, vjp = jax.vjp(lambda h, w: linear_logp(h, w, t, memory_budget=BUDGET), h, w)
        residuals, tree = jax.tree.flatten(vjp)
        trees.append(tree)
        return out, residuals

    def gradients(residuals: Any, g: jax.Array) -> Any:
        return jax.tree.unflatten(trees[0], residuals)(g)

    forward = jax.jit(logp).lower(hidden, weight, ids).compile()
    backward = jax.jit(gradients).lower(forward(hidden, weight, ids)[1], inputs.array_upstream).compile()

    def export(x: Any) -> Any:
        return torch.utils.dlpack.from_dlpack(x.__dlpack__(**on_stream))

    class Least(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Any, w: Any) -> Any:
            out, ctx.residuals = forward(hidden, weight, ids)
            return export(out)

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            return tuple(map(export, backward(ctx.residuals, inputs.array_upstream)))

    found = peers.both_passes(Least.apply, inputs.tensors[:2], inputs.upstream)
    return {what: Candidate(launch) for what, launch in found.items()}


def _jax(inputs: Inputs) -> dict[str, Candidate]:
    """The JAX op; its memory is not reported."""

    def logp(h: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
        return linear_logp(h, w, t, memory_budget=BUDGET)

    def gradient(h: jax.Array, w: jax.Array, t: jax.Array, g: jax.Array) -> Any:
        return jax.grad(lambda h, w: jnp.vdot(logp(h, w, t), g), (0, 1))(h, w)

    found = {
        "forward": compiled_candidate(logp, *inputs.arrays),
        "forward+backward": compiled_candidate(gradient, *inputs.arrays, inputs.array_upstream),
    }
    return {what: replace(x, extra_bytes=None) for what, x in found.items()}


def candidates_of(name: str, inputs: Inputs) -> dict[str, Candidate]:
    """Both passes of one of `OURS` or of a peer; raises what that raises where it cannot run."""
    base = name.removesuffix(ONE_THREAD)
    if base in BRIDGES:
        found = _bridge(base, inputs)
    elif base == LEAST:
        found = _least(inputs)
    elif base == JAX:
        found = _jax(inputs)
    else:
        found = peers.candidates(base, inputs.arrays, inputs.array_upstream)
    return found if base == name else {w: replace(x, launch=_in_one_thread(x.launch)) for w, x in found.items()}


def measure(dtype: str, shape: str, names: Sequence[str], rounds: int, seconds: float) -> list[Row]:
    """The rows of all candidates on one shape; one that cannot run here has a status that says why."""
    inputs = make_inputs(shape, dtype)

    def by_pass(name: str) -> dict[tuple[str, str], Candidate]:
        return {(name, what): x for what, x in candidates_of(name, inputs).items()}

    # The bridges are built first, and that with the most memory last: up to then, JAX's peak of memory is theirs alone.
    order = {name: i for i, name in enumerate(BRIDGES)}
    names = sorted(names, key=lambda name: order.get(name.removesuffix(ONE_THREAD), len(order)))
    builders = {(name, ""): functools.partial(by_pass, name) for name in names}
    found, failed = common.measure_candidates(builders, rounds, seconds)
    rows = [Row(shape, dtype, *key, status) for key, status in failed.items()]
    for (name, what), x in found.items():
        jax_op, compiled = found.get((JAX, what)), found.get((COMPILED, what))
        over = None if jax_op is None or name in OTHER_BUDGETS else 1e3 * (x.ms - jax_op.ms)
        of_compile = None if compiled is None else x.ms / compiled.ms
        rows.append(Row(shape, dtype, name, what, "pass", x.ms, over, of_compile, x.extra_mib))
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
    common.share_gpu_with_torch()
    names = (*OURS, COMPILED, "liger triton (mean loss)", "cce")
    parser = common.parser("torch_bridge", __doc__, shapes=SHAPES, implementations=",".join(names), known=peers.PEERS)
    options = parser.parse_args(argv)
    rows = common.measure_shapes("torch_bridge", options, argv, SMOKE_SHAPES, functools.partial(measure, options.dtype))
    _print(rows, jax.devices()[0].device_kind)
    by_pass = sorted(rows, key=lambda r: r.what)
    bars = ((r.shape, f"{r.what}: {r.candidate}", r.ms) for r in by_pass)
    common.plot(options.plot, bars, "milliseconds a call")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
