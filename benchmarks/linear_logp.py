"""Time and memory of linear_logp beside the bare GEMM: python -m benchmarks.linear_logp --help.

G is XLA's own GEMM [N, D] x [D, V] that writes logits in the input dtype, or in bfloat16 where that is float32. With
--dtype bfloat16/float32 hidden is bfloat16 and the head float32. All candidates of a shape are timed in turn,
round after round, in one process, each back to back for half a second first; ratios are to G of the same rounds.
Memory is what the compiled program (or torch's allocator) takes beyond inputs and results.

With --mask-density below 1 only that fraction of the tokens counts; the masked tokens stand in front, as prompts do.
"forward", "forward+backward" and "frozen head" ignore them by ignore_index; "masked loss" gives them upstream gradients
of 0.
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
from benchmarks.common import Candidate, compiled_candidate
from rlk_jax import linear_logp

SHAPES = "4096,2048,131072;4096,4096,131072;8192,4096,151936;16384,2048,32768"
SMOKE_SHAPES = "64,32,1000"
IGNORED = -100
LOW_RANKS = 16, 64
"""Ranks of an adapter of the head."""
SOFTCAP: dict[str, Any] = {"logit_softcap": 30.0}
"""The softcap of Gemma 2's head."""
MIXED = "bfloat16/float32"
"""The dtypes of hidden and of the head, where they differ."""
KEPT_IDS = 50
"""How many ids of a row a sampler has kept."""
RANKINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("top 20", {"return_top_k": 20}),
    ("top 128", {"return_top_k": 128}),
    ("rank", {"return_target_rank": True}),
)
"""What a caller asks for of the most probable tokens, by name."""
GEMM = "GEMM", "G"
"""The implementation and the pass of the baseline."""


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


def naive(
    hidden: jax.Array,
    weight: jax.Array,
    target_ids: jax.Array,
    *,
    allowed_ids: jax.Array | None = None,
    allowed_mask: jax.Array | None = None,
    return_top_k: int | None = None,
    return_target_rank: bool = False,
    **options: Any,
) -> Any:
    """Log-probabilities, and what `linear_logp` returns for these options, as a trainer writes them without this
    library. Other options are left out.
    """
    logits = hidden @ weight.T
    if allowed_ids is not None or allowed_mask is not None:
        logits = jnp.where(_is_allowed(logits.shape, allowed_ids, allowed_mask), logits, -jnp.inf)
    values = naive_of_logits(logits, target_ids)
    if return_top_k:
        largest, ids = jax.lax.top_k(logits, return_top_k)
        lse = jax.nn.logsumexp(logits.astype(jnp.float32), axis=1, keepdims=True)
        return values, (largest.astype(jnp.float32) - lse, ids)
    if return_target_rank:
        return values, (logits > jnp.take_along_axis(logits, target_ids[:, None], axis=1)).sum(axis=1)
    return values


def _is_allowed(shape: tuple[int, ...], ids: jax.Array | None, mask: jax.Array | None) -> jax.Array:
    """What each row may take, as booleans of the logits' shape."""
    if mask is None:
        return jnp.zeros(shape, bool).at[jnp.arange(shape[0])[:, None], ids].set(True)
    columns = jnp.arange(shape[1])
    return (mask[:, columns // 32] >> (columns % 32).astype(jnp.uint32)) & 1 != 0


def _nine_of_ten(shape: tuple[int, ...]) -> jax.Array:
    """Random words of which each bit is set with a probability of 0.9. The binary digits of 0.9, the last one first,
    say whether further random words are combined with them by `or`, for a 1, or by `and`, for a 0.
    """
    words = jnp.zeros(shape, jnp.uint32)
    for i, digit in enumerate(reversed("1110011001")):
        others = jax.random.bits(jax.random.key(i), shape, "uint32")
        words = words | others if digit == "1" else words & others
    return words


def naive_of_logits(logits: jax.Array, target_ids: jax.Array) -> jax.Array:
    """`naive`, where the logits exist already."""
    return jnp.where(target_ids == IGNORED, 0, log_softmax_at(logits, jnp.maximum(target_ids, 0)))


def log_softmax_at(logits: jax.Array, target_ids: jax.Array) -> jax.Array:
    """The log-softmax of logits `[..., V]` in float32, at target ids `[...]`."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), target_ids[..., None], axis=-1)[..., 0]


@dataclass(frozen=True)
class Inputs:
    """The arrays of one shape, and the fraction of the tokens that counts."""

    hidden: jax.Array
    weight: jax.Array
    target_ids: jax.Array
    bias: jax.Array
    upstream: jax.Array
    density: float

    @property
    def active(self) -> jax.Array:
        """Which tokens count: the last ones."""
        tokens = self.hidden.shape[0]
        return jnp.arange(tokens) >= tokens - round(self.density * tokens)

    def allowed(self) -> dict[str, dict[str, jax.Array]]:
        """Which tokens each row may take, by name: its target is among them."""
        tokens, vocab = self.hidden.shape[0], self.weight.shape[0]
        shape = tokens, -(-vocab // 32)
        some = _nine_of_ten(shape)
        own = jnp.uint32(1) << (self.target_ids % 32).astype(jnp.uint32)
        words = jnp.arange(tokens), self.target_ids // 32
        ids = jax.random.randint(jax.random.key(3), (tokens, KEPT_IDS), 0, vocab).at[:, 0].set(self.target_ids)
        return {
            "all allowed": {"allowed_mask": jnp.full(shape, jnp.iinfo(jnp.uint32).max, jnp.uint32)},
            "9 of 10 allowed": {"allowed_mask": some.at[words].set(some[words] | own)},
            f"{KEPT_IDS} ids allowed": {"allowed_ids": ids},
        }

    def low_rank(self, rank: int) -> tuple[jax.Array, jax.Array]:
        """A `[r, D]` and B `[V, r]` of an adapter."""
        (vocab, dim), dtype = self.weight.shape, self.weight.dtype
        keys = jax.random.split(jax.random.key(rank))
        b = jax.random.normal(keys[1], (vocab, rank)) / dim
        return (jax.random.normal(keys[0], (rank, dim)) / dim**0.5).astype(dtype), b.astype(dtype)


def make_inputs(shape: str, dtype: str, density: float) -> Inputs:
    """Random inputs for a shape "N,D,V"."""
    tokens, dim, vocab = map(int, shape.split(","))
    keys = jax.random.split(jax.random.key(0), 5)
    of_hidden, of_weight = dtype.split("/") if dtype == MIXED else (dtype, dtype)
    return Inputs(
        jax.random.normal(keys[0], (tokens, dim), of_hidden),
        (jax.random.normal(keys[1], (vocab, dim)) / dim**0.5).astype(of_weight),
        jax.random.randint(keys[2], (tokens,), 0, vocab),
        jax.random.normal(keys[3], (vocab,), of_weight),
        jax.random.normal(keys[4], (tokens,)),
        density,
    )


Build = Callable[[], Candidate]
"""Compiles a candidate; raises what it raises where it cannot run."""


def own_candidates(name: str, inputs: Inputs) -> dict[str, Build]:
    """The passes of one implementation, or of "naive"; raises what it raises where it cannot run."""
    is_ours = name != "naive"
    masked: dict[str, Any] = {"ignore_index": IGNORED} if inputs.density < 1 else {}
    ids = jnp.where(inputs.active, inputs.target_ids, IGNORED) if masked else inputs.target_ids

    def logp(h: jax.Array, w: jax.Array, t: jax.Array, b: jax.Array | None = None, **options: Any) -> Any:
        return linear_logp(h, w, t, b, implementation=name, **options) if is_ours else naive(h, w, t, **options)

    def gradient(argnums: tuple[int, ...], **options: Any) -> Callable[..., Any]:
        return jax.grad(lambda h, w, t, g: jnp.vdot(logp(h, w, t, **options), g), argnums)

    def build(f: Callable[..., Any], *arguments: Any, work: int = 1) -> Build:
        return lambda: compiled_candidate(f, *arguments, work=work)

    operands, g = (inputs.hidden, inputs.weight, ids), inputs.upstream
    # `work` counts the products [N, D] x [D, V] that a pass cannot do without; the TFLOP/s are theirs.
    found: dict[str, Build] = {
        "forward": build(lambda h, w, t: logp(h, w, t, **masked), *operands),
        "forward+backward": build(gradient((0, 1), **masked), *operands, g, work=3),
        "frozen head": build(gradient((0,), **masked), *operands, g, work=2),
    }
    if inputs.density < 1:
        zeroed = jnp.where(inputs.active, g, 0)
        arguments = inputs.hidden, inputs.weight, inputs.target_ids, zeroed
        found["masked loss"] = build(gradient((0, 1)), *arguments, work=3)
        return found
    found |= {f"forward, {what}": build(functools.partial(logp, **wanted), *operands) for what, wanted in RANKINGS}
    for what, allowed in inputs.allowed().items():
        found[f"forward, {what}"] = build(lambda h, w, t, a: logp(h, w, t, **a), *operands, allowed)
        found[f"forward+backward, {what}"] = build(
            jax.grad(lambda h, w, t, g, a: jnp.vdot(logp(h, w, t, **a), g), (0, 1)), *operands, g, allowed, work=3
        )
    if not is_ours:
        return found
    found |= {
        "forward, entropy": build(lambda h, w, t: logp(h, w, t, return_entropy=True), *operands),
        "forward, bias": build(logp, *operands, inputs.bias),
        "forward, softcap": build(lambda h, w, t: logp(h, w, t, **SOFTCAP), *operands),
    }
    is_float32 = inputs.weight.dtype == jnp.float32
    holds_all: dict[str, Any] = {"memory_budget": common.budget_for_all(len(inputs.hidden), inputs.weight)}
    passes = {"all kept": holds_all, "softcap": SOFTCAP, "softcap, all kept": SOFTCAP | holds_all}
    for what, options in passes.items():
        found[f"forward+backward, {what}"] = build(gradient((0, 1), **options), *operands, g, work=3)
    for rank in () if is_float32 else LOW_RANKS:
        a, b = inputs.low_rank(rank)
        found[f"forward, rank {rank}"] = build(
            lambda h, w, t, a, b: logp(h, w, t, low_rank=(a, b, 2.0)), *operands, a, b
        )
        found[f"frozen head, rank {rank}"] = build(
            jax.grad(lambda h, w, t, a, b, g: jnp.vdot(logp(h, w, t, low_rank=(a, b, 2.0)), g), (0, 3, 4)),
            *(*operands, a, b, g),
            work=2,
        )
    return found


CandidatesOf = Callable[[str, Inputs], dict[str, Build]]
"""Returns what builds the candidates of one implementation or peer, by pass."""


def candidates_of(name: str, inputs: Inputs) -> dict[str, Build]:
    """The passes of an implementation or of a peer."""
    if name not in peers.PEERS:
        return own_candidates(name, inputs)
    arguments = (inputs.hidden, inputs.weight, inputs.target_ids)
    work = {"forward": 1, "forward+backward": 3}
    found = functools.cache(lambda: peers.candidates(name, arguments, inputs.upstream, work))

    def build(what: str) -> Candidate:
        return found()[what]

    return {what: functools.partial(build, what) for what in work}


def measure(
    build: CandidatesOf,
    dtype: str,
    density: float,
    passes: Sequence[str],
    shape: str,
    implementations: Sequence[str],
    rounds: int,
    seconds: float,
) -> list[Row]:
    """The rows of all implementations on one shape; one that cannot run here has a status that says why."""
    inputs = make_inputs(shape, dtype, density)

    def gemm() -> dict[tuple[str, str], Candidate]:
        halves = (x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in (inputs.hidden, inputs.weight))
        return {GEMM: compiled_candidate(lambda h, w: h @ w.T, *halves)}

    def by_pass(name: str) -> dict[tuple[str, str], Candidate]:
        found = build(name, inputs).items()
        return {(name, what): make() for what, make in found if not passes or what in passes}

    builders = {GEMM: gemm} | {(name, ""): functools.partial(by_pass, name) for name in implementations}
    found, failed = common.measure_candidates(builders, rounds, seconds)
    rows = [Row(shape, dtype, density, *key, status) for key, status in failed.items()]
    baseline = found.get(GEMM)
    tokens, dim, vocab = map(int, shape.split(","))
    for key, x in found.items():
        of_gemm = None if baseline is None else x.ms / baseline.ms
        tflops = x.work * 2 * tokens * dim * vocab / x.ms / 1e9
        rows.append(Row(shape, dtype, density, *key, "pass", x.ms, of_gemm, tflops, x.extra_mib))
    return rows


def _show(op: str, rows: Sequence[Row]) -> None:
    """Print the table of a run."""
    table = Table("N,D,V", "implementation", "pass", "time", "of G", "TFLOP/s", "memory")
    for r in rows:
        figures = ("", r.status, "", "")
        if r.status == "pass":
            memory = "" if r.extra_mib is None else f"{r.extra_mib:.0f} MiB"
            of_gemm = "" if r.of_gemm is None else f"{r.of_gemm:.3f}"
            figures = (f"{r.ms:.3f} ms", of_gemm, f"{r.tflops:.0f}", memory)
        table.add_row(r.shape, r.implementation, r.what, *figures)
    device = jax.devices()[0].device_kind
    common.show(f"{op}, {rows[0].dtype}, mask density {rows[0].mask_density}, {device}", table)


def add_passes(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    options.add_argument(
        "--passes", default="", help='"pass;pass;…" to measure these alone, by their names in the table'
    )
    return options


def run_benchmark(module: str, options: argparse.Namespace, argv: Sequence[str] | None, build: CandidatesOf) -> int:
    """Measure as the options say; print, write and draw the rows. Returns the exit status."""
    passes = [x for x in options.passes.split(";") if x]
    fixed = build, options.dtype, options.mask_density, passes
    rows = common.measure_shapes(module, options, argv, SMOKE_SHAPES, functools.partial(measure, *fixed))
    _show(module, rows)
    compared = [r for r in rows if r.what != GEMM[1]]
    by_pass = sorted(compared, key=lambda r: r.what)
    bars = ((r.shape, f"{r.what}: {r.implementation}", r.of_gemm) for r in by_pass)
    common.plot(options.plot, bars, "time, in bare GEMMs of the same run")
    if unknown := set(passes) - {r.what for r in compared}:
        print(f"no candidate was measured in a pass {', '.join(map(repr, sorted(unknown)))}", file=sys.stderr)
        return 1
    return common.exit_status(r.status for r in compared)


def main(argv: Sequence[str] | None = None) -> int:
    common.share_gpu_with_torch()
    parser = common.parser(
        "linear_logp",
        __doc__,
        shapes=SHAPES,
        implementations=",".join(("mosaic", "xla", "naive", *peers.PEERS)),
        dtypes=(*common.DTYPES, MIXED),
    )
    options = add_passes(common.add_mask_density(parser)).parse_args(argv)
    return run_benchmark("linear_logp", options, argv, candidates_of)


if __name__ == "__main__":
    sys.exit(main())
