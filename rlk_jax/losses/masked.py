"""Sums, counts and means over the active tokens of a batch, in one fixed order whatever the padding."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from rlk_jax.core.fixed_order import pairwise_spread, pairwise_sum
from rlk_jax.core.mesh import whole_on_every_device
from rlk_jax.core.tokens import active_mask
from rlk_jax.losses.options import Normaliser


def masked_mean(values: Num[Array, "*lead B T"], mask: Num[Array, "B T"] | Bool[Array, "B T"]) -> Float[Array, "*lead"]:
    """`Σ values / max(count, 1)` over all active tokens of the batch, float32: their mean, or 0 where there are none.

    Masked values may be anything. Appended masked rows or columns change no bit of the mean.
    """
    values, mask = whole_on_every_device((values, active_mask(mask)))
    return masked_sum(values, mask, "tokens") / jnp.maximum(masked_count(mask, "tokens"), 1.0)


def active_values(x: Array, mask: Array) -> Array:
    """x in fp32, exactly 0 where masked.

    Values are masked before any exp is taken of them: in the gradient of a later `where`, a NaN would come back as
    0 · NaN.
    """
    return jnp.where(mask, x.astype(jnp.float32), 0.0)


def masked_means(values: dict[str, Array | None], mask: Array) -> dict[str, Any]:
    """`masked_mean` of every value that is not None, with the same bits, in no more kernels than one mean takes."""
    there = {name: x.astype(jnp.float32) for name, x in values.items() if x is not None}
    means = masked_mean(jnp.stack(list(there.values())), mask)
    return dict.fromkeys(values) | dict(zip(there, means, strict=True))


def sequence_means(values: Array, mask: Array) -> Array:
    """The mean of each sequence over its active tokens `[B]`; 0 for a sequence that has none."""
    counts = jnp.sum(mask, axis=1, dtype=jnp.int32).astype(jnp.float32)
    return pairwise_sum(active_values(values, mask)) / jnp.maximum(counts, 1.0)


def spread_to_tokens(per_sequence: Array, mask: Array) -> Array:
    """A number `[B]` of each sequence at each of its active tokens `[B, T]`; 0 where masked."""
    return active_values(pairwise_spread(per_sequence, mask.shape[1]), mask)


def masked_sum(values: Array, mask: Array, normaliser: Normaliser) -> Array:
    """What a normaliser divides: the sum over tokens and then over sequences, in a fixed order."""
    if normaliser == "sequence_mean":
        return pairwise_sum(sequence_means(values, mask))
    return pairwise_sum(pairwise_sum(active_values(values, mask)))


def masked_count(mask: Array, normaliser: Normaliser) -> Array:
    """What a normaliser counts: active tokens, or sequences that have one."""
    counted = mask if normaliser == "tokens" else mask.any(axis=1)
    return jnp.sum(counted, dtype=jnp.int32).astype(jnp.float32)
