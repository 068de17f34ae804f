"""The custom_vjp of linear_logp on one device: values forward, gradients of the operands backward.

One custom_vjp holds both passes, so that the forward knows whether a backward will follow. The only collective inside
it is the gather of partial softmaxes in the forward.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core import transforms
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands
from rlk_jax.core.shard import (
    Gather,
    Shard,
    hidden_for_gradient,
    hidden_gradient_carrier,
    is_covered,
    local_tokens,
    rank_summands,
    real_columns_of_shard,
    shard_position,
    sum_over_ranks,
)
from rlk_jax.core.softmax import values_of_no_tokens
from rlk_jax.core.tokens import LinearLogp, RankedLogp, Tokens, upstream_gradients
from rlk_jax.ops.linear_logp.options import HeadFunctions
from rlk_jax.ops.linear_logp.ranking import Ranking, finished, ranking_of_no_tokens, with_ranking

Array = jax.Array
_NO_SECOND_DERIVATIVE = "linear_logp has no second derivative: its gradient cannot be differentiated again."


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def flat_values(
    functions: HeadFunctions,
    config: HeadConfig,
    shard: Shard | None,
    operands: Operands,
    tokens: Tokens,
    vocab_start_index: Any,
) -> LinearLogp | RankedLogp:
    """The differentiable values of flat tokens: from a whole head on one device, or from the shards of all ranks.

    A ranking, where one is asked for, stands beside them as a constant.
    """
    tokens = lax.stop_gradient(tokens)
    if operands.hidden.shape[0] == 0:
        none = None if config.ranking is None else ranking_of_no_tokens(config.ranking)
        return with_ranking(values_of_no_tokens(config, (0,)), none)
    if shard is None:
        operands, tokens = transforms.equally_varying((operands, tokens))
        values, ranking = _values(functions, config, None, None, operands, tokens, None)
        return with_ranking(values, lax.stop_gradient(ranking))
    position = shard_position(shard, vocab_start_index)
    carrier = hidden_gradient_carrier(shard, hidden_for_gradient(shard, operands.hidden), position.order)
    operands = operands._replace(real_columns=real_columns_of_shard(shard, position.start))
    tokens = local_tokens(shard, tokens, position)
    ranks = _Ranks(position.order, is_covered(shard, tokens, operands.real_columns))
    carrier, operands, tokens, ranks = transforms.equally_varying((carrier, operands, tokens, ranks))
    summands, ranking = _values(functions, config, shard, carrier, operands, tokens, ranks)
    values = jax.tree.map(functools.partial(sum_over_ranks, shard), summands)
    return with_ranking(values, lax.psum(lax.stop_gradient(ranking), shard.axis))


class _Ranks(NamedTuple):
    """What a rank knows of all shards: their order, and which tokens have their target in exactly one of them."""

    order: Array | None
    is_covered: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _values(
    functions: HeadFunctions,
    config: HeadConfig,
    shard: Shard | None,
    carrier: Array | None,
    operands: Operands,
    tokens: Tokens,
    ranks: _Ranks | None,
) -> tuple[LinearLogp, Ranking | None]:
    """The values of linear_logp and the ranking, or a rank's summands of them, whose upstream gradients are those of
    the whole values. The ranking has none.

    Where there is a carrier, it gets the gradient of hidden, and hidden gets none.
    """
    return _forward(functions, config, shard, operands, tokens, ranks)[:2]


def _forward(
    functions: HeadFunctions,
    config: HeadConfig,
    shard: Shard | None,
    operands: Operands,
    tokens: Tokens,
    ranks: _Ranks | None,
) -> tuple[LinearLogp, Ranking | None, Any, Any]:
    """The values and the ranking, a residual with a row per token, and what else is kept for a backward that is not
    under vmap.
    """

    def one_batch(config: HeadConfig, shared: Any, rows: tuple[Array, Tokens]) -> tuple[Any, ...]:
        (hidden, tokens), (order, *factors) = rows, shared
        gather: Gather = lambda groups: groups  # noqa: E731
        if shard is not None:
            gather = functools.partial(shard.gather, order=order)
        operands = Operands(hidden, *factors)
        return transforms.varying_like(tuple(functions.forward(config, operands, tokens, gather)), hidden)

    def batches(shared: Any, rows: tuple[Array, Tokens]) -> tuple[Any, ...]:
        kept = jax.eval_shape(functools.partial(one_batch, config), shared, rows)[-1]
        one_of_many = functools.partial(one_batch, replace(config, keeps=False))
        folding = transforms.vmap_folds_rows(lambda *x: one_of_many(*x)[:-1], outputs_are_rows=True)
        return *folding(shared, rows), jax.tree.map(lambda x: jnp.zeros(0, x.dtype), kept)

    hidden, *factors = lax.stop_gradient(operands)
    # Functions under a vmap rule take every array as an argument: JAX cannot lower one that they close over.
    shared = (None if ranks is None else ranks.order, *factors)
    forward = transforms.with_vmap_rule(functools.partial(one_batch, config), batches)
    values, ranking, residual, kept = forward(shared, (hidden, tokens))
    values = jax.tree.map(lambda x: jnp.where(tokens.active, x, 0), values)
    if ranks is not None:
        # Tokens are poisoned after the pass, so that the pass need not wait for the other ranks' answers.
        covered = ranks.is_covered
        values = jax.tree.map(lambda x: jnp.where(covered, x, jnp.nan), values)
    if ranking is not None:
        ranking = finished(ranking, values.logp, tokens.active)
    if shard is not None:
        values, ranking = rank_summands(shard, (values, ranking))
    return values, ranking, residual, kept


def _values_fwd(
    functions: HeadFunctions, config: HeadConfig, shard: Shard | None, *primals: Any
) -> tuple[tuple[LinearLogp, Ranking | None], Any]:
    carrier, operands = primals[:2]
    targets = (operands.hidden if carrier is None else carrier, *operands[1:4])
    operands, tokens, ranks = transforms.primal_values(primals[1:])
    values, ranking, residual, kept = _forward(functions, replace(config, keeps=True), shard, operands, tokens, ranks)
    if ranks is not None:
        tokens = tokens._replace(temperature=jnp.where(ranks.is_covered, tokens.temperature, jnp.nan))
    return (values, ranking), (transforms.needs_gradient(targets), operands, tokens, residual, kept)


def _values_bwd(
    functions: HeadFunctions,
    config: HeadConfig,
    shard: Shard | None,
    saved: Any,
    cotangents: tuple[LinearLogp, Any],
) -> tuple[Any, ...]:
    needed, operands, tokens, residual, kept = saved
    needs = Needs(*transforms.is_needed(needed))
    upstream = upstream_gradients(cotangents[0], tokens)
    operands, upstream = transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, (operands, upstream))
    tokens = tokens.with_upstream(upstream)

    def one_batch(kept: Any, shared: Any, rows: Any) -> Gradients:
        hidden, tokens, residual, upstream = rows
        operands = Operands(hidden, *shared)
        # Arrays of what is kept are empty where the forward ran under vmap.
        kept = kept if all(x.size for x in jax.tree.leaves(kept)) else None
        found = functions.gradients(config, needs, operands, tokens, residual, kept, upstream)
        return transforms.varying_like(found, hidden)

    def batches(kept: Any, shared: Any, rows: Any) -> Gradients:
        outputs_are_rows = not (config.is_shard or any((needs.weight, needs.bias, needs.low_rank)))
        folding = transforms.vmap_folds_rows(functools.partial(one_batch, None), outputs_are_rows=outputs_are_rows)
        return folding(shared, rows)

    hidden, *shared = operands
    gradients = transforms.with_vmap_rule(one_batch, batches)
    done: Any = Operands(*gradients(kept, tuple(shared), (hidden, tokens, residual, upstream)))  # type: ignore[arg-type]
    d_carrier, done = (done.hidden, done._replace(hidden=None)) if config.is_shard else (None, done)
    return d_carrier, done, None, None


_values.defvjp(_values_fwd, _values_bwd, symbolic_zeros=True)
