"""The portable implementation that keeps every promise of "same bits" on any device. It is slow.

Each number is one chain over ascending keys or queries, in which what a query does not see adds an exact 0. So neither
the place of a sequence in its row nor anything around it can move a bit. The softmax takes two passes: the largest
score needs no order, and nothing is rescaled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.fixed_order import blockwise, rounded_product, zeros_behind
from rlk_jax.core.transforms import fusion_barrier, varying_like
from rlk_jax.ops.attention.options import (
    AttentionConfig,
    AttentionFunctions,
    Gradients,
    Needs,
    Operands,
    by_key_head,
)
from rlk_jax.ops.attention.visibility import Sight, sight_of

Array = jax.Array
_KEYS = 64
"""Keys whose scores are held at a time."""


class _KeyBlock(NamedTuple):
    """64 slots: their keys `[B, 64, G, E]` and values `[B, 64, G, F]` in float32, and which queries see them,
    `[B, T, 1, 1, 64]`.
    """

    key: Array
    value: Array
    visible: Array


class _Kept(NamedTuple):
    """What the forward keeps of each query's softmax for the backward, float32: the largest score and Σ exp(score −
    largest) `[B, T, G, R]`, and the output before it is rounded, `[B, T, G, R, F]`. total is NaN for a query that sees
    what is not finite.
    """

    largest: Array
    total: Array
    output: Array


class _Sums(NamedTuple):
    """What the keys of a query add up to so far: exponentials and weighted values; whether one was not finite."""

    total: Array
    output: Array
    sees_others: Array


class _Scores(NamedTuple):
    """The scores of one block `[B, T, G, R, 64]`, and the slope of the softcap there; None without one."""

    scores: Array
    slope: Array | None


def _over_keys(operands: Operands, sight: Sight, step: Callable[[_KeyBlock, Array, Any], Any], start: Any) -> Any:
    """`step(block, first slot of the block, so far)` for the blocks that some query sees, in ascending order."""
    slots = operands.key.shape[1]
    key, value = (zeros_behind(x, 1, _KEYS).astype(jnp.float32) for x in (operands.key, operands.value))

    def body(i: Array, so_far: Any) -> Any:
        first = i * _KEYS
        own = first + jnp.arange(_KEYS, dtype=jnp.int32)
        visible = sight.of(own) & (own < slots)[None, None]
        own_key, own_value = (lax.dynamic_slice_in_dim(x, first, _KEYS, axis=1) for x in (key, value))
        return step(_KeyBlock(own_key, own_value, visible[:, :, None, None]), first, so_far)

    low, high = jnp.maximum(sight.first.min(), 0) // _KEYS, jnp.minimum(sight.last.max(), slots - 1) // _KEYS
    return lax.fori_loop(low, high + 1, body, varying_like(start, operands.query))


def _row_products(rows: Array, keys: Array) -> Array:
    """rows·keysᵀ `[B, T, G, R, 64]`, each a chain over the ascending columns of rows `[B, T, G, R, E]` and keys
    `[B, 64, G, E]`. Products of two 16-bit numbers are exact in float32, so that a step rounds once.
    """
    by_column = jnp.moveaxis(rows, -1, 0)[..., None], jnp.moveaxis(keys, (3, 2), (0, 2))[:, :, None, :, None]

    def step(e: Array, so_far: Array) -> Array:
        return so_far + by_column[0][e] * by_column[1][e]

    start = jnp.zeros((*rows.shape[:4], keys.shape[1]), jnp.float32)
    return lax.fori_loop(0, rows.shape[4], step, varying_like(start, rows))


def _scores(config: AttentionConfig, query: Array, block: _KeyBlock) -> _Scores:
    scores, slope = rounded_product(_row_products(query, block.key), jnp.float32(config.scale)), None
    if config.logit_softcap is not None:
        cap = jnp.float32(config.logit_softcap)
        tangent = blockwise(jnp.tanh, rounded_product(scores, 1 / cap))
        scores, slope = rounded_product(tangent, cap), 1 - rounded_product(tangent, tangent)
    return _Scores(jnp.where(block.visible, scores, -jnp.inf), slope)


def _exponentials(scores: Array, largest: Array, visible: Array) -> Array:
    shift = jnp.where(jnp.isneginf(largest), 0, largest)[..., None]
    return jnp.where(visible, blockwise(jnp.exp, scores - shift), 0)


def _add_keys(weights: Array, keys: Array, visible: Array, so_far: Array) -> Array:
    """so_far `[B, T, G, R, ·]` + weights `[B, T, G, R, 64]` · keys `[B, 64, G, ·]`, key by key."""

    def step(k: Array, so_far: Array) -> Array:
        added = weights[..., k, None] * keys[:, k][:, None, :, None]
        return so_far + jnp.where(visible[..., k, None], added, 0)

    return lax.fori_loop(0, keys.shape[1], step, so_far)


def _column_sum(x: Array) -> Array:
    """Σ over the last axis, in ascending order."""
    start = varying_like(jnp.zeros(x.shape[:-1], jnp.float32), x)
    return lax.fori_loop(0, x.shape[-1], lambda i, so_far: so_far + x[..., i], start)


def _rounded(x: Array, dtype: Any) -> Array:
    """x rounded to a 16-bit dtype, as float32."""
    return x.astype(dtype).astype(jnp.float32)


def _forward(config: AttentionConfig, operands: Operands) -> tuple[Array, _Kept]:
    operands = fusion_barrier(operands)
    groups, dtype = operands.key.shape[2], operands.query.dtype
    query, sight = by_key_head(operands.query, groups).astype(jnp.float32), sight_of(config, operands)

    def find_largest(block: _KeyBlock, _: Array, largest: Array) -> Array:
        return jnp.maximum(largest, _scores(config, query, block).scores.max(axis=-1))

    largest = _over_keys(operands, sight, find_largest, jnp.full(query.shape[:4], -jnp.inf, jnp.float32))

    def add(block: _KeyBlock, _: Array, so_far: _Sums) -> _Sums:
        exponentials = _exponentials(_scores(config, query, block).scores, largest, block.visible)
        total = lax.fori_loop(0, _KEYS, lambda k, total: total + exponentials[..., k], so_far.total)
        output = _add_keys(_rounded(exponentials, dtype), block.value, block.visible, so_far.output)
        is_finite = jnp.isfinite(block.key).all(axis=-1) & jnp.isfinite(block.value).all(axis=-1)
        is_finite = jnp.moveaxis(is_finite, 2, 1)[:, None, :, None]
        return _Sums(total, output, so_far.sees_others | (block.visible & ~is_finite).any(axis=-1))

    zeros = jnp.zeros(query.shape[:4], jnp.float32)
    no_output = jnp.zeros((*query.shape[:4], operands.value.shape[3]), jnp.float32)
    start = _Sums(zeros, no_output, jnp.zeros((*query.shape[:3], 1), bool))
    sums = _over_keys(operands, sight, add, start)
    is_bad = sums.sees_others | ~jnp.isfinite(query).all(axis=-1)
    is_nothing = sight.first > sight.last
    is_bad = is_bad & ~is_nothing[..., None, None] | ~operands.places.is_good[:, None, None, None]
    total = jnp.where(is_bad, jnp.nan, sums.total)
    output = sums.output / jnp.where(total == 0, 1, total)[..., None]
    flat = output.reshape(*operands.query.shape[:3], -1)
    return fusion_barrier((flat.astype(dtype), _Kept(largest, total, output)))


def _gradients(config: AttentionConfig, needs: Needs, operands: Operands, kept: _Kept, upstream: Array) -> Gradients:
    operands, kept, upstream = fusion_barrier((operands, kept, upstream))
    groups, dtype = operands.key.shape[2], operands.query.dtype
    query, given = (by_key_head(x, groups).astype(jnp.float32) for x in (operands.query, upstream))
    sight = sight_of(config, operands)
    center = _column_sum(rounded_product(given, kept.output))

    def add(block: _KeyBlock, first: Array, so_far: Gradients) -> Gradients:
        scores, slope = _scores(config, query, block)
        total = jnp.where(kept.total == 0, 1, kept.total)[..., None]
        weights = _exponentials(scores, kept.largest, block.visible) / total
        d_query, d_key, d_value = so_far
        if d_value is not None:
            d_value = _add_queries(_rounded(weights, dtype), given, block.visible, first, d_value)
        if needs.query or needs.key:
            d_scores = weights * (_row_products(given, block.value) - center[..., None])
            d_scores = _rounded(d_scores if slope is None else d_scores * slope, dtype)
            if d_query is not None:
                d_query = _add_keys(d_scores, block.key, block.visible, d_query)
            if d_key is not None:
                d_key = _add_queries(d_scores, query, block.visible, first, d_key)
        return Gradients(d_query, d_key, d_value)

    def sums(x: Array, is_needed: bool) -> Array | None:
        return jnp.zeros(x.shape, jnp.float32) if is_needed else None

    start = Gradients(
        sums(query, needs.query),
        sums(zeros_behind(operands.key, 1, _KEYS), needs.key),
        sums(zeros_behind(operands.value, 1, _KEYS), needs.value),
    )
    d_query, d_key, d_value = _over_keys(operands, sight, add, start)
    slots, scale = operands.key.shape[1], jnp.float32(config.scale)
    return Gradients(
        None if d_query is None else (d_query * scale).reshape(operands.query.shape).astype(dtype),
        None if d_key is None else (d_key[:, :slots] * scale).astype(dtype),
        None if d_value is None else d_value[:, :slots].astype(dtype),
    )


def _add_queries(weights: Array, rows: Array, visible: Array, first: Array, so_far: Array) -> Array:
    """so_far `[B, S, G, ·]` with weightsᵀ `[B, T, G, R, 64]` · rows `[B, T, G, R, ·]` added to the 64 slots from
    `first` on, query by query and for each its heads in order.
    """

    def step(t: Array, sums: Array) -> Array:
        is_seen = visible[:, t, 0, 0, :, None, None]
        for head in range(rows.shape[3]):
            weight = jnp.moveaxis(weights[:, t, :, head], 2, 1)[..., None]
            sums = sums + jnp.where(is_seen, weight * rows[:, t, :, head][:, None], 0)
        return sums

    own = lax.dynamic_slice_in_dim(so_far, first, _KEYS, axis=1)
    own = lax.fori_loop(0, rows.shape[1], step, own)
    return lax.dynamic_update_slice_in_dim(so_far, own, first, axis=1)


DETERMINISTIC = AttentionFunctions(_forward, _gradients)
