"""Which slots a query sees: those of its own sequence up to its own slot, and of these the last ones under a window."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlk_jax.ops.attention.options import AttentionConfig, Operands

Array = jax.Array


class Sight(NamedTuple):
    """The first and the last slot that each query sees, int32 `[B, T]` each; none where the first is later."""

    first: Array
    last: Array

    def of(self, slots: Array) -> Array:
        """Which of some slots `[n]` each query sees, `[B, T, n]`."""
        slots = slots[None, None]
        return (slots >= self.first[..., None]) & (slots <= self.last[..., None])


def sight_of(config: AttentionConfig, operands: Operands) -> Sight:
    """What the queries of a call see."""
    batch, length = operands.query.shape[:2]
    last = jnp.broadcast_to(operands.start + jnp.arange(length, dtype=jnp.int32), (batch, length))
    first = operands.places.first_slots
    first = jnp.broadcast_to(first if first.ndim == 2 else first[:, None], (batch, length))
    if config.sliding_window is not None:
        first = jnp.maximum(first, last - (config.sliding_window - 1))
    return Sight(first, last)
