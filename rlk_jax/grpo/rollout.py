"""Completions sampled from a policy with a KV cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rlk_jax.grpo.head import IGNORED
from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.tasks import Examples
from rlk_jax.grpo.vocabulary import EOS, PAD


class Rollout[Logps](NamedTuple):
    """What a policy said: PAD after the first EOS; and its scores, `[B, C]`."""

    completion_ids: Int[Array, "B C"]
    logps: Logps


def unscored(hidden: Float[Array, "B D"], logits: Float[Array, "B V"], token_ids: Int[Array, "B"]) -> None:
    """For rollouts that nothing is learnt from."""


def sample_completions[Logps](
    model: Decoder,
    prompt_ids: Int[Array, "B P"],
    padding: Int[Array, "B"],
    keys: PRNGKeyArray,
    score: Callable[[Array, Array, Array], Logps],
    *,
    length: int,
    greedy: bool = False,
) -> Rollout[Logps]:
    """Up to `length` tokens per left-padded prompt, at temperature 1 or greedily.

    `score(hidden, logits, token_ids)`, of `[B, D]`, `[B, V]` and `[B]`, is asked for the log-probs of tokens as they
    are chosen from these logits; their ids are IGNORED after the first EOS. Every row draws from its own of `keys [B]`,
    whatever the others are.
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
            chosen = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in, (0, None))(keys, index), logits)
        return Rollout(jnp.where(finished, PAD, chosen), score(last, logits, jnp.where(finished, IGNORED, chosen)))

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


def sample_by_length[Logps](
    sample: Callable[[Examples, PRNGKeyArray], Rollout[Logps]],
    examples: Examples,
    keys: PRNGKeyArray,
    *,
    buckets: int,
    spread: NamedSharding,
) -> Rollout[Logps]:
    """`sample(examples, keys)`, of rows `[B, ...]`, in `buckets` equal parts of prompts of about the same length, one
    after the other; each is padded to the smallest of `buckets` widths that holds its prompts, and sampled by a program
    for that width. Cut rows `[buckets, B / buckets, ...]` are laid out as `spread` says.
    """
    if buckets == 1:
        return sample(examples, keys)
    longest = examples.prompt_ids.shape[1]
    widths = sorted({-(-longest * k // buckets) for k in range(1, buckets + 1)})

    def of_width(width: int) -> Callable[[Examples, PRNGKeyArray], Rollout[Logps]]:
        def narrow(examples: Examples, keys: PRNGKeyArray) -> Rollout[Logps]:
            ids, padding = examples.prompt_ids[:, longest - width :], examples.padding - (longest - width)
            return sample(examples._replace(prompt_ids=ids, padding=padding), keys)

        return narrow

    def one(part: tuple[Examples, PRNGKeyArray]) -> Rollout[Logps]:
        width = longest - part[0].padding.min()
        return jax.lax.switch(jnp.searchsorted(jnp.array(widths), width), [of_width(w) for w in widths], *part)

    order = jnp.argsort(examples.padding, stable=True)

    def cut(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x[order].reshape(buckets, -1, *x.shape[1:]), spread)

    found, back = jax.lax.map(one, jax.tree.map(cut, (examples, keys))), jnp.argsort(order)
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[back], found)
