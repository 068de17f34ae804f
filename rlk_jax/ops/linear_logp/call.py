"""A call of linear_logp on one device: checks, the choice of the implementation, flat tokens, values."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlk_jax.core.allowed import with_allowed
from rlk_jax.core.checks import require_values
from rlk_jax.core.dispatch import CallFacts, choose, facts_of
from rlk_jax.core.head import HeadConfig, Operands
from rlk_jax.core.shard import Shard, check_edges
from rlk_jax.core.tokens import LinearLogp, RankedLogp, Tokens, checked_tokens, counted
from rlk_jax.ops.linear_logp.autodiff import flat_values
from rlk_jax.ops.linear_logp.checks import check_call
from rlk_jax.ops.linear_logp.low_rank import LowRankProducts, with_low_rank_columns
from rlk_jax.ops.linear_logp.options import HeadFunctions, HeadInputs, HeadOptions


def on_device(
    inputs: HeadInputs, options: HeadOptions, vocab_start_index: Any = None
) -> jax.Array | LinearLogp | RankedLogp:
    """What `linear_logp` returns for arrays that are one device's own, or that XLA lays over a program's devices."""
    call = flat_call(inputs, options, vocab_start_index)
    values = flat_values(*call, vocab_start_index)
    lead = jnp.shape(inputs.target_ids)
    values = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), values)
    is_alone = isinstance(values, LinearLogp) and not (options.return_lse or options.return_entropy)
    return values.logp if is_alone else values


class FlatCall(NamedTuple):
    """A call whose arguments are checked, of flat tokens: what runs it, its static facts, and its arrays."""

    functions: HeadFunctions
    config: HeadConfig
    shard: Shard | None
    operands: Operands
    tokens: Tokens


def flat_call(inputs: HeadInputs, options: HeadOptions, vocab_start_index: Any = None) -> FlatCall:
    """The call that these arguments lead to."""
    inputs, config, shard = check_call(inputs, options, vocab_start_index)
    require_values(inputs)
    chosen = choose(facts_of_call(inputs, config), options.implementation)
    if shard is not None and chosen.promises_bits:
        check_edges(shard)
    tokens = tokens_of(inputs, config.real_vocab_size if shard is None else shard.vocab_size, options)
    dim = inputs.hidden.shape[-1]
    rows = jnp.asarray(inputs.hidden).reshape(math.prod(inputs.hidden.shape[:-1]), dim)
    weight = jnp.asarray(inputs.lm_head_weight)
    operands = Operands(rows, weight, None if inputs.bias is None else jnp.asarray(inputs.bias))
    if config.rank:
        # Kernels in Pallas' interpreter are no HeadFunctions, and have effects that XLA cannot spread.
        is_spread = isinstance(chosen.functions, HeadFunctions)
        products = LowRankProducts(chosen.functions.gemm, config.weight_layout, is_spread)
        rows = with_low_rank_columns(products, inputs, rows)
        operands = operands._replace(hidden=rows, low_rank=jnp.asarray(inputs.low_rank_b).astype(weight.dtype))
    return FlatCall(chosen.functions, config, shard, operands, tokens)


def facts_of_call(inputs: HeadInputs, config: HeadConfig) -> CallFacts:
    """The facts by which dispatch decides a call."""
    return facts_of("linear_logp", (inputs.hidden, inputs.lm_head_weight, inputs.bias), config)


def tokens_of(inputs: HeadInputs, vocab_size: int, options: HeadOptions) -> Tokens:
    """Flat tokens, of which ignored ones are not active, with their values checked as `options.validate` says."""
    tokens = checked_tokens(
        inputs.target_ids,
        inputs.temperature,
        counted(inputs.target_ids, options.ignore_index),
        vocab_size=vocab_size,
        validate=options.validate,
        name="target_ids",
    )
    return with_allowed(
        tokens,
        inputs,
        vocab_size=vocab_size,
        validate=options.validate,
        name="target_ids",
        memory_budget=options.memory_budget,
    )
