"""Process groups: which have other ranks, and how the ranks of one agree on a call over the host."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rlk_jax.ops.linear_logp.sharding import agreement


def has_other_ranks(tp_group: Any, vocab_start_index: int) -> bool:
    """Whether the group has ranks besides this one; raises where this process cannot use the group."""
    if tp_group is not None:
        if not dist.is_available():
            raise RuntimeError("tensor-parallel linear_logp requires torch.distributed.")
        if not dist.is_initialized():
            raise RuntimeError("tensor-parallel linear_logp requires an initialized process group.")
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
