"""linear_logp in Triton, for NVIDIA GPUs from Ampere on: which rows and columns the kernels see, and in which slices.

The forward is one pass over the head that keeps a partial softmax per row and chunk of columns. The backward cuts the
vocabulary into slices whose gradients of logits fit the memory budget; for each slice it recomputes the logits and
writes their gradients in 16 bits, of which core/triton_slices.py makes those of the operands.
Logits' products go on over the columns of a low-rank term, whose gradients the kernels of dH and dW make once more.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import padded
from pallas_kernels.triton import linear_logp as kernels
from pallas_kernels.triton.gemm import gemm
from pallas_kernels.triton.linear_logp import TILE_ROWS, ColumnRange, UpstreamGradients
from rlk_jax.core.gemm import GemmLayout
from rlk_jax.core.head import (
    Gradients,
    HeadConfig,
    Needs,
    Operands,
    head_dim,
    kernel_memory_budget,
    least_columns,
    room_for_slices,
)
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.softmax import Partial, Statistics, fp16_scale, gradient_bound, merged, values_of
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.core.triton_slices import bytes_of_chain, bytes_of_rows, gradients_by_slice, triton_head, width_within
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
    """Columns of a slice of one group. Its dlogits fit the budget beside hidden's copies and a group's chain of dH, as
    `room_for_slices` has it.
    """
    rows = padded(tokens, TILE_ROWS)
    room = kernel_memory_budget(config, dim, tokens) - bytes_of_rows(needs, rows, dim, dtype)
    least = least_columns(config, dim, tokens) * 2 * rows
    return width_within(config, room_for_slices(room, bytes_of_chain(needs, rows, dim), least), 2 * rows)


def _partials(config: HeadConfig, operands: Operands, tokens: Tokens) -> tuple[Partial, Compacted]:
    """The partials of every group by row of the kernels, and which token is in which row."""
    typed = operands.hidden
    operands, tokens = fusion_barrier(as_replicated((operands, tokens)))
    rows = compact(tokens.active, padded(typed.shape[0], TILE_ROWS), all_active=not config.may_ignore)
    head = triton_head(config, operands, rows, tokens.allowed)
    found = kernels.group_partials(
        head.shape,
        head.of_kernels,
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
    rows = compact(tokens.active, padded(n, TILE_ROWS))
    head = triton_head(config, operands, rows, tokens.allowed)
    target_ids, temperature = rows.take(tokens.target_ids), rows.take(tokens.temperature, 1)
    own = jax.tree.map(rows.take, statistics)
    given = jax.tree.map(rows.take, upstream)
    scale = None
    if dtype == jnp.float16:
        scale = rows.take(fp16_scale(gradient_bound(tokens.temperature, upstream)), 1)
    lift = jnp.ones(rows.size, jnp.float32) if scale is None else scale
    logp = own.logprobs(own.target_logit)
    coefficients = kernels.coefficients(temperature, own.log_sum, logp, own.gap, _upstream(config, given), lift)
    width = slice_width(config, dim, n, needs=needs, dtype=dtype)

    def dlogits(where: ColumnRange) -> Array:
        of_rows = target_ids, temperature, own.max, own.log_sum, coefficients
        return kernels.dlogits(head.shape, head.of_kernels, *of_rows, where, width)

    return gradients_by_slice(head, needs, scale, width, dlogits)


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
    head = triton_head(config, operands, rows, tokens.allowed)
    target = Target(rows.take(statistics.target_logit), rows.take(tokens.target_ids))
    temperature = rows.take(tokens.temperature, 1)
    budget = kernel_memory_budget(config, dim, typed.shape[0])
    width = width_within(config, budget, BYTES_PER_RANKED_LOGIT * rows.size)
    slices = head.slices_in_group(width)

    def of_slice(i: Array, so_far: BestColumns) -> BestColumns:
        where = head.slice_of_group(config.vocab_size, width, i // slices, i % slices)
        logits = kernels.logits(head.shape, head.of_kernels, temperature, where, width)
        return add_columns(so_far, logits, (where.start + jnp.arange(width, dtype=jnp.int32))[None], target)

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
