"""The steps of a run of a given model: rollouts and updates are programs of a device, rewards are functions of texts on
the host between them.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int

from rlk_jax import models
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.faults import Metrics
from rlk_jax.grpo.kept_programs import KeptProgram
from rlk_jax.grpo.policy import Policy, load_parameters, make_policy
from rlk_jax.grpo.run_config import RunConfig
from rlk_jax.grpo.samples import Sample
from rlk_jax.grpo.sequences import Sequences, join_completions
from rlk_jax.grpo.steps import EVALUATION_SAMPLES, EVALUATION_STEP, TrainingSteps, TrainState
from rlk_jax.grpo.teacher import Teacher, make_teacher
from rlk_jax.grpo.text_task import TextRows, TextTask, shown_prompt, warn_beyond
from rlk_jax.grpo.updates import Learner, TargetValues, Updates, adam, learning_rate_of
from rlk_jax.losses import group_advantages
from rlk_jax.models.sampling import Completions


@dataclass(frozen=True)
class Hosted[**Arguments, Result]:
    """A function with work on the host around a program. What it lowers to is that program, whose memory it needs."""

    function: Callable[Arguments, Result]
    program: Callable[..., jax.stages.Lowered]

    def __call__(self, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        return self.function(*arguments, **keywords)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        return self.program(*arguments)


class Scored:
    """Completions with their texts and rewards, on the host."""

    def __init__(self, task: TextTask, rows: TextRows, completions: Completions[Array]) -> None:
        self.task, self.rows = task, rows
        self.ids, self.lengths, self.logps = (np.asarray(x) for x in completions[:3])
        tokenizer = task.tokenizer
        self.texts = [
            tokenizer.decode(ids[:length].tolist()) for ids, length in zip(self.ids, self.lengths, strict=True)
        ]
        self.scores = task.scores(rows, self.texts)
        self.rewards: Float32[np.ndarray, "B"] = task.rewards.combined(self.scores)
        last = self.ids[np.arange(len(self.ids)), self.lengths - 1]
        self.ended = np.isin(last, tokenizer.stop_ids)

    def metrics(self) -> dict[str, float]:
        """What was measured, by name."""
        found: dict[str, float] = {"reward": self.rewards.mean(), "completion_length": self.lengths.mean()}
        # The mean of −log p is an estimate of the entropy of what tokens were drawn from.
        found |= {"truncated": 1 - self.ended.mean(), "entropy": -self.logps.sum() / self.lengths.sum()}
        names = self.task.rewards.names
        if len(names) > 1:
            found |= {f"reward/{name}": self.scores[:, i].mean() for i, name in enumerate(names)}
        return found

    def samples(self, step: int, rows: Sequence[int]) -> list[Sample]:
        """These rows for people to read."""
        names = self.task.rewards.names
        return [
            Sample(
                step,
                shown_prompt(self.rows.prompts[i]),
                self.texts[i],
                dict(zip(names, map(float, self.scores[i]), strict=True)),
                float(self.rewards[i]),
                int(self.lengths[i]),
                bool(self.ended[i]),
            )
            for i in rows
        ]


def build_text_steps(config: GrpoConfig, task: TextTask, mesh: Mesh) -> TrainingSteps:
    """Bind config, prompts and mesh into the steps of a run; each of their programs is compiled when first called.

    All randomness of step k comes from (seed, k), as that of `build_steps`. Raises BadInput when the model cannot run
    as the config says.
    """
    policy = make_policy(config, mesh, task.tokenizer)
    teacher = make_teacher(config, policy, task.tokenizer, mesh)
    head = policy.head
    warn_beyond(policy.described, task.train.prompt_ids.shape[1] + config.max_new_tokens, "rlk grpo")
    replicated, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    run_key, group = jax.random.key(config.seed), config.samples_per_prompt
    rows_per_step = config.prompts_per_step * group
    optimizer = adam(learning_rate_of(config), head, config.max_gradient_norm)
    drawn: list[Sample] = []

    def roll_out(params: nnx.State, prompt_ids: Array, padding: Array, step: Array) -> tuple[None, dict[str, Array]]:
        keys = jax.random.split(jax.random.fold_in(run_key, step), len(padding))
        prompts = jax.lax.with_sharding_constraint((prompt_ids, padding, keys), by_row)
        completions = policy.roll_out(params, *prompts, max_new_tokens=config.max_new_tokens)
        return None, {name: x for name, x in completions._asdict().items() if x is not None}

    def update(
        state: TrainState, prompt_ids: Array, padding: Array, completions: Completions, rewards: Array, step: Array
    ) -> tuple[TrainState, Metrics]:
        given = prompt_ids, padding, completions, rewards
        prompt_ids, padding, completions, rewards = jax.lax.with_sharding_constraint(given, by_row)
        advantages = group_advantages(rewards, samples_per_prompt=group)
        if config.shuffle_advantages:
            advantages = jax.random.permutation(jax.random.fold_in(run_key, ~step), advantages)
        rows = join_completions(prompt_ids, padding, completions.ids, completions.mask, completions.allowed)
        trained, frozen = policy.split(state.params)
        taught_by: Any = state.teacher

        def values(trained: nnx.State, sequences: Sequences) -> TargetValues:
            params, how = nnx.merge_state(trained, frozen), {"entropy": bool(config.entropy_coef > 0)}
            if teacher is None or sequences.teacher_hidden is None:
                found, divergence = policy.values(params, sequences, **how), None
            else:
                found, divergence = teacher.values(params, taught_by, sequences, **how)
            return TargetValues(found.logp, found.entropy, divergence)

        teacher_hidden = None if teacher is None else functools.partial(teacher.hidden, taught_by)
        updates = Updates(config, mesh, values, config.max_new_tokens, teacher_hidden)
        learner = Learner(trained, state.opt_state)
        scored = updates.scored(learner, state.reference, rows, completions.logps, advantages)
        learner, metrics = updates.run(optimizer, learner, scored)
        params = nnx.merge_state(learner.params, frozen)
        return state._replace(params=params, opt_state=learner.opt_state), metrics

    # With a beta of 0 nothing is measured to the reference.
    state, initial_state = beginning(config, policy, optimizer, keeps_reference=config.beta > 0, teacher=teacher)
    key = program_key(config, policy), None if teacher is None else teacher.key
    roll_out_program = KeptProgram(roll_out, key, (), by_row)
    update_program = KeptProgram(update, key, jax.tree.leaves(state), replicated)

    def completed(params: nnx.State, rows: TextRows, step: int) -> Completions[Array]:
        prompts = jax.device_put((rows.prompt_ids, rows.padding), by_row)
        return Completions(**roll_out_program(params, *prompts, jnp.uint32(step))[1])

    def grpo_step(state: TrainState, step: int) -> tuple[TrainState, Metrics]:
        numbers = rows_of_step(config.seed, step, len(task.train.prompts), config.prompts_per_step)
        rows = task.train.take(np.repeat(numbers, group))
        completions = completed(state.params, rows, step)
        scored = Scored(task, rows, completions)
        drawn.extend(scored.samples(step, range(rows_per_step)))
        given = rows.prompt_ids, rows.padding, completions, scored.rewards
        state, metrics = update_program(state, *jax.device_put(given, by_row), jnp.uint32(step))
        return state, {**metrics, **{name: jnp.asarray(x) for name, x in scored.metrics().items()}}

    def heldout_rewards(params: nnx.State) -> Metrics:
        """The mean reward of completions of the held-out prompts. As many are sampled at a time as in a step."""
        count = EVALUATION_SAMPLES * len(task.heldout.prompts)
        numbers = np.resize(np.arange(count), -(-count // rows_per_step) * rows_per_step)
        rewards = []
        for i, block in enumerate(numbers.reshape(-1, rows_per_step)):
            rows = task.heldout.take(block // EVALUATION_SAMPLES)
            scored = Scored(task, rows, completed(params, rows, EVALUATION_STEP - i))
            rewards.append(scored.rewards)
            first = i * rows_per_step
            fresh = [row for row, x in enumerate(block) if x % EVALUATION_SAMPLES == 0 and first + row < count]
            drawn.extend(scored.samples(-1, fresh))
        return {"sampled": jnp.asarray(np.concatenate(rewards)[:count].mean())}

    rows = jax.ShapeDtypeStruct((rows_per_step, task.train.prompt_ids.shape[1]), jnp.int32, sharding=by_row)
    row = jax.ShapeDtypeStruct((rows_per_step,), jnp.int32, sharding=by_row)
    number = jax.ShapeDtypeStruct((), jnp.uint32)

    def lower_roll_out(params: nnx.State) -> jax.stages.Lowered:
        return roll_out_program.lower(params, rows, row, number)

    def lower_update(state: TrainState, _: int) -> jax.stages.Lowered:
        _, shapes = roll_out_program.shapes(state.params, rows, row, number)
        placed: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row) for name, x in shapes.items()
        }
        rewards = jax.ShapeDtypeStruct(row.shape, jnp.float32, sharding=by_row)
        return update_program.lower(state, rows, row, Completions(**placed), rewards, number)

    whole_step = Hosted(grpo_step, lower_update)
    return TrainingSteps(
        initial_state=initial_state,
        start_grpo=Hosted(lambda state: state, lambda state: lower_roll_out(state.params)),
        warmup_step=whole_step,  # It is never called: a given model has no warm start.
        grpo_step=whole_step,
        heldout_rewards=Hosted(heldout_rewards, lower_roll_out),
        drawn=drawn,
        load_teacher=None if teacher is None else teacher.load,
        save_hf=lambda params, directory: save_hf(config, policy, params, directory),
    )


def beginning(
    config: RunConfig,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    *,
    keeps_reference: bool,
    teacher: Teacher | None = None,
) -> tuple[Any, Hosted[[], TrainState]]:
    """How the states of a run of a given model lie, and the function that makes the first ones of its checkpoint."""

    def begin(given: nnx.State, taught_by: nnx.State | None) -> TrainState:
        params = policy.begun(policy.head.shard(given))
        # The reference computes from rounded numbers, as the policy does.
        reference = policy.reference(params) if keeps_reference else None
        return TrainState(params, reference, optimizer.init(policy.split(params)[0]), taught_by)

    shapes = policy.given_shapes, None if teacher is None else teacher.shapes
    shardings = policy.shardings(jax.eval_shape(begin, *shapes))
    shardings = shardings._replace(teacher=jax.tree.map(lambda x: x.sharding, shapes[1]))
    program = jax.jit(begin, out_shardings=shardings, donate_argnums=1)  # A teacher stays as it is.

    def first_state() -> TrainState:
        given = load_parameters(config.model or "", policy.head.mesh, policy.given_dtype)
        return program(given, None if teacher is None else teacher.load())

    return shardings, Hosted(first_state, lambda: program.lower(*shapes))


_NOT_OF_PROGRAMS = (
    *("prompts", "eval_prompts", "data", "eval_data", "model", "teacher"),
    *("reward", "save_hf", "show_every", "checkpoint_every"),
)
"""Fields of a configuration that no program depends on."""


def program_key(config: RunConfig, policy: Policy) -> Hashable:
    """What the programs of a run are made from."""
    fields = {name: x for name, x in asdict(config).items() if name not in _NOT_OF_PROGRAMS}
    return tuple(fields.items()), policy.described, policy.head.implementation, policy.stop_ids, policy.pad_id


def rows_of_step(seed: int, step: int, count: int, wanted: int) -> Int[np.ndarray, "wanted"]:
    """The numbers of the rows that a step takes: all `count` rows in a new random order, again and again."""
    places = np.arange(step * wanted, (step + 1) * wanted)
    epochs = range(int(places[0]) // count, int(places[-1]) // count + 1)
    orders = np.concatenate([np.random.default_rng([seed, epoch]).permutation(count) for epoch in epochs])
    return orders[places - epochs[0] * count]


def save_hf(config: RunConfig, policy: Policy, params: nnx.State, directory: Path | str) -> None:
    """Write the policy as a checkpoint, in the dtype that it computed in, with the tokenizer of the given model. The
    weights, which appear last and whole, replace those that an earlier end of the same run wrote.
    """
    models.save(policy.model(params), directory, like=config.model)
