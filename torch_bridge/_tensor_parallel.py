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

from rlk_jax import _agreement, dispatch, validation
from rlk_jax._cut import Cut, State, Steps
from rlk_jax._problem import LinearLogp, Needs
from rlk_jax.linear_logp import check as check_call
from torch_bridge import _calls, _exchange, _inputs, _programs
from torch_bridge._calls import Frame


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
    own = torch.frombuffer(bytearray(_agreement.encoded(text)), dtype=torch.uint8)
    texts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, own, group=_host_group(group))
    return [_agreement.decoded(bytes(x.tolist())) for x in texts]


@torch.compiler.disable
def linear_logp(
    tensors: Tensors, rank: Rank, options: dict[str, Any], validate: bool | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """logp, and lse and entropy where they are asked for; `options` are those of `rlk_jax.linear_logp`."""
    cut = _cut(tensors, rank, options, validate)
    hidden, weight, bias = _inputs.autocast(*tensors[:3])
    weight, layout = _inputs.in_place(weight, options["weight_layout"])
    options = {**options, "weight_layout": layout}
    tensors = tensors._replace(hidden=hidden, lm_head_weight=weight, bias=bias)
    frame, needs = _calls.flat(tensors.target_ids.shape), _inputs.needs(hidden, weight, bias)
    with _exchange.launching([hidden]):
        steps, tokens = _steps(cut, tensors, rank, options, frame, validate, keeps=any(needs))
        call = _Call(steps, frame, rank, options["ignore_index"], Needs(*needs))
        return _TensorParallel.apply(hidden, weight, bias, call, tokens)


def _cut(tensors: Tensors, rank: Rank, options: dict[str, Any], validate: bool | None) -> Cut:
    """How the ranks cut the vocabulary, once all of them have passed the checks that each can make alone."""

    def check() -> tuple[None, str]:
        given = tensors._asdict()
        scale = given.pop("temperature")
        _inputs.check_head(given, scale, **{**options, "ignore_index": None}, validate=validate)
        columns = tensors.lm_head_weight.shape[0 if options["weight_layout"] == "vd" else 1]
        start = _integer("vocab_start_index", rank.start)
        vocab_size = None if rank.vocab_size is None else _integer("global_vocab_size", rank.vocab_size)
        facts = {"range": (start, start + columns), "vocab_size": vocab_size}
        return None, json.dumps({**facts, "call": _text(tensors, rank, {**options, "validate": validate})})

    _, texts = _agreement.agreed(check, functools.partial(_everyone, rank.group))
    facts = [json.loads(text) for text in texts]
    _agreement.require_same([x["call"] for x in facts])
    ranges = [tuple(x["range"]) for x in facts]
    return validation.cut(ranges, [x["vocab_size"] for x in facts], options["ignore_index"])


def _integer(name: str, x: Any) -> int:
    """One of Python's, as JSON takes it."""
    try:
        return operator.index(x)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {x!r}.") from None


def _text(tensors: Tensors, rank: Rank, options: dict[str, Any]) -> str:
    """What must be the same on every rank."""

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
    return ", ".join(f"{name}={text}" for name, text in {**given, **options}.items())


def _steps(
    cut: Cut,
    tensors: Tensors,
    rank: Rank,
    options: dict[str, Any],
    frame: Frame,
    validate: bool | None,
    *,
    keeps: bool,
) -> tuple[Steps, tuple[jax.Array, ...]]:
    """This rank's steps by the implementation that all of them run, and `Frame.tokens`, once all have checked
    theirs.
    """
    ignored = _calls.ignored(options["ignore_index"])
    facts = tuple({**options, "ignore_index": ignored}.items())
    operands = (("hidden", tensors.hidden), ("lm_head_weight", tensors.lm_head_weight), ("bias", tensors.bias))
    specs = tuple((name, None if x is None else _inputs.spec(x)) for name, x in operands)
    specs = (*specs, ("target_ids", _inputs.spec(tensors.target_ids)))

    def check() -> tuple[tuple[Steps, tuple[jax.Array, ...]], str]:
        for _, x in operands:
            if x is not None:
                _exchange.in_memory(x)
        steps, name = _chosen(cut, dist.get_rank(rank.group), tensors.hidden.device, specs, keeps, facts)
        checked_against = cut.vocab_size if _inputs.must_check(validate, tensors.hidden) else None
        scale = _inputs.temperature(tensors.temperature)
        ids = tensors.target_ids
        return (steps, frame.tokens(ids, scale, options["ignore_index"], "target_ids", checked_against)), name

    found, names = _agreement.agreed(check, functools.partial(_everyone, rank.group))
    _agreement.require_same([f"implementation={name}" for name in names])
    return found


@functools.lru_cache(maxsize=256)
def _chosen(
    cut: Cut, rank: int, device: torch.device, specs: Any, keeps: bool, options: _programs.Options
) -> tuple[Steps, str]:
    """The rank's steps, and the name of the implementation."""
    given = {name: None if spec is None else jax.ShapeDtypeStruct(*spec) for name, spec in specs}
    with jax.default_device(_exchange.jax_device(device)):
        (inputs, static, _), implementation = check_call(**given, **dict(options))
        here = cut.options_of(replace(static, keeps=keeps), rank)
        operands = (inputs.hidden, inputs.lm_head_weight, inputs.bias)
        chosen = dispatch.choose(dispatch.problem_of("linear_logp", operands, here), implementation)
    if chosen.promises_bits:
        dispatch.check_edges(cut)
    return Steps(chosen.functions.on_device, here, cut, rank), chosen.name


def _partials(
    hidden: Any,
    weight: Any,
    bias: Any,
    ids: Any,
    count: Any,
    temperature: Any,
    *,
    steps: Steps,
    ignore_index: int | None,
) -> Any:
    """This rank's groups, packed with which targets it holds, and its state."""
    ids = _calls.token_ids(ids, count, ignore_index=ignore_index)
    counted = validation.counted(ids, _calls.ignored(ignore_index))
    tokens = validation.tokens(
        ids, temperature, counted, vocab_size=steps.cut.vocab_size, validate=False, name="target_ids"
    )
    groups, is_here, state = steps.partials(steps.operands(hidden, weight, bias), tokens)
    stacked = jnp.stack(jax.tree.leaves(groups), axis=1)
    most = max(steps.cut.tree(rank).groups for rank in range(len(steps.cut.ranges)))
    padded = jnp.pad(stacked, ((0, most - stacked.shape[0]), (0, 0), (0, 0)))
    return jnp.concatenate([padded.reshape(-1), is_here.astype(jnp.float32)]), groups, state


def _merge(packed: Any, groups: Any, state: State, *, steps: Steps) -> tuple[LinearLogp, State]:
    """The values of what all ranks have packed `[ranks, ·]`; `groups` are this rank's, for their form."""
    leaves, structure = jax.tree.flatten(groups)
    size = packed.shape[1] - state.tokens.active.shape[0]
    by_rank = packed[:, :size].reshape(len(packed), -1, len(leaves), leaves[0].shape[1])
    in_order = [by_rank[rank, : steps.cut.tree(rank).groups] for rank in steps.cut.order]
    whole = jnp.concatenate(in_order)
    merged = jax.tree.unflatten(structure, [whole[:, i] for i in range(len(leaves))])
    return steps.merge(merged, packed[:, size:].sum(axis=0), state)


def _gradients(
    hidden: Any, weight: Any, bias: Any, upstream: tuple[Any, ...], state: State, *, steps: Steps, needs: Needs
) -> Any:
    logp, lse, entropy = upstream
    given = LinearLogp(jnp.zeros_like(state.tokens.temperature) if logp is None else logp, lse, entropy)
    return steps.gradients(needs, steps.operands(hidden, weight, bias), state, given)


@dataclass(frozen=True)
class _Call:
    """What a call's forward and backward share besides tensors and arrays."""

    steps: Steps
    frame: Frame
    rank: Rank
    ignore_index: int | None
    needs: Needs

    def operands(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[jax.Array | None, ...]:
        own = None if bias is None else _exchange.lend(bias)
        return self.frame.rows(hidden, columns=1), _exchange.lend(weight), own

    def gathered(self, packed: jax.Array) -> jax.Array:
        """`[ranks, ·]` of what each rank has packed."""
        own = _exchange.to_torch(packed)
        count = len(self.steps.cut.ranges)
        everyone = own.new_empty(count * own.shape[0])
        dist.all_gather_into_tensor(everyone, own, group=self.rank.group)
        return _exchange.lend(everyone.reshape(count, -1))

    def summed(self, parts: jax.Array, like: Tensor) -> Tensor:
        """dH of this rank's float32 part `[1, N, D]`, of all ranks unless the caller sums it."""
        # A tensor of torch's own, for a collective to write into.
        whole = self.frame.real(parts[0], like.shape).clone()
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
        lead, asked = call.frame.lead, call.steps.options
        wanted = (True, asked.return_lse, asked.return_entropy)
        if call.frame.is_empty:
            ctx.save_for_backward(hidden, weight, bias, _calls.keep(None))
            return tuple(hidden.new_zeros(lead, dtype=torch.float32) if wants else None for wants in wanted)
        static = {"steps": call.steps}
        own = (*call.operands(hidden, weight, bias), *tokens)
        packed, groups, state = _programs.run("forward", _partials, own, ignore_index=call.ignore_index, **static)
        values, state = _programs.run("forward", _merge, (call.gathered(packed), groups, state), **static)
        ctx.save_for_backward(hidden, weight, bias, _calls.keep(state))
        return tuple(None if x is None else call.frame.real(x, lead) for x in values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            return (None,) * 5
        *tensors, handle = ctx.saved_tensors
        with torch.no_grad():
            found = _pull_back(ctx.call, tuple(tensors), handle, upstream)
        return *_calls.differentiable_once(found, *tensors, *upstream), None, None


def _pull_back(
    call: _Call, tensors: tuple[Tensor, Tensor, Tensor | None], handle: Tensor, upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of this rank's hidden, weight and bias; None where none is needed."""
    state = _calls.kept(handle)
    if state is None:
        return [None if x is None or not x.requires_grad else torch.zeros_like(x) for x in tensors]
    hidden, weight, bias = tensors
    static = {"steps": call.steps, "needs": call.needs}
    with _exchange.launching(upstream):
        given = tuple(None if g is None else call.frame.rows(g) for g in upstream)
        own = (*call.operands(hidden, weight, bias), given, state)
        d_hidden, d_weight, d_bias = _programs.run("backward", _gradients, own, **static)
        return [
            None if d_hidden is None else call.summed(d_hidden, hidden),
            None if d_weight is None else _exchange.to_torch(d_weight),
            None if d_bias is None else _exchange.to_torch(d_bias),
        ]
