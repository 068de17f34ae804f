"""The plain definition of log-probabilities on float32 logits, for reference implementations. It stays this plain."""

import jax
import jax.numpy as jnp

from rlk_jax.core.allowed import is_allowed
from rlk_jax.core.softmax import SoftmaxConfig
from rlk_jax.core.tokens import LinearLogp, Tokens


def scaled_logits(config: SoftmaxConfig, logits: jax.Array, tokens: Tokens) -> jax.Array:
    """z = softcap(logits) / temperature, −inf in columns that are padding or not allowed."""
    columns = jnp.arange(config.vocab_size)[None]
    counts = columns < config.real_vocab_size
    if tokens.allowed is not None:
        counts &= is_allowed(tokens.allowed, columns)
        # What a column that is not allowed holds must not reach the gradient, nor what a row holds that is not active,
        # which is allowed all columns.
        logits = jnp.where(counts & tokens.active[:, None], logits, 0)
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    logits = logits / tokens.temperature[:, None]
    return jnp.where(counts, logits, -jnp.inf)


def values_of_logits(config: SoftmaxConfig, logits: jax.Array, tokens: Tokens) -> LinearLogp:
    """logp = log_softmax(z)[target], or its mean under a smoothed target, lse and entropy of z = `scaled_logits`."""
    logits = scaled_logits(config, logits, tokens)
    logprobs = jax.nn.log_softmax(logits)
    probability = jnp.exp(logprobs)
    # An impossible token has p·ln p = 0; the inner where keeps its infinite logarithm out of the gradient too.
    surprise = probability * jnp.where(probability > 0, logprobs, 0)
    logp = jnp.take_along_axis(logprobs, tokens.target_ids[:, None], axis=-1)[:, 0]
    if config.smoothing is not None:
        share, real = config.smoothing.share, config.real_vocab_size
        mean = logprobs[:, :real].mean(axis=-1)
        # With a share of 1 the target has no part of its own, which would be 0·−∞ where it is impossible.
        logp = mean if share == 1 else (1 - share) * logp + share * mean
    return LinearLogp(
        logp=logp,
        lse=jax.nn.logsumexp(logits, axis=-1) if config.return_lse else None,
        entropy=-surprise.sum(axis=-1) if config.return_entropy else None,
    )
