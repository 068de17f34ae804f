"""The custom_vjps of the ops over logits: log-probabilities of the tokens, and ratio and KL of log-probabilities."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32

from rlk_jax.core import transforms
from rlk_jax.core.exports import exportable
from rlk_jax.core.fixed_order import blockwise_exp, rounded_product
from rlk_jax.core.softmax import values_of_no_tokens
from rlk_jax.core.tokens import LinearLogp, Tokens, upstream_gradients
from rlk_jax.losses.bounds import bounded, bounded_operands, log_ratio_of
from rlk_jax.losses.kl import k3_kl, k3_slope
from rlk_jax.ops.logits.options import LogitsFunctions, LogpConfig

Array = jax.Array
_NO_SECOND_DERIVATIVE = "the gradient of log-probabilities of logits cannot be differentiated again."
_NO_DERIVATIVE = "as_linear_logp gives log-probabilities to record, without a gradient: linear_logp has it."


@exportable
class RatioKl(NamedTuple):
    """What `ratio_kl` returns: float32 `[*lead]`, 1 and 0 at masked tokens."""

    ratio: Float32[Array, "*lead"]
    kl: Float32[Array, "*lead"]


def values_of_tokens(
    functions: LogitsFunctions, config: LogpConfig, donate: bool, logits: Array, tokens: Tokens
) -> LinearLogp:
    """The values of flat tokens under their rows of logits `[*lead, V]`: `[*lead]`, 0 where not active."""
    lead = logits.shape[:-1]
    if 0 in lead:
        return values_of_no_tokens(config, lead)
    rows = logits.reshape(math.prod(lead), logits.shape[-1])
    return jax.tree.map(lambda x: x.reshape(lead), _flat_values(functions, config, donate, rows, tokens))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _flat_values(
    functions: LogitsFunctions, config: LogpConfig, donate: bool, logits: Array, tokens: Tokens
) -> LinearLogp:
    logits, tokens = transforms.equally_varying((logits, tokens))
    if config.as_linear_logp:
        logits = transforms.refuse_derivative(_NO_DERIVATIVE, logits)
    return _values(functions, config, donate, logits, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _values(functions: LogitsFunctions, config: LogpConfig, donate: bool, logits: Array, tokens: Tokens) -> LinearLogp:
    return _forward(functions, config, logits, tokens)[0]


def _forward(functions: LogitsFunctions, config: LogpConfig, logits: Array, tokens: Tokens) -> tuple[LinearLogp, Any]:
    """Values, and a residual with a row per token."""
    forward = functions.as_linear_logp if config.as_linear_logp else functions.forward
    assert forward is not None

    def of_rows(_: Any, rows: tuple[Array, Tokens]) -> tuple[LinearLogp, Any]:
        return transforms.varying_like(forward(config, *rows), rows[0])

    rows = (lax.stop_gradient(logits), tokens)
    found, residual = transforms.vmap_folds_rows(of_rows, outputs_are_rows=True)((), rows)
    return jax.tree.map(lambda x: jnp.where(tokens.active, x, 0), found), residual


def _values_fwd(
    functions: LogitsFunctions, config: LogpConfig, donate: bool, *primals: Any
) -> tuple[LinearLogp, tuple[Array, Tokens, Any]]:
    logits, tokens = transforms.primal_values(primals)
    found, residual = _forward(functions, config, logits, tokens)
    return found, (logits, tokens, residual)


def _values_bwd(
    functions: LogitsFunctions, config: LogpConfig, donate: bool, saved: Any, cotangents: LinearLogp
) -> tuple[Any, ...]:
    logits, tokens, residual = saved
    upstream = upstream_gradients(cotangents, tokens)
    logits, upstream = transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, (logits, upstream))
    tokens = tokens.with_upstream(upstream)

    def of_rows(_: Any, rows: tuple[Array, Tokens, Any, LinearLogp]) -> Array:
        logits, tokens, residual, upstream = rows
        found = functions.gradient(config, logits, tokens, residual, upstream, donate)
        return transforms.varying_like(found, logits)

    folding = transforms.vmap_folds_rows(of_rows, outputs_are_rows=True)
    return folding((), (logits, tokens, residual, upstream)), None


_values.defvjp(_values_fwd, _values_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def ratio_and_kl(logp: Array, ref_logps: Array, old_logps: Array, bound: float | None) -> RatioKl:
    """exp(logp − old) and the KL estimate k3 of each token, of bounded log-ratios; gradients flow to logp only."""
    return _ratio_and_kl_fwd(logp, ref_logps, old_logps, bound)[0]


class _Slopes(NamedTuple):
    """What the backward of `ratio_and_kl` multiplies: the ratio, and operands of the KL; and where they are bounded."""

    ratio: Array
    logp: Array
    ref_logps: Array
    is_ratio_bounded: Array | None
    is_kl_bounded: Array | None


def _ratio_and_kl_fwd(logp: Array, ref_logps: Array, old_logps: Array, bound: float | None) -> tuple[RatioKl, _Slopes]:
    log_ratio, is_ratio_bounded = bounded(log_ratio_of(logp, old_logps, bound), bound)
    logp, ref_logps, is_kl_bounded = bounded_operands(logp, ref_logps, bound)
    found = RatioKl(blockwise_exp(log_ratio), k3_kl(logp, ref_logps))
    masks = (None, None) if bound is None else (is_ratio_bounded, is_kl_bounded)
    return found, _Slopes(found.ratio, logp, ref_logps, *masks)


def _ratio_and_kl_bwd(bound: float | None, saved: _Slopes, upstream: RatioKl) -> tuple[Array, None, None]:
    """g_ratio·ratio + g_kl·(1 − exp d), with products that are rounded in every program; 0 beyond the bound.

    An output without an upstream gradient contributes nothing, even where the output is not finite.
    """

    def scaled(g: Array, slope: Array, is_bounded: Array | None) -> Array:
        is_constant = g == 0 if is_bounded is None else (g == 0) | is_bounded
        return rounded_product(g, jnp.where(is_constant, 0, slope))

    d_ratio = scaled(upstream.ratio, saved.ratio, saved.is_ratio_bounded)
    return d_ratio + scaled(upstream.kl, k3_slope(saved.logp, saved.ref_logps), saved.is_kl_bounded), None, None


ratio_and_kl.defvjp(_ratio_and_kl_fwd, _ratio_and_kl_bwd)
