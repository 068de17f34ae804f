"""A head whose vocabulary is cut between processes at any columns, and one rank's steps of linear_logp.

For callers that gather by other means than a mesh axis (`torch_bridge`): each step is a function of arrays, and between
them the caller gathers. Partial softmaxes of all ranks are merged by the same tree as on a mesh.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlk_jax._problem import Array, Gradients, LinearLogp, LinearLogpFunctions, Needs, Operands, Options, Tokens
from rlk_jax._tree import GROUPS, Tree, tree


@dataclass(frozen=True)
class Cut:
    """Which columns `[start, end)` each rank holds, by rank. Those from `vocab_size` on are padding."""

    ranges: tuple[tuple[int, int], ...]
    vocab_size: int

    def __str__(self) -> str:
        return f"shards of {', '.join(str(end - start) for start, end in self.ranges)} columns"

    @property
    def order(self) -> list[int]:
        """The ranks in the order of their columns."""
        return sorted(range(len(self.ranges)), key=lambda rank: self.ranges[rank])

    @property
    def on_group_edges(self) -> bool:
        """Whether every rank owns whole groups of the unsharded head's tree: then cutting changes no bits."""
        width = tree(self.vocab_size).width
        ends = [0, *(self.ranges[rank][1] for rank in self.order)]
        return all(end % width == 0 for end in ends[:-1]) and ends[-2] < GROUPS * width

    def tree(self, rank: int) -> Tree:
        """The groups that a rank owns; off the edges, eight of its own."""
        start, end = self.ranges[rank]
        if not self.on_group_edges:
            return tree(end - start)
        width = tree(self.vocab_size).width
        last = GROUPS if rank == self.order[-1] else end // width
        return Tree(last - start // width, width)

    def real_columns(self, rank: int) -> int:
        """Columns of a rank that are no padding."""
        start, end = self.ranges[rank]
        return min(max(self.vocab_size - start, 0), end - start)

    def options_of(self, options: Options, rank: int) -> Options:
        """The static facts of a call on the whole head, for a rank's shard."""
        start, end = self.ranges[rank]
        return replace(
            options,
            vocab_size=end - start,
            real_vocab_size=self.real_columns(rank),
            tree=self.tree(rank),
            hidden_gradient="float32",
        )


class State(NamedTuple):
    """What one rank's steps hand on: of `partials` to `merge`, and of `merge` to `gradients`."""

    tokens: Tokens
    own: Any
    """Of the implementation."""


@dataclass(frozen=True)
class Steps:
    """One rank's steps, in order; `options` are those of its shard."""

    functions: LinearLogpFunctions
    options: Options
    cut: Cut
    rank: int

    def operands(self, hidden: Array, weight: Array, bias: Array | None) -> Operands:
        real = self.cut.real_columns(self.rank)
        is_padded = real < self.options.vocab_size
        return Operands(hidden, weight, bias, jnp.int32(real) if is_padded else None)

    def partials(self, operands: Operands, tokens: Tokens) -> tuple[Any, Array, State]:
        """The softmax over the rank's groups `[groups, rows]`, which tokens' targets it holds `[N]`, and a state.

        Ids of `tokens` are those of the whole vocabulary.
        """
        tokens = tokens._replace(target_ids=tokens.target_ids - self.cut.ranges[self.rank][0])
        groups, own = self.functions.partials(self.options, operands, tokens)
        is_here = (tokens.target_ids >= 0) & (tokens.target_ids < self.cut.real_columns(self.rank))
        return groups, is_here, State(tokens, own)

    def merge(self, groups: Any, owners: Array, state: State) -> tuple[LinearLogp, State]:
        """The values of all ranks' groups, in the order of the vocabulary; NaN where not one rank holds the target."""
        tokens, own = state
        values, residual, kept = self.functions.merge(self.options, groups, own)
        covered = owners == 1
        values = jax.tree.map(lambda x: jnp.where(tokens.active, jnp.where(covered, x, jnp.nan), 0), values)
        tokens = tokens._replace(temperature=jnp.where(covered, tokens.temperature, jnp.nan))
        return values, State(tokens, (residual, kept))

    def gradients(self, needs: Needs, operands: Operands, state: State, upstream: LinearLogp) -> Gradients:
        """The rank's float32 part of dH `[1, N, D]`, and dW and db of its own columns."""
        tokens, (residual, kept) = state
        tokens = tokens.with_upstream(upstream)
        return self.functions.gradients(self.options, needs, operands, tokens, residual, kept, upstream)
