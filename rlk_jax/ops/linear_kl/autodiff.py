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
from rlk_jax.ops.linear_kl.options import Gradients, KlConfig, KlFunctions, KlTokens, Needs, OneHead, Operands

Array = jax.Array
_NO_SECOND_DERIVATIVE = "linear_kl has no second derivative: its gradient cannot be differentiated again."


@functools.partial(jax.jit, static_argnums=(0, 1))
def divergences(functions: KlFunctions, config: KlConfig, operands: Operands, tokens: KlTokens) -> Array:
    """The differentiable divergence of each token, `[N]`."""
    if tokens.active.shape[0] == 0:
        return jnp.zeros(0, jnp.float32)
    frozen = lax.stop_gradient((operands.teacher, tokens))
    operands, tokens = transforms.equally_varying((operands._replace(teacher=frozen[0]), frozen[1]))
    return _values(functions, config, operands, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _values(functions: KlFunctions, config: KlConfig, operands: Operands, tokens: KlTokens) -> Array:
    return _forward(functions, config, operands, tokens)[0]


def _heads_and_hidden(operands: Operands) -> tuple[Operands, tuple[Array, Array | None]]:
    """The operands without hidden states, which are the same for all rows, and the hidden states of both."""
    student, teacher = operands
    hidden = student.hidden, None if teacher is None else teacher.hidden
    return _joined(operands, (None, None)), hidden


def _joined(heads: Operands, hidden: tuple[Array | None, Array | None]) -> Operands:
    teacher = None if heads.teacher is None else heads.teacher._replace(hidden=hidden[1])
    return Operands(heads.student._replace(hidden=hidden[0]), teacher)


def _forward(functions: KlFunctions, config: KlConfig, operands: Operands, tokens: KlTokens) -> tuple[Array, Any]:
    """The values, 0 for tokens that are not active, and what is kept for the backward."""

    def of_rows(heads: Operands, rows: tuple[Any, KlTokens]) -> tuple[Array, Any]:
        hidden, tokens = rows
        return transforms.varying_like(functions.forward(config, _joined(heads, hidden), tokens), hidden[0])

    heads, hidden = _heads_and_hidden(lax.stop_gradient(operands))
    folding = transforms.vmap_folds_rows(of_rows, outputs_are_rows=True)
    values, residual = folding(heads, (hidden, tokens))
    return jnp.where(tokens.active, values, 0), residual


def _values_fwd(functions: KlFunctions, config: KlConfig, *primals: Any) -> tuple[Array, Any]:
    needed = transforms.needs_gradient(primals[0].student)
    operands, tokens = transforms.primal_values(primals)
    values, residual = _forward(functions, config, operands, tokens)
    return values, (needed, operands, tokens, residual)


def _values_bwd(functions: KlFunctions, config: KlConfig, saved: Any, upstream: Any) -> tuple[Any, None]:
    needed, operands, tokens, residual = saved
    if isinstance(upstream, SymbolicZero):
        return None, None
    needs = Needs(*transforms.is_needed(needed))
    operands, upstream = transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, (operands, upstream))
    # A token whose upstream gradient is 0 contributes nothing, whatever it holds.
    tokens = tokens._replace(active=tokens.active & (upstream != 0))

    def of_rows(heads: Operands, rows: Any) -> Gradients:
        hidden, tokens, residual, upstream = rows
        found = functions.gradients(config, needs, _joined(heads, hidden), tokens, residual, upstream)
        return transforms.varying_like(found, hidden[0])

    heads, hidden = _heads_and_hidden(operands)
    folding = transforms.vmap_folds_rows(of_rows, outputs_are_rows=not (needs.weight or needs.bias))
    found = folding(heads, (hidden, tokens, residual, upstream))
    return Operands(OneHead(*found), None), None


_values.defvjp(_values_fwd, _values_bwd, symbolic_zeros=True)
