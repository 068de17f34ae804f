"""What the kernels of linear_kl see on Hopper: rows of both hidden states, and slices of both heads."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import LogitsConfig, SliceProducts, Softmax, new_partials
from pallas_kernels.hopper.divergence import (
    DivergencePartials,
    GradientFactors,
    HeadRows,
    Kind,
    MixtureSums,
    RowNormalizer,
    TwoSlices,
)
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from pallas_kernels.logits import LN_2
from rlk_jax.core.fixed_order import rounded_product
from rlk_jax.core.head import Operands, real_columns
from rlk_jax.core.hopper_forward import ForwardPass, Listener
from rlk_jax.core.hopper_kernels import HeadKernels
from rlk_jax.core.hopper_plan import ChunkRange, HopperPlan, vocabulary_of
from rlk_jax.core.hopper_slices import HeadSlice, matrices, slice_of
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.shard import Gather
from rlk_jax.core.softmax import logits_of
from rlk_jax.core.transforms import fusion_barrier
from rlk_jax.ops.linear_kl.divergence import Normalizer, SliceLogits
from rlk_jax.ops.linear_kl.hopper_plan import TwoPlans, softmax_plan
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

    def over_one_head(self) -> tuple[RowsOfHead, RowsOfHead]:
        """Student and teacher for a pass over one of both heads."""
        student, teacher = self.student, self.teacher
        return (
            replace(student, plan=softmax_plan(student.plan, teacher.plan)),
            replace(teacher, plan=softmax_plan(teacher.plan, student.plan)),
        )

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


def _no_targets(plan: HopperPlan) -> tuple[Array, Array]:
    """The target of each row, and which blocks of rows have one in which chunk: none has any."""
    blocks = plan.rows // 64, vocabulary_of(plan.config).chunks
    return jnp.full(plan.rows, -1, jnp.int32), jnp.zeros(blocks, jnp.int32)


def softmax_of(
    use: HeadKernels,
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
    of_rows = head.hidden, None, *_no_targets(plan), head.temperature, allowed
    one_pass = ForwardPass(plan, rows, head.operands, *of_rows)
    out = one_pass.new_partials()
    one_pass.run(use, machine, out, listener=listener)
    groups = use.fold_chunks(jax.tree.map(jax.freeze, out), plan.config.groups.count, rows.count, machine)
    return fusion_barrier(use.fold_groups(gather(groups), rows.count, machine))


def normalizer_of_softmax(softmax: Softmax) -> Normalizer:
    """ln Σ exp z of rows whose sum is total·2^shift."""
    return Normalizer(rounded_product(softmax.shift, jnp.float32(LN_2)), jnp.log(softmax.total))


def logits_of_slice(use: HeadKernels, machine: Machine, head: RowsOfHead, own: SliceOfHead) -> SliceLogits:
    """The logits of all rows `[matrix rows, slice's places]`, of products that a kernel brings to memory."""
    plan, places = head.plan, own.part.columns.size
    shape = (places // COLUMNS, plan.rows)
    products = SliceProducts(*(jax.new_ref(lax.empty(x, jnp.float32)) for x in ((plan.matrix_rows, places), shape)))
    has_softcap = plan.config.logit_softcap is not None
    of_chunks = vocabulary_of(plan.config).chunks, plan.rows
    partials = new_partials(of_chunks, with_gap=False, with_derivative=has_softcap)
    of_head = own.part.where, own.rows.hidden, own.rows.weight, own.rows.bias
    use.partials(
        own.logits, machine, *of_head, *_no_targets(plan), own.rows.temperature, partials, None, None, products
    )
    raw = fusion_barrier(jax.freeze(products.values))
    columns, end = own.part.columns[None], real_columns(plan.config, head.operands)
    no_bias, temperature = jnp.zeros((1, 1), jnp.float32), head.temperature[: plan.matrix_rows]
    return SliceLogits(columns < end, raw, logits_of(plan.config, raw, no_bias, temperature, columns, end))
