"""The ops over logits by kernels that stream rows: what they take for each token, and what is made of their results."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.logits import LN_2, LOG2_E, RowCoefficients, RowConfig, RowStatistics
from rlk_jax.core.fixed_order import rounded_product
from rlk_jax.core.softmax import SoftmaxConfig, Statistics, values_of
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier
from rlk_jax.ops.logits.options import LogitsFunctions

Array = jax.Array


class StatisticsKernel(Protocol):
    """The forward kernel; `pallas_kernels.logits` says what it takes and gives."""

    def __call__(
        self,
        config: RowConfig,
        logits: Array,
        target_ids: Array,
        temperature: Array,
        active: Array,
        allowed: Array | None,
        /,
    ) -> RowStatistics: ...


class GradientsKernel(Protocol):
    """The backward kernel; the last argument says that it may write where the logits are."""

    def __call__(
        self,
        config: RowConfig,
        logits: Array,
        target_ids: Array,
        active: Array,
        allowed: Array | None,
        rows: RowCoefficients,
        donate: bool,
        /,
    ) -> Array: ...


class RowKernels(NamedTuple):
    """A pair of kernels, of the same signature on every kind of GPU."""

    statistics: StatisticsKernel
    gradients: GradientsKernel


def by_kernels(load: Callable[[], RowKernels]) -> LogitsFunctions:
    """The implementation on `load()`, which may import what only it needs."""

    def forward(config: SoftmaxConfig, logits: Array, tokens: Tokens) -> tuple[LinearLogp, RowStatistics]:
        rows = RowConfig(config.real_vocab_size, config.logit_softcap, config.return_entropy)
        active = tokens.active.astype(jnp.int32)
        arrays = (logits, tokens.target_ids, tokens.temperature, active, tokens.allowed)
        found = fusion_barrier(load().statistics(rows, *fusion_barrier(as_replicated(arrays))))
        return values_of(config, _natural(found, _reciprocal(tokens))), found

    def gradient(
        config: SoftmaxConfig,
        logits: Array,
        tokens: Tokens,
        found: RowStatistics,
        upstream: LinearLogp,
        donate: bool,
    ) -> Array:
        rows = RowConfig(config.real_vocab_size, config.logit_softcap, upstream.entropy is not None)
        coefficients, active = _coefficients(config, tokens, found, upstream), tokens.active.astype(jnp.int32)
        arrays = fusion_barrier(as_replicated((logits, tokens.target_ids, active, tokens.allowed, coefficients)))
        return fusion_barrier(load().gradients(rows, *arrays, donate))

    return LogitsFunctions(forward, gradient)


def _reciprocal(tokens: Tokens) -> Array:
    """1 / temperature, behind a barrier: XLA would divide by it in some programs and multiply in others."""
    return lax.optimization_barrier(1 / tokens.temperature)


def _natural(found: RowStatistics, reciprocal: Array) -> Statistics:
    """The kernels' statistics with logits divided by the temperature, and natural logarithms."""
    gap = None if found.gap is None else rounded_product(found.gap / found.total, jnp.float32(LN_2))
    maximum, target = (rounded_product(x, reciprocal) for x in (found.maximum, found.target))
    return Statistics(maximum, jnp.log(found.total), target, gap)


def _coefficients(config: SoftmaxConfig, tokens: Tokens, found: RowStatistics, upstream: LinearLogp) -> RowCoefficients:
    """What each row's gradient is made of.

    With upstream gradients g, p = exp(z − lse) and H the entropy, a logit's gradient is
    p·(g_lse − g_logp − g_entropy·(ln p + H)) / temperature; at the target −g_logp·expm1(logp) stands in the place of
    g_logp·(1 − p).
    """
    reciprocal = _reciprocal(tokens)
    logp, _, entropy = values_of(config, _natural(found, reciprocal))
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
        # Where p = 0, ln p is −∞, and 0·∞ must be 0.
        surprise = jnp.where(probability == 0, 0, probability * (logp + entropy))
        at_target -= rounded_product(upstream.entropy, surprise)
    scale = rounded_product(jnp.float32(LOG2_E), reciprocal)
    return RowCoefficients(
        scale, found.maximum, jnp.log2(found.total), others * reciprocal, slope, at_target * reciprocal
    )
