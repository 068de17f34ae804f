"""What a call of linear_kl carries: its options, its arrays, and what every implementation takes and gives.

Implementations see flat tokens `[N]`, N >= 1, and two heads of one vocabulary, whole or one device's shards of both, or
one head or a shard of it and what the teacher lists.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from rlk_jax.core.fixed_order import ColumnGroups
from rlk_jax.core.gemm import WeightLayout
from rlk_jax.core.head import HeadConfig
from rlk_jax.core.rank_columns import RankColumns
from rlk_jax.core.shard import Gather, Shard, ShardOptions
from rlk_jax.core.softmax import SoftmaxConfig

Array = jax.Array
DivergenceKind = Literal["forward", "reverse", "jsd"]


class KlInputs(NamedTuple):
    """One call's arrays as the user shaped them: hidden states `[*lead, D]` and `[*lead, Dt]`, heads, biases `[V]` or
    None, the mask `[*lead]` or None, temperatures `[]` or `[*lead]`; None for a teacher's that is the student's. A
    teacher has a head, or ids and log-probs `[*lead, k]`.
    """

    hidden: Any
    lm_head_weight: Any
    teacher_hidden: Any
    teacher_weight: Any
    bias: Any
    teacher_bias: Any
    completion_mask: Any
    temperature: Any
    teacher_temperature: Any
    teacher_ids: Any
    teacher_logps: Any


@dataclass(frozen=True)
class KlOptions(ShardOptions):
    """The options of one call as the user gave them: every static keyword of `linear_kl`, which documents them."""

    kind: DivergenceKind = "forward"
    beta: float = 0.5
    logit_softcap: float | None = None
    teacher_logit_softcap: float | None = None
    weight_layout: WeightLayout = "vd"
    teacher_weight_layout: WeightLayout = "vd"
    global_vocab_size: int | None = None
    teacher_global_vocab_size: int | None = None
    memory_budget: int | None = None
    validate: bool | None = None
    implementation: str | None = None


@dataclass(frozen=True)
class OneHeadConfig(SoftmaxConfig):
    """The static facts of one of the two heads."""

    weight_layout: WeightLayout

    @property
    def vocab_axis(self) -> int:
        """The axis of the weight that is the vocabulary."""
        return 0 if self.weight_layout == "vd" else 1


@dataclass(frozen=True)
class KlConfig:
    """The static facts of one call that an implementation is compiled for. Both heads have one true vocabulary.

    The teacher is None where it has no head.
    """

    kind: DivergenceKind
    beta: float
    """The teacher's share of the mixture, above 0 and below 1; only kind "jsd" has one."""
    student: OneHeadConfig
    teacher: OneHeadConfig | None
    memory_budget: int | None
    """Bytes for the logits and gradients that an implementation holds at a time; None for its own default."""
    groups: ColumnGroups
    """The groups of columns that sums in a fixed order go by."""
    vocabulary: int
    """How many tokens both heads share, of which a shard holds some."""
    is_shard: bool = False
    """Whether the heads are one rank's shards. dH is then float32 sums `[parts, N, D]`, for a reduction."""
    sums_by_group: bool = False
    """Whether a shard gives one sum of dH for each of its groups, as reduction="canonical" needs, not one for all."""
    gathers_outside_loops: bool = False
    """Whether the forward may gather for all tokens at once only, as callers need whose programs end at a gather."""

    @property
    def real_vocab_size(self) -> int:
        """The columns of the vocabulary that both heads share; those behind them are padding. In a shard, the least
        number that any shard has.
        """
        return self.student.real_vocab_size

    def of_kernels(self, head: OneHeadConfig) -> HeadConfig:
        """What kernels that know one head are compiled for. The budget is that of the call."""
        return HeadConfig(
            head.vocab_size,
            head.real_vocab_size,
            head.logit_softcap,
            return_lse=False,
            return_entropy=False,
            groups=self.groups,
            is_shard=self.is_shard,
            sums_by_group=self.sums_by_group,
            weight_layout=head.weight_layout,
            may_ignore=True,
            memory_budget=self.memory_budget,
        )

    def of_shard(self, shard: Shard) -> "KlConfig":
        """What an implementation is compiled for on this shard of both heads."""
        cut = self._cut(shard.columns, shard.least_real_columns, shard.groups)
        return replace(cut, sums_by_group=shard.reduction == "canonical")

    def of_rank(self, columns: RankColumns, rank: int) -> "KlConfig":
        """What an implementation is compiled for on the shards of both heads that one process holds."""
        start, end = columns.ranges[rank]
        cut = self._cut(end - start, columns.real_columns(rank), columns.groups(rank))
        return replace(cut, gathers_outside_loops=True)

    def _cut(self, columns: int, real_columns: int, groups: ColumnGroups) -> "KlConfig":
        """The config of shards of so many columns of both heads."""

        def cut(head: OneHeadConfig) -> OneHeadConfig:
            return replace(head, vocab_size=columns, real_vocab_size=real_columns)

        teacher = None if self.teacher is None else cut(self.teacher)
        return replace(self, student=cut(self.student), teacher=teacher, groups=groups, is_shard=True)


class OneHead(NamedTuple):
    """hidden `[N, D]`, weight `[V, D]` ("vd") or `[D, V]` ("dv"), bias `[V]` or None, of student or teacher."""

    hidden: Any
    weight: Array
    bias: Array | None


class Operands(NamedTuple):
    """The arrays of both. Only the student's get gradients. The teacher is None where it has no head."""

    student: OneHead
    teacher: OneHead | None
    real_columns: Array | None = None
    """int32 scalar: how many columns of both are no padding, where only the device knows (shards of padded heads)."""

    def count_real(self, config: KlConfig) -> Any:
        """How many columns are no padding."""
        return config.real_vocab_size if self.real_columns is None else self.real_columns


def dims_of(operands: Operands) -> tuple[int, int]:
    """The widths of student and teacher."""
    assert operands.teacher is not None
    return operands.student.hidden.shape[1], operands.teacher.hidden.shape[1]


class TeacherTopK(NamedTuple):
    """Tokens that a teacher lists, and their log-probs under it: int32 and float32 `[N, k]`.

    `ids` are columns of the student's head, or of the shard of it that this device holds; −1 is none of these. The
    columns of a row are in range and distinct. What is not listed has the log-prob −inf.
    """

    ids: Array
    logps: Array
    is_listed: Array
    """Whether the token stands on any device."""

    def of_shard(self, start: Array | int, columns: int) -> "TeacherTopK":
        """The list of whole heads beside a shard that has so many columns from `start` on."""
        ids = self.ids - start
        return self._replace(ids=jnp.where(self.is_listed & (ids >= 0) & (ids < columns), ids, -1))


class KlTokens(NamedTuple):
    """One row per token `[N]`: both temperatures, float32, of which NaN poisons the row; whether it counts; and what
    the teacher lists, or None for a teacher that has a head.
    """

    temperature: Array
    teacher_temperature: Array
    active: Array
    top_k: TeacherTopK | None = None


@dataclass(frozen=True)
class Needs:
    """Which operands of the student need a gradient; the others cost no work."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients in the shapes and dtypes of the student's operands; None where none is needed."""

    hidden: Array | None
    weight: Array | None
    bias: Array | None

    def like(self, config: KlConfig, head: OneHead) -> "Gradients":
        """The gradients in the dtypes of a head. A shard's dH stays float32."""
        rounded = Gradients(*(None if g is None else g.astype(x.dtype) for g, x in zip(self, head, strict=True)))
        return rounded._replace(hidden=self.hidden) if config.is_shard else rounded


@dataclass(frozen=True)
class KlFunctions:
    """One implementation. `forward` gives the divergence `[N]` in float32, and a tree of arrays `[N]` that `gradients`
    is given along with the upstream gradient `[N]`. Its last argument brings the groups of other devices; it may gather
    in loops over tokens, which are the same on every device, unless the config says otherwise.
    """

    forward: Callable[[KlConfig, Operands, KlTokens, Gather], tuple[Array, Any]]
    gradients: Callable[[KlConfig, Needs, Operands, KlTokens, Any, Array], Gradients]
    by_group: bool = True
    """Whether it gathers one row for each group of the config; else one for all columns."""
