"""The gold: each op as its plain definition on float32-upcast inputs. Materialises everything; nothing clever, ever."""

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from rlk_jax._gemm import Form
from rlk_jax._problem import (
    Array,
    Gradients,
    LinearLogp,
    LinearLogpFunctions,
    LogpFunctions,
    Needs,
    Operands,
    Options,
    SoftmaxOptions,
    Tokens,
)

if TYPE_CHECKING:
    from rlk_jax.dispatch import Problem


def linear_logp(options: Options, operands: Operands, tokens: Tokens) -> LinearLogp:
    """z = softcap(hidden·Wᵀ + bias) / temperature; logp = log_softmax(z)[target], lse, entropy = −Σ p·ln p."""
    is_padding = jnp.arange(options.vocab_size)[None] >= options.real_vocab_size
    weight = operands.weight.T if options.weight_layout == "vd" else operands.weight
    weight = jnp.where(is_padding, 0, weight.astype(jnp.float32))
    logits = jnp.matmul(operands.hidden.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
    if operands.bias is not None:
        logits = logits + jnp.where(is_padding, 0, operands.bias.astype(jnp.float32)[None])
    return _of_logits(options, logits, tokens)


def _of_logits(options: SoftmaxOptions, logits: Array, tokens: Tokens) -> LinearLogp:
    """z = softcap(logits) / temperature, −inf in padding columns; then the definitions."""
    is_padding = jnp.arange(options.vocab_size)[None] >= options.real_vocab_size
    if options.logit_softcap is not None:
        logits = options.logit_softcap * jnp.tanh(logits / options.logit_softcap)
    logits = logits / tokens.temperature[:, None]
    logits = jnp.where(is_padding, -jnp.inf, logits)
    logprobs = jax.nn.log_softmax(logits)
    probability = jnp.exp(logprobs)
    # An impossible token has p·ln p = 0; the inner where keeps its infinite logarithm out of the gradient too.
    surprise = probability * jnp.where(probability > 0, logprobs, 0)
    return LinearLogp(
        logp=jnp.take_along_axis(logprobs, tokens.target_ids[:, None], axis=-1)[:, 0],
        lse=jax.nn.logsumexp(logits, axis=-1) if options.return_lse else None,
        entropy=-surprise.sum(axis=-1) if options.return_entropy else None,
    )


def why_not(problem: "Problem") -> list[str]:
    """Reasons why it cannot run this problem."""
    return (
        [] if problem.options.hidden_gradient == "rounded" else ["needs the whole head, not a shard of its vocabulary"]
    )


def _merge(options: Options, values: LinearLogp, state: None) -> tuple[LinearLogp, None, None]:
    """Nothing to merge: the head is whole."""
    return values, None, None


def _gradients(
    options: Options, needs: Needs, operands: Operands, tokens: Tokens, residual: None, kept: None, upstream: LinearLogp
) -> Gradients:
    """JAX's own derivative of the definition, on the active rows."""
    operands = operands._replace(hidden=jnp.where(tokens.active[:, None], operands.hidden, 0))
    tokens = tokens._replace(temperature=jnp.where(tokens.active, tokens.temperature, 1))
    upstream = jax.tree.map(lambda g: jnp.where(tokens.active, g, 0), upstream)

    def values(operands: Operands) -> LinearLogp:
        logp, lse, entropy = linear_logp(options, operands, tokens)
        return LinearLogp(logp, None if upstream.lse is None else lse, None if upstream.entropy is None else entropy)

    gradients = jax.vjp(values, operands)[1](upstream)[0]
    return Gradients(
        hidden=gradients.hidden if needs.hidden else None,
        weight=gradients.weight if needs.weight else None,
        bias=gradients.bias if needs.bias else None,
    )


LINEAR_LOGP = LinearLogpFunctions(lambda *x: (linear_logp(*x), None), _merge, _gradients)


def logp(options: SoftmaxOptions, logits: Array, tokens: Tokens) -> LinearLogp:
    """The definitions on float32 logits; padding columns may hold anything."""
    is_padding = jnp.arange(options.vocab_size)[None] >= options.real_vocab_size
    return _of_logits(options, jnp.where(is_padding, 0, logits.astype(jnp.float32)), tokens)


def _logp_gradient(
    options: SoftmaxOptions, logits: Array, tokens: Tokens, residual: None, upstream: LinearLogp, donate: bool
) -> Array:
    """JAX's own derivative of the definition, on the active rows."""
    logits = jnp.where(tokens.active[:, None], logits, 0)
    tokens = tokens._replace(temperature=jnp.where(tokens.active, tokens.temperature, 1))
    upstream = jax.tree.map(lambda g: jnp.where(tokens.active, g, 0), upstream)
    options = replace(options, return_lse=upstream.lse is not None, return_entropy=upstream.entropy is not None)
    return jax.vjp(lambda x: logp(options, x, tokens), logits)[1](upstream)[0]


LOGP = LogpFunctions(lambda *x: (logp(*x), None), _logp_gradient)


def det_gemm(form: Form, a: Array, b: Array, start: Array | None) -> Array:
    """start + A·B on float32-upcast operands, rounded once."""
    a, b = (x.astype(jnp.float32) for x in (a.T if form.a_transposed else a, b.T if form.b_transposed else b))
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (product if start is None else start + product).astype(form.out_dtype)
