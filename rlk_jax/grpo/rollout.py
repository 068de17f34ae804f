"""Completions sampled from a policy with a KV cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.tasks import EOS, PAD


def sample_completions(
    model: Decoder,
    prompt_ids: Int[Array, "B P"],
    padding: Int[Array, "B"],
    key: PRNGKeyArray,
    *,
    length: int,
    greedy: bool = False,
) -> Int[Array, "B C"]:
    """Up to `length` tokens per left-padded prompt, at temperature 1 or greedily; PAD after the first EOS."""
    batch, prompt_width = prompt_ids.shape
    cache = model.empty_cache(batch, prompt_width + length)
    hidden, cache = model.extend(prompt_ids, padding, cache, 0)

    def choose(hidden: Array, finished: Array, index: int | Array) -> Array:
        logits = model.lm_head(hidden[:, -1])
        if greedy:
            chosen = jnp.argmax(logits, axis=-1)
        else:
            chosen = jax.random.categorical(jax.random.fold_in(key, index), logits)
        return jnp.where(finished, PAD, chosen)

    def decode_one(carry: tuple, index: Array) -> tuple[tuple, Array]:
        token, finished, cache = carry
        finished = finished | (token == EOS)
        hidden, cache = model.extend(token[:, None], padding, cache, prompt_width + index - 1)
        token = choose(hidden, finished, index)
        return (token, finished, cache), token

    unfinished = jnp.zeros(batch, bool)
    first = choose(hidden, unfinished, 0)
    _, rest = jax.lax.scan(decode_one, (first, unfinished, cache), jnp.arange(1, length))
    return jnp.concatenate([first[:, None], rest.T], axis=1)
