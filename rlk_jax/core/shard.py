"""One device's shard of a head whose vocabulary is spread over mesh axes, inside shard_map.

The functions here gather what ranks make of their groups of the vocabulary, give every rank the whole gradient of the
values, and sum the gradient of hidden, right under check_vma=True and False alike.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from rlk_jax.core.allowed import words_from
from rlk_jax.core.dispatch import refuse_if_strict
from rlk_jax.core.fixed_order import GROUPS, ColumnGroups, ascending_sum, column_groups, zeros_behind
from rlk_jax.core.head import HeadConfig
from rlk_jax.core.mesh import AxisName, axis_names, is_checked
from rlk_jax.core.reports import reported
from rlk_jax.core.tokens import Tokens, as_int32
from rlk_jax.core.transforms import equally_varying, varying_axes, varying_like

Array = jax.Array
Reduction = Literal["sum", "canonical"]
Gather = Callable[[Any], Any]
"""A function from the groups `[groups, ...]` of one shard to those of the whole vocabulary, in its order."""


@dataclass(frozen=True)
class ShardOptions:
    """The options of a call that say how a head is spread over mesh axes; `linear_logp` documents them."""

    axis_name: AxisName | None = None
    reduction: Reduction = "sum"
    reduce_hidden_grad: bool = True


@dataclass(frozen=True)
class Shard:
    """The static facts of a shard: it holds `columns` of the `vocab_size` columns that `count` ranks share."""

    axis: AxisName
    """The mesh axis of the ranks; a single axis by its name."""
    count: int
    columns: int
    vocab_size: int
    """The true vocabulary; columns behind it are padding."""
    reduction: Reduction
    reduce_hidden_grad: bool

    def __str__(self) -> str:
        return f"{self.count} shards of {self.columns} columns"

    @property
    def on_group_edges(self) -> bool:
        """Whether every rank owns whole groups of the unsharded head's softmax: then sharding changes no bits."""
        if self.count == 1:
            return True
        return GROUPS % self.count == 0 and self.columns == shard_width(self.vocab_size, self.count)

    @property
    def groups(self) -> ColumnGroups:
        """The groups that this shard owns; where the cut is not on group edges, eight groups of its own columns."""
        if self.on_group_edges:
            return ColumnGroups(GROUPS // self.count, column_groups(self.vocab_size).width)
        return column_groups(self.columns)

    @property
    def least_real_columns(self) -> int:
        """How many columns are no padding in the shard with the most padding."""
        return max(0, min(self.columns, self.vocab_size - (self.count - 1) * self.columns))

    def config(self, whole: HeadConfig) -> HeadConfig:
        """What an implementation is compiled for on this shard, from the config of the whole head."""
        return replace(
            whole,
            vocab_size=self.columns,
            real_vocab_size=self.least_real_columns,
            groups=self.groups,
            is_shard=True,
            sums_by_group=self.reduction == "canonical",
        )

    def gather(self, tree: Any, order: Array | None) -> Any:
        """`[all groups, ...]` of all ranks from `[groups, ...]`, in vocabulary order, by one collective."""
        leaves, structure = jax.tree.flatten(tree)
        ranks = lax.all_gather(jnp.stack(leaves, axis=1), self.axis)
        if order is not None:
            ranks = ranks[order]
        whole = lax.collapse(ranks, 0, 2)
        return jax.tree.unflatten(structure, [whole[:, i] for i in range(len(leaves))])


def shard_width(vocab_size: int, n: int) -> int:
    """Columns of each of n equal shards that end where groups do; where they cannot, a multiple of 64."""
    whole = column_groups(vocab_size)
    return whole.width * (whole.count // n) if whole.count % n == 0 else -(-vocab_size // (64 * n)) * 64


class CutHead(Protocol):
    """A head that several ranks share."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def on_group_edges(self) -> bool: ...


def check_edges(shards: CutHead) -> None:
    """Logs once where shards cut a group of the softmax and so keep no bits across TP degrees; strict mode raises."""
    if not shards.on_group_edges:
        refuse_if_strict(
            f"{shards} do not end where the softmax's groups do for a vocabulary of "
            f"{shards.vocab_size}: results are right, but their bits differ from those at other TP degrees. "
            "rlk_jax.vocab_parallel.pad_lm_head makes shards that keep them"
        )


class ShardPosition(NamedTuple):
    """Where in the vocabulary this rank's shard lies; only the device knows it."""

    start: Array
    """int32 scalar: the first column of the shard."""
    order: Array | None
    """`[count]`: ranks in the order of their shards; None where that is the axis' own."""
    is_partition: Array | None
    """Whether all shards cover the vocabulary once; None where they do by construction."""


def shard_position(shard: Shard, vocab_start_index: Any) -> ShardPosition:
    """The position of this rank's shard: rank r holds the columns from r·columns on, or those from `vocab_start_index`
    on. All shards must cover the vocabulary once.
    """
    if vocab_start_index is None:
        return ShardPosition(lax.axis_index(shard.axis).astype(jnp.int32) * shard.columns, None, None)
    start = as_int32(jnp.asarray(vocab_start_index))
    starts = lax.all_gather(start, shard.axis)
    order = jnp.argsort(starts)
    # Shards are equally wide, so only one set of starts covers the vocabulary; shards behind it hold padding only.
    wanted = jnp.arange(shard.count, dtype=jnp.int32) * shard.columns
    covers = jnp.where(wanted < shard.vocab_size, starts[order] == wanted, starts[order] >= shard.vocab_size)
    is_partition = jnp.all(covers)
    start = reported(
        start,
        is_partition,
        f"TP vocab shards must form a contiguous [0, {shard.vocab_size}) partition; "
        f"got starts={{starts}} of {shard.columns} columns each.",
        starts=starts[order],
    )
    return ShardPosition(start, order, is_partition)


def real_columns_of_shard(shard: Shard, start: Array) -> Array | None:
    """How many of this shard's columns are no padding; None where all are real, on every rank."""
    if shard.least_real_columns == shard.columns:
        return None
    return jnp.clip(shard.vocab_size - start, 0, shard.columns)


def rank_summands(shard: Shard, values: Any) -> Any:
    """What each rank adds to `sum_over_ranks`: rank 0 the values, the others −0, which changes no bit of a sum."""
    is_first = lax.axis_index(shard.axis) == 0
    return jax.tree.map(lambda x: jnp.where(is_first, x, jnp.asarray(-0.0, x.dtype)), values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_over_ranks(shard: Shard, summand: Array) -> Array:
    """Σ of the ranks' summands, the same on every rank; each rank's summand gets the whole upstream gradient.

    Under check_vma=False JAX gives a rank only an n-th of that gradient: the parts are added up in pairs, so that 2, 4
    or 8 equal parts are exactly the whole.
    """
    return lax.psum(summand, shard.axis)


def _sum_over_ranks_fwd(shard: Shard, summand: Array) -> tuple[Array, None]:
    return sum_over_ranks(shard, summand), None


def _sum_over_ranks_bwd(shard: Shard, _: None, upstream: Array) -> tuple[Array]:
    if is_checked(shard.axis):
        return (varying_like(upstream, lax.axis_index(shard.axis)),)
    parts = lax.all_gather(upstream, shard.axis)
    while parts.shape[0] > 1:
        half = parts.shape[0] // 2
        parts = jnp.concatenate([parts[:half] + parts[half : 2 * half], parts[2 * half :]])
    return (parts[0],)


sum_over_ranks.defvjp(_sum_over_ranks_fwd, _sum_over_ranks_bwd)


def is_covered(shard: Shard, tokens: Tokens, columns: Array | None) -> Array:
    """Which of the `local_tokens` have their target in exactly one shard; none may, where ranks were given different
    ids.

    Where some ranks ignore a token that others do not, no token is covered: the rows that ranks send may then belong to
    different tokens.
    """
    width = shard.columns if columns is None else columns
    is_mine = (tokens.target_ids >= 0) & (tokens.target_ids < width)
    owners, active = lax.psum(jnp.stack([is_mine, tokens.active]).astype(jnp.int32), shard.axis)
    covered = (owners == 1) & jnp.all((active == 0) | (active == shard.count))
    return reported(
        covered,
        jnp.all(covered),
        "target_ids must be covered by exactly one TP vocab shard; check vocab_start_index and global_vocab_size.",
    )


def poisoned_unless_partition(position: ShardPosition, temperature: Array) -> Array:
    """The temperatures; NaN, which poisons their rows, where the shards are no partition."""
    return temperature if position.is_partition is None else jnp.where(position.is_partition, temperature, jnp.nan)


def local_tokens(shard: Shard, tokens: Tokens, position: ShardPosition) -> Tokens:
    """Tokens whose ids, and what they may take, count from this shard's first column; where the shards are no
    partition, all are poisoned.
    """
    temperature = poisoned_unless_partition(position, tokens.temperature)
    allowed = None if tokens.allowed is None else words_from(tokens.allowed, position.start, shard.columns)
    return Tokens(tokens.target_ids - position.start, temperature, tokens.active, allowed)


def hidden_for_gradient(shard: Shard, hidden: Array) -> Array:
    """hidden, typed as its gradient will be: the same on every rank, or a part of its own on each rank."""
    if not shard.reduce_hidden_grad:
        return varying_like(hidden, lax.axis_index(shard.axis))
    if set(axis_names(shard.axis)) & varying_axes(hidden):
        raise ValueError(
            f"hidden varies over {shard.axis!r}, so JAX sums its gradient where it came to do so: pass "
            "reduce_hidden_grad=False, or a hidden that is the same on every rank of that axis."
        )
    return hidden


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def hidden_gradient_carrier(shard: Shard, hidden: Array, order: Array | None) -> Array:
    """An array whose gradient is this rank's float32 sums `[parts, N, D]` of dH; hidden then gets their reduction."""
    parts = shard.groups.count if shard.reduction == "canonical" else 1
    # It is computed from hidden, so that vmap batches it where hidden is batched.
    zeros = jnp.where(jnp.zeros(hidden.shape, bool), hidden, 0).astype(jnp.float32)
    carrier = jnp.broadcast_to(zeros, (parts, *hidden.shape))
    return equally_varying((carrier, hidden, lax.axis_index(shard.axis)))[0]


def _carrier_fwd(shard: Shard, hidden: Array, order: Array | None) -> tuple[Array, tuple[Array, Array | None]]:
    # The empty slice keeps hidden's type for the backward, and none of its values.
    return hidden_gradient_carrier(shard, hidden, order), (hidden[:0, :0], order)


def _carrier_bwd(shard: Shard, saved: tuple[Array, Array | None], sums: Array) -> tuple[Array, None]:
    like, order = saved
    if not shard.reduce_hidden_grad:
        return ascending_sum(sums).astype(like.dtype), None
    whole = varying_like(reduce_hidden_gradient(shard, sums, order, like.dtype), like)
    # Under check_vma=False JAX adds up what the ranks return.
    return (whole if is_checked(shard.axis) else jnp.where(lax.axis_index(shard.axis) == 0, whole, 0)), None


hidden_gradient_carrier.defvjp(_carrier_fwd, _carrier_bwd)


def reduce_hidden_gradient(shard: Shard, sums: Array, order: Array | None, dtype: Any) -> Array:
    """dH `[N, D]` on every rank: the sum of all ranks' float32 `[parts, N, D]`, rounded once.

    Each rank sums its share of the rows, and sends them back rounded to `dtype`.
    """
    n, axis = sums.shape[1], shard.axis
    sums = zeros_behind(sums, 1, shard.count)
    # JAX 0.11 cannot lower a psum_scatter over manual axes beside Explicit ones.
    is_scattered = AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types
    if shard.reduction == "canonical" or not is_scattered:
        ranks = lax.all_to_all(sums[None], axis, split_axis=2, concat_axis=0, tiled=True)
        ranks = ranks if order is None else ranks[order]
        rows = ascending_sum(lax.collapse(ranks, 0, 2))
    else:
        rows = lax.psum_scatter(sums[0], axis, scatter_dimension=0, tiled=True)
    to = "invarying" if is_checked(axis) else "varying"
    return lax.all_gather(rows.astype(dtype), axis, tiled=True, to=to)[:n]
