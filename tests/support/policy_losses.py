"""A batch for linear_grpo_loss: its loss in one call, and in two."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax import linear_grpo_loss, linear_logp
from rlk_jax.checker import gold
from rlk_jax.losses import LossOptions, PolicyLoss, policy_loss

TOKENS, DIM, VOCAB = 2000, 192, 5056
BUDGETS = (2**20, 2**24, None)
"""Memory budgets of a GPU test: of 20 MB of exponentials the first keeps none, the second some, the default all."""


class Batch(NamedTuple):
    """linear_grpo_loss's operands, in its order."""

    hidden: Any
    weight: Any
    target_ids: Any
    old_logps: Any
    ref_logps: Any
    advantages: Any
    mask: Any
    bias: Any = None

    def loss(self, **changes: Any) -> PolicyLoss:
        return linear_grpo_loss(*self, **changes)

    def in_two_calls(
        self, *, options: LossOptions = LossOptions(), entropy_threshold: float | None = None, **head: Any
    ) -> PolicyLoss:
        """`linear_logp`, then `policy_loss`."""
        ids = jnp.where(self.mask, self.target_ids, -100)
        found = linear_logp(self.hidden, self.weight, ids, self.bias, ignore_index=-100, return_lse=True, **head)
        tokens = found.logp, self.old_logps, self.advantages, self.mask
        values = {"ref_logps": self.ref_logps, "entropy": found.entropy, "entropy_threshold": entropy_threshold}
        return policy_loss(*tokens, **values, options=options)


def batch(lead: tuple[int, int], dim: int, vocab_size: int, dtype: Any = jnp.float32) -> Batch:
    """Random numbers; old and reference log-probs are about those of the policy."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(*lead, dim)), dtype)
    weight = jnp.asarray(rng.normal(size=(vocab_size, dim)) * 1.6 / dim**0.5, dtype)
    ids = jnp.asarray(rng.integers(0, vocab_size, lead), jnp.int32)
    logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    old, ref = (jnp.float32(gold.logps(logits, ids) + 0.2 * rng.normal(size=lead)) for _ in range(2))
    mask = jnp.asarray(rng.random(lead) < 0.7)
    return Batch(hidden, weight, ids, old, ref, jnp.float32(rng.normal(size=lead[0])), mask)


def gradients(loss: Callable[..., PolicyLoss], *operands: Any) -> Any:
    """((loss, everything), the gradients of all operands)."""
    return _gradients(loss, *operands).compile()(*operands)


def gradients_of_batch(loss: Callable[..., PolicyLoss], b: Batch, **options: Any) -> Any:
    """`gradients` of hidden, weight and, where there is one, bias; `loss` is `Batch.loss` or `Batch.in_two_calls`."""
    program, operands = lowered(loss, b, **options)
    return program.compile()(*operands)


def lowered(loss: Callable[..., PolicyLoss], b: Batch, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The program of `gradients_of_batch`, and its operands."""
    operands = {name: x for name in ("hidden", "weight", "bias") if (x := getattr(b, name)) is not None}

    def loss_of_arrays(*xs: Any) -> PolicyLoss:
        return loss(b._replace(**dict(zip(operands, xs, strict=True))), **options)

    return _gradients(loss_of_arrays, *operands.values()), tuple(operands.values())


def _gradients(loss: Callable[..., PolicyLoss], *operands: Any) -> Any:
    def with_metrics(*operands: Any) -> tuple[Any, PolicyLoss]:
        found = loss(*operands)
        return found.loss, found

    return jax.jit(jax.value_and_grad(with_metrics, tuple(range(len(operands))), has_aux=True)).lower(*operands)
