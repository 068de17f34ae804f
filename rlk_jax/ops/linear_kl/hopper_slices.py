"""What the kernels of linear_kl see on Hopper: rows of both hidden states, and slices of both heads."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.arrays import LogitsConfig, Softmax
from pallas_kernels.hopper.divergence import (
    DivergencePartials,
    GradientFactors,
    HeadRows,
    Kind,
    MixtureSums,
    RowNormalizer,
    TwoSlices,
)
from pallas_kernels.hopper.tiles import Machine
from rlk_jax.core.head import Operands
from rlk_jax.core.hopper_forward import ForwardPass, Listener
from rlk_jax.core.hopper_kernels import HeadKernels
from rlk_jax.core.hopper_plan import ChunkRange, HopperPlan, vocabulary_of
from rlk_jax.core.hopper_slices import HeadSlice, matrices, slice_of
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.shard import Gather
from rlk_jax.core.transforms import fusion_barrier
from rlk_jax.ops.linear_kl.hopper_plan import TwoPlans
from rlk_jax.ops.linear_kl.options import KlTokens, OneHead
from rlk_jax.ops.linear_kl.options import Operands as BothOperands

Array = jax.Array


class KlKernels(HeadKernels, Protocol):
    """The kernels that linear_kl needs beside those of a head; `pallas_kernels.mosaic.head_kernels` has them."""

    def divergence_partials(self, two: TwoSlices, out: DivergencePartials, /) -> None: ...

    def fold_divergence(
        self, partials: DivergencePartials, groups: int, active: Array, machine: Machine, /
    ) -> DivergencePartials: ...

    def mixture_sums(
        self,
        two: TwoSlices,
        share: float,
        normalizers: tuple[RowNormalizer, RowNormalizer],
        out: MixtureSums,
        /,
    ) -> None: ...

    def divergence_gradients(
        self,
        two: TwoSlices,
        kind: Kind,
        share: float,
        normalizers: tuple[RowNormalizer, RowNormalizer],
        factors: GradientFactors,
        out: Any,
        /,
    ) -> None: ...

    def fold_mixture(self, sums: MixtureSums, groups: int, active: Array, machine: Machine, /) -> MixtureSums: ...


class SliceOfHead(NamedTuple):
    """One slice of one head, how its products become logits, and what the kernels make both of."""

    part: HeadSlice
    logits: LogitsConfig
    rows: HeadRows


def two_slices(a: SliceOfHead, b: SliceOfHead, machine: Machine) -> TwoSlices:
    """One slice of both, for a kernel."""
    return TwoSlices((a.logits, b.logits), (a.rows, b.rows), a.part.where, machine)


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

    def slices(self, chunks: ChunkRange, index: Any) -> tuple[SliceOfHead, SliceOfHead]:
        """Slice number `index` of a range of the student's plan, of student and teacher."""
        teacher = self._slice(self.teacher, self.plans.teacher_range(chunks), index)
        return self._slice(self.student, chunks, index), teacher

    def _slice(self, head: RowsOfHead, chunks: ChunkRange, index: Any) -> SliceOfHead:
        part = slice_of(head.plan, chunks, index, head.operands, self.rows)
        logits = LogitsConfig(part.head, head.plan.config.logit_softcap)
        return SliceOfHead(part, logits, HeadRows(head.hidden, part.weight, part.bias, head.temperature))


def both_rows(plans: TwoPlans, operands: BothOperands, tokens: KlTokens) -> BothRows:
    """The rows of all active tokens."""
    rows, real_columns = compact(tokens.active, plans.student.rows), operands.real_columns
    assert operands.teacher is not None
    student = rows_of_head(plans.student, rows, operands.student, tokens.temperature, real_columns)
    teacher = rows_of_head(plans.teacher, rows, operands.teacher, tokens.teacher_temperature, real_columns)
    return BothRows(plans, rows, student, teacher)


def rows_of_head(
    plan: HopperPlan, rows: Compacted, head: OneHead, temperature: Array, real_columns: Array | None = None
) -> RowsOfHead:
    """One head beside the rows of all active tokens."""
    own = Operands(*head, real_columns=real_columns)
    hidden = matrices(plan, rows, own.hidden)[0]
    return RowsOfHead(plan, own, hidden, fusion_barrier(rows.take(temperature, 1)))


def softmax_of(
    use: KlKernels,
    machine: Machine,
    head: RowsOfHead,
    rows: Compacted,
    gather: Gather = lambda groups: groups,
    *,
    allowed: Array | None = None,
    listener: Listener | None = None,
) -> Softmax:
    """The softmax of each row over one head, or over the columns that `allowed` has bits of. No row has a target."""
    plan = head.plan
    targets = jnp.full(plan.rows, -1, jnp.int32)
    holds_target = jnp.zeros((plan.rows // 64, vocabulary_of(plan.config).chunks), jnp.int32)
    of_rows = head.hidden, None, targets, holds_target, head.temperature, allowed
    one_pass = ForwardPass(plan, rows, head.operands, *of_rows)
    out = one_pass.new_partials()
    one_pass.run(use, machine, out, listener=listener)
    groups = use.fold_chunks(jax.tree.map(jax.freeze, out), plan.config.groups.count, rows.count, machine)
    return fusion_barrier(use.fold_groups(gather(groups), rows.count, machine))
