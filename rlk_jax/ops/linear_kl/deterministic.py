"""The portable implementation that keeps every promise of "same bits" on any device. It is slow.

Every sum has one written-down order, on blocks of 64 rows and chunks of 256 columns: matrix products are chains over
ascending K; sums over the vocabulary go by halves inside a chunk, then over ascending chunks of each of the eight
groups, then over ascending groups. The first pass over both heads takes the softmaxes, the second the divergence, and
the backward makes all logits once more. Padding of a head is never read.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import padded
from rlk_jax.core.column_chunks import (
    ColumnChunk,
    chunks_in_group,
    column_chunk,
    folded_by_group,
    padded_columns,
)
from rlk_jax.core.fixed_order import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    DEPTH_MULTIPLE,
    ascending_sum,
    fma_chain,
    halving_sum,
)
from rlk_jax.core.rows import Block, fold_blocks, store_by_block
from rlk_jax.core.softmax import Partial, empty_partial, fixed_order_partial, fold, logits_of, merged
from rlk_jax.core.transforms import varying_like
from rlk_jax.ops.linear_kl.divergence import KlStatistics, Normalizer, Terms, raw_gradients, terms_of
from rlk_jax.ops.linear_kl.options import (
    Gradients,
    KlConfig,
    KlFunctions,
    KlTokens,
    Needs,
    OneHead,
    OneHeadConfig,
    Operands,
)

Array = jax.Array


class _HeadRows(NamedTuple):
    """A head beside a block's 64 rows of its hidden states, their columns padded, and the rows' temperatures."""

    head: OneHead
    hidden: Array
    temperature: Array


class _ChunkLogits(NamedTuple):
    """A chunk of a head, and a block's logits there, −inf in columns that are not the chunk's; `raw` is before softcap
    and temperature.
    """

    chunk: ColumnChunk
    raw: Array
    logits: Array


def _head_rows(head: OneHead, block: Block, temperature: Array) -> _HeadRows:
    hidden = padded_columns(block.take_hidden(head.hidden))
    return _HeadRows(head, hidden, temperature)


def _rows_of_both(operands: Operands, block: Block, tokens: KlTokens) -> tuple[_HeadRows, _HeadRows]:
    student = _head_rows(operands.student, block, tokens.temperature)
    return student, _head_rows(operands.teacher, block, tokens.teacher_temperature)


def _chunk_logits(config: KlConfig, head: OneHeadConfig, rows: _HeadRows, group: Array, index: Array) -> _ChunkLogits:
    """Those of chunk number `index` of a group."""
    weight, bias, real = (rows.head.weight,), rows.head.bias, config.real_vocab_size
    chunk = column_chunk(weight, bias, head.weight_layout, config.groups, real, group, index)
    products = chunk.products(rows.hidden)
    logits = logits_of(head, products, chunk.bias, rows.temperature, chunk.columns, real)
    return _ChunkLogits(chunk, products + chunk.bias, jnp.where(chunk.valid, logits, -jnp.inf))


def _both_chunk_logits(
    config: KlConfig, both: tuple[_HeadRows, _HeadRows], group: Array, index: Array
) -> tuple[_ChunkLogits, _ChunkLogits]:
    """The student's and the teacher's."""
    student = _chunk_logits(config, config.student, both[0], group, index)
    return student, _chunk_logits(config, config.teacher, both[1], group, index)


def _normalizer_in_order(config: KlConfig, head: OneHeadConfig, rows: _HeadRows) -> Normalizer:
    no_target = jnp.zeros((1, BLOCK_COLUMNS), bool)

    def add_chunk(group: Array, index: Array, so_far: Partial) -> Partial:
        logits = _chunk_logits(config, head, rows, group, index).logits
        return fold(so_far, fixed_order_partial(logits, no_target, with_gap=False))

    empty = empty_partial(BLOCK_ROWS, rows.hidden, with_gap=False)
    found = merged(folded_by_group(config.groups, add_chunk, empty))
    return Normalizer(found.max, found.log_sum)


def _forward(config: KlConfig, operands: Operands, tokens: KlTokens) -> tuple[Array, KlStatistics]:
    def of_block(block: Block) -> tuple[Array, KlStatistics]:
        both = _rows_of_both(operands, block, block.take(tokens))
        student = _normalizer_in_order(config, config.student, both[0])
        teacher = _normalizer_in_order(config, config.teacher, both[1])

        def add_chunk(group: Array, index: Array, so_far: Terms) -> Terms:
            own, other = _both_chunk_logits(config, both, group, index)
            terms = terms_of(config, student.logprobs(own.logits), teacher.logprobs(other.logits))
            return jax.tree.map(lambda total, x: total + halving_sum(x), so_far, terms)

        zeros = varying_like(jnp.zeros(BLOCK_ROWS, jnp.float32), both[0].hidden)
        groups = folded_by_group(config.groups, add_chunk, Terms(zeros, zeros))
        value, slope = jax.tree.map(ascending_sum, groups)
        return value, KlStatistics(student, teacher, slope)

    zeros = jnp.zeros(tokens.active.shape, jnp.float32)
    start = zeros, KlStatistics(Normalizer(zeros, zeros), Normalizer(zeros, zeros), zeros)
    return store_by_block(tokens.active, BLOCK_ROWS, of_block, start)


def _gradients(
    config: KlConfig, needs: Needs, operands: Operands, tokens: KlTokens, statistics: KlStatistics, upstream: Array
) -> Gradients:
    """dH is summed over chunks and groups as the softmax is; dW and db are one chain over ascending active tokens.

    Gradients of logits stay float32.
    """
    student, groups = operands.student, config.groups
    dim, vocab_size = student.hidden.shape[1], config.student.vocab_size

    def step(block: Block, so_far: Gradients) -> Gradients:
        own, (own_statistics, own_upstream) = block.take(tokens), block.take((statistics, upstream))
        own = own._replace(active=block.active)
        both = _rows_of_both(operands, block, own)
        rows = both[0]

        def of_chunk(group: Array, index: Array, so_far: Gradients) -> Gradients:
            (chunk, raw, logits), other = _both_chunk_logits(config, both, group, index)
            of_both = (logits, other.logits)
            gradient = raw_gradients(config, raw, of_both, own, own_statistics, own_upstream, chunk.valid)
            d_hidden, d_weight, d_bias = so_far
            if d_hidden is not None:
                d_hidden += fma_chain(gradient.T, chunk.weight, jnp.zeros_like(rows.hidden))
            if d_weight is not None:
                d_weight = _add_to_rows(d_weight, chunk.start, gradient, rows.hidden)
            if d_bias is not None:
                d_bias = _add_to_rows(d_bias, chunk.start, gradient, jnp.ones((BLOCK_ROWS, 1), jnp.float32))
            return Gradients(d_hidden, d_weight, d_bias)

        def of_group(so_far: Gradients, group: Array) -> tuple[Gradients, Array | None]:
            zeros = varying_like(jnp.zeros_like(rows.hidden), rows.hidden) if needs.hidden else None
            add = functools.partial(of_chunk, group)
            done = lax.fori_loop(0, chunks_in_group(groups), add, so_far._replace(hidden=zeros))
            return done._replace(hidden=None), done.hidden

        heads = so_far._replace(hidden=None)
        done, of_groups = lax.scan(of_group, heads, jnp.arange(groups.count, dtype=jnp.int32))
        if of_groups is None or so_far.hidden is None:
            return done
        return done._replace(hidden=block.store(so_far.hidden, ascending_sum(of_groups)[:, :dim]))

    # A chunk writes 256 rows, of which those outside its group are zero: the last chunk needs room for them.
    columns = max(groups.count * groups.width + BLOCK_COLUMNS, vocab_size)
    start = Gradients(
        jnp.zeros_like(student.hidden) if needs.hidden else None,
        jnp.zeros((columns, padded(dim, DEPTH_MULTIPLE)), jnp.float32) if needs.weight else None,
        jnp.zeros((columns, 1), jnp.float32) if needs.bias else None,
    )
    done = fold_blocks(tokens.active, BLOCK_ROWS, step, start)
    if done.weight is not None:
        d_weight = done.weight[:vocab_size, :dim]
        done = done._replace(weight=d_weight if config.student.vocab_axis == 0 else d_weight.T)
    if done.bias is not None:
        done = done._replace(bias=done.bias[:vocab_size, 0])
    return done.like(student)


def _add_to_rows(sums: Array, first: Array, gradient: Array, factors: Array) -> Array:
    """`sums` with gradientᵀ·factors added to 256 of its rows."""
    old = lax.dynamic_slice_in_dim(sums, first, BLOCK_COLUMNS)
    return lax.dynamic_update_slice_in_dim(sums, fma_chain(gradient, factors, old), first, 0)


DETERMINISTIC = KlFunctions(_forward, _gradients)
