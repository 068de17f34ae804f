"""Portable implementations that keep every promise of "same bits" on any device. Slow.

Every sum has one written-down order, and every operation runs on blocks of constant shape (64 rows × 256 columns), so
neither the number of tokens nor a token's place can reach a bit:
  - a matrix product is, per element, one chain over ascending K (`chain`), never a library GEMM;
  - the softmax is a fixed tree over the vocabulary: eight groups of ceil(V/64)·8 columns, chunks of 256 columns inside
    a group, halving sums inside a chunk; chunks and then groups are folded in ascending order. V is the true
    vocabulary: padding rows of the head are never read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax._problem import (
    Array,
    Gradients,
    LinearLogp,
    LinearLogpFunctions,
    Needs,
    Operands,
    Options,
    Statistics,
    Tokens,
    dproducts_of,
    logits_of,
    rounded_product,
    values_of,
)
from rlk_jax._rows import Block, fold_blocks
from rlk_jax._transforms import start_of_loop
from rlk_jax._tree import GROUPS, group_width

ROWS = 64
COLUMNS = 256
_K_BLOCK = 64


def chain(a_transposed: Array, b: Array, c: Array) -> Array:
    """c + aᵀ·b for `[K, R]`, `[K, C]` and float32 `[R, C]`: fma(a_k, b_k, ·) over ascending k, starting from c."""

    def step(k: Array, c: Array) -> Array:
        return c + a_transposed[k][:, None] * b[k][None, :]

    return lax.fori_loop(0, b.shape[0], step, start_of_loop(c, b))


class _Partial(NamedTuple):
    """Softmax over some columns, a row per token: maximum, Σ e, the target's logit if among them, Σ e·(max − z)."""

    max: Array
    total: Array
    target_logit: Array
    gap: Array


def _halving_sum(x: Array) -> Array:
    """Sum over 256 columns: the upper half onto the lower one, eight times."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _finite(maximum: Array) -> Array:
    """A maximum to subtract: 0 where every logit is −inf."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


def _partial(logits: Array, is_target: Array) -> _Partial:
    maximum = logits.max(axis=1)
    below = _finite(maximum)[:, None] - logits
    exponentials = jnp.exp(-below)
    gaps = jnp.where(exponentials == 0, 0, rounded_product(exponentials, below))
    return _Partial(
        max=maximum,
        total=_halving_sum(exponentials),
        target_logit=_halving_sum(jnp.where(is_target, logits, 0)),
        gap=_halving_sum(gaps),
    )


def _fold(a: _Partial, b: _Partial) -> _Partial:
    maximum = jnp.maximum(a.max, b.max)

    def rescaled(x: _Partial) -> tuple[Array, Array]:
        below = _finite(maximum) - x.max
        factor = jnp.exp(-below)
        shift = jnp.where(x.total == 0, 0, rounded_product(x.total, below))
        return rounded_product(x.total, factor), rounded_product(x.gap + shift, factor)

    (total_a, gap_a), (total_b, gap_b) = rescaled(a), rescaled(b)
    return _Partial(maximum, total_a + total_b, a.target_logit + b.target_logit, gap_a + gap_b)


class _Chunk(NamedTuple):
    """Up to 256 columns of one group: ids, bias `[1, 256]` and weight `[256, D]`, and which of them are real."""

    start: Array
    columns: Array
    valid: Array
    weight: Array
    bias: Array


def _padded_columns(x: Array) -> Array:
    """float32 `[·, D]` with zeros up to a multiple of 64 columns; zeros at the end of a chain change no bits."""
    return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % _K_BLOCK)))


def _chunk(options: Options, operands: Operands, group: Array, chunk: Array) -> _Chunk:
    width = group_width(options.real_vocab_size)
    start = group * width + chunk * COLUMNS
    columns = start + jnp.arange(COLUMNS, dtype=jnp.int32)
    valid = columns < jnp.minimum((group + 1) * width, options.real_vocab_size)
    index = jnp.minimum(columns, options.real_vocab_size - 1)
    weight = operands.weight[index] if options.weight_layout == "vd" else operands.weight[:, index].T
    bias = jnp.zeros(COLUMNS, jnp.float32) if operands.bias is None else operands.bias[index].astype(jnp.float32)
    return _Chunk(
        start,
        columns[None],
        valid[None],
        _padded_columns(jnp.where(valid[:, None], weight, 0)),
        jnp.where(valid, bias, 0)[None],
    )


def _chunks_in_group(vocab_size: int) -> int:
    return -(-group_width(vocab_size) // COLUMNS)


def _block_products(hidden: Array, chunk: _Chunk) -> Array:
    return chain(hidden.T, chunk.weight.T, jnp.zeros((ROWS, COLUMNS), jnp.float32))


def _block_statistics(options: Options, operands: Operands, hidden: Array, tokens: Tokens) -> Statistics:
    def of_chunk(group: Array, index: Array) -> _Partial:
        chunk = _chunk(options, operands, group, index)
        logits = logits_of(options, _block_products(hidden, chunk), chunk.bias, tokens.temperature, chunk.columns)
        is_target = (chunk.columns == tokens.target_ids[:, None]) & chunk.valid
        return _partial(jnp.where(chunk.valid, logits, -jnp.inf), is_target)

    def of_group(group: Array) -> _Partial:
        return lax.fori_loop(
            0, _chunks_in_group(options.real_vocab_size), lambda c, so_far: _fold(so_far, of_chunk(group, c)), empty
        )

    zeros = jnp.zeros(ROWS, jnp.float32)
    empty = _Partial(jnp.full(ROWS, -jnp.inf, jnp.float32), zeros, zeros, zeros)
    empty = start_of_loop(empty, tokens.active)
    whole = lax.fori_loop(0, GROUPS, lambda g, so_far: _fold(so_far, of_group(g)), empty)
    gap = whole.gap / whole.total if options.return_entropy else None
    return Statistics(whole.max, jnp.log(whole.total), whole.target_logit, gap)


def _unfolded(tokens: Tokens) -> Tokens:
    """Keeps a division by a constant temperature from becoming a product with its reciprocal, or nothing at all."""
    return tokens._replace(temperature=lax.optimization_barrier(tokens.temperature))


def _forward(options: Options, operands: Operands, tokens: Tokens) -> tuple[LinearLogp, Statistics]:
    tokens = _unfolded(tokens)

    def step(block: Block, so_far: Statistics) -> Statistics:
        hidden = _padded_columns(block.take_hidden(operands.hidden))
        statistics = _block_statistics(options, operands, hidden, block.take_tokens(tokens))
        return jax.tree.map(block.store, so_far, statistics)

    zeros = jnp.zeros_like(tokens.active, jnp.float32)
    start = Statistics(zeros, zeros, zeros, zeros if options.return_entropy else None)
    statistics = fold_blocks(tokens.active, ROWS, step, start)
    return values_of(options, statistics), statistics


def _gradients(
    options: Options,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    statistics: Statistics,
    upstream: LinearLogp,
) -> Gradients:
    """dH is summed over the vocabulary by the softmax's tree; dW and db are one chain over ascending active tokens.

    Gradients of logits stay float32.
    """
    dim, vocab_size = operands.hidden.shape[1], options.real_vocab_size
    tokens = _unfolded(tokens)

    def of_chunk(group: Array, index: Array, hidden: Array, own: tuple, so_far: Gradients) -> Gradients:
        chunk = _chunk(options, operands, group, index)
        gradient = dproducts_of(options, _block_products(hidden, chunk), chunk.bias, own[0], chunk.columns, *own[1:])
        gradient = jnp.where(chunk.valid, gradient, 0)
        d_hidden, d_weight, d_bias = so_far
        if d_hidden is not None:
            d_hidden += chain(gradient.T, chunk.weight, jnp.zeros_like(hidden))
        if d_weight is not None:
            old = lax.dynamic_slice_in_dim(d_weight, chunk.start, COLUMNS)
            d_weight = lax.dynamic_update_slice_in_dim(d_weight, chain(gradient, hidden, old), chunk.start, 0)
        if d_bias is not None:
            old = lax.dynamic_slice_in_dim(d_bias, chunk.start, COLUMNS)
            new = chain(gradient, jnp.ones((ROWS, 1), jnp.float32), old)
            d_bias = lax.dynamic_update_slice_in_dim(d_bias, new, chunk.start, 0)
        return Gradients(d_hidden, d_weight, d_bias)

    def step(block: Block, so_far: Gradients) -> Gradients:
        hidden = _padded_columns(block.take_hidden(operands.hidden))
        own = (block.take_tokens(tokens), *block.take((statistics, upstream)))

        def of_group(group: Array, so_far: Gradients) -> Gradients:
            start = so_far._replace(hidden=zeros)
            done = lax.fori_loop(
                0, _chunks_in_group(vocab_size), lambda c, x: of_chunk(group, c, hidden, own, x), start
            )
            return done._replace(hidden=jax.tree.map(jnp.add, so_far.hidden, done.hidden))

        zeros = start_of_loop(jnp.zeros_like(hidden), hidden) if needs.hidden else None
        done = lax.fori_loop(0, GROUPS, of_group, so_far._replace(hidden=zeros))
        d_hidden = jax.tree.map(lambda into, rows: block.store(into, rows[:, :dim]), so_far.hidden, done.hidden)
        return done._replace(hidden=d_hidden)

    # A chunk writes 256 rows, though only those of its group are not zero: keep room behind the last one.
    padded_vocab = max(GROUPS * group_width(vocab_size) + COLUMNS, options.vocab_size)
    padded_dim = dim + -dim % _K_BLOCK
    start = Gradients(
        jnp.zeros_like(operands.hidden) if needs.hidden else None,
        jnp.zeros((padded_vocab, padded_dim), jnp.float32) if needs.weight else None,
        jnp.zeros((padded_vocab, 1), jnp.float32) if needs.bias else None,
    )
    d_hidden, d_weight, d_bias = fold_blocks(tokens.active, ROWS, step, start)
    if d_weight is not None:
        d_weight = d_weight[: options.vocab_size, :dim]
        d_weight = d_weight if options.weight_layout == "vd" else d_weight.T
    return Gradients(d_hidden, d_weight, None if d_bias is None else d_bias[: options.vocab_size, 0]).like(operands)


LINEAR_LOGP = LinearLogpFunctions(_forward, _gradients)
