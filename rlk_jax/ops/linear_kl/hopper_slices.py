"""What the kernels of linear_kl see on Hopper: rows of both hidden states, and slices of both heads."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import LogitsConfig, VocabSlice
from pallas_kernels.hopper.divergence import (
    DivergencePartials,
    GradientFactors,
    HeadProducts,
    Kind,
    MixtureSums,
    RowNormalizer,
    TwoLogits,
)
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from pallas_kernels.hopper.vocabulary import HeadAccess
from rlk_jax.core.head import Operands
from rlk_jax.core.hopper_kernels import HeadKernels
from rlk_jax.core.hopper_plan import ChunkRange, HopperPlan
from rlk_jax.core.hopper_slices import HeadSlice, matrices, slice_of
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.transforms import fusion_barrier
from rlk_jax.ops.linear_kl.hopper_plan import TwoPlans
from rlk_jax.ops.linear_kl.options import KlTokens, OneHead
from rlk_jax.ops.linear_kl.options import Operands as BothOperands

Array = jax.Array


class KlKernels(HeadKernels, Protocol):
    """The kernels that linear_kl needs beside those of a head; `pallas_kernels.mosaic.head_kernels` has them."""

    def head_products(
        self, head: HeadAccess, machine: Machine, where: VocabSlice, hidden: Array, weight: Array, out: Any, /
    ) -> None: ...

    def divergence_partials(
        self,
        logits: TwoLogits,
        machine: Machine,
        where: VocabSlice,
        a: HeadProducts,
        b: HeadProducts,
        out: DivergencePartials,
        /,
    ) -> None: ...

    def fold_divergence(
        self, partials: DivergencePartials, groups: int, active: Array, machine: Machine, /
    ) -> DivergencePartials: ...

    def mixture_sums(
        self,
        logits: TwoLogits,
        share: float,
        machine: Machine,
        where: VocabSlice,
        products: tuple[HeadProducts, HeadProducts],
        normalizers: tuple[RowNormalizer, RowNormalizer],
        out: MixtureSums,
        /,
    ) -> None: ...

    def divergence_gradients(
        self,
        logits: TwoLogits,
        kind: Kind,
        share: float,
        machine: Machine,
        where: VocabSlice,
        products: tuple[HeadProducts, HeadProducts],
        normalizers: tuple[RowNormalizer, RowNormalizer],
        factors: GradientFactors,
        out: Any,
        /,
    ) -> None: ...

    def fold_mixture(self, sums: MixtureSums, groups: int, active: Array, machine: Machine, /) -> MixtureSums: ...


class HeadSliceProducts(NamedTuple):
    """One slice of one head, how its products become logits, and the products of all rows."""

    part: HeadSlice
    logits: LogitsConfig
    products: HeadProducts


@dataclass(frozen=True)
class RowsOfHead:
    """A head beside the compacted rows of its hidden states, and their temperatures."""

    plan: HopperPlan
    operands: Operands
    hidden: Array
    temperature: Array


@dataclass(frozen=True)
class BothRows:
    """The compacted rows of a call's active tokens, as the kernels see them."""

    plans: TwoPlans
    rows: Compacted
    student: RowsOfHead
    teacher: RowsOfHead

    def products(
        self, use: KlKernels, machine: Machine, chunks: ChunkRange, index: Any
    ) -> tuple[HeadSliceProducts, HeadSliceProducts]:
        """The products of student and teacher in slice number `index` of a range of the student's plan."""
        ranges = chunks, self.plans.teacher_range(chunks)
        student, teacher = (
            self._of_head(use, machine, head, of_head, index)
            for head, of_head in zip((self.student, self.teacher), ranges, strict=True)
        )
        return student, teacher

    def _of_head(
        self, use: KlKernels, machine: Machine, head: RowsOfHead, chunks: ChunkRange, index: Any
    ) -> HeadSliceProducts:
        part = slice_of(head.plan, chunks, index, head.operands, self.rows)
        out = jax.new_ref(lax.empty((self.plans.product_rows, chunks.width * COLUMNS), jnp.float32))
        use.head_products(part.head, machine, part.where, head.hidden, part.weight, out)
        logits = LogitsConfig(part.head, head.plan.config.logit_softcap)
        return HeadSliceProducts(part, logits, HeadProducts(jax.freeze(out), part.bias, head.temperature))


def operands_of(head: OneHead | None) -> Operands:
    """A head as its kernels take it."""
    assert head is not None
    return Operands(*head)


def both_rows(plans: TwoPlans, operands: BothOperands, tokens: KlTokens) -> BothRows:
    """The rows of all active tokens."""
    rows = compact(tokens.active, plans.student.rows)

    def of_head(plan: HopperPlan, head: OneHead | None, temperature: Array) -> RowsOfHead:
        own = operands_of(head)
        hidden = matrices(plan, rows, own.hidden)[0]
        return RowsOfHead(plan, own, hidden, fusion_barrier(rows.take(temperature, 1)))

    student = of_head(plans.student, operands.student, tokens.temperature)
    teacher = of_head(plans.teacher, operands.teacher, tokens.teacher_temperature)
    return BothRows(plans, rows, student, teacher)
