"""What the kernels of a head see on Hopper: hidden's active rows, and the head in slices of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.allowed import allowed_bits
from pallas_kernels.hopper.arrays import VocabSlice
from pallas_kernels.hopper.parts import Matrix, split
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH
from pallas_kernels.hopper.vocabulary import HeadAccess
from pallas_kernels.products import LowRankTerm
from rlk_jax.core.checks import INT32
from rlk_jax.core.fixed_order import zeros_behind
from rlk_jax.core.head import Operands, rank_axis, real_columns
from rlk_jax.core.hopper_plan import (
    ChunkRange,
    HopperPlan,
    softmax_vocabulary,
    stores_in_place,
    vocabulary_of,
)
from rlk_jax.core.rows import Compacted
from rlk_jax.core.tokens import Tokens
from rlk_jax.core.transforms import fusion_barrier

Array = jax.Array
NOWHERE = INT32.max
"""The place of a token that a slice does not hold: it is beyond the slice."""


@dataclass(frozen=True)
class HeadSlice:
    """One slice of the vocabulary: what the kernels read of the head there, and where its columns belong."""

    where: VocabSlice
    head: HeadAccess
    stored: HeadAccess
    """Where the slice's part of the weight's gradient is stored, as `head` says where the weight is read."""
    weight: Matrix
    bias: Array | None
    low_rank: Array | None
    """B of a low-rank term, cut as the weight is."""
    columns: Array
    """The column of each place `[slice's chunks · 256]`; V where a place holds none."""

    def term(self, low_rank_hidden: Array | None) -> LowRankTerm | None:
        """What a low-rank term adds to a product with the slice."""
        return None if low_rank_hidden is None else LowRankTerm(low_rank_hidden, self.low_rank)


def slice_of(plan: HopperPlan, chunks: ChunkRange, index: Any, operands: Operands, rows: Compacted) -> HeadSlice:
    """Slice number `index` of a range of chunks."""
    config, vocabulary = plan.config, vocabulary_of(plan.config)
    real = real_columns(config, operands)
    first = chunks.first + jnp.asarray(index, jnp.int32) * chunks.width
    count = jnp.minimum(chunks.width, chunks.end - first)
    chunk = (first + jnp.arange(chunks.width, dtype=jnp.int32))[:, None]
    place = jnp.arange(COLUMNS, dtype=jnp.int32)
    holds = (place < vocabulary.width(chunk, real)) & (chunk < chunks.end)
    columns = jnp.where(holds, vocabulary.start(chunk) + place, config.vocab_size).reshape(-1)
    there = jnp.minimum(columns, jnp.maximum(real - 1, 0))
    bias = None

    def of_slice(weight: Array) -> Array:
        if not chunks.copied:
            return weight
        taken = weight[there] if config.weight_layout == "vd" else weight[:, there].T
        taken = jnp.where(holds.reshape(-1, 1), taken, 0)
        return zeros_behind(taken, 1, DEPTH)

    low_rank = operands.low_rank
    if low_rank is not None:
        low_rank = of_slice(zeros_behind(low_rank, rank_axis(config.weight_layout), DEPTH))
    if operands.bias is not None:
        bias = jnp.where(holds.reshape(-1), operands.bias[there].astype(jnp.float32), 0)
    known = operands.real_columns
    where = VocabSlice(rows.count, first.reshape(1), count.reshape(1), None if known is None else known.reshape(1))
    head = stored = HeadAccess(vocabulary, "vd" if chunks.copied else config.weight_layout, chunks.copied)
    if config.weight_parts > 1 and stores_in_place(config, plan.dim):
        stored = HeadAccess(vocabulary, config.weight_layout, False)
    weight: Matrix = of_slice(operands.weight)
    if config.weight_parts > 1:
        weight = fusion_barrier(split(weight.astype(jnp.float32)))
    return HeadSlice(where, head, stored, weight, bias, low_rank, columns)


def places_in_slice(plan: HopperPlan, part: HeadSlice, ids: Array) -> Array:
    """The place in a slice of each of the tokens `[rows, k]`, or NOWHERE."""
    vocabulary = vocabulary_of(plan.config)
    is_column = (ids >= 0) & (ids < plan.config.vocab_size)
    chunk = vocabulary.chunk_of(jnp.where(is_column, ids, 0))
    behind = chunk - part.where.first_chunk
    is_here = is_column & (behind >= 0) & (behind < part.where.chunks)
    return jnp.where(is_here, behind * COLUMNS + ids - vocabulary.start(chunk), NOWHERE)


def bits_of_rows(plan: HopperPlan, rows: Compacted, tokens: Tokens) -> Array | None:
    """Which columns each row is allowed, as kernels with a softmax read it, or None for all of them."""
    if tokens.allowed is None:
        return None
    return fusion_barrier(allowed_bits(softmax_vocabulary(plan.config), rows.take(tokens.allowed)))


def over_slices(plan: HopperPlan, step: Callable[[ChunkRange, Any], None]) -> None:
    """Calls `step(range, slice of the range)` for all slices in ascending order."""
    for chunks in plan.ranges:
        if chunks.slices == 1:
            step(chunks, 0)
        else:
            lax.fori_loop(0, chunks.slices, lambda i, _, chunks=chunks: step(chunks, i), None)


def _matrix(plan: HopperPlan, rows: Compacted, hidden: Array) -> Matrix:
    """The compacted rows of some columns of hidden, followed by zeros, up to a multiple of 64 columns."""
    taken = zeros_behind(rows.take(hidden)[: plan.matrix_rows], 1, DEPTH)
    return fusion_barrier(split(taken.astype(jnp.float32)) if plan.config.hidden_parts > 1 else taken)


def matrices(plan: HopperPlan, rows: Compacted, hidden: Array) -> tuple[Matrix, Matrix | None]:
    """hidden's own columns, and those of a low-rank term, as two matrices."""
    dim = plan.dim
    return _matrix(plan, rows, hidden[:, :dim]), _matrix(plan, rows, hidden[:, dim:]) if plan.config.rank else None
