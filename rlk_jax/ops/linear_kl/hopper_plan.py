"""The plan of linear_kl on Hopper: slices of the vocabulary where a head is copied, and in the backward.

Everything here is a pure function of static facts. No choice changes a bit.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from pallas_kernels.hopper.divergence import DivergencePartials, stored_tiles
from pallas_kernels.hopper.tiles import COLUMNS, THREADS, Machine
from pallas_kernels.products import padded
from rlk_jax.core.head import HeadConfig, Needs, kernel_memory_budget
from rlk_jax.core.hopper_plan import (
    BufferSizes,
    ChunkRange,
    HopperPlan,
    backward_sizes,
    copied_chunk_bytes,
    hidden_bytes,
    matrix_rows,
    plan_of_sums,
    reads_in_place,
    sliced_plan,
    vocabulary_of,
)
from rlk_jax.ops.linear_kl.divergence import BYTES_PER_PAIR
from rlk_jax.ops.linear_kl.options import KlConfig


@dataclass(frozen=True)
class TwoPlans:
    """One pass over both heads: their slices have the same chunks, and each reads its head in place or copies it."""

    student: HopperPlan
    teacher: HopperPlan

    def teacher_range(self, chunks: ChunkRange) -> ChunkRange:
        """The teacher's range of the chunks of one of the student's."""
        return self.teacher.ranges[self.student.ranges.index(chunks)]


def softmax_plan(head: HopperPlan, *others: HopperPlan) -> HopperPlan:
    """The plan of a pass over one head, beside the rows of others: one slice where it is read in place."""
    fixed = sum(hidden_bytes(x.config, x.dim, x.tokens) for x in (head, *others))
    return _pass_over(head.config, head.dim, head.tokens, BufferSizes(0, copied_chunk_bytes(head.dim), fixed))


def products_plan(head: HeadConfig, dim: int, tokens: int) -> HopperPlan:
    """The plan of a pass over one head whose float32 products of a slice the budget holds."""
    products = 4 * COLUMNS * matrix_rows(tokens)
    sizes = BufferSizes(products, copied_chunk_bytes(dim), hidden_bytes(head, dim, tokens))
    return _pass_over(head, dim, tokens, sizes)


def forward_plans(config: KlConfig, dims: tuple[int, int], tokens: int) -> TwoPlans:
    """The plan of a pass over both heads: one slice where they are read in place."""
    return _plans_over_both(config, dims, tokens, BufferSizes(0, 0, _tile_bytes(tokens)))


def backward_plans(config: KlConfig, dims: tuple[int, int], tokens: int, needs: Needs, dtype: Any) -> TwoPlans:
    """The plan of a pass that also holds the gradients of the student's logits, and what its sums take."""
    return _plans_of_sums(config, dims, tokens, needs, dtype, BufferSizes(0, 0, _tile_bytes(tokens)))


def forward_plans_of_products(config: KlConfig, dims: tuple[int, int], tokens: int) -> TwoPlans:
    """The plan of a pass that brings the products of a slice with both heads to memory."""
    student, _ = head_configs(config, dims, tokens)
    sums = 2 * 4 * vocabulary_of(student).chunks * matrix_rows(tokens)
    return _plans_over_both(config, dims, tokens, BufferSizes(_products_bytes(tokens), 0, sums))


def backward_plans_of_products(
    config: KlConfig, dims: tuple[int, int], tokens: int, needs: Needs, dtype: Any
) -> TwoPlans:
    """The plan of a pass that holds those products, the gradients of the student's logits, and what its sums take."""
    student, _ = head_configs(config, dims, tokens)
    beside = BufferSizes(_products_bytes(tokens), 0, _partial_bytes(student, tokens))
    return _plans_of_sums(config, dims, tokens, needs, dtype, beside)


def _plans_over_both(config: KlConfig, dims: tuple[int, int], tokens: int, beside: BufferSizes) -> TwoPlans:
    """The plan of a forward that holds so many bytes beside the rows of both hidden states, copies and partials."""
    student, teacher = head_configs(config, dims, tokens)
    rows = sum(hidden_bytes(head, dim, tokens) for head, dim in zip((student, teacher), dims, strict=True))
    fixed = rows + _partial_bytes(student, tokens) + beside.fixed
    sizes = BufferSizes(beside.chunk + _copied_bytes(teacher, dims[1]), copied_chunk_bytes(dims[0]), fixed)
    return _with_teacher(_pass_over(student, dims[0], tokens, sizes), teacher, dims[1])


def _plans_of_sums(
    config: KlConfig, dims: tuple[int, int], tokens: int, needs: Needs, dtype: Any, beside: BufferSizes
) -> TwoPlans:
    """The plan of a backward that holds so many bytes beside what sums of the student's gradients take."""
    student, teacher = head_configs(config, dims, tokens)
    sizes = backward_sizes(student, dims[0], tokens, needs, dtype)
    chunk = sizes.chunk + beside.chunk + _copied_bytes(teacher, dims[1])
    fixed = sizes.fixed + beside.fixed + hidden_bytes(teacher, dims[1], tokens)
    plan = plan_of_sums(student, dims[0], tokens, replace(sizes, chunk=chunk, fixed=fixed), needs)
    return _with_teacher(plan, teacher, dims[1])


def head_configs(config: KlConfig, dims: tuple[int, int], tokens: int) -> tuple[HeadConfig, HeadConfig]:
    """What the kernels of each head are compiled for. Both have the budget of the call."""
    assert config.teacher is not None
    student, teacher = map(config.of_kernels, (config.student, config.teacher))
    budget = kernel_memory_budget(student, sum(dims), tokens)
    return replace(student, memory_budget=budget), replace(teacher, memory_budget=budget)


def _is_copied(head: HeadConfig, dim: int) -> bool:
    """Whether products with a head are taken with copies of its slices."""
    return not reads_in_place(head, dim) or dim % 8 != 0


def _pass_over(head: HeadConfig, dim: int, tokens: int, sizes: BufferSizes) -> HopperPlan:
    in_place = 0 if _is_copied(head, dim) else vocabulary_of(head).chunks
    return sliced_plan(head, dim, tokens, in_place, 0, sizes, 1)


def _copied_bytes(head: HeadConfig, dim: int) -> int:
    """Bytes of one chunk of a head's copy, 0 where it is read in place."""
    return copied_chunk_bytes(dim) if _is_copied(head, dim) else 0


def _tile_bytes(tokens: int) -> int:
    """Bytes of the tiles that the blocks of a kernel over two heads hold."""
    return 4 * math.prod(stored_tiles(tokens, Machine()))


def _products_bytes(tokens: int) -> int:
    """Bytes of one chunk's pairs of products, and of the largest product of each row."""
    rows = matrix_rows(tokens)
    return BYTES_PER_PAIR * COLUMNS * rows + 2 * 4 * padded(rows, THREADS)


def _partial_bytes(head: HeadConfig, tokens: int) -> int:
    """Bytes of the partials of a divergence, float32 for each row and chunk."""
    fields = len(DivergencePartials._fields)
    return 4 * fields * vocabulary_of(head).chunks * padded(matrix_rows(tokens), THREADS)


def _with_teacher(student: HopperPlan, teacher: HeadConfig, dim: int) -> TwoPlans:
    """The student's plan, and the same slices of the teacher's head."""
    ranges = tuple(replace(x, copied=_is_copied(teacher, dim)) for x in student.ranges)
    return TwoPlans(student, HopperPlan(teacher, dim, student.tokens, ranges))
