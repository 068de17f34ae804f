"""linear_kl in Triton, for NVIDIA GPUs from Ampere on.

A pass over each head takes its softmax and keeps no logits; a teacher that lists tokens needs none. The next one, slice
by slice of the vocabulary, brings the products with both heads to memory, as many as the budget holds, and XLA makes
the terms of the divergence of them. Their sums go by halves inside a chunk of columns, by pairs of chunks inside a
group, then over ascending groups. The backward makes the products once more and writes the gradients of the student's
logits in 16 bits, of which core/triton_slices.py makes those of the operands.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import padded
from pallas_kernels.triton import linear_logp as kernels
from pallas_kernels.triton.linear_logp import TILE_COLUMNS, TILE_ROWS, ColumnRange
from rlk_jax.core import head as one_head
from rlk_jax.core.fixed_order import ascending_sum, pairwise_sum
from rlk_jax.core.head import kernel_memory_budget, least_columns, room_for_slices
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.shard import Gather
from rlk_jax.core.softmax import Partial, fixed_order_partial, logits_of, partial_of_chunks
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.core.triton_slices import (
    TritonHead,
    bytes_of_chain,
    bytes_of_rows,
    gradients_by_slice,
    triton_head,
    width_within,
)
from rlk_jax.ops.linear_kl.divergence import (
    BYTES_PER_PAIR,
    KlStatistics,
    SliceLogits,
    derivatives_of,
    normalizer_of_groups,
    raw_gradients,
    row_scale,
    sums_of_chunks,
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
    possibly_of_none,
    without_listed,
)

Array = jax.Array
_SUMS_OF_CHUNK = 4


@dataclass(frozen=True)
class _RowsOfOne:
    """One of the two heads beside the rows of its hidden states, and their temperatures."""

    head: TritonHead
    temperature: Array

    def partials(self) -> Partial:
        """The softmax over each group, `[groups, rows]`. No row has a target."""
        none = jnp.full(self.temperature.shape, -1, jnp.int32)
        of_head = self.head.shape, self.head.of_kernels, none, self.temperature
        return Partial(*fusion_barrier(kernels.group_partials(*of_head, with_gap=False, with_sum=False)))

    def logits(self, where: ColumnRange, width: int) -> SliceLogits:
        """Those of a slice of so many columns."""
        ones = jnp.ones_like(self.temperature)
        bare = replace(self.head.shape, softcap=None)
        raw = fusion_barrier(kernels.logits(bare, self.head.of_kernels, ones, where, width))
        columns = (where.start + jnp.arange(width, dtype=jnp.int32))[None]
        end = jnp.minimum(where.chain_end, self.head.of_kernels.real_columns)
        logits = logits_of(self.head.config, raw, jnp.zeros((1, 1), jnp.float32), self.temperature, columns, end)
        return SliceLogits(columns < end, raw, logits)


@dataclass(frozen=True)
class _RowsOfBoth:
    """The compacted rows of a call's active tokens, and their tokens, of which only those rows are active.

    The teacher is None where it has no head.
    """

    config: KlConfig
    rows: Compacted
    tokens: KlTokens
    student: _RowsOfOne
    teacher: _RowsOfOne | None

    def width(self, needs: one_head.Needs, dtype: Any, bytes_of_sums: int) -> int:
        """Columns of a slice whose logits fit the budget beside hidden states, sums, and dH where it is needed, as
        `room_for_slices` has it.
        """
        teacher_dim = 0 if self.teacher is None else self.teacher.head.shape.dim
        config, dim = self.student.head.config, self.student.head.shape.dim
        budget = kernel_memory_budget(config, dim + teacher_dim, len(self.rows.active))
        beside = bytes_of_rows(needs, self.rows.size, dim, dtype) + (2 * teacher_dim + bytes_of_sums) * self.rows.size
        column = BYTES_PER_PAIR * self.rows.size
        least = least_columns(config, dim + teacher_dim, len(self.rows.active)) * column
        room = room_for_slices(budget - beside, bytes_of_chain(needs, self.rows.size, dim), least)
        return width_within(config, room, column)

    def forward_width(self) -> int:
        """Columns of a slice of the forward, which holds as many sums of each chunk of columns as a list needs."""
        chunks = self.config.groups.count * self.student.head.shape.group_chunks
        return self.width(one_head.Needs(False, False, False), None, 4 * _SUMS_OF_CHUNK * chunks)


def _rows_of_call(config: KlConfig, operands: Operands, tokens: KlTokens) -> _RowsOfBoth:
    """The rows of a call's active tokens, a whole number of tiles."""
    rows = compact(tokens.active, padded(len(tokens.active), TILE_ROWS))
    own = jax.tree.map(rows.take, tokens)

    def of_head(head: OneHeadConfig, of_call: OneHead, temperature: Array) -> _RowsOfOne:
        own = one_head.Operands(*of_call, real_columns=operands.real_columns)
        return _RowsOfOne(triton_head(config.of_kernels(head), own, rows), rows.take(temperature, 1))

    student = of_head(config.student, operands.student, tokens.temperature)
    teacher = None
    if config.teacher is not None and operands.teacher is not None:
        teacher = of_head(config.teacher, operands.teacher, tokens.teacher_temperature)
    return _RowsOfBoth(config, rows, own._replace(temperature=student.temperature), student, teacher)


def _over_slices[Carry](
    both: _RowsOfBoth, step: Callable[[ColumnRange, int, Carry], tuple[Carry, Any]], start: Carry
) -> tuple[Carry, Any]:
    """`step(where, width, carry)` over all slices in ascending order. What it gives for each chunk `[rows, chunks of a
    slice]` comes back as `[groups, rows, chunks of a group]`.
    """
    head, width = both.student.head, both.forward_width()
    slices, groups = head.slices_in_group(width), both.config.groups.count

    def of_slice(carry: Carry, i: Array) -> tuple[Carry, Any]:
        return step(head.slice_of_group(head.config.vocab_size, width, i // slices, i % slices), width, carry)

    def by_group(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(groups, slices, *x.shape[1:]), 1, 2).reshape(groups, x.shape[1], -1)

    carry, found = lax.scan(of_slice, start, jnp.arange(groups * slices, dtype=jnp.int32))
    return carry, jax.tree.map(by_group, found)


def _in_chunks(x: Array) -> Array:
    """Rows of a slice `[rows, width]` as rows of its chunks, `[rows · chunks, columns of a chunk]`."""
    return x.reshape(-1, TILE_COLUMNS)


def _divergence_from_head(both: _RowsOfBoth, teacher: _RowsOfOne, gather: Gather) -> tuple[Array, KlStatistics]:
    """The divergence of all rows from a teacher that has a head."""
    partials = gather((both.student.partials(), teacher.partials()))
    # Behind the barrier, both are as they are in the backward: equal heads have equal ones.
    student, other = normalizers = fusion_barrier(tuple(map(normalizer_of_groups, partials)))

    def step(where: ColumnRange, width: int, carry: None) -> tuple[None, Any]:
        found = (x.logits(where, width).logits for x in (both.student, teacher))
        return None, sums_of_chunks(both.config, normalizers, found, TILE_COLUMNS)

    sums = gather(jax.tree.map(pairwise_sum, _over_slices(both, step, None)[1]))
    value, slope = map(ascending_sum, sums)
    return value, KlStatistics(student, other, slope)


def _divergence_from_list(both: _RowsOfBoth, top_k: TeacherTopK, gather: Gather) -> tuple[Array, BucketStatistics]:
    """The divergence of all rows from a teacher that lists tokens: one pass gives the softmaxes over all tokens and
    over the rest.
    """

    def partial_of_slice(logits: Array) -> Partial:
        chunks = fixed_order_partial(_in_chunks(logits), jnp.zeros((1, TILE_COLUMNS), bool), with_gap=False)
        return jax.tree.map(lambda x: x.reshape(both.rows.size, -1), chunks)

    def step(where: ColumnRange, width: int, so_far: Array) -> tuple[Array, tuple[Partial, Partial]]:
        found = both.student.logits(where, width)
        rest = without_listed(found.logits, top_k, where.start)
        # Each listed token has its logit in one slice, and 0 in all others; columns behind a group are −inf there.
        own = listed_logits(jnp.where(found.valid, found.logits, 0), top_k, where.start)
        return so_far + own, (partial_of_slice(found.logits), partial_of_slice(rest))

    logits, chunks = _over_slices(both, step, jnp.zeros(top_k.ids.shape, jnp.float32))
    student, rest = map(normalizer_of_groups, gather(tuple(map(partial_of_chunks, chunks))))
    rest, logits = possibly_of_none(rest), logits_of_all(logits, both.config.groups.count, gather)
    return divergence_of_buckets(both.config, top_k, logits, student, rest)


def _forward(
    config: KlConfig, operands: Operands, tokens: KlTokens, gather: Gather
) -> tuple[Array, KlStatistics | BucketStatistics]:
    typed = operands.student.hidden
    operands, tokens = fusion_barrier(as_replicated((operands, tokens)))
    both = _rows_of_call(config, operands, tokens)

    def gathered(groups: Any) -> Any:
        """The groups of all devices, of which kernels see values that vary over no mesh axis."""
        return as_replicated(gather(varying_like(groups, typed)))

    found: Any
    if both.tokens.top_k is not None:
        found = _divergence_from_list(both, both.tokens.top_k, gathered)
    else:
        assert both.teacher is not None
        found = _divergence_from_head(both, both.teacher, gathered)
    return varying_like(jax.tree.map(both.rows.spread, fusion_barrier(found)), typed)


def _derivatives_in_slice(both: _RowsOfBoth, statistics: Any, found: SliceLogits, where: ColumnRange) -> Array:
    """The derivatives by the logits of a slice."""
    if both.tokens.top_k is not None:
        return derivatives_with_rest(statistics, both.tokens.top_k, found.logits, where.start)
    assert both.teacher is not None
    teacher = both.teacher.logits(where, found.logits.shape[1])
    return derivatives_of(both.config, (found.logits, teacher.logits), statistics)


def _gradients(
    config: KlConfig, needs: Needs, operands: Operands, tokens: KlTokens, statistics: Any, upstream: Array
) -> Gradients:
    """The gradients, slice by slice: each slice of the vocabulary adds to dH, and stores its part of dW and db."""
    typed = operands.student.hidden
    operands, tokens, statistics, upstream = fusion_barrier(as_replicated((operands, tokens, statistics, upstream)))
    both = _rows_of_call(config, operands, tokens)
    known, given, scale = jax.tree.map(both.rows.take, statistics), both.rows.take(upstream), None
    if typed.dtype == jnp.float16:
        scale = row_scale(both.tokens, known.slope, given)
        given = given * scale
    of_head = one_head.Needs(needs.hidden, needs.weight, needs.bias)
    width = both.width(of_head, typed.dtype, 0)

    def dlogits(where: ColumnRange) -> Array:
        found = both.student.logits(where, width)
        by_logit = _derivatives_in_slice(both, known, found, where)
        exact = raw_gradients(config, found.raw, by_logit, both.tokens, given, found.valid)
        return fusion_barrier(exact.astype(typed.dtype))

    found = gradients_by_slice(both.student.head, of_head, scale, width, dlogits)
    return varying_like(Gradients(found.hidden, found.weight, found.bias), typed)


TRITON = KlFunctions(_forward, _gradients)
