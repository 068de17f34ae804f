"""Estimates of KL(policy ‖ reference) per sampled token."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def k1_kl(logp: Float[Array, "*n"], ref_logps: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Estimate of KL(policy ‖ reference) per sampled token: `logp − ref`. Its gradient is 0 in expectation.

    Source: J. Schulman, "Approximating KL divergence" (2020), which has all three estimates.
    """
    return logp - ref_logps


def k2_kl(logp: Float[Array, "*n"], ref_logps: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Estimate of KL(policy ‖ reference) per sampled token: `(logp − ref)² / 2`. In expectation its gradient is the
    KL's.

    Source: the same as for `k1_kl`.
    """
    return (logp - ref_logps) ** 2 / 2


def k3_kl(logp: Float[Array, "*n"], ref_logps: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Estimate of KL(policy ‖ reference) per sampled token: `exp(d) − 1 − d`, `d = ref − logp`; never negative.

    Equal log-probabilities give 0, even if both are −inf; a logp of −inf beside another ref gives ∞.

    Source: the same as for `k1_kl`; DeepSeekMath, arXiv 2402.03300, eq. 4.
    """
    finite, is_infinite = _k3_difference(logp, ref_logps)
    return jnp.where(is_infinite, jnp.inf, jnp.expm1(finite) - finite)


def k3_slope(logp: Array, ref_logps: Array) -> Array:
    """The derivative of `k3_kl` by logp, `1 − exp(d)`; 0 where the estimate is infinite."""
    finite, _ = _k3_difference(logp, ref_logps)
    return -jnp.expm1(finite)


def _k3_difference(logp: Array, ref_logps: Array) -> tuple[Array, Array]:
    """`ref − logp` with 0 in the place of ∞, and a mask of where it is ∞.

    Equal log-probs differ by 0, even if both are −inf.
    """
    difference = jnp.where(ref_logps == logp, 0.0, ref_logps - logp)
    is_infinite = difference == jnp.inf
    return jnp.where(is_infinite, 0.0, difference), is_infinite


KL_ESTIMATORS = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}
