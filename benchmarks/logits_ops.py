"""Time and memory of the ops over logits beside a copy of them: python -m benchmarks.logits_ops --help.

A shape B,T,V is B sequences of T tokens. Bytes are those that a pass cannot do without: one read of each of the logits
and, for the gradient, one more of the policy's and one write. "of copy" is the bandwidth of these bytes over that of a
copy (the faster of memcpy and XLA's negation, bytes read and written) in the same rounds. With a mask the first tokens
of every sequence are masked, and bytes stay those of all tokens: "of whole" is the time over that without a mask.

"in place" donates the logits to the program, and their gradient takes their memory. All candidates of a shape are timed
in turn, round after round, each back to back for half a second first.
"""

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
from rlk_jax import logp, ratio_kl

SHAPES = "8,1024,131072"
SMOKE_SHAPES = "2,8,1000"
COPY, NAIVE, COMPILED = "copy", "naive", "torch.compile"
_MASKED = ", masked"


@dataclass(frozen=True)
class Row:
    """One candidate in one pass over one shape."""

    shape: str
    dtype: str
    op: str
    implementation: str
    what: str
    status: str
    ms: float | None = None
    of_copy: float | None = None
    of_whole: float | None = None
    """Where some tokens are masked."""
    extra_mib: float | None = None
    """Of the compiled program, beyond inputs and results; None where it is not known."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    policy: jax.Array
    ref: jax.Array
    ids: jax.Array
    old_logps: jax.Array
    upstream: jax.Array

    def mask(self, density: float) -> jax.Array:
        length = self.ids.shape[1]
        return jnp.broadcast_to(jnp.arange(length) >= length - round(density * length), self.ids.shape)


def make(shape: str, dtype: str) -> Problem:
    batch, length, vocab = map(int, shape.split(","))
    keys = jax.random.split(jax.random.key(0), 5)

    def logits(key: jax.Array) -> jax.Array:
        return (2 * jax.random.normal(key, (batch, length, vocab), dtype)).astype(dtype)

    lead = (batch, length)
    ids = jax.random.randint(keys[2], lead, 0, vocab)
    return Problem(
        jax.jit(logits)(keys[0]),
        jax.jit(logits)(keys[1]),
        ids,
        -jax.random.exponential(keys[3], lead),
        jax.random.normal(keys[4], lead),
    )


def _naive_logp(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """What a trainer writes without this library."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), ids[..., None], axis=-1)[..., 0]


def _logp(implementation: str, policy: jax.Array, p: Problem, mask: jax.Array, donate: bool) -> jax.Array:
    if implementation == NAIVE:
        return jnp.where(mask, _naive_logp(policy, p.ids), 0)
    ids = jnp.where(mask, p.ids, -100)
    return logp(policy, ids, ignore_index=-100, donate_logits=donate, implementation=implementation)


def _ratio_kl(implementation: str, policy: jax.Array, p: Problem, mask: jax.Array, donate: bool) -> jax.Array:
    if implementation == NAIVE:
        own, ref = _naive_logp(policy, p.ids), _naive_logp(p.ref, p.ids)
        return jnp.where(mask, jnp.exp(own - p.old_logps) + jnp.exp(ref - own) - (ref - own), 0)
    found = ratio_kl(policy, p.ref, p.ids, mask, p.old_logps, donate_logits=donate, implementation=implementation)
    return found.ratio + found.kl


OPS: dict[str, Any] = {"logp": _logp, "ratio_kl": _ratio_kl}
READS = {"logp": 1, "ratio_kl": 2}
"""Arrays of logits that a forward reads."""


@dataclass(frozen=True)
class Candidate:
    launch: Launch
    passes: int
    """Over one array of logits, reads and writes counted."""
    extra_bytes: int | None


def _compiled(function: Callable[..., Any], arguments: Any, donated: tuple[int, ...] = ()) -> Any:
    """For the arguments' arrays, one by one: to take trees apart takes the host longer than a short kernel runs."""
    arrays, tree = jax.tree.flatten(arguments)
    run = jax.jit(lambda *arrays: function(*jax.tree.unflatten(tree, arrays)), donate_argnums=donated)
    return run.lower(*arrays).compile()


def _temp_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def candidates(op: str, implementation: str, p: Problem, density: float) -> dict[str, Callable[[], Candidate]]:
    """Each pass by its name."""
    mask, reads = p.mask(density), READS[op]

    def values(donate: bool, policy: jax.Array, p: Problem, mask: jax.Array) -> jax.Array:
        return OPS[op](implementation, policy, p, mask, donate)

    def gradient(donate: bool, policy: jax.Array, p: Problem, mask: jax.Array) -> Any:
        return jax.value_and_grad(lambda policy: jnp.vdot(p.upstream, values(donate, policy, p, mask)))(policy)

    def fresh(function: Callable[..., Any], passes: int) -> Candidate:
        arguments = (p.policy, p, mask)
        compiled = _compiled(functools.partial(function, False), arguments)
        arrays = jax.tree.leaves(arguments)
        return Candidate(Launch(lambda: compiled(*arrays)), passes, _temp_bytes(compiled))

    def in_place() -> Candidate:
        arguments = (jnp.copy(p.policy), p, mask)
        compiled = _compiled(functools.partial(gradient, True), arguments, donated=(0,))
        arrays = jax.tree.leaves(arguments)

        def start() -> Any:
            loss, arrays[0] = compiled(*arrays)
            return loss

        return Candidate(Launch(start), reads + 2, _temp_bytes(compiled))

    return {
        "forward": lambda: fresh(values, reads),
        "forward+backward": lambda: fresh(gradient, reads + 2),
        "forward+backward, in place": in_place,
    }


def _of_torch(p: Problem) -> dict[str, Callable[[], Candidate]]:
    """logp by torch.compile; "forward" builds both, each asks for its own."""
    arguments = (p.policy.reshape(-1, p.policy.shape[-1]), p.ids.reshape(-1))
    launches = functools.cache(lambda: peers.logp_launches(arguments, p.upstream.reshape(-1)))

    def of(what: str, passes: int) -> Callable[[], Candidate]:
        return lambda: Candidate(launches()[what], passes, None)

    return {what: of(what, passes) for what, passes in (("forward", 1), ("forward+backward", 3))}


def _copies(p: Problem) -> dict[str, Launch]:
    negated = jax.jit(jnp.negative)
    return {
        f"{COPY}: memcpy": Launch(lambda: jnp.copy(p.policy)),
        f"{COPY}: negation": Launch(lambda: negated(p.policy)),
    }


def measure(
    dtype: str, density: float, shape: str, implementations: Sequence[str], rounds: int, seconds: float
) -> list[Row]:
    """All implementations of all ops over one shape; one that cannot run here says so in its status."""
    p = make(shape, dtype)
    found: dict[tuple[str, str, str], Candidate] = {}
    rows: list[Row] = []
    for op in OPS:
        for name in implementations:
            if name == COMPILED:
                passes = _of_torch(p) if op == "logp" else {}
            else:
                passes = candidates(op, name, p, 1)
                masked = candidates(op, name, p, density)
                passes |= {} if name == NAIVE else {what + _MASKED: x for what, x in masked.items()}
            for what, build in passes.items():
                try:
                    candidate = build()
                    candidate.launch.wait(candidate.launch.start())
                    found[op, name, what] = candidate
                except Exception as problem:
                    rows.append(Row(shape, dtype, op, name, what, common.status(problem)))
    launches = _copies(p) | {", ".join(key): x.launch for key, x in found.items()}
    ms = common.milliseconds(launches, rounds, warm=seconds, timed=0.6 * seconds)
    copy = min(x for name, x in ms.items() if name.startswith(COPY))
    rows += [Row(shape, dtype, "", name, "", "pass", x, copy / x) for name, x in ms.items() if name.startswith(COPY)]
    for (op, name, what), candidate in found.items():
        t = ms[f"{op}, {name}, {what}"]
        whole = ms.get(f"{op}, {name}, {what.removesuffix(_MASKED)}")
        of_whole = t / whole if what.endswith(_MASKED) and whole else None
        of_copy = None if of_whole else 0.5 * candidate.passes * copy / t
        extra = None if candidate.extra_bytes is None else candidate.extra_bytes / 2**20
        rows.append(Row(shape, dtype, op, name, what, "pass", t, of_copy, of_whole, extra))
    return rows


def _print(rows: Sequence[Row], device: str, density: float) -> None:
    table = Table("B,T,V", "op", "implementation", "pass", "time", "of copy", "of whole", "memory")
    for r in rows:
        figures: tuple[str, ...] = (r.status, "", "", "")
        if r.status == "pass":
            ratios = ("" if x is None else f"{x:.3f}" for x in (r.of_copy, r.of_whole))
            figures = (f"{r.ms:.3f} ms", *ratios, "" if r.extra_mib is None else f"{r.extra_mib:.1f} MiB")
        table.add_row(r.shape, r.op, r.implementation, r.what, *figures)
    common.show(f"ops over logits, {rows[0].dtype}, {device}; masked: {density} of the tokens count", table, width=140)


def main(argv: Sequence[str] | None = None) -> int:
    options = common.add_mask_density(
        common.parser(
            "logits_ops", __doc__, shapes=SHAPES, implementations=f"mosaic,xla,{NAIVE},{COMPILED}", sizes="B,T,V"
        )
    )
    options.set_defaults(mask_density=0.5)
    chosen = options.parse_args(argv)
    fixed = chosen.dtype, chosen.mask_density
    rows = common.measured("logits_ops", chosen, argv, SMOKE_SHAPES, functools.partial(measure, *fixed))
    _print(rows, jax.devices()[0].device_kind, chosen.mask_density)
    if chosen.plot:
        panels: dict[str, dict[str, float]] = {}
        for r in rows:
            if r.of_copy is not None:
                panels.setdefault(r.shape, {})[f"{r.op} {r.what}: {r.implementation}"] = r.of_copy
        common.plot(chosen.plot, panels, "bandwidth, a copy of the same run = 1")
    return common.exit_status(r.status for r in rows if r.op)


if __name__ == "__main__":
    sys.exit(main())
