"""The steps of a run: supervised warm start, GRPO and evaluation, each one jitted program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from rlk_jax.core.tokens import LinearLogp
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.faults import Metrics
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.layers import INVARIANT, STOCK, Layers
from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.rollout import (
    Rollout,
    no_score,
    sample_completions,
    sample_in_length_buckets,
)
from rlk_jax.grpo.run_config import BadField, RunConfig
from rlk_jax.grpo.samples import Sample
from rlk_jax.grpo.sequences import Sequences, join_completions
from rlk_jax.grpo.supervised import supervised_update
from rlk_jax.grpo.tasks import Examples, Task, completion_mask, exact_answer_reward
from rlk_jax.grpo.updates import Learner, TargetValues, Updates, adam, learning_rate_of
from rlk_jax.losses import group_advantages
from rlk_jax.ops.linear_cross_entropy import loss_of_values

EVALUATION_SAMPLES = 8
"""Completions sampled for each held-out prompt."""
EVALUATION_STEP = 2**31 - 1  # Evaluation folds this into the seed where training folds in its step.


class TrainState(NamedTuple):
    """All that is kept from step to step. `reference` is the frozen policy that the KL is measured to; a given model
    has none where beta is 0. `teacher` is the frozen model that a given model may learn from.
    """

    params: nnx.State
    reference: nnx.State | None
    opt_state: optax.OptState
    teacher: nnx.State | None = None

    @property
    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds, by name: a teacher is in a directory of its own."""
        return {name: x for name, x in self._asdict().items() if name != "teacher"}


class Jitted[**Arguments, Result](Protocol):
    """A jitted function. What `lower` and `compile` have compiled serves its calls, too."""

    def __call__(self, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result: ...

    def lower(self, *arguments: Any) -> jax.stages.Lowered: ...


@dataclass(frozen=True)
class Phase:
    """Steps of a run that are of one kind and follow one another."""

    name: str
    """What metrics call it."""
    title: str
    """What messages call a step."""
    begin: int
    """How many steps of the run are before it."""
    end: int
    """How many are done after it."""
    step: Jitted[[TrainState, int], tuple[TrainState, Metrics]]
    start: Jitted[[TrainState], TrainState] | None = None
    """Makes its first state of the last one of the phase before."""
    start_title: str = ""


class RunSteps(Protocol):
    """What the trainer asks of the programs of a run, whichever command it is of."""

    @property
    def initial_state(self) -> Jitted[[], TrainState]: ...

    def phases(self, config: Any) -> Sequence[Phase]:
        """All phases, in their order. The last one is evaluated before and after it."""
        ...

    @property
    def evaluation(self) -> Jitted[[nnx.State], Metrics]: ...

    @property
    def drawn(self) -> list[Sample]: ...

    @property
    def load_teacher(self) -> Callable[[], nnx.State] | None: ...

    @property
    def save_hf(self) -> Callable[[nnx.State, str], None] | None: ...


@dataclass(frozen=True)
class TrainingSteps:
    """The programs of one run of `rlk grpo`. `warmup_step` and `grpo_step` donate their state: it is updated in
    place.
    """

    initial_state: Jitted[[], TrainState]
    start_grpo: Jitted[[TrainState], TrainState]
    warmup_step: Jitted[[TrainState, int], tuple[TrainState, Metrics]]
    grpo_step: Jitted[[TrainState, int], tuple[TrainState, Metrics]]
    heldout_rewards: Jitted[[nnx.State], Metrics]
    drawn: list[Sample] = field(default_factory=list)
    """Completions of a given model since the trainer last took them."""
    load_teacher: Callable[[], nnx.State] | None = None
    """Reads the teacher, which checkpoints do not hold, where a run has one."""
    save_hf: Callable[[nnx.State, str], None] | None = None
    """Writes a given model as a checkpoint."""

    @property
    def evaluation(self) -> Jitted[[nnx.State], Metrics]:
        return self.heldout_rewards

    def phases(self, config: GrpoConfig) -> Sequence[Phase]:
        warm, total = config.warmup_steps, config.total_steps
        start = "the start of GRPO" if config.model is None else "a rollout"
        return (
            Phase("warmup", "a warm-up step", 0, warm, self.warmup_step),
            Phase("grpo", "a GRPO step", warm, total, self.grpo_step, self.start_grpo, start),
        )


def make_mesh(config: RunConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh ("data", "tensor") of the first of these devices, or of JAX's. Raises BadInput when there are too few."""
    data, tensor = config.mesh_shape
    devices = jax.devices() if devices is None else devices
    if data * tensor > len(devices):
        raise BadField(f"`mesh` {config.mesh} needs {data * tensor} devices and there are {len(devices)}")
    return Mesh(np.array(devices[: data * tensor]).reshape(data, tensor), ("data", "tensor"))


def make_head(config: GrpoConfig, task: Task, mesh: Mesh) -> MeshHead:
    """The LM head of a run. Raises BadInput when linear_logp cannot run on it, or cannot promise the bits that
    `invariant` asks for.
    """
    head = MeshHead(mesh, task.vocab_size, config.implementation, make_layers(config).dtype)
    head.check(config.width)
    return head.with_promised_bits(config.width) if config.invariant else head


def make_layers(config: GrpoConfig) -> Layers:
    """The layers of a run."""
    return replace(INVARIANT if config.invariant else STOCK, dtype=jnp.dtype(config.compute_dtype))


def target_logps(model: Decoder, sequences: Sequences, head: MeshHead) -> Float[Array, "R T"]:
    """The log-probs of `target_values`."""
    return target_values(model, sequences, head).logp


def target_values(model: Decoder, sequences: Sequences, head: MeshHead, *, entropy: bool = False) -> LinearLogp:
    """fp32 log-prob of every target given the tokens of its sequence before it, and the entropy where it is asked for;
    0 where IGNORED.
    """

    def decode(model: Decoder) -> Array:
        return model(sequences.token_ids, sequences.padding)

    hidden = head.with_fusion_barriers(decode)(model)[:, -sequences.target_ids.shape[1] :]
    return head.values(hidden, model.lm_head.kernel[...], sequences.target_ids, entropy=entropy)


def build_steps(config: GrpoConfig, task: Task, mesh: Mesh) -> TrainingSteps:
    """Bind config, examples and mesh into the programs of a run; each is compiled when it is first called.

    All randomness of step k comes from (seed, k), so a run can stop after any step and go on later without changing a
    bit. Raises BadInput when linear_logp cannot run as the config says.
    """
    head = make_head(config, task, mesh)
    replicated, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    train, heldout = jax.device_put((task.train, task.heldout), replicated)
    run_key = jax.random.key(config.seed)

    def new_model() -> Decoder:
        sizes = task.vocab_size, config.width, config.layers, config.heads
        return Decoder(*sizes, kind=make_layers(config), rngs=nnx.Rngs(config.seed))

    graph = nnx.graphdef(nnx.eval_shape(new_model))
    demonstration_errors = config.demonstration_errors if config.prompts is None else 0.0
    rows_per_step = config.prompts_per_step * config.samples_per_prompt
    length = task.train.answer_ids.shape[1]
    warmup_optimizer = adam(config.warmup_learning_rate, head, config.max_gradient_norm)
    grpo_optimizer = adam(learning_rate_of(config), head, config.max_gradient_norm)

    def draw(examples: Examples, key: PRNGKeyArray, count: int) -> Examples:
        rows = jax.random.randint(key, (count,), 0, examples.padding.shape[0])
        return jax.lax.with_sharding_constraint(jax.tree.map(lambda array: array[rows], examples), by_row)

    def values(params: nnx.State, sequences: Sequences) -> TargetValues:
        found = target_values(nnx.merge(graph, params), sequences, head, entropy=bool(config.entropy_coef > 0))
        return TargetValues(found.logp, found.entropy)

    def losses(params: nnx.State, sequences: Sequences) -> Array:
        """The cross-entropy of linear_cross_entropy, whose head may be cut here."""
        logp = target_logps(nnx.merge(graph, params), sequences, head)
        return loss_of_values(logp, None, sequences.mask.astype(jnp.float32), z_loss=0.0, reduction="none")

    updates = Updates(config, mesh, values, length)

    def sampler(params: nnx.State, score: Any, greedy: bool = False) -> Callable[[Examples, PRNGKeyArray], Rollout]:
        model = nnx.merge(graph, head.unshard(params))

        def sample(examples: Examples, keys: PRNGKeyArray) -> Rollout:
            prompts, length = (examples.prompt_ids, examples.padding), examples.answer_ids.shape[1]
            return sample_completions(model, *prompts, keys, score, length=length, greedy=greedy)

        return sample

    bucketing: dict[str, Any] = {
        "buckets": config.rollout_buckets,
        "sharding": NamedSharding(mesh, PartitionSpec(None, "data")),
    }

    def roll_out(params: nnx.State, examples: Examples, key: PRNGKeyArray) -> Rollout[Array]:
        kernel = nnx.merge(graph, params).lm_head.kernel[...]

        def score(hidden: Array, logits: Array, token_ids: Array) -> Array:
            if config.invariant:  # The bits of training take another product with the head.
                return head.logps(hidden, kernel, token_ids)
            return head.logps_of_logits(logits, token_ids)

        sample = sampler(params, score)
        return sample_in_length_buckets(sample, examples, jax.random.split(key, examples.padding.shape[0]), **bucketing)

    def success_rate(params: nnx.State, examples: Examples, keys: PRNGKeyArray, *, greedy: bool = False) -> Array:
        """The share of right completions. As many are sampled at a time as in a step, so they need no more memory."""
        sample, count = sampler(params, no_score, greedy), examples.padding.shape[0]

        def is_right(block: tuple[Examples, PRNGKeyArray]) -> Array:
            block = jax.lax.with_sharding_constraint(block, by_row)
            return exact_answer_reward(
                sample_in_length_buckets(sample, *block, **bucketing).completion_ids, block[0].answer_ids
            )

        rows = jnp.arange(-(-count // rows_per_step) * rows_per_step) % count  # The first rows fill up the last block.
        blocks = jax.tree.map(lambda x: x[rows].reshape(-1, rows_per_step, *x.shape[1:]), (examples, keys))
        return jax.lax.map(is_right, blocks).reshape(-1)[:count].mean()

    def initial_state() -> TrainState:
        params = head.shard(nnx.state(new_model()))
        return TrainState(params, params, warmup_optimizer.init(params))

    def start_grpo(state: TrainState) -> TrainState:
        return TrainState(state.params, state.params, grpo_optimizer.init(state.params))

    def warmup_step(state: TrainState, step: Array) -> tuple[TrainState, Metrics]:
        batch_key, wrong_key, other_key = jax.random.split(jax.random.fold_in(run_key, step), 3)
        examples = draw(train, batch_key, rows_per_step)
        wrong = jax.random.bernoulli(wrong_key, demonstration_errors, (rows_per_step, 1))
        answer_ids = jnp.where(wrong, draw(train, other_key, rows_per_step).answer_ids, examples.answer_ids)
        rows = join_completions(examples.prompt_ids, examples.padding, answer_ids, completion_mask(answer_ids))
        learner = Learner(state.params, state.opt_state)
        learner, metrics = supervised_update(updates, warmup_optimizer, losses, learner, rows)
        return state._replace(**learner._asdict()), metrics

    def grpo_step(state: TrainState, step: Array) -> tuple[TrainState, Metrics]:
        prompt_key, sample_key, shuffle_key = jax.random.split(jax.random.fold_in(run_key, step), 3)
        prompts = draw(train, prompt_key, config.prompts_per_step)
        examples = jax.tree.map(lambda array: jnp.repeat(array, config.samples_per_prompt, axis=0), prompts)
        rollout = roll_out(state.params, examples, sample_key)
        rewards = exact_answer_reward(rollout.completion_ids, examples.answer_ids).astype(jnp.float32)
        advantages = group_advantages(rewards, samples_per_prompt=config.samples_per_prompt)
        if config.shuffle_advantages:
            advantages = jax.random.permutation(shuffle_key, advantages)
        mask = completion_mask(rollout.completion_ids)
        rows = join_completions(examples.prompt_ids, examples.padding, rollout.completion_ids, mask)
        learner = Learner(state.params, state.opt_state)
        scored = updates.scored(learner, state.reference, rows, rollout.logps, advantages)
        learner, metrics = updates.run(grpo_optimizer, learner, scored)
        return state._replace(**learner._asdict()), {**metrics, "reward": rewards.mean()}

    def heldout_rewards(params: nnx.State) -> Metrics:
        batch = jax.tree.map(lambda array: jnp.repeat(array, EVALUATION_SAMPLES, axis=0), heldout)
        keys = jax.random.split(jax.random.fold_in(run_key, EVALUATION_STEP), batch.padding.shape[0])
        greedy = success_rate(params, heldout, keys[: heldout.padding.shape[0]], greedy=True)
        return {"sampled": success_rate(params, batch, keys), "greedy": greedy}

    state = head.shardings(jax.eval_shape(initial_state))
    in_place: dict[str, Any] = {"out_shardings": (state, replicated), "donate_argnums": 0}
    return TrainingSteps(
        initial_state=jax.jit(initial_state, out_shardings=state),
        start_grpo=jax.jit(start_grpo, out_shardings=state),
        warmup_step=jax.jit(warmup_step, **in_place),
        grpo_step=jax.jit(grpo_step, **in_place),
        heldout_rewards=jax.jit(heldout_rewards, out_shardings=replicated),
    )
