"""Updates whose loss or gradient is not finite: which token they come from; a run ends by them, or skips them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlk_jax.grpo.run_config import Diverged

_COUNT = "nonfinite_updates"
_PLACE = ("nonfinite_sequence", "nonfinite_token")
"""Metrics of a step: how many of its updates are not finite, and the first token that the first of them comes from (of
all sequences, then of all tokens of a completion, counted from 0); −1 where it comes from no single token.
"""

Metrics = dict[str, Float[Array, ""] | Int[Array, ""]]
"""What a step measured, by name."""


def number_targets(mask: Bool[Array, "B C"]) -> Int[Array, "B C"]:
    """A number for each target of a batch, sequence by sequence, counted from the first slot of its row that counts.
    `fault_metrics` tells it back.
    """
    return jnp.arange(mask.size, dtype=jnp.int32).reshape(mask.shape) - jnp.argmax(mask, axis=1, keepdims=True)


def is_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every value of every array is finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def fault_metrics(
    loss_and_gradients: Any, is_bad: Callable[[], Bool[Array, "R T"]], numbers: Int[Array, "R T"], length: int
) -> Metrics:
    """The metrics of one update. `is_bad()` says which targets have no finite loss or gradient, and `numbers` which
    target of the batch stands where; completions are `length` tokens long.
    """
    is_fine = is_finite(loss_and_gradients)

    def first_bad() -> Array:
        none = jnp.iinfo(jnp.int32).max
        first = jnp.where(is_bad(), numbers, none).min()
        return jnp.where(first == none, jnp.array([-1, -1]), jnp.stack(jnp.divmod(first, length)))

    # Where all is well, nothing is looked for.
    sequence, token = jax.lax.cond(is_fine, lambda: jnp.array([-1, -1]), first_bad)
    return {_COUNT: 1 - is_fine.astype(jnp.int32), **dict(zip(_PLACE, (sequence, token), strict=True))}


def of_step(metrics: Metrics) -> Metrics:
    """The metrics of a step from those of its updates, stacked: the count of all, and the place of the first fault."""
    first = jnp.argmax(metrics[_COUNT])
    return {_COUNT: metrics[_COUNT].sum(), **{name: metrics[name][first] for name in _PLACE}}


def kept_if_finite[Tree](metrics: Metrics, new: Tree, old: Tree) -> Tree:
    """The new arrays after an update that is finite by its metrics, else the old ones."""
    return jax.tree.map(lambda x, y: jnp.where(metrics[_COUNT] == 0, x, y), new, old)


def logged(metrics: dict[str, float], done: int, phase: str, *, skips: bool) -> dict[str, float | None]:
    """The metrics of step `done` for the log: None for what is not finite, and no place where nothing was skipped.

    Raises Diverged for an update that is not finite, unless the run skips those.
    """
    if metrics[_COUNT] and not skips:
        what, where = _what_is_not_finite(metrics["loss"]), _described_place(*(int(metrics[name]) for name in _PLACE))
        raise Diverged(f"training diverged: {what} at step {done} ({phase}){where}")
    shown = metrics if metrics[_COUNT] else {name: x for name, x in metrics.items() if name not in _PLACE}
    return {name: value if math.isfinite(value) else None for name, value in shown.items()}


def _what_is_not_finite(loss: float) -> str:
    return "the gradient is not finite" if math.isfinite(loss) else f"loss is {loss}"


def _described_place(sequence: int, token: int) -> str:
    return "" if sequence < 0 else f", first at token {token} of sequence {sequence}"
