"""The portable implementation that keeps every promise of "same bits" on any device. It is slow.

Every sum has one written-down order, on blocks of 64 rows and chunks of 256 columns: matrix products are chains over
ascending K; sums over the vocabulary go by halves inside a chunk, then over ascending chunks of each of the eight
groups, then over ascending groups. The first pass over both heads takes the softmaxes, the second the divergence, and
the backward makes all logits once more. Padding of a head is never read.
"""

import functools
from typing import Any, NamedTuple

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
    rows_first,
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
from rlk_jax.core.shard import Gather
from rlk_jax.core.softmax import Partial, empty_partial, fixed_order_partial, fold, logits_of
from rlk_jax.core.transforms import varying_like
from rlk_jax.ops.linear_kl.divergence import (
    KlStatistics,
    Normalizer,
    Terms,
    derivatives_of,
    normalizer_of_groups,
    raw_gradients,
    terms_of,
)
from rlk_jax.ops.linear_kl.options import (
    Gradients,
    KlConfig,
    KlFunctions,
    KlTokens,
    Needs,
    OneHead,
    OneHeadConfig,
    Operands,
    TeacherTopK,
)
from rlk_jax.ops.linear_kl.top_k import (
    BucketStatistics,
    derivatives_with_rest,
    divergence_of_buckets,
    listed_logits,
    logits_of_all,
    no_values,
    possibly_of_none,
    without_listed,
)

Array = jax.Array


class _HeadRows(NamedTuple):
    """A head of so many real columns beside a block's 64 rows of its hidden states, their columns padded, and the rows'
    temperatures.
    """

    config: OneHeadConfig
    head: OneHead
    real_columns: Any
    hidden: Array
    temperature: Array


class _ChunkLogits(NamedTuple):
    """A chunk of a head, and a block's logits there, −inf in columns that are not the chunk's; `raw` is before softcap
    and temperature.
    """

    chunk: ColumnChunk
    raw: Array
    logits: Array


def _head_rows(config: OneHeadConfig, head: OneHead, real: Any, block: Block, temperature: Array) -> _HeadRows:
    return _HeadRows(config, head, real, padded_columns(block.take_hidden(head.hidden)), temperature)


def _rows_of_both(
    config: KlConfig, operands: Operands, block: Block, tokens: KlTokens
) -> tuple[_HeadRows, _HeadRows | None]:
    """Those of the student, and of a teacher that has a head."""
    real = operands.count_real(config)
    student = _head_rows(config.student, operands.student, real, block, tokens.temperature)
    if config.teacher is None or operands.teacher is None:
        return student, None
    return student, _head_rows(config.teacher, operands.teacher, real, block, tokens.teacher_temperature)


def _chunk_logits(config: KlConfig, rows: _HeadRows, group: Array, index: Array) -> _ChunkLogits:
    """Those of chunk number `index` of a group."""
    weight, bias, real = (rows.head.weight,), rows.head.bias, rows.real_columns
    chunk = column_chunk(weight, bias, rows.config.weight_layout, config.groups, real, group, index)
    products = chunk.products(rows.hidden)
    logits = logits_of(rows.config, products, chunk.bias, rows.temperature, chunk.columns, real)
    return _ChunkLogits(chunk, products + chunk.bias, jnp.where(chunk.valid, logits, -jnp.inf))


def _partial_of_chunk(logits: Array) -> Partial:
    return fixed_order_partial(logits, jnp.zeros((1, BLOCK_COLUMNS), bool), with_gap=False)


def _partials_in_order(config: KlConfig, rows: _HeadRows) -> Partial:
    """A partial for each group, `[groups, 64]`."""

    def add_chunk(group: Array, index: Array, so_far: Partial) -> Partial:
        return fold(so_far, _partial_of_chunk(_chunk_logits(config, rows, group, index).logits))

    empty = empty_partial(BLOCK_ROWS, rows.hidden, with_gap=False)
    return folded_by_group(config.groups, add_chunk, empty)


def _both_partials(config: KlConfig, operands: Operands, tokens: KlTokens, block: Block) -> tuple[Partial, Partial]:
    """Those of student and teacher for each group, `[groups, 64]`."""
    student, teacher = _rows_of_both(config, operands, block, block.take(tokens))
    assert teacher is not None
    return _partials_in_order(config, student), _partials_in_order(config, teacher)


def _block_terms(
    config: KlConfig, operands: Operands, tokens: KlTokens, block: Block, normalizers: tuple[Normalizer, Normalizer]
) -> Terms:
    """The terms of a block, summed up over each group, `[groups, 64]`."""
    student, teacher = _rows_of_both(config, operands, block, block.take(tokens))
    assert teacher is not None

    def add_chunk(group: Array, index: Array, so_far: Terms) -> Terms:
        logits = (_chunk_logits(config, x, group, index).logits for x in (student, teacher))
        terms = terms_of(config, *(x.logprobs(own) for x, own in zip(normalizers, logits, strict=True)))
        return jax.tree.map(lambda total, x: total + halving_sum(x), so_far, terms)

    zeros = varying_like(jnp.zeros(BLOCK_ROWS, jnp.float32), student.hidden)
    return folded_by_group(config.groups, add_chunk, Terms(zeros, zeros))


def _from_head(config: KlConfig, operands: Operands, tokens: KlTokens, gather: Gather) -> tuple[Array, KlStatistics]:
    """The divergence from a teacher that has a head: all tokens' softmaxes first, and then their terms."""
    many = jnp.zeros((tokens.active.shape[0], config.groups.count), jnp.float32)
    by_block = functools.partial(store_by_block, tokens.active, BLOCK_ROWS)

    def normalizers(block: Block) -> tuple[Normalizer, Normalizer]:
        student, teacher = map(normalizer_of_groups, rows_first(block.take(partials)))
        return student, teacher

    def terms(block: Block) -> Terms:
        return rows_first(_block_terms(config, operands, tokens, block, normalizers(block)))

    def values(block: Block) -> tuple[Array, KlStatistics]:
        value, slope = jax.tree.map(ascending_sum, rows_first(block.take(sums)))
        return value, KlStatistics(*normalizers(block), slope)

    empty = Partial(many, many + 1, many, None)
    own = by_block(lambda block: rows_first(_both_partials(config, operands, tokens, block)), (empty, empty))
    partials = rows_first(gather(rows_first(own)))
    sums = rows_first(gather(rows_first(by_block(terms, Terms(many, many)))))
    return by_block(values, no_values(tokens))


class _ListedSums(NamedTuple):
    """The softmax over some columns without those that the teacher lists, and the logits `[64, k]` of these."""

    rest: Partial
    logits: Array


def _sums_beside_list(config: KlConfig, student: _HeadRows, top_k: TeacherTopK) -> _ListedSums:
    """Those of a block for each group, `[groups, 64]` and `[groups, 64, k]`."""

    def add_chunk(group: Array, index: Array, so_far: _ListedSums) -> _ListedSums:
        (chunk, _, logits) = _chunk_logits(config, student, group, index)
        rest = _partial_of_chunk(without_listed(logits, top_k, chunk.start))
        # Each listed token has its logit in one chunk, and 0 in all others; columns behind a group are −inf there.
        own = jnp.where(chunk.valid, logits, 0)
        return _ListedSums(fold(so_far.rest, rest), so_far.logits + listed_logits(own, top_k, chunk.start))

    nothing = varying_like(jnp.zeros(top_k.ids.shape, jnp.float32), student.hidden)
    empty = _ListedSums(empty_partial(BLOCK_ROWS, student.hidden, with_gap=False), nothing)
    return folded_by_group(config.groups, add_chunk, empty)


def _from_list(
    config: KlConfig, operands: Operands, tokens: KlTokens, top_k: TeacherTopK, gather: Gather
) -> tuple[Array, BucketStatistics]:
    """The divergence from a teacher that lists tokens: all tokens' softmaxes first, and then their terms."""
    many = jnp.zeros((tokens.active.shape[0], config.groups.count), jnp.float32)
    by_block = functools.partial(store_by_block, tokens.active, BLOCK_ROWS)

    def sums(block: Block) -> tuple[Partial, Partial, Array]:
        student, _ = _rows_of_both(config, operands, block, block.take(tokens))
        found = _sums_beside_list(config, student, block.take(top_k))
        partials, rest = rows_first((_partials_in_order(config, student), found.rest))
        return partials, rest, ascending_sum(found.logits)

    def values(block: Block) -> tuple[Array, BucketStatistics]:
        student, rest = map(normalizer_of_groups, rows_first(block.take(partials)))
        listed = block.take(top_k), block.take(logits)
        return divergence_of_buckets(config, *listed, student, possibly_of_none(rest))

    empty = Partial(many, many + 1, many, None)
    *own, own_logits = by_block(sums, (empty, empty, jnp.zeros(top_k.ids.shape, jnp.float32)))
    partials = rows_first(gather(rows_first(tuple(own))))
    logits = logits_of_all(own_logits, config.groups.count, gather)
    return by_block(values, no_values(tokens))


def _forward(
    config: KlConfig, operands: Operands, tokens: KlTokens, gather: Gather
) -> tuple[Array, KlStatistics | BucketStatistics]:
    if tokens.top_k is None:
        return _from_head(config, operands, tokens, gather)
    return _from_list(config, operands, tokens, tokens.top_k, gather)


class _BlockRows(NamedTuple):
    """What a block has of both in the backward: its rows, its tokens, and what the forward found for them."""

    student: _HeadRows
    teacher: _HeadRows | None
    tokens: KlTokens
    statistics: Any


def _derivatives_in_chunk(config: KlConfig, rows: _BlockRows, own: _ChunkLogits, group: Array, index: Array) -> Array:
    """The derivatives by the logits of a chunk."""
    if rows.tokens.top_k is not None:
        return derivatives_with_rest(rows.statistics, rows.tokens.top_k, own.logits, own.chunk.start)
    assert rows.teacher is not None
    others = _chunk_logits(config, rows.teacher, group, index).logits
    return derivatives_of(config, (own.logits, others), rows.statistics)


def _gradients(
    config: KlConfig, needs: Needs, operands: Operands, tokens: KlTokens, statistics: Any, upstream: Array
) -> Gradients:
    """dH is summed over chunks and groups as the softmax is; dW and db are one chain over ascending active tokens.

    Gradients of logits stay float32.
    """
    student, groups = operands.student, config.groups
    dim, vocab_size = student.hidden.shape[1], config.student.vocab_size

    def step(block: Block, so_far: Gradients) -> Gradients:
        own, (own_statistics, own_upstream) = block.take(tokens), block.take((statistics, upstream))
        own = own._replace(active=block.active)
        both = _BlockRows(*_rows_of_both(config, operands, block, own), own, own_statistics)
        rows = both.student

        def of_chunk(group: Array, index: Array, so_far: Gradients) -> Gradients:
            logits = _chunk_logits(config, rows, group, index)
            chunk, by_logit = logits.chunk, _derivatives_in_chunk(config, both, logits, group, index)
            gradient = raw_gradients(config, logits.raw, by_logit, own, own_upstream, chunk.valid)
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
        if not config.sums_by_group:
            of_groups = ascending_sum(of_groups)[None]
        return done._replace(hidden=block.store(so_far.hidden, jnp.swapaxes(of_groups[..., :dim], 0, 1)))

    # A chunk writes 256 rows, of which those outside its group are zero: the last chunk needs room for them.
    columns = max(groups.count * groups.width + BLOCK_COLUMNS, vocab_size)
    parts, dtype = groups.count if config.sums_by_group else 1, jnp.float32 if config.is_shard else student.hidden.dtype
    start = Gradients(
        jnp.zeros((len(tokens.active), parts, dim), dtype) if needs.hidden else None,
        jnp.zeros((columns, padded(dim, DEPTH_MULTIPLE)), jnp.float32) if needs.weight else None,
        jnp.zeros((columns, 1), jnp.float32) if needs.bias else None,
    )
    done = fold_blocks(tokens.active, BLOCK_ROWS, step, start)
    if done.hidden is not None:
        d_hidden = jnp.swapaxes(done.hidden, 0, 1)
        done = done._replace(hidden=d_hidden if config.is_shard else d_hidden[0])
    if done.weight is not None:
        d_weight = done.weight[:vocab_size, :dim]
        done = done._replace(weight=d_weight if config.student.vocab_axis == 0 else d_weight.T)
    if done.bias is not None:
        done = done._replace(bias=done.bias[:vocab_size, 0])
    return done.like(config, student)


def _add_to_rows(sums: Array, first: Array, gradient: Array, factors: Array) -> Array:
    """`sums` with gradientᵀ·factors added to 256 of its rows."""
    old = lax.dynamic_slice_in_dim(sums, first, BLOCK_COLUMNS)
    return lax.dynamic_update_slice_in_dim(sums, fma_chain(gradient, factors, old), first, 0)


DETERMINISTIC = KlFunctions(_forward, _gradients)
