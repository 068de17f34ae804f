"""The portable implementation on logits, which XLA fuses."""

import jax
import jax.numpy as jnp

from rlk_jax.core.softmax import (
    SoftmaxConfig,
    Statistics,
    logits_of,
    merged,
    partial_of_rows,
    product_gradients,
    values_of,
)
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.ops.logits.options import LogitsFunctions

Array = jax.Array


def _no_bias() -> Array:
    """Zeros for the formulas that linear_logp shares, which add a bias."""
    return jnp.zeros((1, 1), jnp.float32)


def _columns(config: SoftmaxConfig) -> Array:
    return jnp.arange(config.vocab_size, dtype=jnp.int32)[None]


def _forward(config: SoftmaxConfig, logits: Array, tokens: Tokens) -> tuple[LinearLogp, Statistics]:
    """The softmax in two passes. On GPUs XLA fuses what is done to each logit into the sums; on CPUs it makes a float32
    copy of the logits first.
    """

    def of(logits: Array, columns: Array, allowed: Array | None) -> Array:
        facts = (_no_bias(), tokens.temperature, columns, config.real_vocab_size, allowed)
        return logits_of(config, logits.astype(jnp.float32), *facts)

    targets = tokens.target_ids[:, None]
    # The target is picked before anything is done to it: a pick from computed logits would need all of them in memory.
    target_logit = of(jnp.take_along_axis(logits, targets, axis=1), targets, None)[:, 0]
    of_rows = of(logits, _columns(config), tokens.allowed)
    partial = partial_of_rows(of_rows, target_logit, with_gap=config.return_entropy)
    statistics = merged(jax.tree.map(lambda x: x[None], partial))
    return values_of(config, statistics), statistics


def _gradient(
    config: SoftmaxConfig, logits: Array, tokens: Tokens, statistics: Statistics, upstream: LinearLogp, donate: bool
) -> Array:
    """The gradient, element by element. XLA itself writes it in place where the logits are donated."""
    facts = (_no_bias(), tokens, _columns(config), config.real_vocab_size, statistics, upstream)
    return product_gradients(config, logits.astype(jnp.float32), *facts).astype(logits.dtype)


XLA = LogitsFunctions(_forward, _gradient)
