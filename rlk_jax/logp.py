"""logp: log-probabilities of the taken tokens from logits that are in memory already."""

import functools
import inspect
import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike, Float, Float32, Int

from rlk_jax import _transforms, dispatch, validation
from rlk_jax._problem import LinearLogp, LogpFunctions, LogpInputs, SoftmaxOptions, Tokens

_NO_SECOND_DERIVATIVE = "the gradient of log-probabilities of logits cannot be differentiated again."


class CommonOptions(TypedDict, total=False):
    """The options that do not decide what logp returns, for its overloads."""

    temperature: float | Float[ArrayLike, "*lead"]
    logit_softcap: float | None
    ignore_index: int | None
    global_vocab_size: int | None
    row_indices: Int[Array, " K"] | None
    initial: Float32[Array, "*lead"] | None
    donate_logits: bool
    validate: bool | None
    implementation: str | None


@overload
def logp(
    logits: Float[Array, "*lead V"],
    token_ids: Int[Array, "*lead"],
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[CommonOptions],
) -> Float32[Array, "*lead"]: ...


@overload
def logp(
    logits: Float[Array, "*lead V"],
    token_ids: Int[Array, "*lead"],
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[CommonOptions],
) -> LinearLogp: ...


def logp(
    logits: Float[Array, "*lead V"],
    token_ids: Int[Array, "*lead"],
    *,
    temperature: float | Float[ArrayLike, "*lead"] = 1.0,
    logit_softcap: float | None = None,
    ignore_index: int | None = None,
    global_vocab_size: int | None = None,
    row_indices: Int[Array, " K"] | None = None,
    initial: Float32[Array, "*lead"] | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    donate_logits: bool = False,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Float32[Array, "*lead"] | LinearLogp:
    """Log-probability of each token under its row of logits.

        z = softcap(logits) / temperature,   softcap(x) = c·tanh(x/c)
        logp = z[token] − ln Σ_v exp z_v,   lse = ln Σ_v exp z_v,   entropy = −Σ_v p_v·ln p_v     (natural logarithms)

    Where hidden states are at hand, `linear_logp` needs no logits.

    Args:
      logits: `[*lead, V]`, bfloat16, float16 or float32; sums run in float32. −inf is a token that cannot be taken
        (beside a softcap it counts as −c).
      token_ids: `[*lead]`, any integer dtype.
      temperature: positive; a scalar or one per token. Not differentiated.
      logit_softcap: c > 0 (Gemma), or None. Not differentiated.
      ignore_index: tokens with this id give 0 in every output and exactly 0 in every gradient, and their logits are not
        read. It must lie outside the vocabulary.
      global_vocab_size: true vocabulary size where the last columns are padding: they count as −inf.
      row_indices: numbers of the rows to compute, `[K]`, counting tokens of all lead dimensions from 0, in any order.
        The others are treated as ignored ones, but for `initial`.
      initial: float32 `[*lead]`: logp of the rows that `row_indices` does not list; 0 without it. Updated in place
        where it is donated to jit.
      return_lse, return_entropy: also return these, from the same pass, differentiable.
      donate_logits: the gradient may stand where the logits do, in memory that they need no more: for logits that
        nothing else uses, computed in the same program or donated to jit. Where that does not hold, XLA copies
        them first, and the result is the same.
      validate: True checks ids, rows and temperatures before launch (small read-backs); False never waits for the
        device; None checks concrete arrays and nothing under jit. A bad row that is not checked gives NaN in its
        outputs and its gradient (a bad entry of row_indices: in all rows), and is reported under
        `jax.experimental.checkify`.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here
        (`rlk_jax.explain` tells).

    Returns:
      float32 logp `[*lead]`, or `LinearLogp(logp, lse, entropy)` where more was asked for (None for what was not).

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    The gradient is written once, in the logits' dtype; a row whose upstream gradients are all 0 gets exactly 0 without
    being read.

    Same bits: `mosaic`, `triton` and `deterministic` give a row the same raw bits in any batch, at any position and
    beside any neighbours; `xla` promises accuracy only. docs/logp.md has the whole contract.

    Source: RL-Kernel's logp; the online softmax (Milakov and Gimelshein, arXiv 1805.02867).
    """
    given = LogpInputs(logits, token_ids, temperature, row_indices, initial)
    facts: dict[str, Any] = {
        "logit_softcap": logit_softcap,
        "ignore_index": ignore_index,
        "global_vocab_size": global_vocab_size,
        "return_lse": return_lse,
        "return_entropy": return_entropy,
        "validate": validate,
    }
    inputs, options = validation.logp(*given, **facts)
    validation.require_values(inputs)
    chosen = dispatch.choose(dispatch.problem_of("logp", (inputs.logits,), options), implementation)
    tokens, kept = _tokens_of(inputs, options, ignore_index, validate)
    found = values(chosen.functions, options, donate_logits, jnp.asarray(inputs.logits), tokens)
    if kept is not None:
        found = found._replace(logp=jnp.where(kept, inputs.initial, found.logp))
    return found if return_lse or return_entropy else found.logp


def _tokens_of(
    inputs: LogpInputs, options: SoftmaxOptions, ignore_index: int | None, validate: bool | None
) -> tuple[Tokens, Array | None]:
    """Flat tokens, of which those are active that count; and which rows keep what `initial` has, `[*lead]`."""
    ids, kept, temperature = inputs.token_ids, None, inputs.temperature
    counted = validation.counted(ids, ignore_index)
    if inputs.row_indices is not None:
        listed, fit = validation.rows(inputs.row_indices, counted.shape[0], validate)
        # Which row was meant cannot be known: all turn NaN.
        counted &= listed | ~fit
        temperature = jnp.where(fit, temperature, jnp.nan)
        kept = None if inputs.initial is None else ~listed.reshape(ids.shape) & fit
    vocab_size = options.real_vocab_size
    return validation.tokens(
        ids, temperature, counted, vocab_size=vocab_size, validate=validate, name="token_ids"
    ), kept


def describe(*args: Any, **kwargs: Any) -> tuple[dispatch.Problem, str | None]:
    """What `dispatch` sees of the call `logp(*args, **kwargs)`, and the implementation it names."""
    call = inspect.signature(logp).bind(*args, **kwargs)
    call.apply_defaults()
    implementation = call.arguments.pop("implementation")
    del call.arguments["donate_logits"]
    inputs, options = validation.logp(**call.arguments)
    return dispatch.problem_of("logp", (inputs.logits,), options), implementation


def values(
    functions: LogpFunctions, options: SoftmaxOptions, donate: bool, logits: Array, tokens: Tokens
) -> LinearLogp:
    """What the ops over logits `[*lead, V]` know of their flat tokens: `[*lead]`, 0 where not active."""
    lead = logits.shape[:-1]
    if 0 in lead:
        nothing = jnp.zeros(lead, jnp.float32)
        return LinearLogp(nothing, nothing if options.return_lse else None, nothing if options.return_entropy else None)
    rows = logits.reshape(math.prod(lead), logits.shape[-1])
    return jax.tree.map(lambda x: x.reshape(lead), _of_rows(functions, options, donate, rows, tokens))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _of_rows(
    functions: LogpFunctions, options: SoftmaxOptions, donate: bool, logits: Array, tokens: Tokens
) -> LinearLogp:
    return _values(functions, options, donate, *_transforms.equally_varying((logits, tokens)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _values(
    functions: LogpFunctions, options: SoftmaxOptions, donate: bool, logits: Array, tokens: Tokens
) -> LinearLogp:
    return _forward(functions, options, logits, tokens)[0]


def _forward(
    functions: LogpFunctions, options: SoftmaxOptions, logits: Array, tokens: Tokens
) -> tuple[LinearLogp, Any]:
    def of_rows(_: Any, rows: tuple[Array, Tokens]) -> tuple[LinearLogp, Any]:
        return _transforms.varying_like(functions.forward(options, *rows), rows[0])

    rows = (lax.stop_gradient(logits), tokens)
    found, residual = _transforms.vmap_folds_rows(of_rows, outputs_are_rows=True)((), rows)
    return jax.tree.map(lambda x: jnp.where(tokens.active, x, 0), found), residual


def _save(
    functions: LogpFunctions, options: SoftmaxOptions, donate: bool, *primals: Any
) -> tuple[LinearLogp, tuple[Array, Tokens, Any]]:
    logits, tokens = _transforms.primal_values(primals)
    found, residual = _forward(functions, options, logits, tokens)
    return found, (logits, tokens, residual)


def _pull_back(
    functions: LogpFunctions, options: SoftmaxOptions, donate: bool, saved: Any, upstream: LinearLogp
) -> tuple[Any, ...]:
    logits, tokens, residual = saved
    given = [None if isinstance(g, SymbolicZero) else g for g in upstream]
    upstream = LinearLogp(jnp.zeros_like(tokens.temperature) if given[0] is None else given[0], *given[1:])
    logits, upstream = _transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, (logits, upstream))
    tokens = tokens.with_upstream(upstream)

    def of_rows(_: Any, rows: tuple[Array, Tokens, Any, LinearLogp]) -> Array:
        logits, tokens, residual, upstream = rows
        found = functions.gradient(options, logits, tokens, residual, upstream, donate)
        return _transforms.varying_like(found, logits)

    folding = _transforms.vmap_folds_rows(of_rows, outputs_are_rows=True)
    return folding((), (logits, tokens, residual, upstream)), None


_values.defvjp(_save, _pull_back, symbolic_zeros=True)
