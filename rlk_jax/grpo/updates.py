"""The updates of GRPO on a rollout: what their loss needs, the loss, and the optimizer's steps on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from rlk_jax.core.fixed_order import rounded_product, sum_of_squares
from rlk_jax.grpo import faults
from rlk_jax.grpo.accumulation import accumulated_gradients, scan_micro_batches
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.faults import Metrics
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.run_config import RunConfig
from rlk_jax.grpo.sequences import Sequences, pack
from rlk_jax.losses import PolicyLoss, expand_advantages, loss_denominator, policy_loss
from rlk_jax.losses.masked import masked_count, masked_sum

ADAM_B2 = 0.95  # Runs are short: a longer average of squared gradients would still be filling up at their end.
_LOSS_METRICS = (
    "loss",
    "policy_loss",
    "kl",
    "entropy_bonus",
    "clip_fraction",
    "ratio_min",
    "ratio_max",
    "importance_weight_mean",
    "importance_capped_fraction",
    "log_ratio_bounded_fraction",
    "teacher_kl",
)
"""Metrics of an update, where its loss has them."""
_FIRST_UPDATE_METRICS = ("clip_fraction", "ratio_min", "ratio_max")
"""Metrics that are also reported for the first update on a rollout, under the prefix "first_"."""


class TargetValues(NamedTuple):
    """What the loss reads of every target under the policy, fp32, 0 where none counts: its log-prob, the entropy where
    the loss takes that, and the divergence from the teacher where there is one.
    """

    logp: Float[Array, "R T"]
    entropy: Float[Array, "R T"] | None = None
    divergence: Float[Array, "R T"] | None = None


class UpdateLoss(NamedTuple):
    """What an update minimises, and what it is made of: the loss of GRPO, and the teacher's mean divergence."""

    loss: Float[Array, ""]
    policy: PolicyLoss
    teacher_kl: Float[Array, ""] | None


class ScoredRollout(NamedTuple):
    """The sequences of a rollout, with all that the loss needs for their targets except the policy's log-probs."""

    sequences: Sequences
    numbers: Int[Array, "R T"]
    """Which target of the rollout stands where; packing moves them."""
    old_logps: Float[Array, "R T"]
    ref_logps: Float[Array, "R T"] | None
    rollout_logps: Float[Array, "R T"] | None
    """Log-probs that tokens were drawn with, where those of the policy before its updates stand in `old_logps`."""
    advantages: Float[Array, "R T"]

    @property
    def mask(self) -> Bool[Array, "R T"]:
        """Where targets count."""
        return self.sequences.mask


class Learner(NamedTuple):
    """What an update changes."""

    params: nnx.State
    opt_state: optax.OptState


@dataclass(frozen=True)
class Batching:
    """How the batches of a run are cut and packed, and what becomes of their gradients."""

    config: RunConfig
    mesh: Mesh

    @property
    def micro_batching(self) -> dict[str, Any]:
        """How a batch is cut, as keywords of `accumulated_gradients`."""
        options: dict[str, Any] = {"micro_batches": self.config.micro_batches, "mesh": self.mesh}
        if self.config.packing:
            options["is_active"] = lambda micro_batch: micro_batch.mask.any()
        return options

    def packed[Values](self, sequences: Sequences, values: Values) -> tuple[Sequences, Values]:
        """Sequences and the values of their targets, several to a row where the run packs."""
        if not self.config.packing:
            return sequences, values
        return pack(sequences, values, shards=self.mesh.shape["data"])

    def applied(
        self, optimizer: optax.GradientTransformation, grads: nnx.State, learner: Learner, found: Metrics
    ) -> Learner:
        """The learner after one step of the optimizer; where the run skips what is not finite, as it was after such."""
        updates, opt_state = optimizer.update(grads, learner.opt_state, learner.params)
        new = Learner(optax.apply_updates(learner.params, updates), opt_state)
        return faults.kept_if_finite(found, new, learner) if self.config.skip_nonfinite else new


@dataclass(frozen=True)
class Updates(Batching):
    """The updates of a run. `values(params, sequences)` has divergences where the sequences have `teacher_hidden`."""

    config: GrpoConfig
    values: Callable[[nnx.State, Sequences], TargetValues]
    length: int
    """The tokens of a completion, at most."""
    teacher_hidden: Callable[[Sequences], Float[Array, "R T Dt"]] | None = None
    """Hidden states of the teacher that predict the targets."""

    def scored(
        self,
        learner: Learner,
        reference: nnx.State | None,
        rows: Sequences,
        drawn_logps: Array,
        advantages: Float[Array, "B"],
    ) -> ScoredRollout:
        """A rollout with the log-probs of the reference; None stands for none, which beta 0 allows. Where tokens have
        importance weights, these lie between the log-probs that they were drawn with and those of training.
        """
        values = drawn_logps, expand_advantages(advantages, rows.mask), faults.number_targets(rows.mask)
        rows, (drawn_logps, advantages, numbers) = self.packed(rows, values)
        ref_logps = None if reference is None else self._logps(reference, rows)
        old_logps, rollout_logps = drawn_logps, None
        if self.config.importance_cap is not None:
            old_logps, rollout_logps = self._logps(learner.params, rows), drawn_logps
        if self.teacher_hidden is not None:
            rows = rows._replace(teacher_hidden=self._of_rows(self.teacher_hidden, rows))
        return ScoredRollout(rows, numbers, old_logps, ref_logps, rollout_logps, advantages)

    def _logps(self, params: nnx.State, rows: Sequences) -> Float[Array, "R T"]:
        return self._of_rows(lambda micro_batch: self.values(params, micro_batch).logp, rows)

    def _of_rows(self, function: Callable[[Sequences], Array], rows: Sequences) -> Array:
        """What a function gives for all rows, in micro-batches."""

        def of_micro_batch(carry: None, micro_batch: Sequences) -> tuple[None, Array]:
            return carry, function(micro_batch)

        return scan_micro_batches(of_micro_batch, None, rows, **self.micro_batching)[1]

    def run(
        self, optimizer: optax.GradientTransformation, learner: Learner, scored: ScoredRollout
    ) -> tuple[Learner, Metrics]:
        """All updates on a rollout, and what they measured."""
        count = masked_count(scored.mask, "tokens")
        denominators = loss_denominator(scored.mask, options=self.config.loss_options()), count

        def loss_fn(params: nnx.State, micro_batch: ScoredRollout) -> tuple[Array, TargetValues]:
            values = self.values(params, micro_batch.sequences)
            return self._loss(values, micro_batch, denominators).loss, values

        def update(learner: Learner, _: None) -> tuple[Learner, Metrics]:
            grads, values = accumulated_gradients(loss_fn, learner.params, scored, **self.micro_batching)
            whole, logp = self._loss(values, scored, denominators), values.logp
            measured = {**whole.policy._asdict(), "loss": whole.loss, "teacher_kl": whole.teacher_kl}
            metrics = {name: x for name in _LOSS_METRICS if (x := measured[name]) is not None}
            drawn = scored.old_logps if scored.rollout_logps is None else scored.rollout_logps
            metrics["mismatch"] = jnp.abs(logp - drawn).max()

            def is_bad() -> Array:
                slope = jax.grad(lambda logp: self._loss(values._replace(logp=logp), scored, denominators).loss)(logp)
                taught = 0 if values.divergence is None else values.divergence
                return scored.mask & ~jnp.isfinite(logp + slope + taught)

            found = faults.fault_metrics((whole.loss, grads), is_bad, scored.numbers, self.length)
            return self.applied(optimizer, grads, learner, found), metrics | found

        learner, metrics = jax.lax.scan(update, learner, length=self.config.updates_per_rollout)
        last = jax.tree.map(lambda values: values[-1], metrics)
        rollout_metrics = {"tokens": scored.mask.sum(), "mismatch": metrics["mismatch"][0]}
        rollout_metrics |= {f"first_{name}": metrics[name][0] for name in _FIRST_UPDATE_METRICS}
        return learner, last | rollout_metrics | faults.of_step(metrics)

    def _loss(self, values: TargetValues, scored: ScoredRollout, denominators: tuple[Array, Array]) -> UpdateLoss:
        """The loss of a part of a rollout. What GRPO's loss and the divergence are divided by is of the whole."""
        denominator, count = denominators
        policy = policy_loss(
            values.logp,
            scored.old_logps,
            scored.advantages,
            scored.mask,
            ref_logps=scored.ref_logps,
            rollout_logps=scored.rollout_logps,
            entropy=values.entropy,
            denominator=denominator,
            options=self.config.loss_options(),
        )
        if values.divergence is None:
            return UpdateLoss(policy.loss, policy, None)
        teacher_kl = masked_sum(values.divergence, scored.mask, "tokens") / count
        taught = self.config.teacher_coef * teacher_kl
        return UpdateLoss(taught if self.config.teacher_only else policy.loss + taught, policy, teacher_kl)


def adam(
    learning_rate: optax.ScalarOrSchedule, head: MeshHead, max_norm: float, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Adam on gradients clipped to a norm; its moments lie as their parameters do. With a weight decay it is AdamW,
    which takes the decay times the learning rate off every matrix; scales of norms and biases keep theirs.
    """

    def clipped(grads: nnx.State, _: Any) -> nnx.State:
        grads = head.fusion_barrier(grads)
        norm = global_norm(grads, head)
        scaled = jax.tree.map(lambda grad: jnp.where(norm < max_norm, grad, grad / norm * max_norm), grads)
        return head.fusion_barrier(scaled)

    def decayed(updates: nnx.State, params: nnx.State) -> nnx.State:
        return jax.tree.map(
            lambda x, y: x if y.ndim < 2 else x + rounded_product(jnp.float32(weight_decay), y), updates, params
        )

    decay = [optax.stateless(decayed)] if weight_decay else []
    steps = optax.scale_by_adam(b2=ADAM_B2), *decay, optax.scale_by_learning_rate(learning_rate)
    return optax.chain(optax.stateless(clipped), optax.chain(*steps))


def global_norm(grads: nnx.State, head: MeshHead) -> Float[Array, ""]:
    """The norm of all gradients. It is summed over one whole array after the other, each on every device, in an order
    that is written down: XLA's own depends on the program. An array is gathered when the one before it is done with.
    """
    total = jnp.float32(0)
    for grad in jax.tree.leaves(head.unshard(grads)):
        total, grad = jax.lax.optimization_barrier((total, grad))
        total += sum_of_squares(head.replicated(grad))
    return jnp.sqrt(total)


def learning_rate_of(config: RunConfig) -> optax.ScalarOrSchedule:
    """The learning rate by update, after a warm start."""
    total, warmup = config.scheduled_updates
    rate, rest = config.learning_rate, max(total - warmup, 1)
    after = {
        "constant": optax.constant_schedule(rate),
        "linear": optax.linear_schedule(rate, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(rate, rest),
    }[config.schedule]
    if warmup == 0:
        return rate if config.schedule == "constant" else after
    # The first update has a share of the rate, not 0.
    return optax.join_schedules([optax.linear_schedule(rate / warmup, rate, warmup - 1), after], [warmup])
