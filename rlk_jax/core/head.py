"""A language-model head as its kernels see it: static facts, arrays, gradients, and the bytes that kernels may take.

Ops that multiply hidden states by a head share this.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax

from rlk_jax.core.fixed_order import ColumnGroups
from rlk_jax.core.gemm import WeightLayout
from rlk_jax.core.softmax import SoftmaxConfig

Array = jax.Array

KERNEL_MEMORY_BUDGET = 512 * 2**20
"""Default bytes that kernels take for a slice's gradients of logits and what they hold beside them, or more for many
rows: see `kernel_memory_budget`."""
_LEAST_COLUMNS = 4096
"""Columns of a slice that a default budget has room for, however many rows there are, and for which a smaller budget is
exceeded: see `room_for_slices`. Padding of sums and a second copy in float16 take a quarter of it at most. Every slice
reads and writes a float32 sum of dH. With so many columns that costs about 1/16 of the products, with fewer more."""


@dataclass(frozen=True)
class RankingConfig:
    """What is wanted of a ranking."""

    top_k: int | None
    """How many of the most probable tokens; None for none."""
    has_target_rank: bool


@dataclass(frozen=True)
class HeadConfig(SoftmaxConfig):
    """The static facts of one call that an implementation is compiled for; a column is one of this weight's logits."""

    groups: ColumnGroups
    weight_layout: WeightLayout
    may_ignore: bool
    """Whether tokens may be ignored; without an ignore_index, an implementation need not look for any."""
    memory_budget: int | None
    """Bytes for the logits and gradients that an implementation holds at a time; None for its own default."""
    is_shard: bool = False
    """Whether the weight is one rank's part of a head. dH is then float32 sums `[parts, N, D]`, for a reduction."""
    sums_by_group: bool = False
    """Whether a shard gives one sum of dH for each of its groups, as reduction="canonical" needs, not one for all."""
    keeps: bool = False
    """Whether a backward will follow, for which the forward may keep some of what it computes."""
    rank: int = 0
    """The rank of the head's low-rank term; 0 without one."""
    hidden_parts: int = 1
    """In how many 16-bit parts tensor cores take hidden: two for float32, and for float16 beside float32."""
    weight_parts: int = 1
    """In how many 16-bit parts tensor cores take the weight."""
    has_mask: bool = False
    """Whether rows may not take all tokens."""
    ranking: RankingConfig | None = None
    """What is wanted of the order of tokens by their probability; None for nothing."""

    @property
    def logit_parts(self) -> int:
        """In how many 16-bit parts tensor cores take gradients of logits."""
        return max(self.hidden_parts, self.weight_parts)

    @property
    def hidden_gradient_parts(self) -> int:
        """How many float32 sums a shard gives of dH."""
        return self.groups.count if self.sums_by_group else 1


class Operands(NamedTuple):
    """hidden `[N, D]`, weight `[V, D]` ("vd") or `[D, V]` ("dv"), bias `[V]` or None.

    With a low-rank term, hidden has r more columns, scale·hidden·Aᵀ, whose factors are those of low_rank: B `[V, r]`
    ("vd") or `[r, V]` ("dv"). A product is then one sum over D and r, in this order.
    """

    hidden: Array
    weight: Array
    bias: Array | None
    low_rank: Array | None = None
    real_columns: Array | None = None
    """int32 scalar: how many columns are no padding, where only the device knows (a shard of a padded head)."""


@dataclass(frozen=True)
class Needs:
    """Which operands need a gradient; the others cost no work."""

    hidden: bool
    weight: bool
    bias: bool
    low_rank: bool = False


class Gradients(NamedTuple):
    """Gradients in their operands' shapes and dtypes; None where none is needed."""

    hidden: Array | None
    weight: Array | None
    bias: Array | None
    low_rank: Array | None = None

    def like(self, config: HeadConfig, operands: Operands) -> "Gradients":
        """The gradients in their operands' dtypes, without the columns by which kernels pad the rank.

        A shard's dH stays float32.
        """
        rounded = (None if g is None or x is None else g.astype(x.dtype) for g, x in zip(self, operands, strict=False))
        gradients = Gradients(*rounded)
        if gradients.low_rank is not None:
            axis = rank_axis(config.weight_layout)
            gradients = gradients._replace(low_rank=lax.slice_in_dim(gradients.low_rank, 0, config.rank, axis=axis))
        return gradients._replace(hidden=self.hidden) if config.is_shard else gradients


def rank_axis(layout: WeightLayout) -> int:
    """The axis of the rank in B of a low-rank term."""
    return 1 if layout == "vd" else 0


def head_dim(config: HeadConfig, operands: Operands) -> int:
    """D: how many of hidden's columns are multiplied by the weight."""
    return operands.hidden.shape[1] - config.rank


def real_columns(config: HeadConfig, operands: Operands) -> Any:
    """How many columns are real; all columns behind them are padding."""
    return config.real_vocab_size if operands.real_columns is None else operands.real_columns


def kernel_memory_budget(config: HeadConfig, dim: int, tokens: int) -> int:
    """The bytes that kernels may take: the call's own budget, or the default for this many tokens."""
    return config.memory_budget or _default_memory_budget(config, dim, tokens)


def _default_memory_budget(config: HeadConfig, dim: int, tokens: int) -> int:
    """The bytes that kernels may take where the call names none.

    They hold 8 bytes for each number of hidden, which are two copies in 16 bits, or one in two parts, and a float32 sum
    of dH. Beside them there is room for slices that are not too narrow.
    """
    return max(KERNEL_MEMORY_BUDGET, (8 * dim + 2 * config.logit_parts * _LEAST_COLUMNS) * tokens)


def least_columns(config: HeadConfig, dim: int, tokens: int) -> int:
    """Columns of a slice for which a chain of dH may exceed the budget: none, unless it is below the default."""
    is_small = kernel_memory_budget(config, dim, tokens) < _default_memory_budget(config, dim, tokens)
    return _LEAST_COLUMNS if is_small else 0


def room_for_slices(room: int, chain: int, least: int) -> int:
    """Bytes for slices of gradients, of `room` bytes that the budget has beside hidden.

    Slices leave room for one group's chain of dH. Where that leaves less than `least` bytes, the chain comes on top of
    the budget as far as these need it: each slice reads and writes the chain, and narrow ones do little else.
    """
    return max(room - chain, min(room, least))
