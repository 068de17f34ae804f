"""The custom_vjp of linear_kl: divergences forward, gradients of the student's operands backward, none of the
teacher's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from rlk_jax.core import transforms
from rlk_jax.core.reports import reported
from rlk_jax.core.shard import (
    Gather,
    Shard,
    ShardPosition,
    hidden_for_gradient,
    hidden_gradient_carrier,
    poisoned_unless_partition,
    rank_summands,
    real_columns_of_shard,
    shard_position,
    sum_over_ranks,
)
from rlk_jax.ops.linear_kl.options import Gradients, KlConfig, KlFunctions, KlTokens, Needs, OneHead, Operands

Array = jax.Array
_NO_SECOND_DERIVATIVE = "linear_kl has no second derivative: its gradient cannot be differentiated again."


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def divergences(
    functions: KlFunctions,
    config: KlConfig,
    shard: Shard | None,
    operands: Operands,
    tokens: KlTokens,
    vocab_start_index: Any,
) -> Array:
    """The differentiable divergence of each token, `[N]`: from whole heads on one device, or from the shards of all
    ranks.
    """
    if tokens.active.shape[0] == 0:
        return jnp.zeros(0, jnp.float32)
    frozen = lax.stop_gradient((operands.teacher, tokens))
    operands, tokens = operands._replace(teacher=frozen[0]), frozen[1]
    if shard is None:
        operands, tokens = transforms.equally_varying((operands, tokens))
        return _values(functions, config, None, None, operands, tokens, None)
    position = shard_position(shard, vocab_start_index)
    carrier = hidden_gradient_carrier(shard, hidden_for_gradient(shard, operands.student.hidden), position.order)
    operands = operands._replace(real_columns=real_columns_of_shard(shard, position.start))
    given = carrier, operands, _tokens_of_ranks(shard, tokens, position), position.order
    summands = _values(functions, config, shard, *transforms.equally_varying(given))
    return sum_over_ranks(shard, summands)


def _tokens_of_ranks(shard: Shard, tokens: KlTokens, position: ShardPosition) -> KlTokens:
    """Tokens of which the same are active on all ranks, so that ranks meet in every gather: those that are active on
    any rank. One that is not active on all of them is poisoned. What a teacher lists stands in this rank's columns.
    """
    active = transforms.varying_like(tokens.active.astype(jnp.int32), lax.axis_index(shard.axis))
    count = lax.psum(active, shard.axis)
    is_same = (count == 0) | (count == shard.count)
    message = f"completion_mask must be the same on every rank of {shard.axis!r}."
    is_same = reported(is_same, jnp.all(is_same), message)
    temperature = jnp.where(is_same, poisoned_unless_partition(position, tokens.temperature), jnp.nan)
    top_k = None if tokens.top_k is None else tokens.top_k.of_shard(position.start, shard.columns)
    return tokens._replace(active=count > 0, temperature=temperature, top_k=top_k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _values(
    functions: KlFunctions,
    config: KlConfig,
    shard: Shard | None,
    carrier: Array | None,
    operands: Operands,
    tokens: KlTokens,
    order: Array | None,
) -> Array:
    """The divergences, or a rank's summands of them, whose upstream gradients are those of the whole values.

    Where there is a carrier, it gets the gradient of hidden, and hidden gets none. `order` is that of the ranks.
    """
    return _forward(functions, config, shard, operands, tokens, order)[0]


def _without_hidden(operands: Operands) -> tuple[Operands, tuple[Array, Array | None]]:
    """The operands without hidden states, which are the same for all rows, and the hidden states of both."""
    student, teacher = operands.student, operands.teacher
    hidden = student.hidden, None if teacher is None else teacher.hidden
    return _joined(operands, (None, None)), hidden


def _joined(heads: Operands, hidden: tuple[Array | None, Array | None]) -> Operands:
    teacher = None if heads.teacher is None else heads.teacher._replace(hidden=hidden[1])
    return heads._replace(student=heads.student._replace(hidden=hidden[0]), teacher=teacher)


def _forward(
    functions: KlFunctions,
    config: KlConfig,
    shard: Shard | None,
    operands: Operands,
    tokens: KlTokens,
    order: Array | None,
) -> tuple[Array, Any]:
    """The values, 0 for tokens that are not active, or a rank's summands of them; and what is kept for the backward."""

    def of_rows(shared: tuple[Operands, Array | None], rows: tuple[Any, KlTokens]) -> tuple[Array, Any]:
        (heads, order), (hidden, tokens) = shared, rows
        gather: Gather = lambda groups: groups  # noqa: E731
        if shard is not None:
            gather = functools.partial(shard.gather, order=order)
        found = functions.forward(config, _joined(heads, hidden), tokens, gather)
        return transforms.varying_like(found, hidden[0])

    heads, hidden = _without_hidden(lax.stop_gradient(operands))
    folding = transforms.vmap_folds_rows(of_rows, outputs_are_rows=True)
    values, residual = folding((heads, order), (hidden, tokens))
    values = jnp.where(tokens.active, values, 0)
    return (values if shard is None else rank_summands(shard, values)), residual


def _values_fwd(functions: KlFunctions, config: KlConfig, shard: Shard | None, *primals: Any) -> tuple[Array, Any]:
    carrier, operands = primals[:2]
    targets = (operands.student.hidden if carrier is None else carrier, *operands.student[1:])
    operands, tokens, order = transforms.primal_values(primals[1:])
    values, residual = _forward(functions, config, shard, operands, tokens, order)
    return values, (transforms.needs_gradient(targets), operands, tokens, residual)


def _values_bwd(
    functions: KlFunctions, config: KlConfig, shard: Shard | None, saved: Any, upstream: Any
) -> tuple[Any, ...]:
    needed, operands, tokens, residual = saved
    if isinstance(upstream, SymbolicZero):
        return None, None, None, None
    needs = Needs(*transforms.is_needed(needed))
    operands, upstream = transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, (operands, upstream))
    # A token whose upstream gradient is 0 contributes nothing, whatever it holds.
    tokens = tokens._replace(active=tokens.active & (upstream != 0))

    def of_rows(heads: Operands, rows: Any) -> Gradients:
        hidden, tokens, residual, upstream = rows
        found = functions.gradients(config, needs, _joined(heads, hidden), tokens, residual, upstream)
        return transforms.varying_like(found, hidden[0])

    heads, hidden = _without_hidden(operands)
    outputs_are_rows = not (needs.weight or needs.bias or config.is_shard)
    folding = transforms.vmap_folds_rows(of_rows, outputs_are_rows=outputs_are_rows)
    found = folding(heads, (hidden, tokens, residual, upstream))
    d_carrier = found.hidden if config.is_shard else None
    student = OneHead(*found)._replace(hidden=None) if config.is_shard else OneHead(*found)
    return d_carrier, Operands(student, None), None, None


_values.defvjp(_values_fwd, _values_bwd, symbolic_zeros=True)
