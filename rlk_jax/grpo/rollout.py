"""Completions sampled from a policy with a KV cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rlk_jax.core.tokens import IGNORED
from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.tasks import Examples
from rlk_jax.grpo.vocabulary import EOS, PAD


class Rollout[Logps](NamedTuple):
    """Sampled completions, PAD after the first EOS, and the log-probs `[B, C]` that their tokens were sampled with."""

    completion_ids: Int[Array, "B C"]
    logps: Logps


def no_score(hidden: Float[Array, "B D"], logits: Float[Array, "B V"], token_ids: Int[Array, "B"]) -> None:
    """The `score` of rollouts that nothing is learnt from: they have no log-probs."""


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
    """Up to `length` tokens for each left-padded prompt, at temperature 1 or greedily.

    `score(hidden, logits, token_ids)`, with shapes `[B, D]`, `[B, V]` and `[B]`, returns the log-probs of tokens that
    were just chosen from these logits; ids are IGNORED after the first EOS. Every row draws from its own key of
    `keys [B]`, so its tokens do not depend on the other rows.
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

    def decode_next(carry: tuple, index: Array) -> tuple[tuple, Rollout[Logps]]:
        token, finished, cache = carry
        finished = finished | (token == EOS)
        hidden, cache = model.extend(token[:, None], padding, cache, prompt_width + index - 1)
        chosen = choose(hidden, finished, index)
        return (chosen.completion_ids, finished, cache), chosen

    unfinished = jnp.zeros(batch, bool)
    first = choose(hidden, unfinished, 0)
    _, rest = jax.lax.scan(decode_next, (first.completion_ids, unfinished, cache), jnp.arange(1, length))
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[:, None], rest.T], axis=1), first, rest)


def sample_in_length_buckets[Logps](
    sample: Callable[[Examples, PRNGKeyArray], Rollout[Logps]],
    examples: Examples,
    keys: PRNGKeyArray,
    *,
    buckets: int,
    sharding: NamedSharding,
) -> Rollout[Logps]:
    """`sample(examples, keys)` of rows `[B, ...]`, in `buckets` equal parts, one after the other; the rows of the
    result are in the order of `examples`.

    A part holds prompts of about the same length. It is padded to the smallest of `buckets` widths that holds its
    prompts, and sampled by a program for that width. `sharding` is that of the parts, stacked to
    `[buckets, B / buckets, ...]`.
    """
    if buckets == 1:
        return sample(examples, keys)
    longest = examples.prompt_ids.shape[1]
    widths = sorted({-(-longest * k // buckets) for k in range(1, buckets + 1)})

    def sample_at(width: int) -> Callable[[Examples, PRNGKeyArray], Rollout[Logps]]:
        def sample_narrowed(examples: Examples, keys: PRNGKeyArray) -> Rollout[Logps]:
            ids, padding = examples.prompt_ids[:, longest - width :], examples.padding - (longest - width)
            return sample(examples._replace(prompt_ids=ids, padding=padding), keys)

        return sample_narrowed

    def sample_bucket(bucket: tuple[Examples, PRNGKeyArray]) -> Rollout[Logps]:
        width = longest - bucket[0].padding.min()
        programs = [sample_at(width) for width in widths]
        return jax.lax.switch(jnp.searchsorted(jnp.array(widths), width), programs, *bucket)

    order = jnp.argsort(examples.padding, stable=True)

    def split(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x[order].reshape(buckets, -1, *x.shape[1:]), sharding)

    sampled, inverse = jax.lax.map(sample_bucket, jax.tree.map(split, (examples, keys))), jnp.argsort(order)
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[inverse], sampled)
