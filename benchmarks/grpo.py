"""An update of a whole policy by GRPO: python -m benchmarks.grpo --help.

The policy is `rlk grpo`'s decoder, from random initialisation, with float32 parameters and bfloat16 products; an update
is forward, loss, backward and Adam on B sequences of T tokens, all of which count. Candidates differ in what they do
between hidden states and loss. Memory is all that the compiled update holds at its peak, parameters included.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.table import Table

from benchmarks import common
from benchmarks.linear_logp import naive
from rlk_jax import linear_grpo_loss, linear_logp
from rlk_jax.grpo import LossOptions, policy_loss
from rlk_jax.grpo.layers import STOCK
from rlk_jax.grpo.model import Decoder

SHAPES = "64,256,512,12,131072;768,256,512,12,131072"
SMOKE_SHAPES = "2,8,16,1,300"
HEADS = 8
LEARNING_RATE = 1e-4
OPTIONS = LossOptions()
ONE_CALL = "linear_grpo_loss "


@dataclass(frozen=True)
class Row:
    """One candidate at one size."""

    shape: str
    candidate: str
    status: str
    million_parameters: float | None = None
    ms: float | None = None
    tokens_per_second: float | None = None
    peak_mib: float | None = None


@dataclass(frozen=True)
class Batch:
    """What an update is computed from; the log-probs of rollouts are of no policy, near enough to clip few."""

    tokens: jax.Array
    old_logps: jax.Array
    advantages: jax.Array
    mask: jax.Array


def make(shape: str) -> tuple[Callable[[], Decoder], Batch]:
    """The policy and the batch of a shape "B,T,D,L,V"."""
    rows, length, dim, layers, vocab = map(int, shape.split(","))
    kind = replace(STOCK, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 2)
    batch = Batch(
        jax.random.randint(keys[0], (rows, length + 1), 0, vocab),
        jnp.full((rows, length), -jnp.log(vocab)),
        jax.random.normal(keys[1], (rows,)),
        jnp.ones((rows, length), bool),
    )
    return lambda: Decoder(vocab, dim, layers, HEADS, kind=kind, rngs=nnx.Rngs(0)), batch


def loss_of(candidate: str, hidden: jax.Array, kernel: jax.Array, batch: Batch) -> jax.Array:
    """By "naive", an implementation of linear_logp, or one behind `ONE_CALL`."""
    target_ids, rest = batch.tokens[:, 1:], (batch.advantages, batch.mask)
    head: Any = {"weight_layout": "dv", "implementation": candidate.removeprefix(ONE_CALL)}
    if candidate.startswith(ONE_CALL):
        given = target_ids, batch.old_logps, None, *rest
        return linear_grpo_loss(hidden, kernel, *given, options=OPTIONS, **head).loss
    if candidate == "naive":
        flat = hidden.reshape(-1, hidden.shape[-1])
        logp = naive(flat, kernel.T, target_ids.reshape(-1)).reshape(target_ids.shape)
    else:
        logp = linear_logp(hidden, kernel, target_ids, **head)
    return policy_loss(logp, batch.old_logps, *rest, options=OPTIONS).loss


def update_of(candidate: str, new: Callable[[], Decoder], batch: Batch) -> tuple[Any, Any]:
    """The compiled update of a policy, in place, and what makes its first argument."""
    graph, optimizer = nnx.graphdef(nnx.eval_shape(new)), optax.adam(LEARNING_RATE)
    padding = jnp.zeros(batch.tokens.shape[0], jnp.int32)

    def start() -> Any:
        params = nnx.state(new())
        return params, optimizer.init(params)

    def update(state: Any) -> Any:
        def loss(params: nnx.State) -> jax.Array:
            model = nnx.merge(graph, params)
            hidden, kernel = model(batch.tokens[:, :-1], padding), model.lm_head.kernel[...]
            return loss_of(candidate, hidden.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), batch)

        params, moments = state
        updates, moments = optimizer.update(jax.grad(loss)(params), moments, params)
        return optax.apply_updates(params, updates), moments

    lowered = jax.jit(update, donate_argnums=0).lower(jax.eval_shape(start))
    return lowered.compile(), jax.jit(start)


def measure(shape: str, candidates: Sequence[str], rounds: int, seconds: float) -> list[Row]:
    """All candidates at one size, one after the other: each needs the memory to itself."""
    new, batch = make(shape)
    rows = []
    for name in candidates:
        print(f"measuring {shape}, {name} …", file=sys.stderr)
        try:
            rows.append(_measured(shape, name, new, batch, rounds, seconds))
        except Exception as problem:
            rows.append(Row(shape, name, common.status(problem)))
    return rows


def _measured(shape: str, name: str, new: Callable[[], Decoder], batch: Batch, rounds: int, seconds: float) -> Row:
    compiled, start = update_of(name, new, batch)
    memory: Any = compiled.memory_analysis()
    state = start()
    parameters = sum(x.size for x in jax.tree.leaves(state[0])) / 1e6

    def again() -> Any:
        nonlocal state
        state = compiled(state)
        return state

    ms = common.milliseconds({name: common.Launch(again)}, rounds, warm=seconds, timed=2 * seconds)[name]
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak += memory.temp_size_in_bytes
    return Row(shape, name, "pass", parameters, ms, batch.mask.size / ms * 1e3, peak / 2**20)


def _show(rows: Sequence[Row]) -> None:
    table = Table("B,T,D,L,V", "candidate", "parameters", "update", "tokens/s", "of naive", "peak memory", "of naive")

    def of_naive(r: Row, figure: str) -> str:
        found = next((getattr(x, figure) for x in rows if (x.shape, x.candidate) == (r.shape, "naive")), None)
        return f"{getattr(r, figure) / found:.2f}" if found else ""

    for r in rows:
        figures = ["", r.status]
        if r.status == "pass":
            figures = [f"{r.million_parameters:.0f} M", f"{r.ms:.1f} ms"]
            figures += [f"{r.tokens_per_second:.0f}", of_naive(r, "tokens_per_second")]
            figures += [f"{r.peak_mib:.0f} MiB", of_naive(r, "peak_mib")]
        table.add_row(r.shape, r.candidate, *figures)
    common.show(f"GRPO updates, bfloat16 products, {jax.devices()[0].device_kind}", table, width=140)


def main(argv: Sequence[str] | None = None) -> int:
    names = f"naive,xla,mosaic,{ONE_CALL}mosaic"
    parser = common.parser("grpo", __doc__, shapes=SHAPES, implementations=names, sizes="B,T,D,L,V")
    options = parser.parse_args(argv)
    rounds, seconds = (1, 0.0) if options.smoke else (options.rounds, 1.0)
    rows: list[Row] = []
    for shape in (SMOKE_SHAPES if options.smoke else options.shapes).split(";"):
        rows += measure(shape, options.implementations.split(","), rounds, seconds)
    _show(rows)
    if options.json:
        common.write(options.json, "grpo", argv, [asdict(r) for r in rows])
    if options.plot:
        panels: dict[str, dict[str, float]] = {}
        for r in rows:
            if r.tokens_per_second is not None:
                panels.setdefault(r.shape, {})[r.candidate] = r.tokens_per_second
        common.plot(options.plot, panels, "tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
