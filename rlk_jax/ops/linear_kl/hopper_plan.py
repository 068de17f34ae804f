"""The plan of linear_kl on Hopper: slices of the vocabulary for which the budget holds the products with both heads.

Everything here is a pure function of static facts. No choice changes a bit.
"""

from dataclasses import dataclass, replace
from typing import Any

from pallas_kernels.hopper.divergence import DivergencePartials
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, THREADS
from pallas_kernels.products import padded
from rlk_jax.core.fixed_order import BLOCK_ROWS
from rlk_jax.core.head import HeadConfig, Needs, kernel_memory_budget
from rlk_jax.core.hopper_plan import (
    BufferSizes,
    ChunkRange,
    HopperPlan,
    backward_sizes,
    copied_chunk_bytes,
    matrix_rows,
    plan_of_sums,
    reads_in_place,
    sliced_plan,
    vocabulary_of,
)
from rlk_jax.ops.linear_kl.options import KlConfig, OneHeadConfig


@dataclass(frozen=True)
class TwoPlans:
    """One pass over both heads: their slices have the same chunks, and each reads its head in place or copies it."""

    student: HopperPlan
    teacher: HopperPlan

    @property
    def product_rows(self) -> int:
        """Rows of the products of a slice, which kernels read 64 at a time."""
        return product_rows(self.student.tokens)

    def teacher_range(self, chunks: ChunkRange) -> ChunkRange:
        """The teacher's range of the chunks of one of the student's."""
        return self.teacher.ranges[self.student.ranges.index(chunks)]


def product_rows(tokens: int) -> int:
    """Rows of the products with a head for so many tokens."""
    return padded(matrix_rows(tokens), BLOCK_ROWS)


def softmax_plan(head: HopperPlan) -> HopperPlan:
    """The plan of a pass over one head of a pair that holds no products: one slice where it is read in place."""
    in_place = 0 if _is_copied(head.config, head.dim) else vocabulary_of(head.config).chunks
    sizes = BufferSizes(0, copied_chunk_bytes(head.dim))
    return sliced_plan(head.config, head.dim, head.tokens, in_place, 0, sizes, 1)


def forward_plans(config: KlConfig, dims: tuple[int, int], tokens: int) -> TwoPlans:
    """The plan of a pass that holds products and, where a head is not read in place, copies."""
    student, teacher = head_configs(config, dims, tokens)
    in_place = 0 if _is_copied(student, dims[0]) else vocabulary_of(student).chunks
    sizes = BufferSizes(
        chunk=_teacher_chunk_bytes(teacher, dims[1], tokens),
        copy=copied_chunk_bytes(dims[0]),
        fixed=sum(_hidden_bytes(dim, tokens) for dim in dims) + _partial_bytes(student, tokens),
        wants_whole_rounds=True,
    )
    return _with_teacher(sliced_plan(student, dims[0], tokens, in_place, 0, sizes, 1), teacher, dims[1])


def backward_plans(config: KlConfig, dims: tuple[int, int], tokens: int, needs: Needs, dtype: Any) -> TwoPlans:
    """The plan of a pass that also holds the gradients of the student's logits, and what its sums take."""
    student, teacher = head_configs(config, dims, tokens)
    sizes = backward_sizes(student, dims[0], tokens, needs, dtype)
    chunk = sizes.chunk + _teacher_chunk_bytes(teacher, dims[1], tokens)
    fixed = sizes.fixed + _hidden_bytes(dims[1], tokens)
    sizes = replace(sizes, chunk=chunk, fixed=fixed, wants_whole_rounds=True)
    return _with_teacher(plan_of_sums(student, dims[0], tokens, sizes, needs), teacher, dims[1])


def head_configs(config: KlConfig, dims: tuple[int, int], tokens: int) -> tuple[HeadConfig, HeadConfig]:
    """What the kernels of each head are compiled for. Both have the budget of the call."""

    def of_head(head: OneHeadConfig) -> HeadConfig:
        return HeadConfig(
            head.vocab_size,
            head.real_vocab_size,
            head.logit_softcap,
            return_lse=False,
            return_entropy=False,
            groups=config.groups,
            weight_layout=head.weight_layout,
            may_ignore=True,
            memory_budget=config.memory_budget,
        )

    assert config.teacher is not None
    student, teacher = of_head(config.student), of_head(config.teacher)
    budget = kernel_memory_budget(student, sum(dims), tokens)
    return replace(student, memory_budget=budget), replace(teacher, memory_budget=budget)


def _is_copied(head: HeadConfig, dim: int) -> bool:
    """Whether products with a head are taken with copies of its slices."""
    return not reads_in_place(head, dim) or dim % 8 != 0


def _teacher_chunk_bytes(teacher: HeadConfig, dim: int, tokens: int) -> int:
    """Bytes of one chunk of the float32 products with both heads, and of a copied teacher's head."""
    products = 2 * 4 * COLUMNS * product_rows(tokens)
    return products + (copied_chunk_bytes(dim) if _is_copied(teacher, dim) else 0)


def _hidden_bytes(dim: int, tokens: int) -> int:
    """Bytes of the compacted rows of hidden states."""
    return 2 * matrix_rows(tokens) * padded(dim, DEPTH)


def _partial_bytes(head: HeadConfig, tokens: int) -> int:
    """Bytes of the partials of a divergence, float32 for each row and chunk."""
    fields = len(DivergencePartials._fields)
    return 4 * fields * vocabulary_of(head).chunks * padded(matrix_rows(tokens), THREADS)


def _with_teacher(student: HopperPlan, teacher: HeadConfig, dim: int) -> TwoPlans:
    """The student's plan, and the same slices of the teacher's head."""
    ranges = tuple(replace(x, copied=_is_copied(teacher, dim)) for x in student.ranges)
    return TwoPlans(student, HopperPlan(teacher, dim, student.tokens, ranges))
