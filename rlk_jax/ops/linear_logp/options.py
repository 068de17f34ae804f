"""What a call of linear_logp carries: its options, its arrays, and what every implementation takes and gives.

An implementation is three functions (`LinearLogpFunctions`): `partials` gives the softmax over its groups of columns,
`merge` makes values and residuals of those of the whole vocabulary, `gradients` turns upstream gradients into those of
the operands. All see flat tokens `[N]`, N >= 0, and one weight: a whole head, or one device's shard of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from rlk_jax.core.exports import exportable
from rlk_jax.core.fixed_order import ColumnGroups
from rlk_jax.core.gemm import Gemm, WeightLayout
from rlk_jax.core.mesh import AxisName
from rlk_jax.core.softmax import SoftmaxConfig
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.ops.linear_logp.ranking import BestColumns, Gather, Ranking, RankingConfig, best_of_shards

Array = jax.Array
Reduction = Literal["sum", "canonical"]

KERNEL_MEMORY_BUDGET = 512 * 2**20
"""Default bytes that kernels take for a slice's gradients of logits and the copies beside them; three times
the bytes of hidden where those are more.
"""


@dataclass(frozen=True)
class HeadOptions:
    """The options of one call as the user gave them: every static keyword of `linear_logp`, which documents them, and
    the label smoothing of `linear_cross_entropy`.
    """

    logit_softcap: float | None = None
    ignore_index: int | None = None
    global_vocab_size: int | None = None
    weight_layout: WeightLayout = "vd"
    return_lse: bool = False
    return_entropy: bool = False
    return_top_k: int | None = None
    return_target_rank: bool = False
    axis_name: AxisName | None = None
    reduction: Reduction = "sum"
    reduce_hidden_grad: bool = True
    memory_budget: int | None = None
    validate: bool | None = None
    implementation: str | None = None
    label_smoothing: float = 0.0


@exportable
class LowRank(NamedTuple):
    """A low-rank term of the head (LoRA): logits are those of W + scale·B·A.

    a is `[r, D]` and b `[V, r]` beside a head `[V, D]`, and `[D, r]` and `[r, V]` beside a head `[D, V]`; scale is a
    number or a scalar array, and is not differentiated. `inputs`, `[*lead, D]`, is what A is applied to where that is
    not hidden, as under dropout.
    """

    a: Any
    b: Any
    scale: Any = 1.0
    inputs: Any = None


class HeadInputs(NamedTuple):
    """One call's arrays as the user shaped them; hidden `[*lead, D]`, ids `[*lead]`, temperature `[]` or `[*lead]`.

    Those of a low-rank term, and what is allowed, are None where there is none.
    """

    hidden: Any
    lm_head_weight: Any
    target_ids: Any
    bias: Any
    temperature: Any
    low_rank_a: Any = None
    low_rank_b: Any = None
    low_rank_scale: Any = None
    low_rank_inputs: Any = None
    allowed_ids: Any = None
    allowed_mask: Any = None


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


@dataclass(frozen=True)
class TokenBlocks:
    """A plan to work on blocks of tokens one after the other, on each from the forward to the gradients."""

    rows: int
    """How many tokens a block has at most."""
    count: int
    """How many blocks there are at most."""
    length: int = 1
    """How many tokens a sequence has. A block ends with a sequence; 1 lets it end anywhere."""
    multiple: int = 1
    """Sums over tokens go on from block to block at multiples of so many active tokens."""

    def __str__(self) -> str:
        if self.length == 1:
            return f"{self.count} blocks of {self.rows} tokens"
        return f"up to {self.count} blocks of whole sequences, within {self.rows} tokens"


@dataclass(frozen=True)
class BlockFunctions:
    """What an implementation has beside `LinearLogpFunctions` to work on one block of tokens after the other.

    `plan(config, dim, tokens, length, dtype)` is the plan that the memory budget leads to, or the reason for none; the
    gradient of a token is known with the log-probs of its sequence of `length` tokens.
    `config(config, dim, tokens)` is what a block's forward and gradients are compiled for. `start` makes the sums of dW
    and db over no tokens. `add` takes what `gradients` does and the sums so far; it gives the block's dH, float32
    `[N, D]` or None, and the sums with the block added. `complete` makes float32 gradients of weight and bias of the
    sums over all blocks.
    """

    plan: Callable[[HeadConfig, int, int, int, Any], TokenBlocks | str]
    config: Callable[[HeadConfig, int, int], HeadConfig]
    start: Callable[[HeadConfig, Needs, Operands], Any]
    add: Callable[[HeadConfig, Needs, Operands, Tokens, Any, Any, LinearLogp, Any], tuple[Array | None, Any]]
    complete: Callable[[HeadConfig, Operands, Any], Gradients]


@dataclass(frozen=True)
class RankingFunctions:
    """What an implementation has beside `LinearLogpFunctions` to find the most probable tokens.

    Both take the residual that `merge` gave. `best` finds the best of this weight's columns, and may gather what it
    must know of other shards. `logps` makes log-probs of the logits `[N, k]` that `best` compared, with the bits that
    `merge` gives a target of that logit, where bits are promised.
    """

    best: Callable[[HeadConfig, Operands, Tokens, Any, Gather], BestColumns]
    logps: Callable[[HeadConfig, Tokens, Any, Array], Array]


@dataclass(frozen=True)
class LinearLogpFunctions:
    """One implementation, on one device.

    `partials` gives partial softmaxes `[groups, rows]` and a state. `merge` is given the groups of all devices and that
    state; it gives values, a residual with a row `[N]` per token, and what else is kept for `gradients` of the same
    tokens, or None. `gradients` is given both the residual and what was kept. `gemm` multiplies the matrices of a
    low-rank term, and keeps the bits of its rows as the others do.
    """

    partials: Callable[[HeadConfig, Operands, Tokens], tuple[Any, Any]]
    merge: Callable[[HeadConfig, Any, Any], tuple[LinearLogp, Any, Any]]
    gradients: Callable[[HeadConfig, Needs, Operands, Tokens, Any, Any, LinearLogp], Gradients]
    gemm: Gemm
    of_blocks: BlockFunctions | None = None
    """What works on blocks of tokens; None where nothing does."""
    of_ranking: RankingFunctions | None = None
    """What finds the most probable tokens; None where nothing does."""

    def forward(
        self, config: HeadConfig, operands: Operands, tokens: Tokens, gather: Gather
    ) -> tuple[LinearLogp, Any, Any]:
        """What `merge` gives, once `gather` has brought the groups of other devices."""
        groups, state = self.partials(config, operands, tokens)
        return self.merge(config, gather(groups), state)

    def ranking(self, config: HeadConfig, operands: Operands, tokens: Tokens, residual: Any, gather: Gather) -> Ranking:
        """Which tokens of the whole vocabulary are the most probable, given what `merge` gave as a residual."""
        assert self.of_ranking is not None
        own = self.of_ranking.best(config, operands, tokens, residual, gather)
        whole = best_of_shards(own, config.vocab_size, gather)
        logps = None if whole.logits is None else self.of_ranking.logps(config, tokens, residual, whole.logits)
        return Ranking(whole.ids, logps, whole.before)


@dataclass(frozen=True)
class HeadFunctions:
    """One implementation, for a whole head however it lies over the devices of a program."""

    forward: Callable[[HeadConfig, Operands, Tokens, Gather], tuple[LinearLogp, Any, Any]]
    gradients: Callable[[HeadConfig, Needs, Operands, Tokens, Any, Any, LinearLogp], Gradients]
    ranking: Callable[[HeadConfig, Operands, Tokens, Any, Gather], Ranking]
    on_device: LinearLogpFunctions
    """The functions of one device, for callers that shard the head and gather by other means than a mesh axis."""

    @property
    def gemm(self) -> Gemm:
        """What multiplies the matrices of a low-rank term, on one device."""
        return self.on_device.gemm


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
    return config.memory_budget or max(KERNEL_MEMORY_BUDGET, 3 * 2 * config.hidden_parts * dim * tokens)
