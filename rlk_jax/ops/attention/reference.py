"""The plain definition of attention in float32, which holds all scores: the gold of the tests."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlk_jax.ops.attention.options import (
    AttentionConfig,
    AttentionFunctions,
    Gradients,
    Needs,
    Operands,
    by_key_head,
)
from rlk_jax.ops.attention.visibility import sight_of

Array = jax.Array


def plain_attention(config: AttentionConfig, operands: Operands, weights_dtype: Any) -> Array:
    """softmax(softcap(scale·query·keyᵀ))·value over the visible slots, with weights of this dtype; 0 where there are
    none. Slots that no query sees may hold anything.
    """
    groups, slots = operands.key.shape[2], jnp.arange(operands.key.shape[1], dtype=jnp.int32)
    visible = sight_of(config, operands).of(slots)
    is_seen = visible.any(axis=1)[..., None, None]
    query = by_key_head(operands.query, groups)
    key, value = (jnp.where(is_seen, x, 0) for x in (operands.key, operands.value))
    wide = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
    scores = jnp.einsum("btgre,bsge->btgrs", query.astype(weights_dtype), key.astype(weights_dtype), **wide)
    scores = scores * config.scale
    if config.logit_softcap is not None:
        scores = config.logit_softcap * jnp.tanh(scores / config.logit_softcap)
    visible = visible[:, :, None, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    exponentials = jnp.where(visible, jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0, largest)), 0)
    total = exponentials.sum(axis=-1, keepdims=True)
    weights = exponentials / jnp.where(total == 0, 1, total)
    attended = jnp.einsum("btgrs,bsgf->btgrf", weights.astype(weights_dtype), value.astype(weights_dtype), **wide)
    poison = jnp.where(operands.places.is_good, 1.0, jnp.nan)[:, None, None, None]
    return (attended.reshape(*operands.query.shape[:3], -1) * poison).astype(operands.query.dtype)


def differentiated_by_jax(attend: Callable[[AttentionConfig, Operands], Array]) -> AttentionFunctions:
    """An implementation by one function of config and operands, which JAX differentiates; nothing is kept."""

    def gradients(config: AttentionConfig, needs: Needs, operands: Operands, _: Any, upstream: Array) -> Gradients:
        def of_arrays(*arrays: Array) -> Array:
            query, key, value = arrays
            return attend(config, operands._replace(query=query, key=key, value=value))

        found = jax.vjp(of_arrays, *operands[:3])[1](upstream)
        needed = (needs.query, needs.key, needs.value)
        return Gradients(*(x if is_needed else None for x, is_needed in zip(found, needed, strict=True)))

    return AttentionFunctions(lambda config, operands: (attend(config, operands), ()), gradients)


def _in_float32(config: AttentionConfig, operands: Operands) -> Array:
    return plain_attention(config, operands, jnp.float32)


REFERENCE = differentiated_by_jax(_in_float32)
