"""The steps of a run of `rlk sft`: one supervised update each."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from rlk_jax.grpo.accumulation import scan_micro_batches
from rlk_jax.grpo.faults import Metrics
from rlk_jax.grpo.kept_programs import KeptProgram
from rlk_jax.grpo.policy import make_policy
from rlk_jax.grpo.samples import Sample
from rlk_jax.grpo.sequences import Sequences
from rlk_jax.grpo.sft.config import SftConfig
from rlk_jax.grpo.sft.task import Demonstration, SftTask
from rlk_jax.grpo.steps import Jitted, Phase, TrainState
from rlk_jax.grpo.supervised import supervised_update
from rlk_jax.grpo.text_steps import Hosted, beginning, program_key, rows_of_step, save_hf
from rlk_jax.grpo.updates import Batching, Learner, adam, learning_rate_of


@dataclass(frozen=True)
class SftSteps:
    """The programs of one run. `sft_step` donates its state: it is updated in place."""

    initial_state: Jitted[[], TrainState]
    sft_step: Jitted[[TrainState, int], tuple[TrainState, Metrics]]
    heldout_loss: Jitted[[nnx.State], Metrics]
    save_hf: Callable[[nnx.State, str], None]
    drawn: list[Sample] = field(default_factory=list)
    """It stays empty: no completions are drawn."""
    load_teacher: None = None

    @property
    def evaluation(self) -> Jitted[[nnx.State], Metrics]:
        return self.heldout_loss

    def phases(self, config: SftConfig) -> Sequence[Phase]:
        return (Phase("sft", "a step", 0, config.steps, self.sft_step),)


def build_sft_steps(config: SftConfig, task: SftTask, mesh: Mesh) -> SftSteps:
    """Bind config, rows and mesh into the steps of a run; each of their programs is compiled when first called.

    The rows of step k come from (seed, k). Raises BadInput when the model cannot run as the config says.
    """
    policy = make_policy(config, mesh, task.tokenizer)
    replicated, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    optimizer = adam(learning_rate_of(config), policy.head, config.max_gradient_norm, config.weight_decay)
    batching, key = Batching(config, mesh), program_key(config, policy)
    lie, initial_state = beginning(config, policy, optimizer, keeps_reference=False)

    def update(state: TrainState, *arrays: Any) -> tuple[TrainState, Metrics]:
        trained, frozen = policy.split(state.params)

        def losses(trained: nnx.State, rows: Sequences) -> Array:
            how = {"z_loss": config.z_loss, "label_smoothing": config.label_smoothing}
            return policy.losses(nnx.merge_state(trained, frozen), rows, **how)

        rows = jax.lax.with_sharding_constraint(Sequences(*arrays), by_row)
        learner, metrics = supervised_update(batching, optimizer, losses, Learner(trained, state.opt_state), rows)
        params = nnx.merge_state(learner.params, frozen)
        return state._replace(params=params, opt_state=learner.opt_state), metrics

    def measure(params: nnx.State, *arrays: Any) -> tuple[None, dict[str, Array]]:
        def of_micro_batch(carry: None, rows: Sequences) -> tuple[None, Array]:
            return carry, policy.losses(params, rows)

        rows = jax.lax.with_sharding_constraint(Sequences(*arrays), by_row)
        return None, {"losses": scan_micro_batches(of_micro_batch, None, rows, **batching.micro_batching)[1]}

    update_program = KeptProgram(update, key, jax.tree.leaves(lie), replicated)
    measure_program = KeptProgram(measure, key, (), by_row)

    def placed(rows: Sequence[Demonstration | None]) -> Sequences:
        return jax.device_put(task.sequences(rows), by_row)

    def sft_step(state: TrainState, step: int) -> tuple[TrainState, Metrics]:
        numbers = rows_of_step(config.seed, step, len(task.train), config.rows_per_step)
        return update_program(state, *placed([task.train[i] for i in numbers]))

    def heldout_loss(params: nnx.State) -> Metrics:
        """The mean cross-entropy of all held-out targets and its exponential. As many rows are read at a time as in a
        step; rows without targets fill the last ones up.
        """
        size, total, count = config.rows_per_step, 0.0, 0
        for first in range(0, len(task.heldout), size):
            block = task.heldout[first : first + size]
            measured = measure_program(params, *placed([*block, *[None] * (size - len(block))]))[1]
            total += float(np.asarray(measured["losses"], np.float64).sum())
            count += sum(len(row.completion_ids) for row in block)
        loss = total / count
        return {"loss": jnp.float32(loss), "perplexity": jnp.float32(np.exp(loss))}

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row), task.sequences([None] * config.rows_per_step)
    )
    return SftSteps(
        initial_state,
        Hosted(sft_step, lambda state, _: update_program.lower(state, *shapes)),
        Hosted(heldout_loss, lambda params: measure_program.lower(params, *shapes)),
        functools.partial(save_hf, config, policy),
    )
