"""linear_logp on a head whose vocabulary is cut between the ranks of a process group.

What a rank has to say of a call it tells all others before any of them goes on, over the host: so that one rank's
mistake is everyone's error, and nobody waits for a rank that has raised. Then each computes its partial softmax, one
collective gathers these, and each merges all of them; the backward sums dH over the ranks in float32.
"""

import functools
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
from torch import Tensor

from rlk_jax.core.dispatch import choose
from rlk_jax.core.tokens import LinearLogp, checked_tokens, counted
from rlk_jax.ops.linear_logp.call import facts_of_call
from rlk_jax.ops.linear_logp.checks import check_call, checked_rank_columns
from rlk_jax.ops.linear_logp.options import HeadInputs, HeadOptions, Needs
from rlk_jax.ops.linear_logp.sharding import agreement
from rlk_jax.ops.linear_logp.sharding.ranks import RankColumns, RankState, RankSteps
from rlk_jax.ops.linear_logp.sharding.shard import check_edges
from torch_bridge import _calls, _exchange, _inputs, _programs
from torch_bridge._calls import RowPadding


class Tensors(NamedTuple):
    """A call's tensors; weight and bias are this rank's."""

    hidden: Tensor
    lm_head_weight: Tensor
    bias: Tensor | None
    target_ids: Tensor
    temperature: Tensor | float


@dataclass(frozen=True)
class Rank:
    """Where this process stands in the group."""

    group: Any
    start: int
    """Its first column."""
    vocab_size: int | None
    """global_vocab_size, as it was given here."""
    reduce_hidden_grad: bool


def is_cut(tp_group: Any, vocab_start_index: int) -> bool:
    """Whether there are other ranks; raises where that is not for this process to ask."""
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
    """The group itself where it can carry a host's memory, or one of the same processes that can."""
    if "gloo" in dist.get_backend(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def _everyone(group: Any, text: str) -> list[str]:
    """What each rank says, in their order."""
    own = torch.frombuffer(bytearray(agreement.encoded(text)), dtype=torch.uint8)
    texts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, own, group=_host_group(group))
    return [agreement.decoded(bytes(x.tolist())) for x in texts]


@torch.compiler.disable
def tensor_parallel_logp(
    tensors: Tensors, rank: Rank, options: HeadOptions
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """logp, and lse and entropy where they are asked for; `options` are those of one whole head."""
    columns = _agreed_columns(tensors, rank, options)
    hidden, weight, bias = _inputs.autocast(*tensors[:3])
    weight, layout = _inputs.in_place(weight, options.weight_layout)
    # Each rank has said its global_vocab_size, and knows how the ranks share the vocabulary.
    options = replace(options, weight_layout=layout, global_vocab_size=None)
    tensors = tensors._replace(hidden=hidden, lm_head_weight=weight, bias=bias)
    padding, needs = _calls.flat(tensors.target_ids.shape), _inputs.needs(hidden, weight, bias)
    with _exchange.launching([hidden]):
        steps, tokens = _agreed_steps(columns, tensors, rank, options, padding, keeps=any(needs))
        call = _Call(steps, padding, rank, options.ignore_index, Needs(*needs))
        return _TensorParallel.apply(hidden, weight, bias, call, tokens)


def _agreed_columns(tensors: Tensors, rank: Rank, options: HeadOptions) -> RankColumns:
    """How the ranks share the vocabulary, once all of them have passed the checks that each can make alone."""

    def check() -> tuple[None, str]:
        given = tensors._asdict()
        scale = given.pop("temperature")
        # What is a valid id of the whole vocabulary is known only once all ranks have said their columns.
        _inputs.check_head(given, scale, replace(options, ignore_index=None, global_vocab_size=None))
        columns = tensors.lm_head_weight.shape[0 if options.weight_layout == "vd" else 1]
        start = _integer("vocab_start_index", rank.start)
        vocab_size = None if rank.vocab_size is None else _integer("global_vocab_size", rank.vocab_size)
        facts = {"range": (start, start + columns), "vocab_size": vocab_size}
        return None, json.dumps({**facts, "call": _text(tensors, rank, options)})

    _, texts = agreement.agreed(check, functools.partial(_everyone, rank.group))
    facts = [json.loads(text) for text in texts]
    agreement.require_same([x["call"] for x in facts])
    ranges = [tuple(x["range"]) for x in facts]
    return checked_rank_columns(ranges, [x["vocab_size"] for x in facts], options.ignore_index)


def _integer(name: str, x: Any) -> int:
    """x as an integer of Python's, which JSON takes."""
    try:
        return operator.index(x)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {x!r}.") from None


def _text(tensors: Tensors, rank: Rank, options: HeadOptions) -> str:
    """A text of everything that must be the same on every rank; global_vocab_size is compared for itself."""

    def of(x: Any) -> str:
        return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else repr(float(x))

    hidden, weight, bias, ids, temperature = tensors
    needed = hidden.requires_grad and torch.is_grad_enabled()
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    dtypes = [autocast, weight.dtype, None if bias is None else bias.dtype]
    given: dict[str, Any] = {
        "hidden": of(hidden),
        "dtypes": dtypes,
        "target_ids": of(ids),
        "temperature": of(temperature),
    }
    given |= {"device": device, "hidden needs a gradient": needed, "reduce_hidden_grad": rank.reduce_hidden_grad}
    asked = {name: x for name, x in vars(options).items() if name != "global_vocab_size"}
    return ", ".join(f"{name}={text}" for name, text in {**given, **asked}.items())


def _agreed_steps(
    columns: RankColumns,
    tensors: Tensors,
    rank: Rank,
    options: HeadOptions,
    padding: RowPadding,
    *,
    keeps: bool,
) -> tuple[RankSteps, tuple[jax.Array, ...]]:
    """This rank's steps, by the implementation that all ranks run, and its `RowPadding.tokens`.

    They are given once all ranks have checked theirs.
    """
    static = replace(options, ignore_index=_calls.ignored(options.ignore_index), validate=None)
    operands = (("hidden", tensors.hidden), ("lm_head_weight", tensors.lm_head_weight), ("bias", tensors.bias))
    specs = tuple((name, None if x is None else _inputs.spec(x)) for name, x in operands)
    specs = (*specs, ("target_ids", _inputs.spec(tensors.target_ids)))

    def check() -> tuple[tuple[RankSteps, tuple[jax.Array, ...]], str]:
        for _, x in operands:
            if x is not None:
                _exchange.in_memory(x)
        steps, name = _chosen_steps(columns, dist.get_rank(rank.group), tensors.hidden.device, specs, keeps, static)
        must_check = _inputs.must_check(options.validate, tensors.hidden)
        checked_against = columns.vocab_size if must_check else None
        scale = _inputs.temperature(tensors.temperature)
        ids = tensors.target_ids
        return (steps, padding.tokens(ids, scale, options.ignore_index, "target_ids", checked_against)), name

    found, names = agreement.agreed(check, functools.partial(_everyone, rank.group))
    agreement.require_same([f"implementation={name}" for name in names])
    return found


@functools.lru_cache(maxsize=256)
def _chosen_steps(
    columns: RankColumns, rank: int, device: torch.device, specs: Any, keeps: bool, options: HeadOptions
) -> tuple[RankSteps, str]:
    """The rank's steps, and the name of the implementation."""
    given = {name: None if spec is None else jax.ShapeDtypeStruct(*spec) for name, spec in specs}
    with jax.default_device(_exchange.jax_device(device)):
        inputs, config, _ = check_call(HeadInputs(**given, temperature=1.0), options)
        own = columns.config(replace(config, keeps=keeps), rank)
        chosen = choose(facts_of_call(inputs, own), options.implementation)
    if chosen.promises_bits:
        check_edges(columns)
    return RankSteps(chosen.functions.on_device, own, columns, rank), chosen.name


def _partials(
    hidden: Any,
    weight: Any,
    bias: Any,
    ids: Any,
    count: Any,
    temperature: Any,
    *,
    steps: RankSteps,
    ignore_index: int | None,
) -> Any:
    """This rank's groups, packed with which targets it holds, and its state."""
    ids = _calls.token_ids(ids, count, ignore_index=ignore_index)
    is_counted = counted(ids, _calls.ignored(ignore_index))
    tokens = checked_tokens(
        ids, temperature, is_counted, vocab_size=steps.columns.vocab_size, validate=False, name="target_ids"
    )
    groups, is_here, state = steps.partials(steps.operands(hidden, weight, bias), tokens)
    stacked = jnp.stack(jax.tree.leaves(groups), axis=1)
    most = max(steps.columns.groups(rank).count for rank in range(len(steps.columns.ranges)))
    padded = jnp.pad(stacked, ((0, most - stacked.shape[0]), (0, 0), (0, 0)))
    return jnp.concatenate([padded.reshape(-1), is_here.astype(jnp.float32)]), groups, state


def _merge(packed: Any, groups: Any, state: RankState, *, steps: RankSteps) -> tuple[LinearLogp, RankState]:
    """The values of what all ranks have packed `[ranks, ·]`; `groups` are this rank's, for their form."""
    leaves, structure = jax.tree.flatten(groups)
    size = packed.shape[1] - state.tokens.active.shape[0]
    by_rank = packed[:, :size].reshape(len(packed), -1, len(leaves), leaves[0].shape[1])
    in_order = [by_rank[rank, : steps.columns.groups(rank).count] for rank in steps.columns.order]
    whole = jnp.concatenate(in_order)
    merged = jax.tree.unflatten(structure, [whole[:, i] for i in range(len(leaves))])
    return steps.merge(merged, packed[:, size:].sum(axis=0), state)


def _gradients(
    hidden: Any, weight: Any, bias: Any, upstream: tuple[Any, ...], state: RankState, *, steps: RankSteps, needs: Needs
) -> Any:
    logp, lse, entropy = upstream
    given = LinearLogp(jnp.zeros_like(state.tokens.temperature) if logp is None else logp, lse, entropy)
    return steps.gradients(needs, steps.operands(hidden, weight, bias), state, given)


@dataclass(frozen=True)
class _Call:
    """What a call's forward and backward share besides tensors and arrays."""

    steps: RankSteps
    padding: RowPadding
    rank: Rank
    ignore_index: int | None
    needs: Needs

    def operands(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[jax.Array | None, ...]:
        own = None if bias is None else _exchange.lend(bias)
        return self.padding.rows(hidden, columns=1), _exchange.lend(weight), own

    def gathered(self, packed: jax.Array) -> jax.Array:
        """`[ranks, ·]` of what each rank has packed."""
        own = _exchange.to_torch(packed)
        count = len(self.steps.columns.ranges)
        everyone = own.new_empty(count * own.shape[0])
        dist.all_gather_into_tensor(everyone, own, group=self.rank.group)
        return _exchange.lend(everyone.reshape(count, -1))

    def summed(self, parts: jax.Array, like: Tensor) -> Tensor:
        """dH of this rank's float32 part `[1, N, D]`, of all ranks unless the caller sums it."""
        # A tensor of torch's own, for a collective to write into.
        whole = self.padding.real(parts[0], like.shape).clone()
        if self.rank.reduce_hidden_grad:
            dist.all_reduce(whole, group=self.rank.group)
        return whole.to(like.dtype)


class _TensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: _Call,
        tokens: tuple[jax.Array, ...],
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        lead, asked = call.padding.lead, call.steps.config
        wanted = (True, asked.return_lse, asked.return_entropy)
        if call.padding.is_empty:
            ctx.save_for_backward(hidden, weight, bias, _calls.keep(None))
            return tuple(hidden.new_zeros(lead, dtype=torch.float32) if wants else None for wants in wanted)
        static = {"steps": call.steps}
        own = (*call.operands(hidden, weight, bias), *tokens)
        packed, groups, state = _programs.run("forward", _partials, own, ignore_index=call.ignore_index, **static)
        values, state = _programs.run("forward", _merge, (call.gathered(packed), groups, state), **static)
        ctx.save_for_backward(hidden, weight, bias, _calls.keep(state))
        return tuple(None if x is None else call.padding.real(x, lead) for x in values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            return (None,) * 5
        *tensors, handle = ctx.saved_tensors
        with torch.no_grad():
            found = _backward(ctx.call, tuple(tensors), handle, upstream)
        return *_calls.differentiable_once(found, *tensors, *upstream), None, None


def _backward(
    call: _Call, tensors: tuple[Tensor, Tensor, Tensor | None], handle: Tensor, upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of this rank's hidden, weight and bias; None where none is needed."""
    state = _calls.kept(handle)
    if state is None:
        return [None if x is None or not x.requires_grad else torch.zeros_like(x) for x in tensors]
    hidden, weight, bias = tensors
    static = {"steps": call.steps, "needs": call.needs}
    with _exchange.launching(upstream):
        given = tuple(None if g is None else call.padding.rows(g) for g in upstream)
        own = (*call.operands(hidden, weight, bias), given, state)
        d_hidden, d_weight, d_bias = _programs.run("backward", _gradients, own, **static)
        return [
            None if d_hidden is None else call.summed(d_hidden, hidden),
            None if d_weight is None else _exchange.to_torch(d_weight),
            None if d_bias is None else _exchange.to_torch(d_bias),
        ]
