"""A loss of log-probs whose gradients are formed in its forward, block by block of tokens.

The forward knows the gradients but for the factor that the loss has upstream, and so the backward has nothing to do but
to multiply by it and to round. Where no gradient is asked for, the forward is that of `linear_logp`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from rlk_jax.core import transforms
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands
from rlk_jax.core.partitioning import chosen_by_devices
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.losses import PolicyLoss
from rlk_jax.ops.linear_logp.autodiff import flat_values
from rlk_jax.ops.linear_logp.call import flat_call
from rlk_jax.ops.linear_logp.options import HeadFunctions, HeadInputs, HeadOptions, LinearLogpFunctions, TokenBlocks
from rlk_jax.ops.linear_logp.token_blocks import values_and_gradients_by_blocks

Array = jax.Array
Loss = Callable[[Any, LinearLogp], PolicyLoss]
"""`loss(constants, values)` of flat tokens `[N]`. The derivative by a token's log-prob depends on none but those of its
sequence.
"""
_NO_SECOND_DERIVATIVE = "linear_grpo_loss has no second derivative: its gradient cannot be differentiated again."


def on_one_device(functions: HeadFunctions | LinearLogpFunctions) -> LinearLogpFunctions:
    """The functions of one device. Kernels in Pallas' interpreter are no HeadFunctions."""
    return functions.on_device if isinstance(functions, HeadFunctions) else functions


def loss_by_blocks(
    inputs: HeadInputs, options: HeadOptions, blocks: TokenBlocks, loss: Loss, constants: Any
) -> PolicyLoss:
    """`loss(constants, values)` of what `linear_logp` gives for the inputs; a gradient takes `blocks` of tokens."""
    call = flat_call(inputs, options)
    return _flat_loss(call.functions, call.config, blocks, loss, call.operands, call.tokens, constants)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _flat_loss(
    functions: HeadFunctions,
    config: HeadConfig,
    blocks: TokenBlocks,
    loss: Loss,
    operands: Operands,
    tokens: Tokens,
    constants: Any,
) -> PolicyLoss:
    return _loss(functions, config, blocks, loss, operands, *jax.lax.stop_gradient((tokens, constants)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _loss(
    functions: HeadFunctions,
    config: HeadConfig,
    blocks: TokenBlocks,
    loss: Loss,
    operands: Operands,
    tokens: Tokens,
    constants: Any,
) -> PolicyLoss:
    """The loss by all tokens at once."""
    return loss(constants, flat_values(functions, config, None, operands, tokens, None))


def _loss_fwd(
    functions: HeadFunctions, config: HeadConfig, blocks: TokenBlocks, loss: Loss, *primals: Any
) -> tuple[PolicyLoss, Any]:
    needed = transforms.needs_gradient(primals[0][:3])
    operands, tokens, constants = transforms.primal_values(primals)
    operands = jax.lax.stop_gradient(transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, operands))
    of_call = functions, config, loss, Needs(*transforms.is_needed(needed))

    def alone(operands: Operands, tokens: Tokens, constants: Any) -> tuple[LinearLogp, Gradients]:
        return _by_blocks(*of_call, blocks, operands, tokens, constants)

    at_once = functools.partial(_at_once, *of_call)
    # Kernels in Pallas' interpreter are no HeadFunctions, and have effects that no choice may hide.
    is_spread = isinstance(functions, HeadFunctions)
    by_devices = functools.partial(chosen_by_devices, alone, at_once) if is_spread else alone
    values, gradients = transforms.with_vmap_rule(by_devices, at_once)(operands, tokens, constants)
    # The tree is the same whatever is needed: JAX keeps one for all linearisations of a jitted function.
    saved = [jnp.zeros(0) if x is None else x for x in gradients[:3]]
    dtypes = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), operands)
    return loss(constants, values), (saved, dtypes)


def _by_blocks(
    functions: HeadFunctions,
    config: HeadConfig,
    loss: Loss,
    needs: Needs,
    blocks: TokenBlocks,
    operands: Operands,
    tokens: Tokens,
    constants: Any,
) -> tuple[LinearLogp, Gradients]:
    """The values of all tokens and the loss's float32 gradients, by blocks."""
    own = on_one_device(functions)
    assert own.of_blocks is not None

    def slopes(values: LinearLogp) -> Array:
        return jax.grad(lambda logp: loss(constants, values._replace(logp=logp)).loss)(values.logp)

    return values_and_gradients_by_blocks(own, own.of_blocks, config, blocks, needs, operands, tokens, slopes)


def _at_once(
    functions: HeadFunctions,
    config: HeadConfig,
    loss: Loss,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    constants: Any,
) -> tuple[LinearLogp, Gradients]:
    """What `_by_blocks` gives, by all tokens at once: under vmap, and over several devices."""
    is_needed = (needs.hidden, needs.weight, needs.bias)

    def of_needed(needed: tuple[Any, ...]) -> tuple[Array, LinearLogp]:
        given: Any = (x if n is None else n for n, x in zip(needed, operands[:3], strict=True))
        values = flat_values(functions, config, None, Operands(*given), tokens, None)
        return loss(constants, values).loss, values

    needed = tuple(x if n else None for n, x in zip(is_needed, operands[:3], strict=True))
    (_, values), found = jax.value_and_grad(of_needed, has_aux=True)(needed)
    return values, Gradients(*jax.tree.map(lambda x: x.astype(jnp.float32), found))


def _loss_bwd(
    functions: HeadFunctions,
    config: HeadConfig,
    blocks: TokenBlocks,
    loss: Loss,
    residual: Any,
    cotangents: PolicyLoss,
) -> tuple[Any, ...]:
    saved, dtypes = residual
    scale = cotangents.loss
    if isinstance(scale, SymbolicZero):
        return None, None, None
    saved, scale = transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, (saved, scale))

    # Without the barrier XLA would hold the zeros that the gradients' sums start from, beside the sums.
    zero = transforms.fusion_barrier(jnp.zeros(()))

    def scaled(gradient: Array, like: Array | None) -> Array | None:
        # A loss that does not count has gradients of 0, whatever its tokens hold; masked tokens do at any scale.
        product = jnp.where((scale == 0) | (gradient == zero), zero, scale * gradient)
        return None if like is None or not gradient.size else product.astype(like.dtype)

    done: Any = map(scaled, saved, dtypes[:3])
    return Operands(*done), None, None


_loss.defvjp(_loss_fwd, _loss_bwd, symbolic_zeros=True)
