"""A supervised update: one step of the optimizer on the cross-entropy of completions that are given."""

from collections.abc import Callable

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from rlk_jax.grpo import faults
from rlk_jax.grpo.accumulation import accumulated_gradients
from rlk_jax.grpo.faults import Metrics
from rlk_jax.grpo.sequences import Sequences
from rlk_jax.grpo.updates import Batching, Learner
from rlk_jax.losses import masked_mean
from rlk_jax.losses.masked import masked_count, masked_sum


def supervised_update(
    batching: Batching,
    optimizer: optax.GradientTransformation,
    losses: Callable[[nnx.State, Sequences], Float[Array, "R T"]],
    learner: Learner,
    rows: Sequences,
) -> tuple[Learner, Metrics]:
    """The learner after a step on the mean loss of all targets of the rows, and what it measured.

    `losses(params, sequences)` gives the fp32 cross-entropy of every target. A micro-batch is divided by the targets of
    all, so that each target has the same weight, to the bit, in whichever part it is.
    """
    length = rows.target_ids.shape[1]
    rows, numbers = batching.packed(rows, faults.number_targets(rows.mask))
    count = masked_count(rows.mask, "tokens")

    def loss_fn(params: nnx.State, micro_batch: Sequences) -> tuple[Array, Array]:
        own = losses(params, micro_batch)
        return masked_sum(own, micro_batch.mask, "tokens") / count, own

    grads, each = accumulated_gradients(loss_fn, learner.params, rows, **batching.micro_batching)
    loss = masked_mean(each, rows.mask)
    found = faults.fault_metrics((loss, grads), lambda: rows.mask & ~jnp.isfinite(each), numbers, length)
    learner = batching.applied(optimizer, grads, learner, found)
    return learner, {"loss": loss, "tokens": rows.mask.sum(), **found}
