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


class _Columns(NamedTuple):
    """`width` columns from `first` on."""

    first: Any
    width: int


class _LogitsChunk(NamedTuple):
    """256 columns of a block's logits, float32 `[64, 256]`; those that are not `valid` are 0."""

    columns: Array
    valid: Array
    logits: Array


def _over_logits(
    config: SoftmaxConfig,
    logits: Array,
    step: Callable[[_LogitsChunk, Any], Any],
    start: Any,
    group: _Columns | None = None,
) -> Any:
    """`step` over the chunks of a block's logits `[BLOCK_ROWS, V]` in ascending order: of one group, or of all V."""
    group = group or _Columns(0, config.vocab_size)
    logits = jnp.pad(logits, ((0, 0), (0, BLOCK_COLUMNS)))

    def body(chunk: Array, so_far: Any) -> Any:
        first = group.first + chunk * BLOCK_COLUMNS
        columns = (first + jnp.arange(BLOCK_COLUMNS, dtype=jnp.int32))[None]
        valid = columns < jnp.minimum(group.first + group.width, config.real_vocab_size)
        own = lax.dynamic_slice_in_dim(logits, first, BLOCK_COLUMNS, axis=1).astype(jnp.float32)
        return step(_LogitsChunk(columns, valid, jnp.where(valid, own, 0)), so_far)

    return lax.fori_loop(0, -(-group.width // BLOCK_COLUMNS), body, varying_like(start, logits))


def _forward(
    config: SoftmaxConfig, logits: Array, tokens: Tokens, groups: ColumnGroups | None = None
) -> tuple[LinearLogp, Statistics]:
    """The softmax over one group of columns after the other."""
    with_gap, real = config.return_entropy, config.real_vocab_size
    bias = jnp.zeros((1, BLOCK_COLUMNS), jnp.float32)
    groups = groups or ColumnGroups(1, config.vocab_size)

    def of_block(block: Block) -> Statistics:
        own, rows = block.take_tokens(tokens), block.take_hidden(logits)

        def step(chunk: _LogitsChunk, so_far: Partial) -> Partial:
            z = logits_of(config, chunk.logits, bias, own.temperature, chunk.columns, real)
            is_target = (chunk.columns == own.target_ids[:, None]) & chunk.valid
            return fold(so_far, fixed_order_partial(jnp.where(chunk.valid, z, -jnp.inf), is_target, with_gap=with_gap))

        def of_group(group: Array) -> Partial:
            start = empty_partial(BLOCK_ROWS, logits, with_gap=with_gap)
            return _over_logits(config, rows, step, start, _Columns(group * groups.width, groups.width))

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
        return _over_logits(config, block.take_hidden(logits), step, start)[:, : config.vocab_size]

    return store_by_block(tokens.active, BLOCK_ROWS, of_block, jnp.zeros_like(logits))


def _over_head_groups(config: SoftmaxConfig, logits: Array, tokens: Tokens) -> tuple[LinearLogp, None]:
    return _forward(config, logits, tokens, column_groups(config.real_vocab_size))[0], None


DETERMINISTIC = LogitsFunctions(_forward, _gradient, _over_head_groups)
