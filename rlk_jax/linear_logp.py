"""linear_logp: log-probabilities of the taken tokens from hidden states and the LM head, without the logits."""

import functools
import inspect
import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, ArrayLike, Float, Int

from rlk_jax import _transforms, dispatch, validation
from rlk_jax._problem import (
    Inputs,
    LinearLogp,
    LinearLogpFunctions,
    Needs,
    Operands,
    Options,
    Tokens,
    WeightLayout,
)

_NO_SECOND_DERIVATIVE = "linear_logp has no second derivative: its gradient cannot be differentiated again."


class _CommonOptions(TypedDict, total=False):
    """The options that do not decide what linear_logp returns, for its overloads."""

    temperature: float | Float[ArrayLike, "*lead"]
    logit_softcap: float | None
    ignore_index: int | None
    global_vocab_size: int | None
    weight_layout: WeightLayout
    memory_budget: int | None
    validate: bool | None
    implementation: str | None


@overload
def linear_logp(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[_CommonOptions],
) -> Float[Array, "*lead"]: ...


@overload
def linear_logp(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[_CommonOptions],
) -> LinearLogp: ...


def linear_logp(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    temperature: float | Float[ArrayLike, "*lead"] = 1.0,
    logit_softcap: float | None = None,
    ignore_index: int | None = None,
    global_vocab_size: int | None = None,
    weight_layout: WeightLayout = "vd",
    return_lse: bool = False,
    return_entropy: bool = False,
    memory_budget: int | None = None,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Float[Array, "*lead"] | LinearLogp:
    """Log-probability of each target token under the LM head.

        z = softcap(hidden·Wᵀ + bias) / temperature,   softcap(x) = c·tanh(x/c)
        logp = z[target] − ln Σ_v exp z_v,   lse = ln Σ_v exp z_v,   entropy = −Σ_v p_v·ln p_v     (natural logarithms)

    Args:
      hidden: last hidden states `[*lead, D]`, already shifted so that a row predicts its target. bfloat16, float16 or
        float32.
      lm_head_weight: `[V, D]`, or `[D, V]` with `weight_layout="dv"`. Same dtypes; sums run in float32.
      target_ids: `[*lead]`, any integer dtype.
      bias: `[V]` or None.
      temperature: positive; a scalar or one per token. Not differentiated.
      logit_softcap: c > 0 (Gemma), or None. Not differentiated.
      ignore_index: tokens with this id give 0 in every output and exactly 0 in every gradient, whatever their hidden
        row holds. It must lie outside the vocabulary.
      global_vocab_size: true vocabulary size where the head's last rows are padding: they count as logits of −inf.
      weight_layout: "vd" (Hugging Face, tied embeddings) or "dv" (Flax Linear kernels). Neither is transposed.
      return_lse, return_entropy: also return these, from the same pass, differentiable.
      memory_budget: bytes for the logits and their gradients that are held at a time, and the copies beside them, never
        for less than one block of them; None for the implementation's default. `mosaic` and `deterministic` give the
        same bits for every budget.
      validate: True checks target ids and temperatures before launch (one small read-back); False never waits for the
        device; None checks concrete arrays and nothing under jit. A bad row that is not checked gives NaN in its
        outputs and in every gradient it reaches, and is reported under `jax.experimental.checkify`.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here
        (`rlk_jax.explain` tells).

    Returns:
      float32 logp `[*lead]`, or `LinearLogp(logp, lse, entropy)` where more was asked for (None for what was not).

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow to hidden, lm_head_weight and bias, in their dtypes. An operand that needs none costs no work, and
    neither does a row whose upstream gradients are all 0: it contributes exactly 0, even if it holds NaN.

    Same bits: `mosaic` and `deterministic` give a row the same raw bits in any batch, at any position and beside any
    neighbours, and dW, db the same bits with ignored rows anywhere; `xla` promises accuracy only. docs/linear_logp.md
    has the whole contract.

    Source: RL-Kernel's linear_logp; the pair (max, ln Σ) as in online softmax (Milakov and Gimelshein,
    arXiv 1805.02867).
    """
    inputs, options = validation.linear_logp(
        hidden,
        lm_head_weight,
        target_ids,
        bias,
        temperature=temperature,
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
        global_vocab_size=global_vocab_size,
        weight_layout=weight_layout,
        return_lse=return_lse,
        return_entropy=return_entropy,
        memory_budget=memory_budget,
        validate=validate,
    )
    validation.require_values(inputs)
    chosen = dispatch.choose(_problem(inputs, options), implementation)
    tokens = _tokens(inputs, options, ignore_index, validate)
    lead, dim = inputs.hidden.shape[:-1], inputs.hidden.shape[-1]
    rows = jnp.asarray(inputs.hidden).reshape(math.prod(lead), dim)
    weight = jnp.asarray(inputs.lm_head_weight)
    operands = Operands(rows, weight, None if inputs.bias is None else jnp.asarray(inputs.bias))
    values = _linear_logp(chosen.functions, options, operands, tokens)
    values = jax.tree.map(lambda x: x.reshape(lead), values)
    return values if return_lse or return_entropy else values.logp


def describe(*args: Any, **kwargs: Any) -> tuple[dispatch.Problem, str | None]:
    """What `dispatch` sees of the call `linear_logp(*args, **kwargs)`, and the implementation it names."""
    call = inspect.signature(linear_logp).bind(*args, **kwargs)
    call.apply_defaults()
    implementation = call.arguments.pop("implementation")
    return _problem(*validation.linear_logp(**call.arguments)), implementation


def _problem(inputs: Inputs, options: Options) -> dispatch.Problem:
    operands = [x for x in (inputs.hidden, inputs.lm_head_weight, inputs.bias) if x is not None]
    return dispatch.Problem(
        op="linear_logp",
        device=dispatch.device_of(operands),
        dtypes=tuple(str(x.dtype) for x in operands),
        dim=inputs.hidden.shape[-1],
        options=options,
    )


def _tokens(inputs: Inputs, options: Options, ignore_index: int | None, validate: bool | None) -> Tokens:
    """Flat tokens. A row with a bad id or temperature gets temperature NaN, which poisons everything it reaches."""
    ids = validation.as_int32(inputs.target_ids).reshape(-1)
    temperature = jnp.asarray(inputs.temperature).astype(jnp.float32)
    temperature = jnp.broadcast_to(temperature, inputs.target_ids.shape).reshape(-1)
    counted = ids != ignore_index if ignore_index is not None else jnp.ones(ids.shape, bool)
    is_good = validation.token_values(ids, counted, temperature, vocab_size=options.real_vocab_size, validate=validate)
    return Tokens(jnp.where(is_good, ids, 0), jnp.where(is_good, temperature, jnp.nan), counted)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _linear_logp(functions: LinearLogpFunctions, options: Options, operands: Operands, tokens: Tokens) -> LinearLogp:
    """The values come from a pass that JAX does not differentiate; `_with_gradients` ties the gradients to them."""
    operands, tokens = _transforms.equally_varying((operands, lax.stop_gradient(tokens)))
    forward = _transforms.vmap_folds_rows(
        lambda shared, rows: functions.forward(options, Operands(rows[0], *shared), rows[1]), outputs_are_rows=True
    )
    hidden, *shared = lax.stop_gradient(operands)
    values, residual = forward(shared, (hidden, tokens))
    values = jax.tree.map(lambda x: jnp.where(tokens.active, x, 0), values)
    return _with_gradients(functions, options, values, operands, tokens, residual)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_gradients(
    functions: LinearLogpFunctions,
    options: Options,
    values: LinearLogp,
    operands: Operands,
    tokens: Tokens,
    residual: Any,
) -> LinearLogp:
    """`values`, with the gradients of linear_logp with respect to `operands`. No collective stands inside."""
    return values


def _save(functions: LinearLogpFunctions, options: Options, *primals: Any) -> tuple[LinearLogp, Any]:
    """Which operands need a gradient is saved as the length of an array, 1 or 0: static, and of this linearisation.

    JAX keeps one residual tree for all linearisations of a jitted function: a flag in the tree would be the last one's.
    """
    values, operands, tokens, residual = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
    needs = tuple(jnp.zeros(int(x is not None and x.perturbed)) for x in primals[1])
    return values, (needs, operands, tokens, residual)


def _pull_back(functions: LinearLogpFunctions, options: Options, saved: Any, upstream: LinearLogp) -> tuple[Any, ...]:
    needed, operands, tokens, residual = saved
    needs = Needs(*(x.shape[0] > 0 for x in needed))
    given = [None if isinstance(g, SymbolicZero) else g for g in upstream]
    upstream = LinearLogp(jnp.zeros_like(tokens.temperature) if given[0] is None else given[0], *given[1:])
    operands, upstream = _transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, (operands, upstream))
    has_upstream = functools.reduce(jnp.logical_or, (g != 0 for g in upstream if g is not None))
    tokens = tokens._replace(active=tokens.active & has_upstream)
    hidden, *shared = operands
    gradients = _transforms.vmap_folds_rows(
        lambda shared, rows: functions.gradients(options, needs, Operands(rows[0], *shared), *rows[1:]),
        outputs_are_rows=not (needs.weight or needs.bias),
    )(shared, (hidden, tokens, residual, upstream))
    return None, Operands(*gradients), None, None


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)


_with_gradients.defvjp(_save, _pull_back, symbolic_zeros=True)
