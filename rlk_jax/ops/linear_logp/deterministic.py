"""The portable implementation that keeps every promise of "same bits" on any device. It is slow.

Every sum has one written-down order, and every operation runs on blocks of constant shape (64 rows × 256 columns), so
neither the number of tokens nor a token's place can reach a bit:
  - a matrix product is, per element, one chain over ascending K (`fma_chain`), never a library GEMM;
  - the softmax is a fixed tree over the vocabulary: eight groups of ceil(V/64)·8 columns, chunks of 256 columns inside
    a group, halving sums inside a chunk; chunks and then groups are folded in ascending order. V is the true
    vocabulary: padding rows of the head are never read.
"""

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
)
from rlk_jax.core.gemm import fixed_order_gemm
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands, head_dim, real_columns
from rlk_jax.core.rows import Block, fold_blocks, store_by_block
from rlk_jax.core.softmax import (
    Partial,
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
from rlk_jax.ops.linear_logp.options import LinearLogpFunctions, RankingFunctions
from rlk_jax.ops.linear_logp.ranking import BestColumns, Target, add_columns, logps_of_statistics, no_columns

Array = jax.Array


def _padded_hidden(config: HeadConfig, operands: Operands, block: Block) -> Array:
    """A block's rows of hidden, its D columns and those of a low-rank term padded each."""
    rows, dim = block.take_hidden(operands.hidden), head_dim(config, operands)
    return padded_columns(rows[:, :dim], *([rows[:, dim:]] if config.rank else []))


def _without_padding(config: HeadConfig, dim: int, x: Array) -> Array:
    """`[..., D + r]` from `[..., padded]`."""
    first = padded(dim, DEPTH_MULTIPLE)
    return jnp.concatenate([x[..., :dim], x[..., first : first + config.rank]], axis=-1)


def _chunk(config: HeadConfig, operands: Operands, group: Array, chunk: Array) -> ColumnChunk:
    """Chunk number `chunk` of a group."""
    weights, real = (operands.weight, operands.low_rank), real_columns(config, operands)
    return column_chunk(weights, operands.bias, config.weight_layout, config.groups, real, group, chunk)


def _logits_of_chunk(
    config: HeadConfig, operands: Operands, hidden: Array, tokens: Tokens, group: Array, index: Array
) -> tuple[ColumnChunk, Array]:
    """Chunk number `index` of a group, and a block's logits there, −inf in columns that are not the chunk's."""
    chunk, real = _chunk(config, operands, group, index), real_columns(config, operands)
    products = chunk.products(hidden)
    logits = logits_of(config, products, chunk.bias, tokens.temperature, chunk.columns, real, tokens.allowed)
    return chunk, jnp.where(chunk.valid, logits, -jnp.inf)


def _block_partials(config: HeadConfig, operands: Operands, hidden: Array, tokens: Tokens) -> Partial:
    """A partial for each group, `[groups, BLOCK_ROWS]`."""
    with_gap, with_sum = config.return_entropy, config.smoothing is not None

    def add_chunk(group: Array, index: Array, so_far: Partial) -> Partial:
        chunk, logits = _logits_of_chunk(config, operands, hidden, tokens, group, index)
        is_target = (chunk.columns == tokens.target_ids[:, None]) & chunk.valid
        summed = chunk.valid if with_sum else None
        return fold(so_far, fixed_order_partial(logits, is_target, with_gap=with_gap, summed=summed))

    start = empty_partial(BLOCK_ROWS, tokens.active, with_gap=with_gap, with_sum=with_sum)
    return folded_by_group(config.groups, add_chunk, start)


def _optional(config: HeadConfig) -> tuple[bool, bool]:
    """Whether partials have a gap and a sum of logits."""
    return config.return_entropy, config.smoothing is not None


def _partials(config: HeadConfig, operands: Operands, tokens: Tokens) -> tuple[Partial, Array]:
    """The partials of every group, `[groups, N]`, and which tokens are active."""

    def partials(block: Block) -> Partial:
        hidden = _padded_hidden(config, operands, block)
        return rows_first(_block_partials(config, operands, hidden, block.take_tokens(tokens)))

    many = jnp.zeros((tokens.active.shape[0], config.groups.count), jnp.float32)
    start = Partial(many, many + 1, many, *(many if wanted else None for wanted in _optional(config)))
    return rows_first(store_by_block(tokens.active, BLOCK_ROWS, partials, start)), tokens.active


def _merge(config: HeadConfig, groups: Partial, active: Array) -> tuple[LinearLogp, Statistics, None]:
    """The values and statistics of active tokens, whose groups are folded block by block."""
    zeros, rows = jnp.zeros_like(active, jnp.float32), rows_first(groups)
    start = Statistics(zeros, zeros, zeros, *(zeros if wanted else None for wanted in _optional(config)))
    statistics = store_by_block(active, BLOCK_ROWS, lambda block: merged(rows_first(block.take(rows))), start)
    return values_of(config, statistics), statistics, None


def _gradients(
    config: HeadConfig,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    statistics: Statistics,
    kept: None,
    upstream: LinearLogp,
) -> Gradients:
    """dH is summed over the vocabulary by the softmax's tree; dW and db are one chain over ascending active tokens.

    Gradients of logits stay float32. The loops have those of dW and dB that are needed side by side.
    """
    dim, n, groups = head_dim(config, operands), tokens.active.shape[0], config.groups.count
    real, chunks = real_columns(config, operands), chunks_in_group(config.groups)

    def of_chunk(group: Array, index: Array, hidden: Array, own: tuple, so_far: Gradients) -> Gradients:
        chunk = _chunk(config, operands, group, index)
        products = chunk.products(hidden)
        gradient = product_gradients(config, products, chunk.bias, own[0], chunk.columns, real, *own[1:])
        gradient = jnp.where(chunk.valid, gradient, 0)
        d_hidden, d_weight, d_bias, _ = so_far
        if d_hidden is not None:
            d_hidden += fma_chain(gradient.T, chunk.weight, jnp.zeros_like(hidden))
        if d_weight is not None:
            old = lax.dynamic_slice_in_dim(d_weight, chunk.start, BLOCK_COLUMNS)
            new = fma_chain(gradient, hidden[:, wanted], old)
            d_weight = lax.dynamic_update_slice_in_dim(d_weight, new, chunk.start, 0)
        if d_bias is not None:
            old = lax.dynamic_slice_in_dim(d_bias, chunk.start, BLOCK_COLUMNS)
            new = fma_chain(gradient, jnp.ones((BLOCK_ROWS, 1), jnp.float32), old)
            d_bias = lax.dynamic_update_slice_in_dim(d_bias, new, chunk.start, 0)
        return Gradients(d_hidden, d_weight, d_bias)

    def step(block: Block, so_far: Gradients) -> Gradients:
        hidden = _padded_hidden(config, operands, block)
        own = (block.take_tokens(tokens), *block.take((statistics, upstream)))

        def of_group(so_far: Gradients, group: Array) -> tuple[Gradients, Array | None]:
            start = so_far._replace(hidden=zeros)
            done = lax.fori_loop(0, chunks, lambda c, x: of_chunk(group, c, hidden, own, x), start)
            return done._replace(hidden=None), done.hidden

        zeros = varying_like(jnp.zeros_like(hidden), hidden) if needs.hidden else None
        heads = so_far._replace(hidden=None)
        done, of_groups = lax.scan(of_group, heads, jnp.arange(groups, dtype=jnp.int32))
        if of_groups is None or so_far.hidden is None:
            return done
        if not config.sums_by_group:
            of_groups = ascending_sum(of_groups)[None]
        rows = jnp.swapaxes(_without_padding(config, dim, of_groups), 0, 1)
        return done._replace(hidden=block.store(so_far.hidden, rows))

    # A chunk writes 256 rows, of which those outside its group are zero: the last chunk needs room for them.
    padded_vocab = max(groups * config.groups.width + BLOCK_COLUMNS, config.vocab_size)
    padded_dim, padded_rank = (padded(x, DEPTH_MULTIPLE) for x in (dim, config.rank))
    # The columns of hidden whose products are needed: D for dW, and those of a low-rank term for dB.
    wanted = slice(0 if needs.weight else padded_dim, padded_dim + (padded_rank if needs.low_rank else 0))
    parts = config.hidden_gradient_parts
    start = Gradients(
        jnp.zeros((n, parts, dim + config.rank), jnp.float32 if config.is_shard else operands.hidden.dtype)
        if needs.hidden
        else None,
        jnp.zeros((padded_vocab, wanted.stop - wanted.start), jnp.float32) if needs.weight or needs.low_rank else None,
        jnp.zeros((padded_vocab, 1), jnp.float32) if needs.bias else None,
    )
    d_hidden, d_weight, d_bias, d_low_rank = fold_blocks(tokens.active, BLOCK_ROWS, step, start)
    if d_hidden is not None:
        d_hidden = jnp.swapaxes(d_hidden, 0, 1) if config.is_shard else d_hidden[:, 0]
    if d_weight is not None:
        sums = d_weight[: config.vocab_size]
        first = padded_dim - wanted.start
        d_weight = sums[:, :dim] if needs.weight else None
        d_low_rank = sums[:, first : first + config.rank] if needs.low_rank else None
        if config.weight_layout == "dv":
            d_weight, d_low_rank = (None if x is None else x.T for x in (d_weight, d_low_rank))
    d_bias = None if d_bias is None else d_bias[: config.vocab_size, 0]
    return Gradients(d_hidden, d_weight, d_bias, d_low_rank).like(config, operands)


def _best(
    config: HeadConfig, operands: Operands, tokens: Tokens, active: Array, statistics: Statistics, targets: Array | None
) -> BestColumns:
    """The logits are made once more, because the target's may be that of another shard."""
    wanted, chunks = config.ranking, chunks_in_group(config.groups)
    assert wanted is not None

    def of_block(block: Block) -> BestColumns:
        hidden, own = _padded_hidden(config, operands, block), block.take_tokens(tokens)
        target = Target(block.take(statistics.target_logit), own.target_ids)

        def add_chunk(i: Array, so_far: BestColumns) -> BestColumns:
            chunk, logits = _logits_of_chunk(config, operands, hidden, own, i // chunks, i % chunks)
            return add_columns(so_far, logits, chunk.columns, target)

        start = varying_like(no_columns(wanted, BLOCK_ROWS), hidden)
        return lax.fori_loop(0, config.groups.count * chunks, add_chunk, start)

    return store_by_block(tokens.active, BLOCK_ROWS, of_block, no_columns(wanted, tokens.active.shape[0]))


DETERMINISTIC = LinearLogpFunctions(
    _partials,
    _merge,
    _gradients,
    fixed_order_gemm,
    of_ranking=RankingFunctions(_best, logps_of_statistics),
)
