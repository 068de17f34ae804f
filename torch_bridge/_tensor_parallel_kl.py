"""linear_kl on heads whose vocabulary is sharded over the ranks of a process group.

The ranks agree on a call as those of linear_logp do. The forward of an implementation asks for the groups of all ranks
up to three times. It runs as one program up to each of these gathers: a program is traced from the start, is given what
was gathered before, and returns what is to be gathered next, so that XLA leaves out what led to earlier gathers.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
from torch import Tensor

from rlk_jax.core.checks import check_flag
from rlk_jax.core.dispatch import choose, facts_of
from rlk_jax.core.gemm import WeightLayout
from rlk_jax.core.rank_columns import RankColumns, checked_rank_columns
from rlk_jax.core.shard import check_edges
from rlk_jax.ops.linear_kl.checks import check_call, tokens_of_call
from rlk_jax.ops.linear_kl.options import (
    KlConfig,
    KlFunctions,
    KlInputs,
    KlOptions,
    KlTokens,
    Needs,
    OneHead,
    Operands,
)
from rlk_jax.ops.linear_logp.sharding import agreement
from torch_bridge import _calls, _exchange, _inputs, _padding, _programs
from torch_bridge._kl_tokens import TokenTensors, check_kl, lent_tokens, scales
from torch_bridge._padding import RowPadding
from torch_bridge._process_groups import GroupPacking, Rank, gather_texts, integer, packing_of
from torch_bridge._programs import Arrays
from torch_bridge._tensor_parallel import of_whole_head


class Tensors(NamedTuple):
    """The tensors of a call; weights and biases are this rank's shards."""

    hidden: Tensor
    lm_head_weight: Tensor
    bias: Tensor | None
    teacher_hidden: Tensor | None
    teacher_weight: Tensor | None
    teacher_bias: Tensor | None
    completion_mask: Tensor | None
    teacher_ids: Tensor | None
    teacher_logps: Tensor | None
    temperature: Tensor | float
    teacher_temperature: Tensor | float | None

    @property
    def told(self) -> TokenTensors:
        """What each token is told, which is the same on every rank."""
        return TokenTensors(*self[6:9], *scales(*self[9:]))


@torch.compiler.disable
def tensor_parallel_kl(tensors: Tensors, rank: Rank, options: KlOptions) -> Tensor:
    """The divergence of each token; `options` are those of the whole heads."""
    columns, sizes = _agreed_columns(tensors, rank, options)
    told = tensors.told
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias = _inputs.autocast(*tensors[:6])
    weight, layout = _inputs.without_transpose(weight, options.weight_layout)
    teacher_layout = options.teacher_weight_layout
    if teacher_weight is not None:
        teacher_weight, teacher_layout = _inputs.without_transpose(teacher_weight, teacher_layout)
    options = replace(options, weight_layout=layout, teacher_weight_layout=teacher_layout)
    heads = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
    needs = Needs(*_inputs.needs(hidden, weight, bias))
    with _exchange.launching([hidden]):
        steps = _agreed_steps(columns, sizes, heads, told, rank, options)
        call = _Call(steps, _padding.flat(hidden.shape[:-1]), rank, told, options, needs)
        return _TensorParallel.apply(call, *heads)


def _of_own_shards(options: KlOptions) -> KlOptions:
    """The options without the sizes of whole heads, which are known only after all ranks' columns are."""
    return replace(options, global_vocab_size=None, teacher_global_vocab_size=None)


def _agreed_columns(tensors: Tensors, rank: Rank, options: KlOptions) -> tuple[RankColumns, tuple[int, int]]:
    """The columns of every rank, after all ranks have passed the checks that each can make alone, and the sizes of both
    vocabularies.
    """

    def check() -> tuple[None, str]:
        named = tensors._asdict()
        scales = named.pop("temperature"), named.pop("teacher_temperature")
        check_kl(named, *scales, _of_own_shards(options))
        check_flag("reduce_hidden_grad", rank.reduce_hidden_grad)
        columns = tensors.lm_head_weight.shape[0 if options.weight_layout == "vd" else 1]
        start = integer("vocab_start_index", rank.start)
        given = {name: getattr(options, name) for name in ("global_vocab_size", "teacher_global_vocab_size")}
        sizes = [None if x is None else integer(name, x) for name, x in given.items()]
        facts = {"range": (start, start + columns), "sizes": sizes, "call": _call_text(tensors, rank, options)}
        return None, json.dumps(facts)

    _, texts = agreement.agreed(check, functools.partial(gather_texts, rank.group))
    facts = [json.loads(text) for text in texts]
    agreement.require_same([x["call"] for x in facts], "linear_kl")
    ranges = [tuple(x["range"]) for x in facts]
    student, teacher = (checked_rank_columns(ranges, [x["sizes"][i] for x in facts], None) for i in range(2))
    return student, (student.vocab_size, teacher.vocab_size)


def _call_text(tensors: Tensors, rank: Rank, options: KlOptions) -> str:
    """A text of everything that must be the same on every rank, except the sizes, which are compared apart."""

    def described(name: str, x: Any) -> str:
        if not isinstance(x, Tensor):
            return repr(x)
        # Ranks may hold shards of different widths.
        return str(x.dtype) if "weight" in name or "bias" in name else f"{x.dtype}{list(x.shape)}"

    hidden = tensors.hidden
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    facts: dict[str, Any] = {name: described(name, x) for name, x in tensors._asdict().items()}
    facts |= {"autocast": autocast, "device": device}
    facts["hidden needs a gradient"] = hidden.requires_grad and torch.is_grad_enabled()
    # This option is the rank's, and stands in its KlOptions at its default.
    facts |= vars(_of_own_shards(options)) | {"reduce_hidden_grad": rank.reduce_hidden_grad}
    return ", ".join(f"{name}={text}" for name, text in facts.items())


@dataclass(frozen=True)
class _Steps:
    """What runs on this rank: the functions of an implementation, and the config of its shards."""

    functions: KlFunctions
    config: KlConfig
    columns: RankColumns
    rank: int

    @property
    def packing(self) -> GroupPacking:
        """How groups travel between ranks."""
        return packing_of(self.columns, by_group=self.functions.by_group)

    def operands(self, heads: Arrays) -> Operands:
        """The operands of this rank's shards."""
        real = self.columns.real_columns(self.rank)
        is_padded = real < self.config.student.vocab_size
        given: Any = heads
        teacher = None if given[4] is None else OneHead(*given[3:])
        return Operands(OneHead(*given[:3]), teacher, jnp.int32(real) if is_padded else None)

    def tokens(self, inputs: KlInputs) -> KlTokens:
        """The tokens of a call, in whose lists stand this rank's columns."""
        tokens, (start, end) = tokens_of_call(inputs, self.config, validate=False), self.columns.ranges[self.rank]
        top_k = None if tokens.top_k is None else tokens.top_k.of_shard(start, end - start)
        return tokens._replace(top_k=top_k)


def _agreed_steps(
    columns: RankColumns,
    sizes: tuple[int, int],
    heads: Sequence[Tensor | None],
    told: TokenTensors,
    rank: Rank,
    options: KlOptions,
) -> _Steps:
    """This rank's steps by the implementation that all ranks run, after every rank has checked its own values."""
    hidden = heads[0]
    assert hidden is not None
    listed = {"teacher_ids": told.teacher_ids, "teacher_logps": told.teacher_logps}
    whole = _whole_heads(columns, heads, options)
    named = dict(zip(Tensors._fields[:6], whole, strict=True)) | listed
    specs = tuple((name, None if x is None else _inputs.spec(x)) for name, x in named.items())
    teacher_size = sizes[1] if told.teacher_ids is None else None
    static = replace(options, global_vocab_size=sizes[0], teacher_global_vocab_size=teacher_size, validate=None)

    def check() -> tuple[_Steps, str]:
        for x in heads:
            if x is not None:
                _exchange.materialized(x)
        steps, name = _chosen_steps(columns, dist.get_rank(rank.group), hidden.device, specs, static)
        if _inputs.should_validate(options.validate, hidden):
            padding = _padding.flat(hidden.shape[:-1])
            lent_tokens(padding, whole, told, static, validate=True)
        return steps, name

    steps, names = agreement.agreed(check, functools.partial(gather_texts, rank.group))
    agreement.require_same([f"implementation={name}" for name in names], "linear_kl")
    return steps


def _whole_heads(columns: RankColumns, heads: Sequence[Tensor | None], options: KlOptions) -> tuple[Tensor | None, ...]:
    """Hidden states beside whole heads and biases, which hold nothing, for checks that know all columns."""

    def whole(x: Tensor | None, layout: WeightLayout) -> Tensor | None:
        struct = of_whole_head(None if x is None else jax.ShapeDtypeStruct(*_inputs.spec(x)), columns, layout)
        return None if x is None or struct is None else torch.empty(struct.shape, dtype=x.dtype, device="meta")

    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias = heads
    student = hidden, whole(weight, options.weight_layout), whole(bias, options.weight_layout)
    layout = options.teacher_weight_layout
    return *student, teacher_hidden, whole(teacher_weight, layout), whole(teacher_bias, layout)


@functools.lru_cache(maxsize=256)
def _chosen_steps(
    columns: RankColumns, rank: int, device: torch.device, specs: Any, options: KlOptions
) -> tuple[_Steps, str]:
    """The rank's steps by the specs of whole heads, and the name of the implementation that they are of."""
    structs = {name: None if spec is None else jax.ShapeDtypeStruct(*spec) for name, spec in specs}
    given = dict.fromkeys(KlInputs._fields) | structs | {"temperature": 1.0}
    with jax.default_device(_exchange.jax_device(device)):
        inputs, whole, _ = check_call(KlInputs(**given), options)
        config = whole.of_rank(columns, rank)
        chosen = choose(facts_of("linear_kl", inputs[:6], config), options.implementation)
    if chosen.promises_bits:
        check_edges(columns)
    return _Steps(chosen.functions, config, columns, rank), chosen.name


class _Asked(NamedTuple):
    """The groups that a forward asks all ranks for, packed for the collective."""

    packed: jax.Array


class _Found(NamedTuple):
    """What a forward found: the divergences, and what a backward is given."""

    values: jax.Array
    state: Any


class _AsksForGroups(Exception):
    """A forward asks for groups that are not gathered yet."""


def _forward(heads: Arrays, told: Arrays, given: Arrays, *, steps: _Steps) -> _Asked | _Found:
    """The forward up to the first gather whose result is not `given`: what all ranks have packed `[ranks, ·]`."""
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias = heads
    mask, ids, logps, temperature, own_temperature = told
    ids = None if ids is None or logps is None else _exchange.ids_of(ids, logps.shape)
    teacher_temperature = temperature if own_temperature is None else own_temperature
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    tokens = steps.tokens(KlInputs(*arrays, mask, temperature, teacher_temperature, ids, logps))
    vectors = iter(given)

    def gather(groups: Any) -> Any:
        vector = next(vectors, None)
        if vector is None:
            raise _AsksForGroups(groups)
        return steps.packing.whole(vector, groups)

    try:
        values, residual = steps.functions.forward(steps.config, steps.operands(heads), tokens, gather)
    except _AsksForGroups as asked:
        return _Asked(steps.packing.packed(asked.args[0]))
    return _Found(jnp.where(tokens.active, values, 0), (tokens, residual))


def _gradients(heads: Arrays, upstream: jax.Array, state: Any, *, steps: _Steps, needs: Needs) -> Any:
    """This rank's float32 part of dH `[1, N, D]`, and dW and db of its shard; None where `needs` says so."""
    tokens, residual = state
    # A token whose upstream gradient is 0 contributes nothing, whatever it holds.
    tokens = tokens._replace(active=tokens.active & (upstream != 0))
    return steps.functions.gradients(steps.config, needs, steps.operands(heads), tokens, residual, upstream)


@dataclass(frozen=True)
class _Call:
    """Facts of a call that its forward and backward share, besides the tensors of both heads."""

    steps: _Steps
    padding: RowPadding
    rank: Rank
    told: TokenTensors
    options: KlOptions
    needs: Needs

    def heads(self, tensors: Sequence[Tensor | None]) -> Arrays:
        """Hidden states with padded rows, weights and biases, lent to a program."""

        def lent(place: int, x: Tensor | None) -> jax.Array | None:
            if x is None:
                return None
            return self.padding.rows(x, columns=1) if place % 3 == 0 else _exchange.lend(x)

        return tuple([lent(place, x) for place, x in enumerate(tensors)])

    def found(self, tensors: Sequence[Tensor | None]) -> _Found:
        """What the forward finds, with a collective between its programs."""
        gathered: list[Tensor] = []
        while True:
            # What was lent ends with each export of a result, and so all is lent to each program.
            told = lent_tokens(self.padding, tensors, self.told, self.options, validate=False)
            arrays = self.heads(tensors), told, tuple(map(_exchange.lend, gathered))
            found = _programs.run("forward", _forward, arrays, steps=self.steps)
            if isinstance(found, _Found):
                return found
            gathered.append(self.rank.gathered(found.packed))


class _TensorParallel(torch.autograd.Function):
    """The forward and backward of both sharded heads for autograd."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *heads: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        hidden = heads[0]
        assert hidden is not None
        if call.padding.is_empty:
            ctx.save_for_backward(*heads, _calls.keep(None))
            return hidden.new_zeros(call.padding.lead, dtype=torch.float32)
        found = call.found(heads)
        ctx.save_for_backward(*heads, _calls.keep(found.state))
        return call.padding.without_padding(found.values, call.padding.lead)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        *heads, handle = ctx.saved_tensors
        if upstream[0] is None:
            return (None,) * (1 + len(heads))
        with torch.no_grad():
            gradients = _linear_kl_bwd(ctx.call, heads, handle, upstream[0])
        return None, *_calls.differentiable_once(gradients, *heads, *upstream), None, None, None


def _linear_kl_bwd(
    call: _Call, heads: Sequence[Tensor | None], handle: Tensor, upstream: Tensor
) -> list[Tensor | None]:
    """Gradients of this rank's hidden, weight and bias; None where none is needed."""
    state = _calls.kept(handle, is_last=_calls.is_last_backward())
    if state is None:
        needs = call.needs.hidden, call.needs.weight, call.needs.bias
        student = zip(heads[:3], needs, strict=True)
        return [torch.zeros_like(x) if is_needed and x is not None else None for x, is_needed in student]
    hidden = heads[0]
    assert hidden is not None
    with _exchange.launching([upstream]):
        arrays = call.heads(heads), call.padding.rows(upstream), state
        found = _programs.run("backward", _gradients, arrays, steps=call.steps, needs=call.needs)
        d_hidden, d_weight, d_bias = found
        return [
            None if d_hidden is None else call.rank.summed(d_hidden, call.padding, hidden),
            None if d_weight is None else _exchange.to_torch(d_weight),
            None if d_bias is None else _exchange.to_torch(d_bias),
        ]
