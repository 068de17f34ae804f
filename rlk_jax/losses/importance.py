"""Importance weights of a rollout whose log-probabilities are not those of training: how they are cut, and what they
weigh.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from rlk_jax.core.fixed_order import blockwise_exp, pairwise_sum
from rlk_jax.losses.bounds import bounded, log_ratio_of
from rlk_jax.losses.masked import active_values, spread_to_tokens
from rlk_jax.losses.options import LossOptions

_LEAST_WEIGHT, _LARGEST_LOG_WEIGHT = 1e-8, 20.0
"""VESPO counts weights as at least and at most these, as its authors' code does."""


class ImportanceWeights(NamedTuple):
    """What each token's loss is multiplied by, `[B, T]`, and where a weight was cut or masked, or its log bounded."""

    values: Array
    is_cut: Array
    is_bounded: Array


def importance_weights(old_logps: Array, rollout_logps: Array, mask: Array, options: LossOptions) -> ImportanceWeights:
    """w = exp(old − rollout) of each token, or of its whole sequence: a product over its active tokens. What lies
    outside [importance_floor, importance_cap] is cut to it, or is 0.
    """
    difference = log_ratio_of(old_logps, rollout_logps, options.log_ratio_bound)
    if options.importance_level == "sequence":
        difference = over_sequence(difference, mask)
    difference, is_bounded = bounded(difference, options.log_ratio_bound)
    weights, floor, cap = blockwise_exp(difference), options.importance_floor or 0.0, options.importance_cap
    assert cap is not None
    is_cut = (weights > cap) | (weights < floor)
    inside = 0.0 if options.importance_beyond == "mask" else jnp.clip(weights, floor, cap)
    return ImportanceWeights(jnp.where(is_cut, inside, weights), is_cut, is_bounded)


def over_sequence(values: Array, mask: Array) -> Array:
    """For every token `[B, T]`, the sum over its sequence's active tokens; 0 where masked."""
    return spread_to_tokens(pairwise_sum(active_values(values, mask)), mask)


def gamma_weights(log_ratio: Array, weights: Array | None, advantages: Array, mask: Array, o: LossOptions) -> Array:
    """VESPO's φ(w) = exp(λ − λ·w)·w^k of each token's sequence, with w the product of its ratios and importance
    weights; k and λ depend on the sign of the advantage. φ(1) is 1.

    Source: VESPO, arXiv 2602.10693.
    """
    if weights is not None:
        log_ratio = log_ratio + jnp.log(jnp.maximum(weights, _LEAST_WEIGHT))
    log_w = jnp.clip(over_sequence(log_ratio, mask), jnp.log(_LEAST_WEIGHT), _LARGEST_LOG_WEIGHT)
    is_positive = advantages >= 0
    k = jnp.where(is_positive, o.vespo_k_pos, o.vespo_k_neg)
    scale = jnp.where(is_positive, o.vespo_lambda_pos, o.vespo_lambda_neg)
    return blockwise_exp(scale + k * log_w - scale * blockwise_exp(log_w))
