"""Log-ratios that count as at most a bound, so that no single token makes exp or KL of them infinite."""

import jax
import jax.numpy as jnp

Array = jax.Array


def bounded(log_ratio: Array, bound: float | None) -> tuple[Array, Array]:
    """The log-ratio, a constant ±bound where it is beyond the bound; and a mask of where it is."""
    if bound is None:
        return log_ratio, jnp.zeros(log_ratio.shape, bool)
    is_beyond = jnp.abs(log_ratio) > bound
    return jnp.where(is_beyond, jnp.sign(jax.lax.stop_gradient(log_ratio)) * bound, log_ratio), is_beyond


def log_ratio_of(logp: Array, other: Array, bound: float | None) -> Array:
    """logp − other. Where there is a bound, two log-probabilities of −inf differ by a constant 0."""
    if bound is None:
        return logp - other
    is_same = jnp.isinf(logp) & (logp == other)
    return jnp.where(is_same, 0.0, logp) - jnp.where(is_same, 0.0, other)


def bounded_operands(logp: Array, ref_logps: Array, bound: float | None) -> tuple[Array, Array, Array]:
    """Two log-probabilities for a KL estimate, constants whose log-ratio is ±bound where theirs is beyond it; and a
    mask of where it is.
    """
    if bound is None:
        return logp, ref_logps, jnp.zeros(logp.shape, bool)
    difference, is_beyond = bounded(log_ratio_of(ref_logps, logp, bound), bound)
    return jnp.where(is_beyond, -difference, logp), jnp.where(is_beyond, 0.0, ref_logps), is_beyond
