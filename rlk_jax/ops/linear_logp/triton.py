"""linear_logp in Triton, for NVIDIA GPUs from Ampere on: which rows and columns the kernels see, and in which slices.

The forward is one pass over the head that keeps a partial softmax per row and chunk of columns. The backward cuts the
vocabulary into slices whose gradients of logits fit the memory budget; for each slice it recomputes the logits, writes
their gradients in 16 bits, adds dlogits·W to dH (one float32 chain for each group of the
vocabulary, folded in ascending order) and stores dW and db complete.
Logits' products go on over the columns of a low-rank term, whose gradients the kernels of dH and dW make once more.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import LowRankTerm, padded
from pallas_kernels.triton import linear_logp as kernels
from pallas_kernels.triton.gemm import ALIGNED, gemm
from pallas_kernels.triton.linear_logp import (
    TILE_COLUMNS,
    TILE_ROWS,
    ColumnRange,
    HeadShape,
    KernelOperands,
    UpstreamGradients,
)
from rlk_jax.core.fixed_order import zeros_behind
from rlk_jax.core.gemm import GemmLayout
from rlk_jax.core.head import (
    Gradients,
    HeadConfig,
    Needs,
    Operands,
    head_dim,
    kernel_memory_budget,
    rank_axis,
    real_columns,
)
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.softmax import Partial, Statistics, fp16_scale, gradient_bound, merged, scaling, values_of
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
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


def slice_width(config: HeadConfig, dim: int, tokens: int, *, needs: Needs, dtype: Any) -> int:
    """Columns of a slice of one group. Its dlogits fit the budget beside hidden's copies and a group's chain of dH."""
    rows = padded(tokens, TILE_ROWS)
    budget = kernel_memory_budget(config, dim, tokens)
    copies = 2 if dtype == jnp.float16 and needs.weight else 1
    beside = (2 * copies + (4 if needs.hidden else 0)) * rows * dim
    return _width_within(config, budget - beside, 2 * rows)


def _width_within(config: HeadConfig, budget: int, bytes_of_column: int) -> int:
    """Columns of a slice of one group that fit the budget; slices of a group are equally wide but for rounding."""
    affordable = max(1, budget // (bytes_of_column * TILE_COLUMNS))
    tiles = -(-config.groups.width // TILE_COLUMNS)
    return TILE_COLUMNS * -(-tiles // -(-tiles // affordable))


def _head_shape(config: HeadConfig, operands: Operands) -> HeadShape:
    """The static facts of the head, as the kernels take them."""
    dim, groups = head_dim(config, operands), config.groups
    return HeadShape(dim, config.vocab_size, config.weight_layout, config.logit_softcap, groups.count, groups.width)


def _kernel_operands(config: HeadConfig, operands: Operands, tokens: Tokens, rows: Compacted) -> KernelOperands:
    """The operands and what tokens are allowed as the kernels take them, with active rows in front."""
    dim, real = head_dim(config, operands), jnp.asarray(real_columns(config, operands), jnp.int32).reshape(1)
    hidden = fusion_barrier(rows.take(operands.hidden[:, :dim]))
    low_rank = None
    if operands.low_rank is not None:
        columns = zeros_behind(rows.take(operands.hidden[:, dim:]), 1, ALIGNED)
        weight = zeros_behind(operands.low_rank, rank_axis(config.weight_layout), ALIGNED)
        low_rank = fusion_barrier(LowRankTerm(columns, weight))
    allowed = None
    if tokens.allowed is not None:
        in_bytes = lax.bitcast_convert_type(rows.take(tokens.allowed), jnp.uint8)
        allowed = fusion_barrier(lax.collapse(in_bytes, 1))
    return KernelOperands(hidden, operands.weight, operands.bias, rows.count, real, low_rank, allowed)


def _terms(head: HeadShape, operands: KernelOperands) -> list[tuple[HeadShape, KernelOperands]]:
    """The head, and its low-rank term where it has one, as a head whose gradients of logits are the same."""
    terms = [(head, operands)]
    if operands.low_rank is not None:
        hidden, weight = operands.low_rank
        terms.append((replace(head, dim=hidden.shape[1]), operands._replace(hidden=hidden, weight=weight)))
    return terms


def _partials(config: HeadConfig, operands: Operands, tokens: Tokens) -> tuple[Partial, Compacted]:
    """The partials of every group by row of the kernels, and which token is in which row."""
    typed = operands.hidden
    operands, tokens = fusion_barrier(as_replicated((operands, tokens)))
    rows = compact(tokens.active, padded(typed.shape[0], TILE_ROWS), all_active=not config.may_ignore)
    found = kernels.group_partials(
        _head_shape(config, operands),
        _kernel_operands(config, operands, tokens, rows),
        rows.take(tokens.target_ids),
        rows.take(tokens.temperature, 1),
        with_gap=config.return_entropy,
        with_sum=config.smoothing is not None,
    )
    return varying_like((Partial(*fusion_barrier(found)), rows), typed)


def _merge(config: HeadConfig, groups: Partial, rows: Compacted) -> tuple[LinearLogp, Statistics, None]:
    """The values and statistics of every token, from the groups of the whole vocabulary."""
    groups, rows = as_replicated((groups, rows))
    statistics = jax.tree.map(rows.spread, merged(groups))
    return values_of(config, statistics), statistics, None


def _upstream(config: HeadConfig, given: LinearLogp) -> UpstreamGradients:
    """The upstream gradients of the kernels' rows, and what a smoothed target adds."""
    parts = (None, None)
    if config.smoothing is not None:
        parts = tuple(given.logp * jnp.float32(x) for x in (config.smoothing.uniform, config.smoothing.share))
    return UpstreamGradients(*given, *parts)


class _SoFar(NamedTuple):
    """What slices have given so far: dH and dW of each term, and db; None where none is needed."""

    hidden: list[Array | None]
    weights: list[Array | None]
    bias: Array | None


def _gradients(
    config: HeadConfig,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    statistics: Statistics,
    kept: None,
    upstream: LinearLogp,
) -> Gradients:
    """The gradients, slice by slice: each slice of the vocabulary adds to dH, and stores its part of dW and db."""
    operands, tokens, statistics, upstream = fusion_barrier(as_replicated((operands, tokens, statistics, upstream)))
    n, dim, dtype = operands.hidden.shape[0], head_dim(config, operands), operands.hidden.dtype
    head = _head_shape(config, operands)
    rows = compact(tokens.active, padded(n, TILE_ROWS))
    of_kernels = _kernel_operands(config, operands, tokens, rows)
    terms = _terms(head, of_kernels)
    target_ids, temperature = rows.take(tokens.target_ids), rows.take(tokens.temperature, 1)
    own = jax.tree.map(rows.take, statistics)
    given = jax.tree.map(rows.take, upstream)
    scale = row_unscale = jnp.ones(rows.size, jnp.float32)
    of_weights, unscale = terms, jnp.ones(1, jnp.float32)
    if dtype == jnp.float16:
        scale = rows.take(fp16_scale(gradient_bound(tokens.temperature, upstream)), 1)
        # dW sums rows of different scales, so hidden is rescaled to the smallest one; the row that has it stays exact.
        row_unscale, to_common, unscale = scaling(rows, scale)
        of_weights = [(shape, x._replace(hidden=(x.hidden * to_common[:, None]).astype(dtype))) for shape, x in terms]
    logp = own.logprobs(own.target_logit)
    row_coefficients = kernels.coefficients(temperature, own.log_sum, logp, own.gap, _upstream(config, given), scale)

    columns = config.real_vocab_size if operands.real_columns is None else config.vocab_size
    width = slice_width(config, dim, n, needs=needs, dtype=dtype)
    new_weight = jnp.zeros if config.real_vocab_size < config.vocab_size else lax.empty
    d_weights = [
        new_weight(x.weight.shape, dtype) if is_needed else None
        for (_, x), is_needed in zip(terms, (needs.weight, needs.low_rank), strict=False)
    ]
    d_bias = jnp.zeros(config.vocab_size, jnp.float32) if needs.bias else None
    parts = config.hidden_gradient_parts
    sums = [jnp.zeros((parts, *x.hidden.shape), jnp.float32) if needs.hidden else None for _, x in terms]

    def of_slice(start: Array, first: Array, end: Array, so_far: _SoFar) -> _SoFar:
        where = ColumnRange(start.reshape(1), first.reshape(1), end.reshape(1))
        of_logits = kernels.dlogits(
            *(head, of_kernels, target_ids, temperature, own.max, own.log_sum, row_coefficients, where), width
        )
        d_hidden, d_weights, d_bias = so_far
        d_hidden = [
            x if x is None else kernels.add_hidden_gradient(*term, of_logits, where, x)
            for term, x in zip(terms, d_hidden, strict=True)
        ]
        d_weights = [
            x if x is None else kernels.store_weight_gradient(*term, of_logits, unscale, where, x)
            for term, x in zip(of_weights, d_weights, strict=True)
        ]
        if d_bias is not None:
            there = start + jnp.arange(width, dtype=jnp.int32)
            there = jnp.where(there < end, there, config.vocab_size)
            d_bias = d_bias.at[there].set(kernels.column_sums(of_logits, row_unscale, rows.count), mode="drop")
        return _SoFar(d_hidden, d_weights, d_bias)

    def of_group(group: Array, so_far: _SoFar) -> _SoFar:
        first, end = _ends_of_group(config, columns, group)
        chains = [None if x is None else jnp.zeros(x.shape[1:], jnp.float32) for x in so_far.hidden]
        # Slices behind a short group's end are empty: a count that only the device knows would wait for the host.
        found = lax.fori_loop(
            0,
            -(-config.groups.width // width),
            lambda i, x: of_slice(first + jnp.asarray(i, jnp.int32) * width, first, end, x),
            so_far._replace(hidden=chains),
        )
        part = group if config.sums_by_group else 0
        pairs = zip(so_far.hidden, found.hidden, strict=True)
        return found._replace(hidden=[x if x is None else x.at[part].add(chain) for x, chain in pairs])

    sums, d_weights, d_bias = lax.fori_loop(0, config.groups.count, of_group, _SoFar(sums, d_weights, d_bias))
    of_hidden = None
    if needs.hidden:
        spread = [jax.vmap(rows.spread)(x * row_unscale[:, None]) for x in sums if x is not None]
        of_hidden = jnp.concatenate(spread, axis=-1)[..., : operands.hidden.shape[1]]
        of_hidden = of_hidden if config.is_shard else of_hidden[0]
    d_weight, d_low_rank = d_weights if config.rank else (*d_weights, None)
    return fusion_barrier(Gradients(of_hidden, d_weight, d_bias, d_low_rank).like(config, operands))


def _ends_of_group(config: HeadConfig, columns: int, group: Array) -> tuple[Array, Array]:
    """The first column of a group, and the one behind its last of so many."""
    first = jnp.asarray(group, jnp.int32) * config.groups.width
    return first, jnp.clip(first + config.groups.width, first, jnp.maximum(first, columns))


def _best(
    config: HeadConfig,
    operands: Operands,
    tokens: Tokens,
    rows: Compacted,
    statistics: Statistics,
    targets: Array | None,
) -> BestColumns:
    """The logits are made once more, slice by slice, because the target's may be that of another shard."""
    wanted, typed, dim = config.ranking, operands.hidden, head_dim(config, operands)
    assert wanted is not None
    operands, tokens, rows, statistics = fusion_barrier(as_replicated((operands, tokens, rows, statistics)))
    head, of_kernels = _head_shape(config, operands), _kernel_operands(config, operands, tokens, rows)
    target = Target(rows.take(statistics.target_logit), rows.take(tokens.target_ids))
    temperature = rows.take(tokens.temperature, 1)
    budget = kernel_memory_budget(config, dim, typed.shape[0])
    width = _width_within(config, budget, BYTES_PER_RANKED_LOGIT * rows.size)
    slices = -(-config.groups.width // width)

    def of_slice(i: Array, so_far: BestColumns) -> BestColumns:
        first, end = _ends_of_group(config, config.vocab_size, i // slices)
        start = first + jnp.asarray(i % slices, jnp.int32) * width
        where = ColumnRange(start.reshape(1), first.reshape(1), end.reshape(1))
        logits = kernels.logits(head, of_kernels, temperature, where, width)
        return add_columns(so_far, logits, (start + jnp.arange(width, dtype=jnp.int32))[None], target)

    best = lax.fori_loop(0, config.groups.count * slices, of_slice, no_columns(wanted, rows.size))
    return varying_like(jax.tree.map(rows.spread, best), typed)


def _triton_gemm(layout: GemmLayout, a: Array, b: Array, start: Array | None) -> Array:
    """The product of a low-rank term's matrices."""
    product = gemm(
        *fusion_barrier(as_replicated((a, b, start))),
        a_transposed=layout.a_transposed,
        b_transposed=layout.b_transposed,
        out_dtype=layout.out_dtype,
    )
    return fusion_barrier(product)


TRITON = LinearLogpFunctions(
    _partials,
    _merge,
    _gradients,
    _triton_gemm,
    of_ranking=RankingFunctions(_best, logps_of_statistics),
)
