"""Time and memory of the ops over logits beside a copy of them: python -m benchmarks.logits_ops --help.

A shape B,T,V is B sequences of T tokens. A pass is charged with the bytes that it cannot do without: one read of each
array of logits and, for the gradient, one more read of the policy's logits and one write. "of copy" is the bandwidth of
these bytes over that of a copy (the faster of memcpy and XLA's negation, bytes read and written) in the same rounds.
"logp of 7 in 8" is logp where each row allows 7 of 8 tokens of the vocabulary; the bytes of its mask are not charged.
Where some tokens are masked, these are the first of every sequence, and the bytes charged stay those of all tokens; "of
whole" is the time over that without masked tokens.

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

from benchmarks import common, peers, programs
from benchmarks.common import Candidate, Launch, compiled_candidate, temporary_bytes
from benchmarks.linear_logp import log_softmax_at
from rlk_jax import logp, ratio_kl

SHAPES = "8,1024,131072"
SMOKE_SHAPES = "2,8,1000"
NAIVE, COMPILED = "naive", "torch.compile"
ALLOWED = "logp of 7 in 8"
"""The op with a mask that allows 7 of 8 tokens in each row."""
_MASKED = ", masked"
"""The end of the names of passes in which some tokens are masked."""


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
    """The time over that of the same pass without a mask; None without a mask."""
    extra_mib: float | None = None
    """What the compiled program takes beyond inputs and results; None where it is not known."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The arrays of one shape: the logits of the policy and of the reference, `[B, T, V]`, words with a bit for each
    token that a row allows, `[B, T, ceil(V/32)]`, and the rest, `[B, T]`.
    """

    policy: jax.Array
    ref: jax.Array
    ids: jax.Array
    old_logps: jax.Array
    upstream: jax.Array
    words: jax.Array

    def mask(self, density: float) -> jax.Array:
        """The tokens that count: this fraction of every sequence, at its end."""
        length = self.ids.shape[1]
        return jnp.broadcast_to(jnp.arange(length) >= length - round(density * length), self.ids.shape)


def make_inputs(shape: str, dtype: str) -> Inputs:
    """Random inputs for a shape "B,T,V"."""
    batch, length, vocab = map(int, shape.split(","))
    keys = jax.random.split(jax.random.key(0), 6)

    def logits(key: jax.Array) -> jax.Array:
        return (2 * jax.random.normal(key, (batch, length, vocab), dtype)).astype(dtype)

    lead = (batch, length)
    ids = jax.random.randint(keys[2], lead, 0, vocab)
    words = -(-vocab // 32)
    some = functools.reduce(jnp.bitwise_or, jax.random.bits(keys[5], (3, *lead, words), "uint32"))
    own = jnp.uint32(1) << (ids % 32).astype(jnp.uint32)
    is_own = jnp.arange(words) == ids[..., None] // 32
    return Inputs(
        jax.jit(logits)(keys[0]),
        jax.jit(logits)(keys[1]),
        ids,
        -jax.random.exponential(keys[3], lead),
        jax.random.normal(keys[4], lead),
        jnp.where(is_own, some | own[..., None], some),
    )


def _logp(
    implementation: str,
    policy: jax.Array,
    inputs: Inputs,
    mask: jax.Array,
    donate: bool,
    words: jax.Array | None = None,
) -> jax.Array:
    if implementation == NAIVE:
        if words is not None:
            column = jnp.arange(policy.shape[-1])
            policy = jnp.where((words[..., column // 32] >> (column % 32)) & 1 != 0, policy, -jnp.inf)
        return jnp.where(mask, log_softmax_at(policy, inputs.ids), 0)
    ids = jnp.where(mask, inputs.ids, -100)
    how: dict[str, Any] = {"allowed_mask": words, "donate_logits": donate, "implementation": implementation}
    return logp(policy, ids, ignore_index=-100, **how)


def _allowed_logp(implementation: str, policy: jax.Array, inputs: Inputs, mask: jax.Array, donate: bool) -> jax.Array:
    return _logp(implementation, policy, inputs, mask, donate, inputs.words)


def _ratio_kl(implementation: str, policy: jax.Array, inputs: Inputs, mask: jax.Array, donate: bool) -> jax.Array:
    ids, old_logps = inputs.ids, inputs.old_logps
    if implementation == NAIVE:
        own, ref = log_softmax_at(policy, ids), log_softmax_at(inputs.ref, ids)
        return jnp.where(mask, jnp.exp(own - old_logps) + jnp.exp(ref - own) - (ref - own), 0)
    found = ratio_kl(policy, inputs.ref, ids, mask, old_logps, donate_logits=donate, implementation=implementation)
    return found.ratio + found.kl


OPS: dict[str, Any] = {"logp": _logp, ALLOWED: _allowed_logp, "ratio_kl": _ratio_kl}
READS = {"logp": 1, ALLOWED: 1, "ratio_kl": 2}
"""How many arrays of logits the forward of an op reads."""


def _flattened(function: Callable[..., Any], arguments: Any) -> tuple[Callable[..., Any], list[jax.Array]]:
    """`function`, made to take the leaves of `arguments` one by one, and these leaves.

    Flattening a tree at every call takes the host longer than a short kernel runs.
    """
    arrays, tree = jax.tree.flatten(arguments)
    return lambda *arrays: function(*jax.tree.unflatten(tree, arrays)), arrays


def candidates_of(op: str, implementation: str, inputs: Inputs, density: float) -> dict[str, Callable[[], Candidate]]:
    """The builders of an implementation's passes; `work` counts reads and writes of one array of logits."""
    mask, reads = inputs.mask(density), READS[op]

    def values(donate: bool, policy: jax.Array, inputs: Inputs, mask: jax.Array) -> jax.Array:
        return OPS[op](implementation, policy, inputs, mask, donate)

    def gradient(donate: bool, policy: jax.Array, inputs: Inputs, mask: jax.Array) -> Any:
        def loss(policy: jax.Array) -> jax.Array:
            return jnp.vdot(inputs.upstream, values(donate, policy, inputs, mask))

        return jax.value_and_grad(loss)(policy)

    def fresh(function: Callable[..., Any], work: int) -> Candidate:
        flat, arrays = _flattened(functools.partial(function, False), (inputs.policy, inputs, mask))
        return compiled_candidate(flat, *arrays, work=work)

    def in_place() -> Candidate:
        flat, arrays = _flattened(functools.partial(gradient, True), (jnp.copy(inputs.policy), inputs, mask))
        compiled = jax.jit(flat, donate_argnums=0).lower(*arrays).compile()

        def start() -> Any:
            loss, arrays[0] = compiled(*arrays)
            return loss

        return Candidate(Launch(start), temporary_bytes(compiled), reads + 2)

    return {
        "forward": lambda: fresh(values, reads),
        "forward+backward": lambda: fresh(gradient, reads + 2),
        "forward+backward, in place": in_place,
    }


def _torch_candidates(inputs: Inputs) -> dict[str, Callable[[], Candidate]]:
    """The builders of both passes of logp by torch.compile. The first that is called makes both; each takes its own."""
    arguments = (inputs.policy.reshape(-1, inputs.policy.shape[-1]), inputs.ids.reshape(-1))
    launches = functools.cache(lambda: peers.logp_launches(arguments, inputs.upstream.reshape(-1)))

    def build(what: str, work: int) -> Candidate:
        return Candidate(launches().pop(what), work=work)

    work = {"forward": 1, "forward+backward": 3}
    return {what: functools.partial(build, what, x) for what, x in work.items()}


Key = tuple[str, str, str]
"""The op, the implementation and the pass of a candidate."""


def _builders(inputs: Inputs, density: float, implementations: Sequence[str]) -> dict[Key, Callable[[], Candidate]]:
    """The builders of all candidates, by key."""
    found: dict[Key, Callable[[], Candidate]] = {
        ("", x, ""): build for x, build in programs.copies(inputs.policy).items()
    }
    for op in OPS:
        for name in implementations:
            if name == COMPILED:
                passes = _torch_candidates(inputs) if op == "logp" else {}
            else:
                passes = candidates_of(op, name, inputs, 1)
                masked = candidates_of(op, name, inputs, density)
                passes |= {} if name == NAIVE or op == ALLOWED else {what + _MASKED: x for what, x in masked.items()}
            found |= {(op, name, what): build for what, build in passes.items()}
    return found


def measure(
    dtype: str, density: float, shape: str, implementations: Sequence[str], rounds: int, seconds: float
) -> list[Row]:
    """The rows of all implementations of all ops on one shape; one that cannot run here has a status that says why."""
    builders = _builders(make_inputs(shape, dtype), density, implementations)
    found, failed = common.measure_candidates(builders, rounds, seconds)
    rows = [Row(shape, dtype, *key, status) for key, status in failed.items()]
    copy_ms = min((x.ms for (op, _, _), x in found.items() if not op), default=None)
    for (op, name, what), x in found.items():
        whole = found.get((op, name, what.removesuffix(_MASKED))) if what.endswith(_MASKED) else None
        of_whole = None if whole is None else x.ms / whole.ms
        of_copy = None if copy_ms is None or of_whole is not None else 0.5 * x.work * copy_ms / x.ms
        rows.append(Row(shape, dtype, op, name, what, "pass", x.ms, of_copy, of_whole, x.extra_mib))
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
    common.share_gpu_with_torch()
    names = f"mosaic,xla,{NAIVE},{COMPILED}"
    parser = common.parser("logits_ops", __doc__, shapes=SHAPES, implementations=names, sizes="B,T,V")
    common.add_mask_density(parser).set_defaults(mask_density=0.5)
    options = parser.parse_args(argv)
    fixed = options.dtype, options.mask_density
    rows = common.measure_shapes("logits_ops", options, argv, SMOKE_SHAPES, functools.partial(measure, *fixed))
    _print(rows, jax.devices()[0].device_kind, options.mask_density)
    bars = ((r.shape, f"{r.op} {r.what}: {r.implementation}", r.of_copy) for r in rows)
    common.plot(options.plot, bars, "bandwidth, a copy of the same run = 1")
    return common.exit_status(r.status for r in rows if r.op)


if __name__ == "__main__":
    sys.exit(main())
