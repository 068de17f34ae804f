"""Portable implementations that never hold `[N, V]`: chunks of tokens against the whole vocabulary.

Sums stay float32 to the end. XLA runs token chunks as full-width GEMMs (650–700 TFLOP/s on an H100; chunks of the
vocabulary run at half that).
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

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
    finite,
    gradient_bound,
    lifting_power,
    logits_of,
    merged,
    real_columns,
    values_of,
)
from rlk_jax._rows import Block, fold_blocks

if TYPE_CHECKING:
    from rlk_jax.dispatch import Problem

MEMORY_BUDGET = 256 * 2**20
"""Bytes that one chunk of logits and its gradient may take, whatever N is; or those of the head, where it is larger."""
_BYTES_PER_LOGIT = 10
"""float32 products, their float32 gradient, and its copy in the 16-bit dtype of the operands."""
_MIN_CHUNK = 16


def memory_budget(options: Options, weight: Array) -> int:
    """Every chunk reads and writes dW once: chunks grow with the head, or that would outweigh their matrix products."""
    return options.memory_budget or max(MEMORY_BUDGET, weight.size * weight.dtype.itemsize)


def chunk_rows(vocab_size: int, tokens: int, memory_budget: int) -> int:
    """Rows of a chunk: as many as the budget holds, a multiple of 16, and no more than there are tokens."""
    affordable = memory_budget // (_BYTES_PER_LOGIT * vocab_size) // _MIN_CHUNK * _MIN_CHUNK
    return max(min(affordable, -(-tokens // _MIN_CHUNK) * _MIN_CHUNK), _MIN_CHUNK)


def _common_dtype(a: Array, b: Array) -> jnp.dtype:
    """The dtype that a product of both runs in: their own, or float32 where they differ."""
    return a.dtype if a.dtype == b.dtype else jnp.dtype(jnp.float32)


def _matmul(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """float32 accumulation and output; float32 operands in full precision rather than TF32."""
    dtype = _common_dtype(a, b)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _products(options: Options, hidden: Array, weight: Array) -> Array:
    return _matmul(hidden, weight, (1, 1 if options.weight_layout == "vd" else 0))


def _no_bias() -> Array:
    return jnp.zeros((1, 1), jnp.float32)


def _bias(operands: Operands) -> Array:
    return _no_bias() if operands.bias is None else operands.bias.astype(jnp.float32)[None]


def _columns(options: SoftmaxOptions) -> Array:
    return jnp.arange(options.vocab_size, dtype=jnp.int32)[None]


def _d_hidden(options: Options, gradient: Array, operands: Operands) -> Array:
    """gradient·W over the true vocabulary: padding rows may hold anything, and 0·NaN is NaN."""
    weight, axis = operands.weight, 0 if options.weight_layout == "vd" else 1
    if operands.real_columns is not None:
        is_real = jnp.arange(options.vocab_size, dtype=jnp.int32) < operands.real_columns
        return _matmul(gradient, jnp.where(jnp.expand_dims(is_real, 1 - axis), weight, 0), (1, axis))
    real = options.real_vocab_size
    return _matmul(gradient[:, :real], lax.slice_in_dim(weight, 0, real, axis=axis), (1, axis))


def _partial_of(logits: Array, target_logit: Array, *, with_gap: bool) -> Partial:
    """The softmax of every row of `logits [rows, V]`."""
    maximum = logits.max(axis=1)
    centred = logits - finite(maximum)[:, None]
    exponentials = jnp.exp(centred)
    gap = -jnp.where(exponentials == 0, 0, exponentials * centred).sum(axis=1) if with_gap else None
    return Partial(maximum, exponentials.sum(axis=1), target_logit, gap)


def _partial(options: Options, operands: Operands, tokens: Tokens) -> Partial:
    """The softmax of every token over the columns of this weight."""
    n, real = tokens.active.shape[0], real_columns(options, operands)
    bias, columns = _bias(operands), _columns(options)

    def of_block(block: Block) -> Partial:
        products = _products(options, block.take_hidden(operands.hidden), operands.weight)
        target_ids, temperature, _ = block.take_tokens(tokens)
        logits = logits_of(options, products, bias, temperature, columns, real)
        place = jnp.clip(target_ids, 0, options.vocab_size - 1)
        target_logit = jnp.take_along_axis(logits, place[:, None], axis=1)[:, 0]
        is_here = (target_ids >= 0) & (target_ids < real)
        return _partial_of(logits, jnp.where(is_here, target_logit, 0), with_gap=options.return_entropy)

    def step(block: Block, so_far: Partial) -> Partial:
        return jax.tree.map(block.store, so_far, of_block(block))

    zeros = jnp.zeros(n, jnp.float32)
    start = Partial(zeros, zeros + 1, zeros, zeros if options.return_entropy else None)
    return fold_blocks(
        tokens.active, chunk_rows(options.vocab_size, n, memory_budget(options, operands.weight)), step, start
    )


def _partials(options: Options, operands: Operands, tokens: Tokens) -> tuple[Partial, None]:
    """One group per shard: no order of sums is promised."""
    return jax.tree.map(lambda x: x[None], _partial(options, operands, tokens)), None


def _merge(options: Options, groups: Partial, state: None) -> tuple[LinearLogp, Statistics, None]:
    statistics = merged(groups)
    return values_of(options, statistics), statistics, None


def _rounding_scale(dtype: jnp.dtype, tokens: Tokens, upstream: LinearLogp) -> Array:
    """A power of two that lifts float16 gradients of logits, so that g·p near 1e-9 survives; 1 for other dtypes."""
    if dtype != jnp.float16:
        return jnp.ones((), jnp.float32)
    bound = jnp.where(tokens.active, gradient_bound(tokens.temperature, upstream), 0)
    return lifting_power(jnp.max(bound))


def _gradients(
    options: Options,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    statistics: Statistics,
    kept: None,
    upstream: LinearLogp,
) -> Gradients:
    bias, columns, real = _bias(operands), _columns(options), real_columns(options, operands)
    dtype = _common_dtype(operands.hidden, operands.weight)

    def step(block: Block, so_far: Gradients) -> Gradients:
        hidden, own = block.take_hidden(operands.hidden), block.take_tokens(tokens)
        own_statistics, own_upstream = block.take((statistics, upstream))
        products = _products(options, hidden, operands.weight)
        exact = dproducts_of(options, products, bias, own, columns, real, own_statistics, own_upstream)
        scale = _rounding_scale(dtype, own, own_upstream)
        rounded = (exact * scale).astype(dtype)
        d_hidden, d_weight, d_bias = so_far
        if d_hidden is not None:
            d_hidden = block.store(d_hidden, _d_hidden(options, rounded, operands) / scale)
        if d_weight is not None:
            pair = (rounded, hidden) if options.weight_layout == "vd" else (hidden, rounded)
            d_weight += _matmul(*pair, (0, 0)) / scale
        if d_bias is not None:
            d_bias += exact.sum(axis=0)
        return Gradients(d_hidden, d_weight, d_bias)

    is_rounded = options.hidden_gradient == "rounded"
    start = Gradients(
        jnp.zeros_like(operands.hidden, None if is_rounded else jnp.float32) if needs.hidden else None,
        jnp.zeros_like(operands.weight, jnp.float32) if needs.weight else None,
        jnp.zeros(options.vocab_size, jnp.float32) if needs.bias else None,
    )
    rows = chunk_rows(options.vocab_size, tokens.active.shape[0], memory_budget(options, operands.weight))
    done = fold_blocks(tokens.active, rows, step, start).like(options, operands)
    return done if done.hidden is None or is_rounded else done._replace(hidden=done.hidden[None])


def why_not(problem: "Problem") -> list[str]:
    """Reasons why it cannot run this problem."""
    if problem.options.hidden_gradient == "groups":
        return ["promises no bits, which reduction='canonical' asks for"]
    return []


LINEAR_LOGP = LinearLogpFunctions(_partials, _merge, _gradients)


def _logp(options: SoftmaxOptions, logits: Array, tokens: Tokens) -> tuple[LinearLogp, Statistics]:
    """On GPUs XLA fuses what is done to a logit into its sums: two passes, no float32 copy (on CPUs it makes one)."""

    def of(logits: Array, columns: Array) -> Array:
        real = options.real_vocab_size
        return logits_of(options, logits.astype(jnp.float32), _no_bias(), tokens.temperature, columns, real)

    targets = tokens.target_ids[:, None]
    # Picked before anything is done to it: a pick from computed logits would need all of them in memory.
    target_logit = of(jnp.take_along_axis(logits, targets, axis=1), targets)[:, 0]
    partial = _partial_of(of(logits, _columns(options)), target_logit, with_gap=options.return_entropy)
    statistics = merged(jax.tree.map(lambda x: x[None], partial))
    return values_of(options, statistics), statistics


def _logp_gradient(
    options: SoftmaxOptions, logits: Array, tokens: Tokens, statistics: Statistics, upstream: LinearLogp, donate: bool
) -> Array:
    """Element by element: XLA itself writes it in place where the logits are donated."""
    facts = (_no_bias(), tokens, _columns(options), options.real_vocab_size, statistics, upstream)
    return dproducts_of(options, logits.astype(jnp.float32), *facts).astype(logits.dtype)


LOGP = LogpFunctions(_logp, _logp_gradient)
