"""Process groups: which have other ranks, how the ranks of one agree on a call over the host, and what they send."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
from torch import Tensor

from rlk_jax.core.rank_columns import RankColumns
from rlk_jax.ops.linear_logp.sharding import agreement
from torch_bridge import _exchange
from torch_bridge._padding import RowPadding


@dataclass(frozen=True)
class Rank:
    """This process' part of the vocabulary, and how it shares in the group's work."""

    group: Any
    start: int
    """This rank's first column of the whole vocabulary."""
    vocab_size: int | None
    """global_vocab_size as this rank was called with it."""
    reduce_hidden_grad: bool

    def gathered(self, packed: jax.Array) -> Tensor:
        """What all ranks have packed `[ranks, ·]`, gathered by a collective."""
        own_part, count = _exchange.to_torch(packed), dist.get_world_size(self.group)
        all_parts = own_part.new_empty(count * own_part.shape[0])
        dist.all_gather_into_tensor(all_parts, own_part, group=self.group)
        return all_parts.reshape(count, -1)

    def summed(self, parts: jax.Array, padding: RowPadding, like: Tensor) -> Tensor:
        """dH in the shape and dtype of `like`, from this rank's float32 part `[1, N, D]`.

        The ranks' parts are summed unless the caller does that (reduce_hidden_grad=False).
        """
        # The clone is torch's own memory, which a collective may write into.
        whole = padding.without_padding(parts[0], like.shape).clone()
        if self.reduce_hidden_grad:
            dist.all_reduce(whole, group=self.group)
        return whole.to(like.dtype)


def packing_of(columns: RankColumns, *, by_group: bool) -> "GroupPacking":
    """How the groups of these ranks travel; without by_group, each rank has one for all of its columns."""
    ranks = range(len(columns.ranges))
    counts = tuple(columns.groups(rank).count if by_group else 1 for rank in ranks)
    return GroupPacking(counts, tuple(columns.order))


@dataclass(frozen=True)
class GroupPacking:
    """How groups `[groups, rows]` of a tree of arrays travel in one vector."""

    counts: tuple[int, ...]
    """How many groups each rank has."""
    order: tuple[int, ...]
    """The ranks in the order of their columns."""

    def packed(self, groups: Any) -> jax.Array:
        """This rank's groups as a vector, padded to the most that a rank has."""
        stacked = jnp.stack(jax.tree.leaves(groups), axis=1)
        return jnp.pad(stacked, ((0, max(self.counts) - stacked.shape[0]), (0, 0), (0, 0))).reshape(-1)

    def size(self, groups: Any) -> int:
        """How long the vector of such groups is."""
        leaves = jax.tree.leaves(groups)
        return max(self.counts) * len(leaves) * leaves[0].shape[1]

    def whole(self, vectors: jax.Array, groups: Any) -> Any:
        """The groups of the whole vocabulary, in its order, from the vectors of all ranks `[ranks, ·]`; `groups` are
        this rank's own, which have the same tree and rows.
        """
        leaves, structure = jax.tree.flatten(groups)
        by_rank = vectors.reshape(len(vectors), -1, len(leaves), leaves[0].shape[1])
        whole = jnp.concatenate([by_rank[rank, : self.counts[rank]] for rank in self.order])
        return jax.tree.unflatten(structure, [whole[:, i] for i in range(len(leaves))])


def has_other_ranks(tp_group: Any, vocab_start_index: int) -> bool:
    """Whether the group has ranks besides this one; raises where this process cannot use the group."""
    if tp_group is not None:
        if not dist.is_available():
            raise RuntimeError("a tp_group requires torch.distributed.")
        if not dist.is_initialized():
            raise RuntimeError("a tp_group requires an initialized process group.")
        if not isinstance(tp_group, dist.ProcessGroup) and tp_group != dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"tp_group must be a process group, got {type(tp_group).__name__}: of a DeviceMesh, its get_group()."
            )
        if dist.get_rank(tp_group) < 0:
            raise ValueError("this process is not in tp_group.")
        if dist.get_world_size(tp_group) > 1:
            return True
    if vocab_start_index != 0:
        raise ValueError("vocab_start_index requires a tensor-parallel group.")
    return False


@functools.cache
def _host_group(group: Any) -> Any:
    """A group of the same processes that can send memory of the host: the group itself, or a new one of gloo."""
    if "gloo" in dist.get_backend(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def gather_texts(group: Any, text: str) -> list[str]:
    """The texts of all ranks, in the order of the ranks."""
    own_text = torch.frombuffer(bytearray(agreement.encoded(text)), dtype=torch.uint8)
    texts = [torch.empty_like(own_text) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, own_text, group=_host_group(group))
    return [agreement.decoded(bytes(x.tolist())) for x in texts]


@torch.compiler.disable
def agree(group: Any, check: Callable[[], str]) -> None:
    """Run a check on every rank, whose texts must be the same; one rank's mistake raises the same error on all."""
    _, texts = agreement.agreed(lambda: (None, check()), functools.partial(gather_texts, group))
    agreement.require_same(texts)


def integer(name: str, x: Any) -> int:
    """x as a Python int, which JSON can write."""
    try:
        return operator.index(x)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {x!r}.") from None
