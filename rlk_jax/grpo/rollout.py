"""Completions sampled from a policy with a KV cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rlk_jax.grpo.head import IGNORED
from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.vocabulary import EOS, PAD


class Rollout[Logps](NamedTuple):
    """What a policy said: PAD after the first EOS; and its scores, `[B, C]`."""

    completion_ids: Int[Array, "B C"]
    logps: Logps


def unscored(hidden: Float[Array, "B D"], token_ids: Int[Array, "B"]) -> None:
    """For rollouts that nothing is learnt from."""


def sample_completions[Logps](
    model: Decoder,
    prompt_ids: Int[Array, "B P"],
    padding: Int[Array, "B"],
    key: PRNGKeyArray,
    score: Callable[[Array, Array], Logps],
    *,
    length: int,
    greedy: bool = False,
) -> Rollout[Logps]:
    """Up to `length` tokens per left-padded prompt, at temperature 1 or greedily.

    `score(hidden, token_ids)`, of `[B, D]` and `[B]`, is asked for the log-probs of tokens as they are chosen; their
    ids are IGNORED after the first EOS.
    """
    batch, prompt_width = prompt_ids.shape
    cache = model.empty_cache(batch, prompt_width + length)
    hidden, cache = model.extend(prompt_ids, padding, cache, 0)

    def choose(hidden: Array, finished: Array, index: int | Array) -> Rollout[Logps]:
        last = hidden[:, -1]
        logits = model.lm_head(last)
        if greedy:
            chosen = jnp.argmax(logits, axis=-1)
        else:
            chosen = jax.random.categorical(jax.random.fold_in(key, index), logits)
        return Rollout(jnp.where(finished, PAD, chosen), score(last, jnp.where(finished, IGNORED, chosen)))

    def decode_one(carry: tuple, index: Array) -> tuple[tuple, Rollout[Logps]]:
        token, finished, cache = carry
        finished = finished | (token == EOS)
        hidden, cache = model.extend(token[:, None], padding, cache, prompt_width + index - 1)
        chosen = choose(hidden, finished, index)
        return (chosen.completion_ids, finished, cache), chosen

    unfinished = jnp.zeros(batch, bool)
    first = choose(hidden, unfinished, 0)
    _, rest = jax.lax.scan(decode_one, (first.completion_ids, unfinished, cache), jnp.arange(1, length))
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[:, None], rest.T], axis=1), first, rest)
