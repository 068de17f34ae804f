"""An update of a whole policy by GRPO: python -m benchmarks.grpo --help.

The policy is `rlk grpo`'s decoder, randomly initialised, with float32 parameters and bfloat16 products. An update is
forward, loss, backward and Adam on B sequences of T tokens, all of which count. Candidates differ in what they do
between hidden states and loss. Memory is all that the compiled update holds at its peak on a device, parameters
included. On a mesh the rows are split over "data", and the head's vocabulary, with its gradients and Adam's moments,
over "tensor"; everything else is on every device. Each candidate runs in a process of its own, because JAX keeps the
memory that it once took. NVLink multicast is off (NCCL_NVLS_ENABLE=0).

With --rollout the current policy first samples the sequences, token by token with a KV cache, behind prompts of one
token. Their log-probs are recorded from the logits that they are sampled from, by a log-softmax or by rlk_jax.logp. One
program does both. A sequence that has ended still costs the time of its remaining tokens.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from benchmarks import common, processes, programs
from benchmarks.argument_types import meshes
from benchmarks.linear_logp import naive, naive_of_logits
from rlk_jax import linear_grpo_loss, linear_logp
from rlk_jax.core.dispatch import IMPLEMENTATIONS
from rlk_jax.grpo import GrpoConfig, LossOptions, policy_loss
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.layers import STOCK
from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.rollout import sample_completions
from rlk_jax.grpo.steps import make_mesh
from rlk_jax.grpo.tasks import completion_mask

SHAPES = "64,256,512,12,131072;768,256,512,12,131072"
SMOKE_SHAPES = "2,8,16,1,300"
ONE_DEVICE = "data=1,tensor=1"
HEADS = 8
LEARNING_RATE = 1e-4
OPTIONS = LossOptions()
ONE_CALL = "linear_grpo_loss "
"""The beginning of the names of candidates that compute the loss in one call of linear_grpo_loss."""
UPDATE, STEP = "update", "rollout and update"
TIMING = "back-to-back wall time, median of rounds, each candidate in a process of its own"


@dataclass(frozen=True)
class Row:
    """One candidate at one size on one mesh."""

    shape: str
    mesh: str
    what: str
    candidate: str
    status: str
    million_parameters: float | None = None
    ms: float | None = None
    tokens_per_second: float | None = None
    peak_mib: float | None = None


class Batch(NamedTuple):
    """What an update is computed from.

    `old_logps` come from no policy: they are those of a uniform distribution, which is near enough to a random policy
    that few tokens are clipped.
    """

    tokens: jax.Array
    old_logps: jax.Array
    advantages: jax.Array
    mask: jax.Array


def make_inputs(shape: str) -> tuple[Callable[[], Decoder], Batch]:
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


def loss_of(candidate: str, head: MeshHead, hidden: jax.Array, kernel: jax.Array, batch: Batch) -> jax.Array:
    """The GRPO loss of hidden states.

    A candidate is "naive", an implementation of linear_logp, or `ONE_CALL` and an implementation of linear_grpo_loss.
    Raises ValueError where "naive" is given a head that is cut over devices.
    """
    target_ids, rest = batch.tokens[:, 1:], (batch.advantages, batch.mask)
    options: Any = {"weight_layout": "dv", "global_vocab_size": head.vocab_size, "implementation": head.implementation}
    if candidate.startswith(ONE_CALL):
        given = target_ids, batch.old_logps, None, *rest
        return linear_grpo_loss(hidden, kernel, *given, options=OPTIONS, **options).loss
    if candidate == "naive":
        if head.shard_count > 1:
            raise ValueError("naive takes no head that is cut over devices")
        flat = hidden.reshape(-1, hidden.shape[-1])
        logp = naive(flat, kernel.T, target_ids.reshape(-1)).reshape(target_ids.shape)
    elif head.mesh.size == 1:  # without the search for tokens to ignore that MeshHead.logps makes
        logp = linear_logp(hidden, kernel, target_ids, **options)
    else:
        logp = head.logps(hidden, kernel, target_ids)
    return policy_loss(logp, batch.old_logps, *rest, options=OPTIONS).loss


def rolled_out(candidate: str, head: MeshHead, graph: nnx.GraphDef, params: nnx.State, batch: Batch) -> Batch:
    """The batch with its first tokens completed by the policy, and the log-probs recorded while they were sampled."""
    prompts, (rows, length) = batch.tokens[:, :1], batch.mask.shape

    policy, keys = nnx.merge(graph, head.unshard(params)), jax.random.split(jax.random.key(1), rows)

    def score(hidden: jax.Array, logits: jax.Array, token_ids: jax.Array) -> jax.Array:
        return (naive_of_logits if candidate == "naive" else head.logps_of_logits)(logits, token_ids)

    found = sample_completions(policy, prompts, jnp.zeros(rows, jnp.int32), keys, score, length=length)
    tokens = jnp.concatenate([prompts, found.completion_ids], axis=1)
    return Batch(tokens, found.logps, batch.advantages, completion_mask(found.completion_ids))


def update_of(
    candidate: str, mesh: Mesh, new: Callable[[], Decoder], batch: Batch, *, rollout: bool = False
) -> tuple[Any, Any]:
    """The compiled update of a policy, which takes its argument's memory, and a function that makes this argument."""
    model = nnx.eval_shape(new)
    graph, vocab_size = nnx.graphdef(model), model.lm_head.kernel.shape[1]
    head = MeshHead(mesh, vocab_size, candidate.removeprefix(ONE_CALL), jnp.bfloat16)
    optimizer, by_row = optax.adam(LEARNING_RATE), NamedSharding(mesh, PartitionSpec("data"))

    def start() -> Any:
        params = head.shard(nnx.state(new()))
        return params, optimizer.init(params)

    def update(state: Any) -> Any:
        params, moments = state
        rows = jax.lax.with_sharding_constraint(batch, by_row)
        if rollout:
            rows = rolled_out(candidate, head, graph, params, rows)
        padding = jnp.zeros(rows.tokens.shape[0], jnp.int32)

        def loss(params: nnx.State) -> jax.Array:
            model = nnx.merge(graph, params)
            hidden, kernel = model(rows.tokens[:, :-1], padding), model.lm_head.kernel[...]
            return loss_of(candidate, head, hidden.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), rows)

        updates, moments = optimizer.update(jax.grad(loss)(params), moments, params)
        return optax.apply_updates(params, updates), moments

    state = jax.eval_shape(start)
    shardings = head.shardings(state)
    jitted = jax.jit(update, donate_argnums=0, in_shardings=(shardings,), out_shardings=shardings)
    return jitted.lower(state).compile(), jax.jit(start, out_shardings=shardings)


def measure(shape: str, mesh: str, what: str, candidate: str, rounds: int, seconds: float) -> Row:
    """The row of one candidate, measured in a process of its own: however that ends, the next has all memory."""
    case = shape, mesh, what, candidate
    print(f"measuring {', '.join(case)} …", file=sys.stderr)
    row = processes.in_own_process(measure_here, *case, rounds, seconds)
    return Row(*case, row) if isinstance(row, str) else row


def measure_here(shape: str, mesh: str, what: str, candidate: str, rounds: int, seconds: float) -> Row:
    """The row of one candidate, measured in this process; one that cannot run has a status that says why."""
    case = shape, mesh, what, candidate
    row = common.attempt(functools.partial(_measure, *case, rounds, seconds))
    return Row(*case, row.status) if isinstance(row, common.Failure) else row


def _measure(shape: str, mesh: str, what: str, candidate: str, rounds: int, seconds: float) -> Row:
    new, batch = make_inputs(shape)
    devices = make_mesh(GrpoConfig(mesh=mesh, prompts_per_step=batch.mask.shape[0]))
    compiled, start = update_of(candidate, devices, new, batch, rollout=what == STEP)
    state = start()
    parameters = sum(x.size for x in jax.tree.leaves(state[0])) / 1e6

    def again() -> Any:
        nonlocal state
        state = compiled(state)
        return state

    candidates = {candidate: common.Candidate(common.Launch(again))}
    ms, failed = common.milliseconds(candidates, rounds, warm=seconds, timed=2 * seconds)
    if failed:
        return Row(shape, mesh, what, candidate, failed[candidate])
    peak = programs.held_bytes(compiled)
    tokens = batch.mask.size
    return Row(
        shape, mesh, what, candidate, "pass", parameters, ms[candidate], tokens / ms[candidate] * 1e3, peak / 2**20
    )


def _show(rows: Sequence[Row]) -> None:
    case = "B,T,D,L,V", "mesh", "what", "candidate"
    speed = "parameters", "time", "tokens/s", "of naive", "of one device"
    table = Table(*case, *speed, "peak memory", "of naive")
    figures_of = {(r.shape, r.mesh, r.what, r.candidate): asdict(r) for r in rows}

    def ratio(r: Row, mesh: str, candidate: str, figure: str) -> str:
        """This row's figure over that of another candidate or mesh."""
        found = figures_of.get((r.shape, mesh, r.what, candidate), {}).get(figure)
        return f"{getattr(r, figure) / found:.2f}" if found else ""

    for r in rows:
        figures = ["", r.status]
        if r.status == "pass":
            figures = [f"{r.million_parameters:.0f} M", f"{r.ms:.1f} ms", f"{r.tokens_per_second:.0f}"]
            figures += [ratio(r, r.mesh, "naive", "tokens_per_second")]
            figures += [ratio(r, ONE_DEVICE, r.candidate, "tokens_per_second")]
            figures += [f"{r.peak_mib:.0f} MiB", ratio(r, r.mesh, "naive", "peak_mib")]
        table.add_row(r.shape, r.mesh, r.what, r.candidate, *figures)
    common.show(f"GRPO, bfloat16 products, {jax.devices()[0].device_kind}", table, width=170)


def main(argv: Sequence[str] | None = None) -> int:
    names = f"naive,xla,mosaic,{ONE_CALL}mosaic"
    parser = common.parser(
        "grpo",
        __doc__,
        shapes=SHAPES,
        implementations=names,
        sizes="B,T,D,L,V",
        dtypes=["bfloat16"],
        known=[*IMPLEMENTATIONS, *(ONE_CALL + x for x in IMPLEMENTATIONS)],
    )
    parser.add_argument("--meshes", type=meshes, default=ONE_DEVICE, help='"data=N,tensor=M;data=N,tensor=M;…"')
    parser.add_argument("--rollout", action="store_true", help="sample the sequences of an update first")
    options = parser.parse_args(argv)
    what = STEP if options.rollout else UPDATE
    rounds, seconds = (1, 0.0) if options.smoke else (options.rounds, 1.0)
    shapes = common.asked_shapes(options, SMOKE_SHAPES)
    cases = itertools.product(shapes, options.meshes, options.implementations)
    rows: list[Row] = []
    for shape, mesh, candidate in cases:
        rows.append(measure(shape, mesh, what, candidate, rounds, seconds))
        if options.json:
            common.write(options.json, "grpo", argv, rows, TIMING)
    _show(rows)
    bars = ((f"{what}, {r.shape}: {r.mesh}", r.candidate, r.tokens_per_second) for r in rows)
    common.plot(options.plot, bars, "tokens/s")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
