"""The custom_vjp of attention. Under vmap the batch is folded into the rows of sequences."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from rlk_jax.core import transforms
from rlk_jax.ops.attention.options import AttentionConfig, AttentionFunctions, Gradients, Needs, Operands

Array = jax.Array
_NO_SECOND_DERIVATIVE = "attention has no second derivative: its gradient cannot be differentiated again."


@functools.partial(jax.jit, static_argnums=(0, 1))
def attended(functions: AttentionFunctions, config: AttentionConfig, operands: Operands) -> Array:
    """The differentiable output `[B, T, H, F]`."""
    batch, length, heads, _ = operands.query.shape
    shape = (batch, length, heads, operands.value.shape[3])
    if 0 in shape:
        return jnp.zeros(shape, operands.query.dtype)
    return _attended(functions, config, transforms.equally_varying(operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(functions: AttentionFunctions, config: AttentionConfig, operands: Operands) -> Array:
    return _forward(functions, config, operands)[0]


def _forward(functions: AttentionFunctions, config: AttentionConfig, operands: Operands) -> tuple[Array, Any]:
    def of_rows(start: Array, rows: Operands) -> tuple[Array, Any]:
        return transforms.varying_like(functions.forward(config, rows._replace(start=start)), rows.query)

    # `start` is no row, and every other leaf has the batch in front.
    rows = lax.stop_gradient(operands)._replace(start=None)
    return transforms.vmap_folds_rows(of_rows, outputs_are_rows=True)(operands.start, rows)


def _attended_fwd(functions: AttentionFunctions, config: AttentionConfig, *primals: Any) -> tuple[Array, Any]:
    needed = transforms.needs_gradient(primals[0][:3])
    (operands,) = transforms.primal_values(primals)
    output, kept = _forward(functions, config, operands)
    return output, (needed, operands, kept)


def _attended_bwd(
    functions: AttentionFunctions, config: AttentionConfig, saved: Any, upstream: Any
) -> tuple[Operands | None]:
    needed, operands, kept = saved
    needs = Needs(*transforms.is_needed(needed))
    if isinstance(upstream, SymbolicZero):
        return (None,)
    operands, upstream = transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, (operands, upstream))

    def of_rows(start: Array, rows: Any) -> Gradients:
        operands, kept, upstream = rows
        found = functions.gradients(config, needs, operands._replace(start=start), kept, upstream)
        return transforms.varying_like(found, upstream)

    rows = (operands._replace(start=None), kept, upstream)
    found = transforms.vmap_folds_rows(of_rows, outputs_are_rows=True)(operands.start, rows)
    return (Operands(*found, None, None),)  # type: ignore[call-arg]


_attended.defvjp(_attended_fwd, _attended_bwd, symbolic_zeros=True)
