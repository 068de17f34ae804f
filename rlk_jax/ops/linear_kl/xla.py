"""The portable implementation that never holds `[N, V]`: blocks of tokens against both whole vocabularies.

A block's logits of student and teacher are made once in the forward, where their softmaxes and the divergence are taken
of them, and once more in the backward; a teacher that lists tokens has none. Sums stay float32 to the end; XLA runs
blocks of tokens as full-width GEMMs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.fixed_order import ascending_sum
from rlk_jax.core.gemm import common_dtype, wide_product
from rlk_jax.core.rows import MEMORY_BUDGET, Block, fold_blocks, rows_within, store_by_block
from rlk_jax.core.shard import Gather
from rlk_jax.core.softmax import Partial, fp16_scale, logits_of, partial_of_rows
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
_BYTES_PER_COLUMN = 18
"""float32 products of both heads, the float32 gradient of the student's, its copy in the operands' 16-bit dtype, and
what XLA keeps between two passes over them.
"""


def rows_of_block(config: KlConfig, operands: Operands) -> int:
    """Tokens of a block, as many as the budget holds. Every block reads both heads once and writes dW, so that the
    default budget is no less than their bytes.
    """
    weights = [x.weight for x in (operands.student, operands.teacher) if x is not None]
    budget = config.memory_budget or max(MEMORY_BUDGET, sum(x.size * x.dtype.itemsize for x in weights))
    columns = max(x.vocab_size for x in (config.student, config.teacher) if x is not None)
    return rows_within(budget, _BYTES_PER_COLUMN * columns, operands.student.hidden.shape[0])


def _columns_of_logits(config: KlConfig, operands: Operands) -> int:
    """How many columns have logits: those of the true vocabulary, or all where only the device knows which are real."""
    return config.real_vocab_size if operands.real_columns is None else config.student.vocab_size


def _is_real(config: KlConfig, operands: Operands) -> Array:
    """Which of the columns that have logits are no padding."""
    return jnp.arange(_columns_of_logits(config, operands), dtype=jnp.int32) < operands.count_real(config)


class _BlockLogits(NamedTuple):
    """A block's logits, `raw` before softcap and temperature."""

    raw: Array
    logits: Array


def _block_logits(
    config: OneHeadConfig, head: OneHead, block: Block, temperature: Array, count: int, real: Any
) -> _BlockLogits:
    """Those of the first `count` columns, of which so many are real."""
    raw = wide_product(block.take_hidden(head.hidden), head.weight, (1, 1 - config.vocab_axis))[:, :count]
    if head.bias is not None:
        raw += head.bias.astype(jnp.float32)[None, :count]
    columns = jnp.arange(count, dtype=jnp.int32)[None]
    return _BlockLogits(raw, logits_of(config, raw, jnp.zeros((1, 1), jnp.float32), temperature, columns, real))


def _student_logits(config: KlConfig, operands: Operands, block: Block, tokens: KlTokens) -> _BlockLogits:
    columns = _columns_of_logits(config, operands), operands.count_real(config)
    return _block_logits(config.student, operands.student, block, tokens.temperature, *columns)


def _teacher_logits(config: KlConfig, operands: Operands, block: Block, tokens: KlTokens) -> Array:
    """Those of a teacher that has a head."""
    assert config.teacher is not None and operands.teacher is not None
    columns = _columns_of_logits(config, operands), operands.count_real(config)
    return _block_logits(config.teacher, operands.teacher, block, tokens.teacher_temperature, *columns).logits


def _tokens_of(block: Block, tokens: KlTokens) -> KlTokens:
    return block.take(tokens)._replace(active=block.active)


def _partials_of(logits: Array) -> Partial:
    """The softmax of rows of logits as one group, `[1, rows]`: no order of sums is promised."""
    return jax.tree.map(lambda x: x[None], partial_of_rows(logits, jnp.zeros_like(logits[:, 0]), with_gap=False))


def _both_logits(config: KlConfig, operands: Operands, tokens: KlTokens, block: Block) -> tuple[Array, Array]:
    """Those of a block, of student and teacher."""
    own = _tokens_of(block, tokens)
    return _student_logits(config, operands, block, own).logits, _teacher_logits(config, operands, block, own)


def _normalizers(partials: tuple[Partial, Partial]) -> tuple[Normalizer, Normalizer]:
    """Those of both. Behind the barrier, XLA sums up the rows of both alike: equal ones then have equal sums."""
    student, teacher = lax.optimization_barrier(tuple(map(normalizer_of_groups, partials)))
    return student, teacher


def _sums_of_terms(config: KlConfig, logits: tuple[Array, Array], normalizers: tuple[Normalizer, Normalizer]) -> Terms:
    """The terms of a block's columns, summed up."""
    (own, other), (student, teacher) = logits, normalizers
    return jax.tree.map(lambda x: x.sum(axis=1), terms_of(config, student.logprobs(own), teacher.logprobs(other)))


def _as_group(tree: Any) -> Any:
    """Arrays `[N]` as those of one group, `[1, N]`."""
    return jax.tree.map(lambda x: x[None], tree)


def _in_two_passes(
    config: KlConfig, operands: Operands, tokens: KlTokens, gather: Gather
) -> tuple[Array, KlStatistics]:
    """What `_forward` gives, by one pass over the tokens for both softmaxes and one for the terms: products are made
    twice, and both gathers are for all tokens at once.
    """
    rows, zeros = rows_of_block(config, operands), jnp.zeros(tokens.active.shape, jnp.float32)

    def partials(block: Block) -> tuple[Partial, Partial]:
        own, other = (
            jax.tree.map(lambda x: x[0], _partials_of(x)) for x in _both_logits(config, operands, tokens, block)
        )
        return own, other

    def terms(block: Block) -> Terms:
        return _sums_of_terms(config, _both_logits(config, operands, tokens, block), block.take(normalizers))

    empty = Partial(zeros, zeros + 1, zeros, None)
    normalizers = _normalizers(gather(_as_group(store_by_block(tokens.active, rows, partials, (empty, empty)))))
    sums = gather(_as_group(store_by_block(tokens.active, rows, terms, Terms(zeros, zeros))))
    value, slope = map(ascending_sum, sums)
    return value, KlStatistics(*normalizers, slope)


def _list_in_one_pass(
    config: KlConfig, operands: Operands, tokens: KlTokens, top_k: TeacherTopK, gather: Gather
) -> tuple[Array, BucketStatistics]:
    """The divergence from a teacher that lists tokens: one pass over the tokens gives the softmaxes over all columns
    and over the rest.
    """
    zeros = jnp.zeros(tokens.active.shape, jnp.float32)

    def sums(block: Block) -> tuple[Partial, Partial, Array]:
        own = _tokens_of(block, tokens)
        assert own.top_k is not None
        logits = _student_logits(config, operands, block, own).logits
        both = (_partials_of(x) for x in (logits, without_listed(logits, own.top_k)))
        student, rest = (jax.tree.map(lambda x: x[0], of_rows) for of_rows in both)
        return student, rest, listed_logits(logits, own.top_k)

    empty = Partial(zeros, zeros + 1, zeros, None)
    start = empty, empty, jnp.zeros(top_k.ids.shape, jnp.float32)
    *partials, logits = store_by_block(tokens.active, rows_of_block(config, operands), sums, start)
    student, rest = map(normalizer_of_groups, gather(_as_group(tuple(partials))))
    rest = possibly_of_none(rest)
    return divergence_of_buckets(config, top_k, logits_of_all(logits, 1, gather), student, rest)


def _forward(
    config: KlConfig, operands: Operands, tokens: KlTokens, gather: Gather
) -> tuple[Array, KlStatistics | BucketStatistics]:
    if tokens.top_k is not None:
        return _list_in_one_pass(config, operands, tokens, tokens.top_k, gather)
    if config.gathers_outside_loops:
        return _in_two_passes(config, operands, tokens, gather)

    def of_head(block: Block) -> tuple[Array, KlStatistics]:
        logits = _both_logits(config, operands, tokens, block)
        normalizers = _normalizers(gather(tuple(map(_partials_of, logits))))
        value, slope = map(ascending_sum, gather(_as_group(_sums_of_terms(config, logits, normalizers))))
        return value, KlStatistics(*normalizers, slope)

    return store_by_block(tokens.active, rows_of_block(config, operands), of_head, no_values(tokens))


def _derivatives(
    config: KlConfig, operands: Operands, block: Block, tokens: KlTokens, statistics: Any, logits: Array
) -> Array:
    """The derivatives by the logits of a block."""
    if tokens.top_k is not None:
        return derivatives_with_rest(statistics, tokens.top_k, logits)
    return derivatives_of(config, (logits, _teacher_logits(config, operands, block, tokens)), statistics)


def _gradients(
    config: KlConfig, needs: Needs, operands: Operands, tokens: KlTokens, statistics: Any, upstream: Array
) -> Gradients:
    """Gradients of logits are rounded once, to the dtype of the student's operands; dW and db are summed in float32."""
    head, student = config.student, operands.student
    dtype, axis = common_dtype(student.hidden, student.weight), head.vocab_axis
    columns, is_real = _columns_of_logits(config, operands), _is_real(config, operands)
    padding = head.vocab_size - columns

    def step(block: Block, so_far: Gradients) -> Gradients:
        own, (own_statistics, own_upstream) = _tokens_of(block, tokens), block.take((statistics, upstream))
        raw, logits = _student_logits(config, operands, block, own)
        by_logit = _derivatives(config, operands, block, own, own_statistics, logits)
        exact = raw_gradients(config, raw, by_logit, own, own_upstream, is_real[None])
        # float16 needs a power of two, so that gradients near 1e-9 survive.
        scale = fp16_scale(jnp.max(jnp.abs(exact))) if dtype == jnp.float16 else jnp.ones((), jnp.float32)
        rounded = (exact * scale).astype(dtype)
        d_hidden, d_weight, d_bias = so_far
        if d_hidden is not None:
            weight = lax.slice_in_dim(student.weight, 0, columns, axis=axis)
            if operands.real_columns is not None:
                # Padding may hold anything, and 0·NaN is NaN.
                weight = jnp.where(jnp.expand_dims(is_real, 1 - axis), weight, 0)
            d_hidden = block.store(d_hidden, wide_product(rounded, weight, (1, axis)) / scale)
        if d_weight is not None:
            rows, padded = block.take_hidden(student.hidden), jnp.pad(rounded, ((0, 0), (0, padding)))
            d_weight += wide_product(*((padded, rows) if axis == 0 else (rows, padded)), (0, 0)) / scale
        if d_bias is not None:
            d_bias += jnp.pad(exact.sum(axis=0), (0, padding))
        return Gradients(d_hidden, d_weight, d_bias)

    start = Gradients(
        jnp.zeros_like(student.hidden, jnp.float32 if config.is_shard else None) if needs.hidden else None,
        jnp.zeros_like(student.weight, jnp.float32) if needs.weight else None,
        jnp.zeros(head.vocab_size, jnp.float32) if needs.bias else None,
    )
    done = fold_blocks(tokens.active, rows_of_block(config, operands), step, start).like(config, student)
    return done._replace(hidden=done.hidden[None]) if config.is_shard and done.hidden is not None else done


XLA = KlFunctions(_forward, _gradients, by_group=False)
