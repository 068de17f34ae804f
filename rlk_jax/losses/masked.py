"""Sums, counts and means over the active tokens of a batch, in one fixed order whatever the padding."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from rlk_jax.core.fixed_order import pairwise_sum
from rlk_jax.core.mesh import whole_on_every_device
from rlk_jax.core.tokens import active_mask
from rlk_jax.losses.options import Normaliser


def masked_mean(values: Num[Array, "*lead B T"], mask: Num[Array, "B T"] | Bool[Array, "B T"]) -> Float[Array, "*lead"]:
    """`Σ of values where mask / max(count, 1)`: the mean over all active tokens of the batch, 0 when there are none.

    Appended masked rows or columns change none of its bits.
    """
    values, mask = whole_on_every_device((values, active_mask(mask)))
    return masked_sum(values, mask, "tokens") / jnp.maximum(masked_count(mask, "tokens"), 1.0)


def active_values(x: Array, mask: Array) -> Array:
    """x in fp32, exactly 0 where masked.

    It must stand before any exp: a NaN there would come back through a later `where` as 0 · NaN.
    """
    return jnp.where(mask, x.astype(jnp.float32), 0.0)


def masked_means(values: dict[str, Array | None], mask: Array) -> dict[str, Any]:
    """`masked_mean` of all values that are not None, to the bit, in the few kernels of one mean."""
    there = {name: x.astype(jnp.float32) for name, x in values.items() if x is not None}
    means = masked_mean(jnp.stack(list(there.values())), mask)
    return dict.fromkeys(values) | dict(zip(there, means, strict=True))


def sequence_means(values: Array, mask: Array) -> Array:
    """The mean of each sequence over its active tokens `[B]`; 0 for a sequence that has none."""
    counts = jnp.sum(mask, axis=1, dtype=jnp.int32).astype(jnp.float32)
    return pairwise_sum(active_values(values, mask)) / jnp.maximum(counts, 1.0)


def masked_sum(values: Array, mask: Array, normaliser: Normaliser) -> Array:
    """What a normaliser divides: the sum over tokens and then over sequences, in a fixed order."""
    if normaliser == "sequence_mean":
        return pairwise_sum(sequence_means(values, mask))
    return pairwise_sum(pairwise_sum(active_values(values, mask)))


def masked_count(mask: Array, normaliser: Normaliser) -> Array:
    """What a normaliser counts: active tokens, or sequences that have one."""
    counted = mask if normaliser == "tokens" else mask.any(axis=1)
    return jnp.sum(counted, dtype=jnp.int32).astype(jnp.float32)
