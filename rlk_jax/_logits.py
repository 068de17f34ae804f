"""logp by kernels that stream rows: what they need of each token, and what comes of theirs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from pallas_kernels.logits import RowCoefficients, RowConfig, RowStatistics
from rlk_jax._problem import (
    Array,
    LinearLogp,
    LogpFunctions,
    SoftmaxOptions,
    Statistics,
    Tokens,
    rounded_product,
    values_of,
)
from rlk_jax._transforms import apart, as_replicated

LN_2 = math.log(2)
LOG2_E = 1 / LN_2


@dataclass(frozen=True)
class RowKernels:
    """A pair of kernels, of the same signature on every kind of GPU."""

    statistics: Callable[[RowConfig, Array, Array, Array, Array], RowStatistics]
    gradients: Callable[[RowConfig, Array, Array, Array, RowCoefficients, bool], Array]


def by_kernels(load: Callable[[], RowKernels]) -> LogpFunctions:
    """The implementation on `load()`, which may import what only it needs."""

    def forward(options: SoftmaxOptions, logits: Array, tokens: Tokens) -> tuple[LinearLogp, RowStatistics]:
        form = RowConfig(options.real_vocab_size, options.logit_softcap, options.return_entropy)
        arrays = (logits, tokens.target_ids, tokens.temperature, tokens.active.astype(jnp.int32))
        found = apart(load().statistics(form, *apart(as_replicated(arrays))))
        return values_of(options, _natural(found, _reciprocal(tokens))), found

    def gradient(
        options: SoftmaxOptions,
        logits: Array,
        tokens: Tokens,
        found: RowStatistics,
        upstream: LinearLogp,
        donate: bool,
    ) -> Array:
        form = RowConfig(options.real_vocab_size, options.logit_softcap, upstream.entropy is not None)
        rows, active = _coefficients(options, tokens, found, upstream), tokens.active.astype(jnp.int32)
        arrays = apart(as_replicated((logits, tokens.target_ids, active, rows)))
        return apart(load().gradients(form, *arrays, donate))

    return LogpFunctions(forward, gradient)


def _reciprocal(tokens: Tokens) -> Array:
    """1 / temperature, apart from what it is multiplied with: XLA would divide in some programs, multiply in others."""
    return lax.optimization_barrier(1 / tokens.temperature)


def _natural(found: RowStatistics, reciprocal: Array) -> Statistics:
    """Logits divided by the temperature, and natural logarithms."""
    gap = None if found.gap is None else rounded_product(found.gap / found.total, jnp.float32(LN_2))
    maximum, target = (rounded_product(x, reciprocal) for x in (found.maximum, found.target))
    return Statistics(maximum, jnp.log(found.total), target, gap)


def _coefficients(
    options: SoftmaxOptions, tokens: Tokens, found: RowStatistics, upstream: LinearLogp
) -> RowCoefficients:
    """With upstream gradients g, p = exp(z − lse) and H the entropy, a logit's gradient is
    p·(g_lse − g_logp − g_entropy·(ln p + H)) / temperature, and at the target −g_logp·expm1(logp) stands in the place
    of g_logp·(1 − p).
    """
    reciprocal = _reciprocal(tokens)
    logp, _, entropy = values_of(options, _natural(found, reciprocal))
    probability = jnp.exp(logp)
    others, slope = -upstream.logp, None
    at_target = rounded_product(-upstream.logp, jnp.expm1(logp))
    if upstream.lse is not None:
        others += upstream.lse
        at_target += rounded_product(upstream.lse, probability)
    if upstream.entropy is not None:
        assert entropy is not None
        slope = rounded_product(-upstream.entropy, jnp.float32(LN_2)) * reciprocal
        others -= rounded_product(upstream.entropy, entropy)
        # p = 0 beside ln p = −∞, where 0·∞ must be 0.
        surprise = jnp.where(probability == 0, 0, probability * (logp + entropy))
        at_target -= rounded_product(upstream.entropy, surprise)
    scale = rounded_product(jnp.float32(LOG2_E), reciprocal)
    return RowCoefficients(
        scale, found.maximum, jnp.log2(found.total), others * reciprocal, slope, at_target * reciprocal
    )
