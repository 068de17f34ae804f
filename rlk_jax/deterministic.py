"""Portable implementations that keep every promise of "same bits" on any device. Slow.

Every sum has one written-down order, and every operation runs on blocks of constant shape (64 rows × 256 columns), so
neither the number of tokens nor a token's place can reach a bit:
  - a matrix product is, per element, one chain over ascending K (`chain`), never a library GEMM;
  - the softmax is a fixed tree over the vocabulary: eight groups of ceil(V/64)·8 columns, chunks of 256 columns inside
    a group, halving sums inside a chunk; chunks and then groups are folded in ascending order. V is the true
    vocabulary: padding rows of the head are never read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax._gemm import Form
from rlk_jax._problem import (
    Array,
    Gradients,
    LinearLogp,
    LinearLogpFunctions,
    LogpFunctions,
    Needs,
    Operands,
    Options,
    Partial,
    SoftmaxOptions,
    Statistics,
    Tokens,
    dproducts_of,
    empty_partial,
    finite,
    fold,
    logits_of,
    merged,
    real_columns,
    rounded_product,
    values_of,
)
from rlk_jax._rows import Block, fold_blocks
from rlk_jax._transforms import varying_like
from rlk_jax._tree import ordered_sum

ROWS = 64
COLUMNS = 256
_K_BLOCK = 64


def chain(a_transposed: Array, b: Array, c: Array) -> Array:
    """c + aᵀ·b for `[K, R]`, `[K, C]` and float32 `[R, C]`: fma(a_k, b_k, ·) over ascending k, starting from c."""

    def step(k: Array, c: Array) -> Array:
        return c + a_transposed[k][:, None] * b[k][None, :]

    return lax.fori_loop(0, b.shape[0], step, varying_like(c, b))


def _halving_sum(x: Array) -> Array:
    """Sum over 256 columns: the upper half onto the lower one, eight times."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _partial(logits: Array, is_target: Array, *, with_gap: bool) -> Partial:
    maximum = logits.max(axis=1)
    below = finite(maximum)[:, None] - logits
    exponentials = jnp.exp(-below)
    gaps = jnp.where(exponentials == 0, 0, rounded_product(exponentials, below)) if with_gap else None
    return Partial(
        max=maximum,
        total=_halving_sum(exponentials),
        target_logit=_halving_sum(jnp.where(is_target, logits, 0)),
        gap=None if gaps is None else _halving_sum(gaps),
    )


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
    width, real = options.tree.width, real_columns(options, operands)
    start = group * width + chunk * COLUMNS
    columns = start + jnp.arange(COLUMNS, dtype=jnp.int32)
    valid = columns < jnp.minimum((group + 1) * width, real)
    index = jnp.clip(columns, 0, jnp.maximum(real - 1, 0))
    weight = operands.weight[index] if options.weight_layout == "vd" else operands.weight[:, index].T
    bias = jnp.zeros(COLUMNS, jnp.float32) if operands.bias is None else operands.bias[index].astype(jnp.float32)
    return _Chunk(
        start,
        columns[None],
        valid[None],
        _padded_columns(jnp.where(valid[:, None], weight, 0)),
        jnp.where(valid, bias, 0)[None],
    )


def _chunks_in_group(options: Options) -> int:
    return -(-options.tree.width // COLUMNS)


def _block_products(hidden: Array, chunk: _Chunk) -> Array:
    return chain(hidden.T, chunk.weight.T, jnp.zeros((ROWS, COLUMNS), jnp.float32))


def _block_partials(options: Options, operands: Operands, hidden: Array, tokens: Tokens) -> Partial:
    """A partial for each group, `[groups, ROWS]`."""
    real, with_gap = real_columns(options, operands), options.return_entropy

    def of_chunk(group: Array, index: Array) -> Partial:
        chunk = _chunk(options, operands, group, index)
        products = _block_products(hidden, chunk)
        logits = logits_of(options, products, chunk.bias, tokens.temperature, chunk.columns, real)
        is_target = (chunk.columns == tokens.target_ids[:, None]) & chunk.valid
        return _partial(jnp.where(chunk.valid, logits, -jnp.inf), is_target, with_gap=with_gap)

    empty = empty_partial(ROWS, tokens.active, with_gap=with_gap)

    def of_group(group: Array) -> Partial:
        return lax.fori_loop(0, _chunks_in_group(options), lambda c, so_far: fold(so_far, of_chunk(group, c)), empty)

    return lax.map(of_group, jnp.arange(options.tree.groups, dtype=jnp.int32))


def _by_block(active: Array, of_block: Callable[[Block], Any], start: Any) -> Any:
    """`start`, arrays `[N, ...]`, with the rows of `of_block` where tokens are active."""
    return fold_blocks(active, ROWS, lambda block, so_far: jax.tree.map(block.store, so_far, of_block(block)), start)


def _rows_first(x: Any) -> Any:
    return jax.tree.map(jnp.transpose, x)


def _partials(options: Options, operands: Operands, tokens: Tokens) -> tuple[Partial, Array]:
    """A row per token, and which tokens are active."""

    def partials(block: Block) -> Partial:
        hidden = _padded_columns(block.take_hidden(operands.hidden))
        return _rows_first(_block_partials(options, operands, hidden, block.take_tokens(tokens)))

    many = jnp.zeros((tokens.active.shape[0], options.tree.groups), jnp.float32)
    start = Partial(many, many + 1, many, many if options.return_entropy else None)
    return _rows_first(_by_block(tokens.active, partials, start)), tokens.active


def _merge(options: Options, groups: Partial, active: Array) -> tuple[LinearLogp, Statistics, None]:
    zeros, rows = jnp.zeros_like(active, jnp.float32), _rows_first(groups)
    start = Statistics(zeros, zeros, zeros, zeros if options.return_entropy else None)
    statistics = _by_block(active, lambda block: merged(_rows_first(block.take(rows))), start)
    return values_of(options, statistics), statistics, None


def _gradients(
    options: Options,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    statistics: Statistics,
    kept: None,
    upstream: LinearLogp,
) -> Gradients:
    """dH is summed over the vocabulary by the softmax's tree; dW and db are one chain over ascending active tokens.

    Gradients of logits stay float32.
    """
    dim, n, groups = operands.hidden.shape[1], tokens.active.shape[0], options.tree.groups
    real = real_columns(options, operands)

    def of_chunk(group: Array, index: Array, hidden: Array, own: tuple, so_far: Gradients) -> Gradients:
        chunk = _chunk(options, operands, group, index)
        products = _block_products(hidden, chunk)
        gradient = dproducts_of(options, products, chunk.bias, own[0], chunk.columns, real, *own[1:])
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

        def of_group(so_far: Gradients, group: Array) -> tuple[Gradients, Array | None]:
            start = so_far._replace(hidden=zeros)
            done = lax.fori_loop(0, _chunks_in_group(options), lambda c, x: of_chunk(group, c, hidden, own, x), start)
            return done._replace(hidden=None), done.hidden

        zeros = varying_like(jnp.zeros_like(hidden), hidden) if needs.hidden else None
        heads = so_far._replace(hidden=None)
        done, of_groups = lax.scan(of_group, heads, jnp.arange(groups, dtype=jnp.int32))
        if of_groups is None or so_far.hidden is None:
            return done
        if options.hidden_gradient != "groups":
            of_groups = ordered_sum(of_groups)[None]
        rows = jnp.swapaxes(of_groups[..., :dim], 0, 1)
        return done._replace(hidden=block.store(so_far.hidden, rows))

    # A chunk writes 256 rows, though only those of its group are not zero: keep room behind the last one.
    padded_vocab = max(groups * options.tree.width + COLUMNS, options.vocab_size)
    padded_dim = dim + -dim % _K_BLOCK
    parts = groups if options.hidden_gradient == "groups" else 1
    start = Gradients(
        jnp.zeros((n, parts, dim), operands.hidden.dtype if options.hidden_gradient == "rounded" else jnp.float32)
        if needs.hidden
        else None,
        jnp.zeros((padded_vocab, padded_dim), jnp.float32) if needs.weight else None,
        jnp.zeros((padded_vocab, 1), jnp.float32) if needs.bias else None,
    )
    d_hidden, d_weight, d_bias = fold_blocks(tokens.active, ROWS, step, start)
    if d_hidden is not None:
        d_hidden = d_hidden[:, 0] if options.hidden_gradient == "rounded" else jnp.swapaxes(d_hidden, 0, 1)
    if d_weight is not None:
        d_weight = d_weight[: options.vocab_size, :dim]
        d_weight = d_weight if options.weight_layout == "vd" else d_weight.T
    d_bias = None if d_bias is None else d_bias[: options.vocab_size, 0]
    return Gradients(d_hidden, d_weight, d_bias).like(options, operands)


LINEAR_LOGP = LinearLogpFunctions(_partials, _merge, _gradients)


class _LogitsChunk(NamedTuple):
    """256 columns of a block's logits, float32 `[ROWS, 256]`; those that are not `valid` are 0."""

    columns: Array
    valid: Array
    logits: Array


def _over_logits(options: SoftmaxOptions, logits: Array, step: Callable[[_LogitsChunk, Any], Any], start: Any) -> Any:
    """`step` over the chunks of a block's logits `[ROWS, V]` in ascending order."""
    chunks = -(-options.vocab_size // COLUMNS)
    logits = jnp.pad(logits, ((0, 0), (0, chunks * COLUMNS - options.vocab_size)))

    def body(chunk: Array, so_far: Any) -> Any:
        columns = (chunk * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32))[None]
        valid = columns < options.real_vocab_size
        own = lax.dynamic_slice_in_dim(logits, chunk * COLUMNS, COLUMNS, axis=1).astype(jnp.float32)
        return step(_LogitsChunk(columns, valid, jnp.where(valid, own, 0)), so_far)

    return lax.fori_loop(0, chunks, body, varying_like(start, logits))


def _logp(options: SoftmaxOptions, logits: Array, tokens: Tokens) -> tuple[LinearLogp, Statistics]:
    with_gap, real = options.return_entropy, options.real_vocab_size
    bias = jnp.zeros((1, COLUMNS), jnp.float32)

    def of_block(block: Block) -> Statistics:
        own = block.take_tokens(tokens)

        def step(chunk: _LogitsChunk, so_far: Partial) -> Partial:
            z = logits_of(options, chunk.logits, bias, own.temperature, chunk.columns, real)
            is_target = (chunk.columns == own.target_ids[:, None]) & chunk.valid
            return fold(so_far, _partial(z, is_target, with_gap=with_gap))

        start = empty_partial(ROWS, logits, with_gap=with_gap)
        whole = _over_logits(options, block.take_hidden(logits), step, start)
        return merged(jax.tree.map(lambda x: x[None], whole))

    zeros = jnp.zeros_like(tokens.active, jnp.float32)
    start = Statistics(zeros, zeros, zeros, zeros if with_gap else None)
    statistics = _by_block(tokens.active, of_block, start)
    return values_of(options, statistics), statistics


def _logp_gradient(
    options: SoftmaxOptions, logits: Array, tokens: Tokens, statistics: Statistics, upstream: LinearLogp, donate: bool
) -> Array:
    bias = jnp.zeros((1, COLUMNS), jnp.float32)

    def of_block(block: Block) -> Array:
        own = (block.take_tokens(tokens), *block.take((statistics, upstream)))

        def step(chunk: _LogitsChunk, so_far: Array) -> Array:
            facts = (own[0], chunk.columns, options.real_vocab_size, *own[1:])
            gradient = dproducts_of(options, chunk.logits, bias, *facts).astype(logits.dtype)
            return lax.dynamic_update_slice_in_dim(so_far, gradient, chunk.columns[0, 0], axis=1)

        start = jnp.zeros((ROWS, options.vocab_size + -options.vocab_size % COLUMNS), logits.dtype)
        return _over_logits(options, block.take_hidden(logits), step, start)[:, : options.vocab_size]

    return _by_block(tokens.active, of_block, jnp.zeros_like(logits))


LOGP = LogpFunctions(_logp, _logp_gradient)


def det_gemm(form: Form, a: Array, b: Array, start: Array | None) -> Array:
    """start + A·B in blocks of 64 × 256, K padded to a multiple of 64: each element is one chain over ascending k.

    Products of two 16-bit numbers are exact in float32, so that fused or not a step rounds once.
    """
    m, k, n = form.sizes(a, b)
    rows, columns, depth = -m % ROWS, -n % COLUMNS, -k % _K_BLOCK
    a = a if form.a_transposed else a.T
    b = b.T if form.b_transposed else b
    a = jnp.pad(a.astype(jnp.float32), ((0, depth), (0, rows))).reshape(k + depth, -1, ROWS)
    b = jnp.pad(b.astype(jnp.float32), ((0, depth), (0, columns))).reshape(k + depth, -1, COLUMNS)
    start = jnp.zeros((m, n), jnp.float32) if start is None else start
    start = jnp.pad(start, ((0, rows), (0, columns))).reshape(-1, ROWS, b.shape[1], COLUMNS)
    b = b.swapaxes(0, 1)

    def of_rows(block: tuple[Array, Array]) -> Array:
        a, start = block
        return lax.map(lambda x: chain(a, *x), (b, start.swapaxes(0, 1)))

    blocks = lax.map(of_rows, (a.swapaxes(0, 1), start))
    return blocks.swapaxes(1, 2).reshape(m + rows, n + columns)[:m, :n].astype(form.out_dtype)
