"""The portable implementation on logits that keeps every promise of "same bits" on any device. It is slow.

Every operation runs on blocks of constant shape (64 rows × 256 columns), and every sum has one written-down order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import padded
from rlk_jax.core.fixed_order import BLOCK_COLUMNS, BLOCK_ROWS, ColumnGroups, column_groups
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


def _rows_with_room(block: Block, logits: Array) -> Array:
    """A block's rows of logits, with columns behind them that the last chunk of a group may reach into."""
    return jnp.pad(block.take_hidden(logits), ((0, 0), (0, BLOCK_COLUMNS)))


def _over_logits(
    config: SoftmaxConfig,
    rows: Array,
    step: Callable[[_LogitsChunk, Any], Any],
    start: Any,
    width: int,
    group: Array | int = 0,
) -> Any:
    """`step` over the chunks of a group of `width` columns in ascending order, in rows that have room."""
    first_of_group = group * width

    def body(chunk: Array, so_far: Any) -> Any:
        first = first_of_group + chunk * BLOCK_COLUMNS
        columns = (first + jnp.arange(BLOCK_COLUMNS, dtype=jnp.int32))[None]
        valid = columns < jnp.minimum(first_of_group + width, config.real_vocab_size)
        own = lax.dynamic_slice_in_dim(rows, first, BLOCK_COLUMNS, axis=1).astype(jnp.float32)
        return step(_LogitsChunk(columns, valid, jnp.where(valid, own, 0)), so_far)

    return lax.fori_loop(0, -(-width // BLOCK_COLUMNS), body, varying_like(start, rows))


def _forward(
    config: SoftmaxConfig, logits: Array, tokens: Tokens, groups: ColumnGroups | None = None
) -> tuple[LinearLogp, Statistics]:
    """The softmax over one group of columns after the other."""
    with_gap, real = config.return_entropy, config.real_vocab_size
    bias = jnp.zeros((1, BLOCK_COLUMNS), jnp.float32)
    groups = groups or ColumnGroups(1, config.vocab_size)

    def of_block(block: Block) -> Statistics:
        own, rows = block.take_tokens(tokens), _rows_with_room(block, logits)

        def step(chunk: _LogitsChunk, so_far: Partial) -> Partial:
            z = logits_of(config, chunk.logits, bias, own.temperature, chunk.columns, real, own.allowed)
            is_target = (chunk.columns == own.target_ids[:, None]) & chunk.valid
            return fold(so_far, fixed_order_partial(jnp.where(chunk.valid, z, -jnp.inf), is_target, with_gap=with_gap))

        def of_group(group: Array) -> Partial:
            start = empty_partial(BLOCK_ROWS, logits, with_gap=with_gap)
            return _over_logits(config, rows, step, start, groups.width, group)

        return merged(lax.map(of_group, jnp.arange(groups.count, dtype=jnp.int32)))

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

        start = jnp.zeros((BLOCK_ROWS, padded(config.vocab_size, BLOCK_COLUMNS)), logits.dtype)
        rows = _rows_with_room(block, logits)
        return _over_logits(config, rows, step, start, config.vocab_size)[:, : config.vocab_size]

    return store_by_block(tokens.active, BLOCK_ROWS, of_block, jnp.zeros_like(logits))


def _over_head_groups(config: SoftmaxConfig, logits: Array, tokens: Tokens) -> tuple[LinearLogp, None]:
    """The values over the groups of columns that linear_logp has."""
    return _forward(config, logits, tokens, column_groups(config.real_vocab_size))[0], None


DETERMINISTIC = LogitsFunctions(_forward, _gradient, _over_head_groups)
