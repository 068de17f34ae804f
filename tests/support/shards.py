"""Shards of a head without as many devices: ranks one after the other, and programs that are only lowered."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rlk_jax import LinearLogp, dispatch, linear_logp
from rlk_jax.core.fixed_order import ascending_sum
from rlk_jax.core.head import Needs, Operands
from rlk_jax.core.shard import Shard
from rlk_jax.core.tokens import Tokens
from rlk_jax.ops.linear_logp.checks import check_call
from rlk_jax.ops.linear_logp.options import HeadFunctions, HeadInputs, HeadOptions
from tests.support import helpers
from tests.support.helpers import Case, assert_same_bits, assert_within_contract


def check_two(
    implementation: str,
    columns: int,
    layout: Any,
    dtype: Any,
    op_class: str,
    *,
    has_bits: bool = True,
    label_smoothing: float = 0.0,
) -> None:
    """Two shards, one after the other on one device, as the ranks of vocab_parallel run them at the same time.

    has_bits: what stands for a GPU here keeps an element's bits wherever in a tile it is.
    """
    case = Case("shards", (40,), 64, 1000, bias=True, options={"label_smoothing": label_smoothing})
    problem = helpers.make(case, dtype)
    head = problem.weight.T if layout == "dv" else problem.weight
    padding = 2 * columns - case.vocab
    # Padding may hold anything.
    filler = [(0, padding), (0, 0)] if layout == "vd" else [(0, 0), (0, padding)]
    weight = jnp.pad(head, filler, constant_values=jnp.nan)
    bias = jnp.pad(problem.bias, (0, padding), constant_values=jnp.nan)
    functions = next(x.functions for x in dispatch.TABLE["linear_logp"] if x.name == implementation)
    functions = functions.on_device if isinstance(functions, HeadFunctions) else functions
    shard = Shard("tp", 2, columns, case.vocab, "canonical", reduce_hidden_grad=True)
    options = HeadOptions(
        global_vocab_size=case.vocab, weight_layout=layout, return_lse=True, return_entropy=True, **case.options
    )
    _, config, _ = check_call(HeadInputs(problem.hidden, weight, problem.target_ids, bias, 1.0), options)
    config = shard.config(config)
    ones = jnp.ones(case.lead, jnp.float32)

    def operands(rank):
        here = slice(rank * columns, (rank + 1) * columns)
        real = jnp.asarray([columns, case.vocab - columns][rank], jnp.int32)
        return Operands(
            problem.hidden, weight[here] if layout == "vd" else weight[:, here], bias[here], real_columns=real
        )

    def tokens(rank):
        return Tokens(problem.target_ids - rank * columns, ones, ones > 0)

    partials, merge = (jax.jit(functools.partial(f, config)) for f in (functions.partials, functions.merge))
    gradients = jax.jit(functools.partial(functions.gradients, config, Needs(True, True, True)))
    groups, states = zip(*(partials(operands(r), tokens(r)) for r in range(2)), strict=True)
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *groups)
    (values, softmax, _), (again, *_) = (merge(whole, state) for state in states)
    assert_same_bits(values, again)
    upstream = LinearLogp(*problem.upstream)
    parts = [gradients(operands(r), tokens(r), softmax, None, upstream) for r in range(2)]
    d_hidden = ascending_sum(jnp.concatenate([p.hidden for p in parts])).astype(dtype)
    d_weight = jnp.concatenate([p.weight for p in parts], axis=0 if layout == "vd" else 1)
    d_bias = jnp.concatenate([p.bias for p in parts])
    gold = helpers.gold(case, problem)
    for actual, expected in zip(values, gold.values, strict=True):
        assert_within_contract(actual, expected, op_class, dtype, "forward")
    d_weight = d_weight if layout == "vd" else d_weight.T
    for actual, expected in zip((d_hidden, d_weight[: case.vocab], d_bias[: case.vocab]), gold.gradients, strict=True):
        assert_within_contract(actual, expected, op_class, dtype, "gradient")
    assert (d_weight[case.vocab :] == 0).all() and (d_bias[case.vocab :] == 0).all()
    if shard.on_group_edges and has_bits:
        assert_same_bits(tuple(values), tuple(problem.call(case, implementation)))
        unsharded = problem.gradients(case, implementation)
        assert_same_bits((d_hidden, d_weight[: case.vocab], d_bias[: case.vocab]), unsharded)


def lowered(implementation: str, vocab: int, *, check_vma: bool, reduction: Any, tokens: int, **options: Any) -> str:
    """The program of gradients on two ranks, for CUDA, in several slices of a padded head."""
    options = {"return_entropy": True, "memory_budget": 2**20} | options
    mesh = Mesh(jax.devices()[:2], ("tp",))

    def on_rank(hidden: Any, weight: Any, target_ids: Any, bias: Any) -> Any:
        return linear_logp(
            hidden,
            weight,
            target_ids,
            bias,
            axis_name="tp",
            global_vocab_size=vocab - 3,
            return_lse=True,
            reduction=reduction,
            implementation=implementation,
            **options,
        )

    def loss(*arrays: Any) -> Any:
        specs = (P(), P("tp", None), P(), P("tp"))
        values = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)(*arrays)
        return sum(x.sum() for x in jax.tree.leaves(values))

    shapes = (
        ((tokens, 1024), jnp.bfloat16),
        ((vocab, 1024), jnp.bfloat16),
        ((tokens,), jnp.int32),
        ((vocab,), jnp.bfloat16),
    )
    gradients = jax.jit(jax.grad(loss, (0, 1, 3))).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    return gradients.lower(lowering_platforms=("cuda",)).as_text()
