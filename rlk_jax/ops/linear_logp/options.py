"""What a call of linear_logp carries: its options, its arrays, and what every implementation takes and gives.

An implementation is three functions (`LinearLogpFunctions`): `partials` gives the softmax over its groups of columns,
`merge` makes values and residuals of those of the whole vocabulary, `gradients` turns upstream gradients into those of
the operands. All see flat tokens `[N]`, N >= 0, and one weight: a whole head, or one device's shard of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlk_jax.core.exports import exportable
from rlk_jax.core.gemm import Gemm, WeightLayout
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands
from rlk_jax.core.shard import Gather, ShardOptions
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.ops.linear_logp.ranking import BestColumns, Ranking, as_integers, best_of_shards, counted_from

Array = jax.Array


@dataclass(frozen=True)
class HeadOptions(ShardOptions):
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

    Both take the residual that `merge` gave, and `best` the state that `partials` gave before it. `best` finds the best
    of this weight's columns, and is given the targets' logits, too, where `own_targets` gives any. `logps` makes
    log-probs of the logits `[N, k]` that `best` compared, with the bits that `merge` gives a target of that logit,
    where bits are promised.
    """

    best: Callable[[HeadConfig, Operands, Tokens, Any, Any, Array | None], BestColumns]
    logps: Callable[[HeadConfig, Tokens, Any, Array], Array]
    own_targets: Callable[[Any], Array | None] = lambda state: None
    """The targets' logits `[N]` as `best` compares them, of the state that `partials` gave: 0 for a target that is no
    column of this weight, so that those of all shards add up to the whole. None where the residual has them.
    """


class Forward(NamedTuple):
    """What a forward gives: the values, and the ranking or None, of the whole vocabulary; a residual with a row per
    token; and what else is kept for a backward, or None.
    """

    values: LinearLogp
    ranking: Ranking | None
    residual: Any
    kept: Any


@dataclass(frozen=True)
class LinearLogpFunctions:
    """One implementation, on one device.

    `partials` gives partial softmaxes `[groups, rows]` and a state. `merge` is given the groups of all devices and that
    state; it gives values, a residual with a row `[N]` per token, and what else is kept for `gradients` of the same
    tokens, or None. `gradients` is given both the residual and what was kept. `gemm` multiplies the matrices of a
    low-rank term, and keeps the bits of its rows as the others do. `of_ranking` finds the most probable tokens.
    """

    partials: Callable[[HeadConfig, Operands, Tokens], tuple[Any, Any]]
    merge: Callable[[HeadConfig, Any, Any], tuple[LinearLogp, Any, Any]]
    gradients: Callable[[HeadConfig, Needs, Operands, Tokens, Any, Any, LinearLogp], Gradients]
    gemm: Gemm
    of_ranking: RankingFunctions
    of_blocks: BlockFunctions | None = None
    """What works on blocks of tokens; None where nothing does."""
    by_group: bool = True
    """Whether `partials` gives one partial softmax for each group of the config; else it gives one for all columns."""

    def forward(self, config: HeadConfig, operands: Operands, tokens: Tokens, gather: Gather) -> Forward:
        """What `merge` gives, once `gather` has brought the groups of other devices, and the ranking that is wanted."""
        groups, state = self.partials(config, operands, tokens)
        values, residual, kept = self.merge(config, gather(groups), state)
        ranking = None
        if config.ranking is not None:
            ranking = self._ranking(config, operands, tokens, state, residual, gather)
        return Forward(values, ranking, residual, kept)

    def _ranking(
        self, config: HeadConfig, operands: Operands, tokens: Tokens, state: Any, residual: Any, gather: Gather
    ) -> Ranking:
        """Which tokens of the whole vocabulary are the most probable."""
        targets = self.of_ranking.own_targets(state)
        if targets is not None:
            targets = gather((targets[None],))[0].sum(axis=0)
        own = self.of_ranking.best(config, operands, tokens, state, residual, targets)
        return self.ranking_of(config, tokens, residual, _of_all_shards(as_integers(own), config.vocab_size, gather))

    def ranking_of(self, config: HeadConfig, tokens: Tokens, residual: Any, shards: BestColumns) -> Ranking:
        """The ranking that the best columns of all shards make, as `best_of_shards` takes them."""
        whole = best_of_shards(shards)
        logps = None if whole.logits is None else self.of_ranking.logps(config, tokens, residual, whole.logits)
        return Ranking(whole.ids, logps, whole.before)


def _of_all_shards(own: BestColumns, columns: int, gather: Gather) -> BestColumns:
    """The best `[shards, ...]` of shards of so many columns each, from those of one of them, whose ids count from its
    first column.
    """
    before = None if own.before is None else gather((own.before[None],))[0]
    if own.logits is None or own.ids is None:
        return BestColumns(None, None, before)
    bits, ids = gather((own.logits[None], own.ids[None]))
    return counted_from(BestColumns(bits, ids, before), columns * jnp.arange(len(ids), dtype=jnp.int32)[:, None, None])


@dataclass(frozen=True)
class HeadFunctions:
    """One implementation, for a whole head however it lies over the devices of a program."""

    forward: Callable[[HeadConfig, Operands, Tokens, Gather], Forward]
    gradients: Callable[[HeadConfig, Needs, Operands, Tokens, Any, Any, LinearLogp], Gradients]
    on_device: LinearLogpFunctions
    """The functions of one device, for callers that shard the head and gather by other means than a mesh axis."""

    @property
    def gemm(self) -> Gemm:
        """What multiplies the matrices of a low-rank term, on one device."""
        return self.on_device.gemm
