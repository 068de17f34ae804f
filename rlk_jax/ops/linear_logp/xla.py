"""The portable implementation that never holds `[N, V]`: chunks of tokens against the whole vocabulary.

Sums stay float32 to the end. XLA runs token chunks as full-width GEMMs (650–700 TFLOP/s on an H100; chunks of the
vocabulary run at half that).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.gemm import GemmLayout, common_dtype, wide_product
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands, head_dim, real_columns
from rlk_jax.core.rows import MEMORY_BUDGET, Block, fold_blocks, rows_within, store_by_block
from rlk_jax.core.softmax import (
    Partial,
    Statistics,
    counted_columns,
    fp16_scale,
    gradient_bound,
    logits_of,
    merged,
    partial_of_rows,
    product_gradients,
    values_of,
)
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import varying_like
from rlk_jax.ops.linear_logp.options import LinearLogpFunctions, RankingFunctions
from rlk_jax.ops.linear_logp.ranking import (
    BYTES_PER_RANKED_LOGIT,
    BestColumns,
    Target,
    add_columns,
    logps_of_statistics,
    no_columns,
)

Array = jax.Array
_BYTES_PER_LOGIT = 10
"""float32 products, their float32 gradient, and its copy in the 16-bit dtype of the operands."""


def memory_budget(config: HeadConfig, weight: Array) -> int:
    """The bytes of one chunk. Every chunk reads and writes dW once, so chunks grow with the head: otherwise that would
    outweigh their matrix products.
    """
    return config.memory_budget or max(MEMORY_BUDGET, weight.size * weight.dtype.itemsize)


def chunk_rows(vocab_size: int, tokens: int, memory_budget: int) -> int:
    """Rows of a chunk: as many as the budget holds, a multiple of 16, and no more than there are tokens."""
    return rows_within(memory_budget, _BYTES_PER_LOGIT * vocab_size, tokens)


def _gemm(layout: GemmLayout, a: Array, b: Array, start: Array | None) -> Array:
    """The product of a low-rank term's matrices."""
    product = wide_product(a, b, (0 if layout.a_transposed else 1, 1 if layout.b_transposed else 0))
    return (product if start is None else start + product).astype(layout.out_dtype)


def _products(config: HeadConfig, hidden: Array, operands: Operands) -> Array:
    """hidden·Wᵀ, whichever way the weight is stored, and the product of the low-rank term."""
    dim, contract = head_dim(config, operands), (1, 1 if config.weight_layout == "vd" else 0)
    products = wide_product(hidden[:, :dim], operands.weight, contract)
    return (
        products if operands.low_rank is None else products + wide_product(hidden[:, dim:], operands.low_rank, contract)
    )


def _bias(operands: Operands) -> Array:
    """The bias as a row that can be added to products; zeros where there is none."""
    return jnp.zeros((1, 1), jnp.float32) if operands.bias is None else operands.bias.astype(jnp.float32)[None]


def _columns(config: HeadConfig) -> Array:
    return jnp.arange(config.vocab_size, dtype=jnp.int32)[None]


def _hidden_gradient(config: HeadConfig, gradient: Array, operands: Operands) -> Array:
    """gradient·W over the true vocabulary, and gradient·B: padding rows may hold anything, and 0·NaN is NaN."""
    axis, real = 0 if config.weight_layout == "vd" else 1, config.real_vocab_size

    def times(weight: Array) -> Array:
        if operands.real_columns is not None:
            is_real = jnp.arange(config.vocab_size, dtype=jnp.int32) < operands.real_columns
            return wide_product(gradient, jnp.where(jnp.expand_dims(is_real, 1 - axis), weight, 0), (1, axis))
        return wide_product(gradient[:, :real], lax.slice_in_dim(weight, 0, real, axis=axis), (1, axis))

    parts = [times(x) for x in (operands.weight, operands.low_rank) if x is not None]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _logits_of_block(config: HeadConfig, operands: Operands, block: Block, own: Tokens) -> Array:
    """The logits of a block's own tokens."""
    products, real = _products(config, block.take_hidden(operands.hidden), operands), real_columns(config, operands)
    return logits_of(config, products, _bias(operands), own.temperature, _columns(config), real, own.allowed)


def _target_logit(config: HeadConfig, operands: Operands, logits: Array, own: Tokens, elsewhere: Any) -> Array:
    """The logit of each row's target, or what is given for targets that are no columns of this weight."""
    place = jnp.clip(own.target_ids, 0, config.vocab_size - 1)
    target_logit = jnp.take_along_axis(logits, place[:, None], axis=1)[:, 0]
    is_here = (own.target_ids >= 0) & (own.target_ids < real_columns(config, operands))
    return jnp.where(is_here, target_logit, elsewhere)


def _softmax_of_tokens(config: HeadConfig, operands: Operands, tokens: Tokens) -> Partial:
    """The softmax of every token over the columns of this weight."""
    n = tokens.active.shape[0]

    def of_block(block: Block) -> Partial:
        own = block.take_tokens(tokens)
        logits = _logits_of_block(config, operands, block, own)
        target_logit = _target_logit(config, operands, logits, own, 0)
        is_real = counted_columns(_columns(config), real_columns(config, operands), None)
        summed = None if config.smoothing is None else is_real
        return partial_of_rows(logits, target_logit, with_gap=config.return_entropy, summed=summed)

    zeros = jnp.zeros(n, jnp.float32)
    optional = (zeros if wanted else None for wanted in (config.return_entropy, config.smoothing))
    start = Partial(zeros, zeros + 1, zeros, *optional)
    rows = chunk_rows(config.vocab_size, n, memory_budget(config, operands.weight))
    return store_by_block(tokens.active, rows, of_block, start)


def _partials(config: HeadConfig, operands: Operands, tokens: Tokens) -> tuple[Partial, None]:
    """The softmax as one group per shard, since no order of sums is promised."""
    return jax.tree.map(lambda x: x[None], _softmax_of_tokens(config, operands, tokens)), None


def _merge(config: HeadConfig, groups: Partial, state: None) -> tuple[LinearLogp, Statistics, None]:
    statistics = merged(groups)
    return values_of(config, statistics), statistics, None


def _rounding_scale(dtype: jnp.dtype, tokens: Tokens, upstream: LinearLogp) -> Array:
    """A power of two that lifts float16 gradients of logits, so that g·p near 1e-9 survives; 1 for other dtypes."""
    if dtype != jnp.float16:
        return jnp.ones((), jnp.float32)
    bound = jnp.where(tokens.active, gradient_bound(tokens.temperature, upstream), 0)
    return fp16_scale(jnp.max(bound))


def _gradients(
    config: HeadConfig,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    statistics: Statistics,
    kept: None,
    upstream: LinearLogp,
) -> Gradients:
    """Gradients of logits are rounded to the operands' dtype; dW and db are summed over chunks in float32."""
    bias, columns, real = _bias(operands), _columns(config), real_columns(config, operands)
    dtype, dim = common_dtype(operands.hidden, operands.weight), head_dim(config, operands)

    def step(block: Block, so_far: Gradients) -> Gradients:
        hidden, own = block.take_hidden(operands.hidden), block.take_tokens(tokens)
        own_statistics, own_upstream = block.take((statistics, upstream))
        products = _products(config, hidden, operands)
        exact = product_gradients(config, products, bias, own, columns, real, own_statistics, own_upstream)
        scale = _rounding_scale(dtype, own, own_upstream)
        rounded = (exact * scale).astype(dtype)
        d_hidden, d_weight, d_bias, d_low_rank = so_far

        def of_columns(rows: Array) -> Array:
            """The sum over this block's rows of gradients times `rows`, as the weight is stored."""
            return wide_product(*((rounded, rows) if config.weight_layout == "vd" else (rows, rounded)), (0, 0)) / scale

        if d_hidden is not None:
            d_hidden = block.store(d_hidden, _hidden_gradient(config, rounded, operands) / scale)
        if d_weight is not None:
            d_weight += of_columns(hidden[:, :dim])
        if d_low_rank is not None:
            d_low_rank += of_columns(hidden[:, dim:])
        if d_bias is not None:
            d_bias += exact.sum(axis=0)
        return Gradients(d_hidden, d_weight, d_bias, d_low_rank)

    start = Gradients(
        jnp.zeros_like(operands.hidden, jnp.float32 if config.is_shard else None) if needs.hidden else None,
        jnp.zeros_like(operands.weight, jnp.float32) if needs.weight else None,
        jnp.zeros(config.vocab_size, jnp.float32) if needs.bias else None,
        jnp.zeros(operands.low_rank.shape, jnp.float32) if operands.low_rank is not None and needs.low_rank else None,
    )
    rows = chunk_rows(config.vocab_size, tokens.active.shape[0], memory_budget(config, operands.weight))
    done = fold_blocks(tokens.active, rows, step, start).like(config, operands)
    return done._replace(hidden=done.hidden[None]) if config.is_shard and done.hidden is not None else done


def _best(
    config: HeadConfig, operands: Operands, tokens: Tokens, state: None, statistics: Statistics, targets: Array | None
) -> BestColumns:
    """The logits are made once more, because the target's may be that of another shard."""
    n, columns = tokens.active.shape[0], _columns(config)
    wanted = config.ranking
    assert wanted is not None

    def of_block(block: Block) -> BestColumns:
        own, own_statistics = block.take_tokens(tokens), block.take(statistics)
        logits = _logits_of_block(config, operands, block, own)
        target = Target(_target_logit(config, operands, logits, own, own_statistics.target_logit), own.target_ids)
        none = varying_like(no_columns(wanted, block.index.shape[0]), logits)
        return add_columns(none, logits, columns, target)

    budget = memory_budget(config, operands.weight)
    rows = rows_within(budget, BYTES_PER_RANKED_LOGIT * config.vocab_size, n)
    return store_by_block(tokens.active, rows, of_block, no_columns(wanted, n))


XLA = LinearLogpFunctions(
    _partials,
    _merge,
    _gradients,
    _gemm,
    of_ranking=RankingFunctions(_best, logps_of_statistics),
    by_group=False,
)
