"""The gold standard of the tests: the plain definition on float32 logits. It stays this plain."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from rlk_jax.core.reference import values_of_logits
from rlk_jax.core.softmax import SoftmaxConfig
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.ops.logits.options import LogitsFunctions

Array = jax.Array


def definition(config: SoftmaxConfig, logits: Array, tokens: Tokens) -> LinearLogp:
    """The values of float32 logits; padding columns may hold anything."""
    is_padding = jnp.arange(config.vocab_size)[None] >= config.real_vocab_size
    return values_of_logits(config, jnp.where(is_padding, 0, logits.astype(jnp.float32)), tokens)


def _forward(config: SoftmaxConfig, logits: Array, tokens: Tokens) -> tuple[LinearLogp, None]:
    return definition(config, logits, tokens), None


def _gradient(
    config: SoftmaxConfig, logits: Array, tokens: Tokens, residual: None, upstream: LinearLogp, donate: bool
) -> Array:
    """JAX's own derivative of the definition, on the active rows."""
    logits = jnp.where(tokens.active[:, None], logits, 0)
    tokens = tokens._replace(temperature=jnp.where(tokens.active, tokens.temperature, 1))
    upstream = jax.tree.map(lambda g: jnp.where(tokens.active, g, 0), upstream)
    config = replace(config, return_lse=upstream.lse is not None, return_entropy=upstream.entropy is not None)
    return jax.vjp(lambda x: definition(config, x, tokens), logits)[1](upstream)[0]


REFERENCE = LogitsFunctions(_forward, _gradient)
