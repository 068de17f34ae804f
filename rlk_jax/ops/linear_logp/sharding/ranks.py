"""One rank's steps of linear_logp on a head whose vocabulary is shared by processes.

They serve callers that gather by other means than a mesh axis (`torch_bridge`): each step is a function of arrays, and
between steps the caller gathers. Partial softmaxes of all ranks are merged by the same tree as on a mesh.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlk_jax.core.allowed import words_from
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands
from rlk_jax.core.rank_columns import RankColumns
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.ops.linear_logp.options import LinearLogpFunctions
from rlk_jax.ops.linear_logp.ranking import BestColumns, Ranking, as_integers, counted_from, finished

Array = jax.Array


class RankState(NamedTuple):
    """What one rank's steps hand on: `partials` to `merge`, and `merge` to those behind it."""

    tokens: Tokens
    own: Any
    """What the implementation itself hands on."""


@dataclass(frozen=True)
class RankSteps:
    """One rank's steps, in order; `config` is that of its shard."""

    functions: LinearLogpFunctions
    config: HeadConfig
    columns: RankColumns
    rank: int

    def operands(self, hidden: Array, weight: Array, bias: Array | None) -> Operands:
        """The operands of this rank's shard."""
        real = self.columns.real_columns(self.rank)
        is_padded = real < self.config.vocab_size
        return Operands(hidden, weight, bias, real_columns=jnp.int32(real) if is_padded else None)

    def partials(self, operands: Operands, tokens: Tokens) -> tuple[Any, Array, RankState]:
        """The softmax over the rank's groups `[groups, rows]`, which tokens' targets it holds `[N]`, and a state.

        Ids of `tokens`, and what they may take, are of the whole vocabulary.
        """
        start, end = self.columns.ranges[self.rank]
        tokens = tokens._replace(
            target_ids=tokens.target_ids - start,
            allowed=None if tokens.allowed is None else words_from(tokens.allowed, jnp.int32(start), end - start),
        )
        groups, own = self.functions.partials(self.config, operands, tokens)
        is_here = (tokens.target_ids >= 0) & (tokens.target_ids < self.columns.real_columns(self.rank))
        return groups, is_here, RankState(tokens, own)

    def merge(self, groups: Any, owners: Array, state: RankState) -> tuple[LinearLogp, RankState]:
        """The values, from all ranks' groups in the order of the vocabulary.

        owners `[N]` counts the ranks that hold a token's target; values are NaN unless exactly one does.
        """
        tokens, own = state
        values, residual, kept = self.functions.merge(self.config, groups, own)
        covered = owners == 1
        values = jax.tree.map(lambda x: jnp.where(tokens.active, jnp.where(covered, x, jnp.nan), 0), values)
        tokens = tokens._replace(temperature=jnp.where(covered, tokens.temperature, jnp.nan))
        return values, RankState(tokens, (residual, kept))

    def own_targets(self, state: RankState) -> Array | None:
        """What `best` must know the sum of over all ranks: the targets' logits `[N]` that this rank has, or None."""
        return self.functions.of_ranking.own_targets(state.own)

    def best(self, operands: Operands, state: RankState, merged: RankState, targets: Array | None) -> BestColumns:
        """The best of this rank's columns, counted from the first one of the vocabulary, `as_integers`.

        `state` is what `merge` was given, and `merged` what it gave.
        """
        residual, _ = merged.own
        best = self.functions.of_ranking.best(self.config, operands, state.tokens, state.own, residual, targets)
        return as_integers(counted_from(best, self.columns.ranges[self.rank][0]))

    def ranking(self, ranks: BestColumns, logp: Array, state: RankState) -> Ranking:
        """The ranking, from the best of all ranks `[ranks, ...]` in the order of the vocabulary, and from the log-probs
        of the targets and the state that `merge` gave.
        """
        tokens, (residual, _) = state
        return finished(self.functions.ranking_of(self.config, tokens, residual, ranks), logp, tokens.active)

    def gradients(self, needs: Needs, operands: Operands, state: RankState, upstream: LinearLogp) -> Gradients:
        """The rank's float32 part of dH `[1, N, D]`, and dW and db of its own columns."""
        tokens, (residual, kept) = state
        tokens = tokens.with_upstream(upstream)
        return self.functions.gradients(self.config, needs, operands, tokens, residual, kept, upstream)
