"""The portable implementation on logits that keeps every promise of "same bits" on any device. It is slow.

Every operation runs on blocks of constant shape (64 rows × 256 columns), and every sum has one written-down order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.fixed_order import BLOCK_COLUMNS, BLOCK_ROWS, zeros_behind
from rlk_jax.core.rows import Block, store_by_block
from rlk_jax.core.softmax import (
    Partial,
    SoftmaxConfig,
    Statistics,
    empty_partial,
    fixed_order_partial,
    fold,
    logits_of,
    merged,
    product_gradients,
    values_of,
)
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import varying_like
from rlk_jax.ops.logits.options import LogitsFunctions

Array = jax.Array


class _LogitsChunk(NamedTuple):
    """256 columns of a block's logits, float32 `[64, 256]`; those that are not `valid` are 0."""

    columns: Array
    valid: Array
    logits: Array


def _over_logits(config: SoftmaxConfig, logits: Array, step: Callable[[_LogitsChunk, Any], Any], start: Any) -> Any:
    """`step` over the chunks of a block's logits `[BLOCK_ROWS, V]` in ascending order."""
    chunks = -(-config.vocab_size // BLOCK_COLUMNS)
    logits = zeros_behind(logits, 1, BLOCK_COLUMNS)

    def body(chunk: Array, so_far: Any) -> Any:
        columns = (chunk * BLOCK_COLUMNS + jnp.arange(BLOCK_COLUMNS, dtype=jnp.int32))[None]
        valid = columns < config.real_vocab_size
        own = lax.dynamic_slice_in_dim(logits, chunk * BLOCK_COLUMNS, BLOCK_COLUMNS, axis=1).astype(jnp.float32)
        return step(_LogitsChunk(columns, valid, jnp.where(valid, own, 0)), so_far)

    return lax.fori_loop(0, chunks, body, varying_like(start, logits))


def _forward(config: SoftmaxConfig, logits: Array, tokens: Tokens) -> tuple[LinearLogp, Statistics]:
    with_gap, real = config.return_entropy, config.real_vocab_size
    bias = jnp.zeros((1, BLOCK_COLUMNS), jnp.float32)

    def of_block(block: Block) -> Statistics:
        own = block.take_tokens(tokens)

        def step(chunk: _LogitsChunk, so_far: Partial) -> Partial:
            z = logits_of(config, chunk.logits, bias, own.temperature, chunk.columns, real)
            is_target = (chunk.columns == own.target_ids[:, None]) & chunk.valid
            return fold(so_far, fixed_order_partial(z, is_target, with_gap=with_gap))

        start = empty_partial(BLOCK_ROWS, logits, with_gap=with_gap)
        whole = _over_logits(config, block.take_hidden(logits), step, start)
        return merged(jax.tree.map(lambda x: x[None], whole))

    zeros = jnp.zeros_like(tokens.active, jnp.float32)
    start = Statistics(zeros, zeros, zeros, zeros if with_gap else None)
    statistics = store_by_block(tokens.active, BLOCK_ROWS, of_block, start)
    return values_of(config, statistics), statistics


def _gradient(
    config: SoftmaxConfig, logits: Array, tokens: Tokens, statistics: Statistics, upstream: LinearLogp, donate: bool
) -> Array:
    bias = jnp.zeros((1, BLOCK_COLUMNS), jnp.float32)

    def of_block(block: Block) -> Array:
        own = (block.take_tokens(tokens), *block.take((statistics, upstream)))

        def step(chunk: _LogitsChunk, so_far: Array) -> Array:
            facts = (own[0], chunk.columns, config.real_vocab_size, *own[1:])
            gradient = product_gradients(config, chunk.logits, bias, *facts).astype(logits.dtype)
            return lax.dynamic_update_slice_in_dim(so_far, gradient, chunk.columns[0, 0], axis=1)

        start = jnp.zeros((BLOCK_ROWS, config.vocab_size + -config.vocab_size % BLOCK_COLUMNS), logits.dtype)
        return _over_logits(config, block.take_hidden(logits), step, start)[:, : config.vocab_size]

    return store_by_block(tokens.active, BLOCK_ROWS, of_block, jnp.zeros_like(logits))


DETERMINISTIC = LogitsFunctions(_forward, _gradient)
