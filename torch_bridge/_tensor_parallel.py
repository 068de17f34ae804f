"""linear_logp on a head whose vocabulary is sharded over the ranks of a process group.

Before any rank computes, each tells all others, over the host, what it was called with. So one rank's mistake raises
the same error on every rank, and no rank waits for one that has raised. Then each rank computes its partial softmax,
one collective gathers these, and each rank merges all of them. For the most probable tokens a second collective gathers
the best of each rank's columns. The backward sums dH over the ranks in float32.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
from jax.flatten_util import ravel_pytree
from torch import Tensor

from rlk_jax.core import overwriting
from rlk_jax.core.allowed import with_allowed
from rlk_jax.core.checks import check_flag
from rlk_jax.core.dispatch import Implementation, choose
from rlk_jax.core.head import Needs
from rlk_jax.core.rank_columns import RankColumns, checked_rank_columns
from rlk_jax.core.shard import check_edges
from rlk_jax.core.tokens import LinearLogp, checked_tokens, counted
from rlk_jax.ops.linear_logp.call import facts_of_call
from rlk_jax.ops.linear_logp.checks import check_call
from rlk_jax.ops.linear_logp.options import HeadInputs, HeadOptions, WeightLayout
from rlk_jax.ops.linear_logp.ranking import Ranking, as_integers, no_columns
from rlk_jax.ops.linear_logp.sharding import agreement
from rlk_jax.ops.linear_logp.sharding.ranks import RankState, RankSteps
from torch_bridge import _calls, _exchange, _inputs, _padding, _programs
from torch_bridge._calls import Output
from torch_bridge._padding import RowPadding
from torch_bridge._process_groups import GroupPacking, Rank, gather_texts, integer, packing_of
from torch_bridge._programs import Arrays


class Tensors(NamedTuple):
    """The tensors of a call; weight and bias are this rank's shards."""

    hidden: Tensor
    lm_head_weight: Tensor
    bias: Tensor | None
    target_ids: Tensor
    temperature: Tensor | float
    allowed_ids: Tensor | None
    allowed_mask: Tensor | None


@torch.compiler.disable
def tensor_parallel_logp(
    tensors: Tensors, rank: Rank, options: HeadOptions, outputs: Callable[[Sequence[int]], Sequence[Output]]
) -> tuple[Tensor, ...]:
    """logp, lse, entropy, top_ids, top_logps and target_rank, as `outputs` has them for a lead shape; `options` are
    those of the whole head.
    """
    columns = _agreed_columns(tensors, rank, options)
    hidden, weight, bias = _inputs.autocast(*tensors[:3])
    weight, layout = _inputs.without_transpose(weight, options.weight_layout)
    # `columns` has the vocabulary's size, on which the ranks have agreed.
    options = replace(options, weight_layout=layout, global_vocab_size=None)
    tensors = tensors._replace(hidden=hidden, lm_head_weight=weight, bias=bias)
    needs = _inputs.needs(hidden, weight, bias)
    with _exchange.launching([hidden]):
        steps, padding, tokens = _agreed_steps(columns, tensors, rank, options, keeps=any(needs))
        call = _Call(steps, padding, rank, options.ignore_index, Needs(*needs), outputs(tensors.target_ids.shape))
        return _TensorParallel.apply(hidden, weight, bias, call, tokens)


def _agreed_columns(tensors: Tensors, rank: Rank, options: HeadOptions) -> RankColumns:
    """The columns of every rank, after all ranks have passed the checks that each can make alone."""

    def check() -> tuple[None, str]:
        named = tensors._asdict()
        scale = named.pop("temperature")
        _inputs.check_tensors(**named)
        # The masks and these options depend on the size of the whole vocabulary, which is known only after all ranks'
        # columns are.
        named |= {"allowed_ids": None, "allowed_mask": None}
        of_own = replace(options, ignore_index=None, global_vocab_size=None, return_top_k=None)
        _inputs.check_head(named, scale, of_own)
        check_flag("reduce_hidden_grad", rank.reduce_hidden_grad)
        columns = tensors.lm_head_weight.shape[0 if options.weight_layout == "vd" else 1]
        start = integer("vocab_start_index", rank.start)
        vocab_size = None if rank.vocab_size is None else integer("global_vocab_size", rank.vocab_size)
        facts = {"range": (start, start + columns), "vocab_size": vocab_size}
        return None, json.dumps({**facts, "call": _call_text(tensors, rank, options)})

    _, texts = agreement.agreed(check, functools.partial(gather_texts, rank.group))
    facts = [json.loads(text) for text in texts]
    agreement.require_same([x["call"] for x in facts])
    ranges = [tuple(x["range"]) for x in facts]
    return checked_rank_columns(ranges, [x["vocab_size"] for x in facts], options.ignore_index)


def _call_text(tensors: Tensors, rank: Rank, options: HeadOptions) -> str:
    """A text of everything that must be the same on every rank, except global_vocab_size, which is compared apart."""

    def described(x: Any) -> str:
        return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else repr(x if x is None else float(x))

    hidden, weight, bias, ids, temperature, allowed_ids, allowed_mask = tensors
    needed = hidden.requires_grad and torch.is_grad_enabled()
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    dtypes = [autocast, weight.dtype, None if bias is None else bias.dtype]
    facts: dict[str, Any] = {
        "hidden": described(hidden),
        "dtypes": dtypes,
        "target_ids": described(ids),
        "temperature": described(temperature),
        "allowed_ids": described(allowed_ids),
        "allowed_mask": described(allowed_mask),
    }
    facts |= {"device": device, "hidden needs a gradient": needed}
    # This option is the rank's, and stands in its HeadOptions at its default.
    compared_options = vars(options) | {"reduce_hidden_grad": rank.reduce_hidden_grad}
    del compared_options["global_vocab_size"]
    return ", ".join(f"{name}={text}" for name, text in (facts | compared_options).items())


def _agreed_steps(
    columns: RankColumns,
    tensors: Tensors,
    rank: Rank,
    options: HeadOptions,
    *,
    keeps: bool,
) -> tuple[RankSteps, RowPadding, Arrays]:
    """This rank's steps by the implementation that all ranks run, how rows are padded for it, and the arrays of its
    tokens (`RowPadding.tokens`).

    It returns after every rank has checked its own.
    """
    static = replace(options, ignore_index=_padding.ignored(options.ignore_index), validate=None)
    given = tensors._asdict()
    operands = [(name, given[name]) for name in ("hidden", "lm_head_weight", "bias")]
    of_tokens = [(name, given[name]) for name in ("target_ids", "allowed_ids", "allowed_mask")]
    specs = tuple((name, None if x is None else _inputs.spec(x)) for name, x in (*operands, *of_tokens))

    def check() -> tuple[tuple[RankSteps, RowPadding, Arrays], str]:
        for _, x in operands:
            if x is not None:
                _exchange.materialized(x)
        call = (columns, dist.get_rank(rank.group), tensors.hidden.device, specs, keeps, static)
        steps, chosen = _chosen_steps(*call)
        should_validate = _inputs.should_validate(options.validate, tensors.hidden)
        checked_against = columns.vocab_size if should_validate else None
        scale = _inputs.temperature(tensors.temperature)
        ids, padding = tensors.target_ids, _padding.flat(tensors.target_ids.shape, skips_padding=chosen.skips_padding)
        allowed = padding.allowed(tensors.allowed_ids, tensors.allowed_mask)
        tokens = padding.tokens(ids, scale, options.ignore_index, "target_ids", checked_against, allowed)
        return (steps, padding, tokens), chosen.name

    found, names = agreement.agreed(check, functools.partial(gather_texts, rank.group))
    agreement.require_same([f"implementation={name}" for name in names])
    return found


@functools.lru_cache(maxsize=256)
def _chosen_steps(
    columns: RankColumns, rank: int, device: torch.device, specs: Any, keeps: bool, options: HeadOptions
) -> tuple[RankSteps, Implementation]:
    """The rank's steps, and the implementation that they are of."""
    structs = {name: None if spec is None else jax.ShapeDtypeStruct(*spec) for name, spec in specs}
    for name in ("lm_head_weight", "bias"):
        structs[name] = of_whole_head(structs[name], columns, options.weight_layout)
    options = replace(options, global_vocab_size=columns.vocab_size)
    with jax.default_device(_exchange.jax_device(device)):
        inputs, config, _ = check_call(HeadInputs(**structs, temperature=1.0), options)
        shard_config = columns.config(replace(config, keeps=keeps), rank)
        chosen = choose(facts_of_call(inputs, shard_config), options.implementation)
    if chosen.promises_bits:
        check_edges(columns)
    return RankSteps(chosen.functions.on_device, shard_config, columns, rank), chosen


def of_whole_head(
    struct: jax.ShapeDtypeStruct | None, columns: RankColumns, layout: WeightLayout
) -> jax.ShapeDtypeStruct | None:
    """The struct of the whole head or bias, whose checks know all columns, in the place of a rank's own."""
    if struct is None:
        return None
    shape = list(struct.shape)
    shape[0 if layout == "vd" else -1] = max(end for _, end in columns.ranges)
    return jax.ShapeDtypeStruct(shape, struct.dtype)


def _partials(
    hidden: Any,
    weight: Any,
    bias: Any,
    ids: Any,
    count: Any,
    temperature: Any,
    allowed_ids: Any,
    allowed_mask: Any,
    *,
    steps: RankSteps,
    ignore_index: int | None,
) -> Any:
    """This rank's partial softmax packed for the collective, the softmax's groups, and the rank's state.

    The packed vector is float32: the groups, padded to the most that a rank has, then 1 for each token whose target
    this rank holds and 0 for the others, then what a ranking must know of the targets.
    """
    ids = _padding.token_ids(ids, count, ignore_index=ignore_index)
    is_counted = counted(ids, _padding.ignored(ignore_index))
    check: Any = {"vocab_size": steps.columns.vocab_size, "validate": False}
    tokens = checked_tokens(ids, temperature, is_counted, name="target_ids", **check)
    allowed = _padding.allowed_values(allowed_ids, allowed_mask)
    tokens = with_allowed(tokens, allowed, name="target_ids", memory_budget=steps.config.memory_budget, **check)
    groups, is_here, state = steps.partials(steps.operands(hidden, weight, bias), tokens)
    targets = None if steps.config.ranking is None else steps.own_targets(state)
    of_tokens = [is_here.astype(jnp.float32)] if targets is None else [is_here.astype(jnp.float32), targets]
    return jnp.concatenate([_packing(steps).packed(groups), *of_tokens]), groups, state


def _packing(steps: RankSteps) -> GroupPacking:
    return packing_of(steps.columns, by_group=steps.functions.by_group)


class _Merged(NamedTuple):
    """What a merge gives: the values and this rank's state, and for a ranking the best of its columns, packed for the
    collective, or None.
    """

    values: LinearLogp
    state: RankState
    best: jax.Array | None


def _merge(packed: Any, groups: Any, operands: Any, state: RankState, *, steps: RankSteps) -> _Merged:
    """The values and what follows, from what all ranks have packed `[ranks, ·]`.

    `groups` are this rank's own, which show how packed groups are unpacked. A ranking needs the operands.
    """
    packing, n = _packing(steps), state.tokens.active.shape[0]
    size = packing.size(groups)
    owners, *targets = packed[:, size:].reshape(len(packed), -1, n).sum(axis=0)
    values, done = steps.merge(packing.whole(packed[:, :size], groups), owners, state)
    if operands is None:
        return _Merged(values, done, None)
    best = steps.best(steps.operands(*operands), state, done, targets[0] if targets else None)
    return _Merged(values, done, ravel_pytree(best)[0])


def _ranking(packed: Any, logp: Any, state: RankState, *, steps: RankSteps) -> Ranking:
    """The most probable tokens, from the best that all ranks have packed `[ranks, ·]`."""
    wanted = steps.config.ranking
    assert wanted is not None
    _, unpacked = ravel_pytree(as_integers(no_columns(wanted, logp.shape[0])))
    return steps.ranking(jax.vmap(unpacked)(packed[jnp.asarray(steps.columns.order)]), logp, state)


def _gradients(
    hidden: Any, weight: Any, bias: Any, upstream: tuple[Any, ...], state: RankState, *, steps: RankSteps, needs: Needs
) -> Any:
    """This rank's float32 part of dH `[1, N, D]`, and dW and db of its shard; None where `needs` says so.

    Beside them there is room for what is overwritten of the state.
    """
    logp, lse, entropy = upstream
    upstream_values = LinearLogp(jnp.zeros_like(state.tokens.temperature) if logp is None else logp, lse, entropy)
    room = overwriting.room(jax.tree.leaves(state))
    return room, steps.gradients(needs, steps.operands(hidden, weight, bias), state, upstream_values)


@dataclass(frozen=True)
class _Call:
    """Facts of a call that its forward and backward share, besides tensors and arrays."""

    steps: RankSteps
    padding: RowPadding
    rank: Rank
    ignore_index: int | None
    needs: Needs
    outputs: Sequence[Output]
    """logp, lse, entropy, top_ids, top_logps and target_rank."""

    def operands(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[jax.Array | None, ...]:
        """hidden with padded rows, weight and bias, lent to a program."""
        lent_bias = None if bias is None else _exchange.lend(bias)
        return self.padding.rows(hidden, columns=1), _exchange.lend(weight), lent_bias

    def exported(
        self, results: Sequence[jax.Array | None], outputs: Sequence[Output], device: torch.device
    ) -> list[Tensor]:
        """Results as these outputs, of which those that were not asked for are empty."""
        return [
            torch.empty(shape, dtype=dtype, device=device) if x is None else self.padding.without_padding(x, shape)
            for x, (shape, dtype) in zip(results, outputs, strict=True)
        ]


class _TensorParallel(torch.autograd.Function):
    """The sharded head's forward and backward for autograd, with a collective between the programs of the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: _Call,
        tokens: Arrays,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        steps, ignore_index = call.steps, call.ignore_index
        if call.padding.is_empty:
            ctx.save_for_backward(hidden, weight, bias, _calls.keep(None))
            return tuple(hidden.new_zeros(x.shape, dtype=x.dtype) for x in call.outputs)
        arrays = (*call.operands(hidden, weight, bias), *tokens)
        packed, groups, state = _programs.run("forward", _partials, arrays, steps=steps, ignore_index=ignore_index)
        # What was lent ends with the first export of a result: a ranking is lent the operands once more.
        gathered = _exchange.lend(call.rank.gathered(packed))
        operands = None if steps.config.ranking is None else call.operands(hidden, weight, bias)
        values, state, best = _programs.run("forward", _merge, (gathered, groups, operands), (state,), steps=steps)
        ranking: Any = (None, None, None)
        if best is not None:
            ranking = _programs.run(
                "forward", _ranking, (_exchange.lend(call.rank.gathered(best)), values.logp, state), steps=steps
            )
        ctx.save_for_backward(hidden, weight, bias, _calls.keep(state))
        # What the last program was lent ends with the first export, too, and so that is one of its own results.
        of_ranking = call.exported(ranking, call.outputs[3:], hidden.device)
        ctx.mark_non_differentiable(*of_ranking)
        return *call.exported(values, call.outputs[:3], hidden.device), *of_ranking

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            return (None,) * 5
        *tensors, handle = ctx.saved_tensors
        with torch.no_grad():
            gradients = _linear_logp_bwd(ctx.call, tuple(tensors), handle, upstream[:3])
        return *_calls.differentiable_once(gradients, *tensors, *upstream), None, None


def _linear_logp_bwd(
    call: _Call, tensors: tuple[Tensor, Tensor, Tensor | None], handle: Tensor, upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of this rank's hidden, weight and bias; None where none is needed."""
    is_last = _calls.is_last_backward()
    state = _calls.kept(handle, is_last=is_last)
    if state is None:
        return [None if x is None or not x.requires_grad else torch.zeros_like(x) for x in tensors]
    hidden, weight, bias = tensors
    with _exchange.launching(upstream):
        lent_upstream = tuple(None if g is None else call.padding.rows(g) for g in upstream)
        arrays = (*call.operands(hidden, weight, bias), lent_upstream)
        donated = state if is_last else overwriting.spared(state)
        _, gradients = _programs.run("backward", _gradients, arrays, (donated,), steps=call.steps, needs=call.needs)
        d_hidden, d_weight, d_bias, _ = gradients
        return [
            None if d_hidden is None else call.rank.summed(d_hidden, call.padding, hidden),
            None if d_weight is None else _exchange.to_torch(d_weight),
            None if d_bias is None else _exchange.to_torch(d_bias),
        ]
