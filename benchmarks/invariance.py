"""What invariant layers cost a trainer, end to end: python -m benchmarks.invariance --help.

Two decoders as Hugging Face has them, SmolLM2-135M and Llama-3.2-1B, of random weights, are run on stock layers (XLA's
dots and fusions, cuDNN's attention where sequences are whole, XLA's where they are decoded) and on this library's
invariant ones. Both have float32 weights and moments, bfloat16 products and residual stream, the same rows of one whole
sequence each, and the same recomputation: an update recomputes every layer in its backward, and stock also the logits.

"update" is forward, log-probs of the taken tokens, policy gradient and AdamW; "prefill" is the forward of prompts,
which fills a KV cache; "decode B" is 128 greedy tokens of B sequences in one program, the last slots of caches of 1024,
with the log-probs that a trainer records. Both kinds of layers are timed in turn on the same arrays.

"share of peak" is that of the card's dense bfloat16 operations, or of its memory bandwidth in decoding, that the work
cannot do without: recomputation does not count. Memory is all that a program holds at its peak. The mismatch is the
largest |log-prob of the training forward − log-prob recorded while decoding| of the same tokens under the same weights.
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

from benchmarks import common, decoder, programs
from benchmarks.argument_types import positive, some_of
from benchmarks.common import Candidate, Launch
from benchmarks.decoder import OPERATIONS, DecoderSizes, Operations

UPDATE, PREFILL, DECODE, MISMATCH = "update", "prefill", "decode", "mismatch"
STOCK = "stock"
_PEAKS = {"NVIDIA H100 80GB HBM3": (989e12, 3.35e12), "NVIDIA H200": (989e12, 4.8e12)}
"""Dense bfloat16 operations and bytes of memory per second, by kind of device, as NVIDIA gives them."""


@dataclass(frozen=True)
class Case:
    """A decoder, and how much of each phase is measured on it."""

    sizes: DecoderSizes
    update_rows: int
    prefill_rows: int = 8
    length: int = 2048
    """Tokens of a row of an update or a prefill."""
    slots: int = 1024
    """Slots of a cache in decoding, whose last `steps` are decoded."""
    steps: int = 128
    decoded_rows: tuple[int, ...] = (1, 8, 64, 256)
    compared_rows: int = 8
    """Sequences of which the mismatch is taken."""

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the phases."""
        return (UPDATE, PREFILL, *(f"{DECODE} {rows}" for rows in self.decoded_rows), MISMATCH)

    @property
    def start(self) -> int:
        """The first slot that is decoded."""
        return self.slots - self.steps


CASES = {
    "135M": Case(DecoderSizes(layers=30, width=576, heads=9, groups=3, inner=1536, vocab=49152), update_rows=16),
    "1B": Case(DecoderSizes(layers=16, width=2048, heads=32, groups=8, inner=8192, vocab=128256), update_rows=8),
}
SMOKE = "smoke"
SMOKE_CASE = Case(
    DecoderSizes(layers=2, width=32, heads=2, groups=1, inner=48, vocab=60, head_size=16),
    update_rows=2,
    prefill_rows=2,
    length=8,
    slots=8,
    steps=3,
    decoded_rows=(2,),
    compared_rows=2,
)


@dataclass(frozen=True)
class Row:
    """One kind of layers in one phase of one decoder."""

    decoder: str
    phase: str
    layers: str
    status: str
    ms: float | None = None
    tokens_per_second: float | None = None
    of_stock: float | None = None
    """Tokens per second over those of stock layers."""
    share_of_peak: float | None = None
    peak_mib: float | None = None
    mismatch: float | None = None


@dataclass(frozen=True)
class Phase:
    """Work of one program that every kind of layers does on the same arrays."""

    compile: Callable[[Operations], Any]
    launch: Callable[[Any], Launch]
    """The launch of a compiled program."""
    tokens: int
    flops: float = 0.0
    """The operations that it cannot do without, where these are its limit; they are 0 where memory is."""
    moved: float = 0.0
    """The bytes that it cannot do without, where memory is its limit."""


class Carried:
    """Arrays that programs hand on: each takes their memory and returns the next ones beside a result."""

    def __init__(self, new: Callable[[], Any]) -> None:
        self._new, self._arrays = new, None

    def launch(self, compiled: Any, *rest: Any) -> Launch:
        """The launch of a program `(arrays, *rest) → (arrays, result)`."""

        def start() -> Any:
            # A program that fails may have taken the arrays' memory: the next one starts from new ones.
            arrays, self._arrays = self._arrays, None
            self._arrays, result = compiled(self._new() if arrays is None else arrays, *rest)
            return result

        return Launch(start)


def _attention_flops(sizes: DecoderSizes, rows: int, length: int) -> int:
    """The operations of the causal attention of all layers, forward."""
    return 2 * sizes.layers * rows * sizes.heads * sizes.head_size * length**2


def update_phase(case: Case) -> Phase:
    """An update of all weights."""
    sizes, rows, length = case.sizes, case.update_rows, case.length
    tokens = jax.random.randint(jax.random.key(1), (rows, length + 1), 0, sizes.vocab)
    rest = tokens, jax.random.normal(jax.random.key(2), (rows,))

    @jax.jit
    def new() -> Any:
        weights = decoder.new_weights(sizes)
        return weights, decoder.OPTIMIZER.init(weights)

    def compiled(operations: Operations) -> Any:
        program = jax.jit(functools.partial(decoder.update, operations, sizes), donate_argnums=0)
        return program.lower(jax.eval_shape(new), *rest).compile()

    carried = Carried(new)
    forward = 2 * (sizes.layer_parameters + sizes.head_parameters) * rows * length
    forward += _attention_flops(sizes, rows, length)
    return Phase(compiled, lambda program: carried.launch(program, *rest), rows * length, flops=3 * forward)


def prefill_phase(case: Case) -> Phase:
    """The forward of prompts."""
    sizes, rows, length = case.sizes, case.prefill_rows, case.length
    arguments = rounded_weights(sizes), jax.random.randint(jax.random.key(1), (rows, length), 0, sizes.vocab)
    needed = 2 * sizes.layer_parameters * rows * length + _attention_flops(sizes, rows, length)
    return Phase(
        lambda operations: prefill(operations, sizes).lower(*arguments).compile(),
        lambda program: Launch(lambda: program(*arguments)),
        rows * length,
        flops=needed,
    )


def decode_phase(case: Case, rows: int) -> Phase:
    """The last slots of caches that hold random numbers before."""
    sizes, weights = case.sizes, for_decoding(rounded_weights(case.sizes))
    shape = (rows, case.slots, sizes.groups, sizes.head_size)

    @jax.jit  # for one layer: a program for all takes minutes to compile
    def cache(key: jax.Array) -> decoder.Cache:
        return decoder.Cache(*(jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(key)))

    def new() -> Any:
        keys = jax.random.split(jax.random.key(1), sizes.layers)
        return jnp.zeros(rows, jnp.int32), tuple(map(cache, keys))

    carried = Carried(new)
    # A step reads all weights, and the keys and values up to its own slot.
    cached = 4 * sizes.layers * rows * sizes.groups * sizes.head_size * (case.start + case.steps / 2)
    moved = case.steps * (2 * (sizes.layer_parameters + sizes.head_parameters) + cached)
    return Phase(
        lambda operations: decode(operations, case).lower(jax.eval_shape(new), weights).compile(),
        lambda program: carried.launch(program, weights),
        rows * case.steps,
        moved=moved,
    )


@functools.partial(jax.jit, static_argnums=0)
def rounded_weights(sizes: DecoderSizes) -> decoder.Weights:
    """The bfloat16 weights of a rollout."""
    return decoder.in_bfloat16(decoder.new_weights(sizes))


def for_decoding(weights: decoder.Weights) -> decoder.Weights:
    """The same weights with layers apart."""
    return weights._replace(layers=decoder.unstacked(weights.layers))


def prefill(operations: Operations, sizes: DecoderSizes) -> Any:
    """The program of `decoder.prefill`."""
    return jax.jit(functools.partial(decoder.prefill, operations, sizes))


@functools.cache
def decode(operations: Operations, case: Case) -> Any:
    """The program of `decoder.decode`, which takes its state's memory."""
    run = functools.partial(decoder.decode, operations, case.sizes, case.start, case.steps)
    return jax.jit(run, donate_argnums=0)


def mismatch_of(operations: Operations, case: Case) -> float:
    """The mismatch of sequences that were prefilled and decoded."""
    sizes, weights = case.sizes, rounded_weights(case.sizes)
    prompts = jax.random.randint(jax.random.key(3), (case.compared_rows, case.start), 0, sizes.vocab)
    token, cache = prefill(operations, sizes)(weights, prompts)
    begun = jnp.concatenate([prompts, token[:, None]], axis=1)
    roomy = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, case.steps), (0, 0), (0, 0)]), cache)
    _, rolled = decode(operations, case)((token, decoder.unstacked(roomy)), for_decoding(weights))

    @jax.jit
    def trained(weights: decoder.Weights, tokens: jax.Array) -> jax.Array:
        hidden, _ = decoder.hidden_states(operations, sizes, weights, tokens[:, :-1])
        return operations.logps(hidden, weights.embedding, tokens[:, 1:])

    logps = trained(weights, jnp.concatenate([begun, rolled.tokens], axis=1))[:, case.start :]
    return float(jnp.abs(logps - rolled.logps).max())


def _phase(case: Case, name: str) -> Phase:
    if name == UPDATE:
        return update_phase(case)
    return prefill_phase(case) if name == PREFILL else decode_phase(case, int(name.split()[1]))


def measure(name: str, case: Case, phase: str, kinds: Sequence[str], rounds: int, seconds: float) -> list[Row]:
    """The rows of all kinds of layers in one phase; one that cannot run has a status that says why."""
    print(f"measuring {name}, {phase} …", file=sys.stderr)
    if phase == MISMATCH:
        return [_mismatch_row(name, case, kind) for kind in kinds]
    work = common.attempt(functools.partial(_phase, case, phase))
    if isinstance(work, common.Failure):
        return [Row(name, phase, kind, work.status) for kind in kinds]
    compiled: dict[str, Any] = {}

    def build(kind: str) -> Candidate:
        print(f"compiling {kind} layers …", file=sys.stderr)
        compiled[kind] = work.compile(OPERATIONS[kind])
        return Candidate(work.launch(compiled[kind]))

    found, failed = common.measure_candidates({kind: functools.partial(build, kind) for kind in kinds}, rounds, seconds)
    rows = [Row(name, phase, kind, status) for kind, status in failed.items()]
    for kind, x in found.items():
        of_stock = found[STOCK].ms / x.ms if STOCK in found else None
        peak_mib = programs.held_bytes(compiled[kind]) / 2**20
        figures = x.ms, 1e3 * work.tokens / x.ms, of_stock, _share_of_peak(work, x.ms), peak_mib
        rows.append(Row(name, phase, kind, "pass", *figures))
    return rows


def _mismatch_row(name: str, case: Case, kind: str) -> Row:
    found = common.attempt(functools.partial(mismatch_of, OPERATIONS[kind], case))
    if isinstance(found, common.Failure):
        return Row(name, MISMATCH, kind, found.status)
    return Row(name, MISMATCH, kind, "pass", mismatch=found)


def _share_of_peak(work: Phase, ms: float) -> float | None:
    peaks = _PEAKS.get(jax.devices()[0].device_kind)
    if peaks is None:
        return None
    flops, bandwidth = peaks
    return 1e3 * (work.flops / flops + work.moved / bandwidth) / ms


def _cells(kind: str, row: Row | None) -> list[str]:
    """What the table says of one kind of layers: speed, that of stock for others, share of the peak, memory."""
    if row is None or row.status != "pass":
        figures = ["" if row is None else row.status, "", "", ""]
    elif row.mismatch is not None:
        figures = [f"{row.mismatch:.1e}" if row.mismatch else "0", "", "", ""]
    else:
        of_stock, share = row.of_stock, row.share_of_peak
        figures = [f"{row.tokens_per_second:.0f} tokens/s", "" if of_stock is None else f"{of_stock:.3f}"]
        figures += ["" if share is None else f"{100 * share:.0f} %", f"{(row.peak_mib or 0) / 1024:.1f} GiB"]
    return [x for i, x in enumerate(figures) if i != 1 or kind != STOCK]


def _show(rows: Sequence[Row], kinds: Sequence[str]) -> None:
    columns = [x for kind in kinds for x in (kind, "of stock", "of peak", "memory") if (kind, x) != (STOCK, "of stock")]
    table = Table("decoder", "phase", *columns)
    by = {(r.decoder, r.phase, r.layers): r for r in rows}
    for name, phase in dict.fromkeys((r.decoder, r.phase) for r in rows):
        table.add_row(name, phase, *(x for kind in kinds for x in _cells(kind, by.get((name, phase, kind)))))
    common.show(f"the price of invariance, {jax.devices()[0].device_kind}", table, width=150)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.invariance", description=__doc__)
    phases = list(dict.fromkeys(x for case in CASES.values() for x in case.phases))
    parser.add_argument("--decoders", type=some_of(CASES), help="comma-separated names (default: all)")
    parser.add_argument("--phases", type=some_of(phases), default=phases, help="comma-separated names")
    parser.add_argument("--layers", type=some_of(OPERATIONS), default=[*OPERATIONS], help="comma-separated names")
    parser.add_argument("--rounds", type=positive, default=3, help="interleaved rounds; figures are medians")
    options = common.add_outputs(parser).parse_args(argv)
    if not (options.smoke or options.decoders):
        common.require_gpu("--smoke has small ones, and --decoders names one")
    timing = (1, 0.0) if options.smoke else (options.rounds, 1.0)
    cases = {SMOKE: SMOKE_CASE} if options.smoke else {name: CASES[name] for name in options.decoders or CASES}
    rows: list[Row] = []
    for name, case in cases.items():
        for phase in case.phases if options.smoke else options.phases:
            rows += measure(name, case, phase, options.layers, *timing)
            if options.json:
                common.write(options.json, "invariance", argv, rows)
    _show(rows, options.layers)
    bars = ((r.decoder, f"{r.phase}: {r.layers}", r.of_stock) for r in rows)
    common.plot(options.plot, bars, f"tokens per second, {STOCK} layers = 1")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
