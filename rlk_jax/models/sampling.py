"""Sampling from a model with a KV cache, and the log-probs that tokens were sampled with."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PRNGKeyArray, UInt32

from rlk_jax import linear_logp, logp
from rlk_jax.core.allowed import AllowedTokens
from rlk_jax.core.checks import as_array, is_concrete, is_integer, require
from rlk_jax.core.tokens import IGNORED
from rlk_jax.core.transforms import equally_varying
from rlk_jax.models.decoder import Cache, CausalLM
from rlk_jax.models.drawing import Sampling
from rlk_jax.ops import promising

Score = Callable[[Array, Array, Array, AllowedTokens], Any]


_AT_ONE = Sampling()


class Completions[Logps](NamedTuple):
    """Sampled tokens: of each row the first `lengths`, a stop token included; behind them stands the pad token."""

    ids: Int[Array, "B C"]
    lengths: Int[Array, "B"]
    logps: Logps
    """float32 `[B, C]` log-probs that the tokens were drawn with, 0 behind the end; or what `score` gave."""
    allowed_ids: Int32[Array, "B C k"] | None = None
    """The tokens that each one was drawn among, where `Sampling` records ids; −1 is padding, and all is behind the end.
    """
    allowed_mask: UInt32[Array, "B C words"] | None = None
    """The same as packed bits, where `Sampling` records those; 0 behind the end."""

    @property
    def mask(self) -> Bool[Array, "B C"]:
        """True for the tokens that were drawn."""
        return jnp.arange(self.ids.shape[1]) < self.lengths[:, None]

    @property
    def allowed(self) -> AllowedTokens:
        """What each token was drawn among."""
        return AllowedTokens(self.allowed_ids, self.allowed_mask)


class RecordedToken(NamedTuple):
    """A token, and what `sample` records of it."""

    id: int
    logp: Float32[np.ndarray, ""]
    """The log-prob that it was drawn with."""
    allowed: AllowedTokens
    """What it was drawn among, as `[k]` ids or `[words]`; neither where this was every token."""


class _Drawn(NamedTuple):
    """How far sampling has come: how many tokens each row may have, its last one, whether it has stopped, and all of
    them.
    """

    steps: Array
    token: Array
    is_done: Array
    found: Completions


def sample(
    model: CausalLM,
    prompt_ids: Int[Array, "B P"],
    padding: Int[Array, "B"],
    keys: PRNGKeyArray,
    *,
    max_new_tokens: int,
    sampling: Sampling = _AT_ONE,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    score: Score | None = None,
) -> Completions:
    """Up to `max_new_tokens` tokens behind each of the left-padded prompts, `padding` slots of each being padding.

    A row ends with its first token of `stop_ids`, and decoding ends when all rows have. Token i of a row is drawn by
    its own key of `keys [B]` folded with i, so that it does not depend on the other rows where their logits do not.

    Log-probs are those of the distribution that tokens are drawn from, as training computes them of the same `allowed`
    tokens; a temperature of 0 records those of the whole vocabulary at temperature 1. Those of an invariant model have
    the bits that `linear_logp` gives for the same hidden states. `score(hidden, products, ids, allowed)` replaces them:
    of hidden states `[B, D]`, what `model.lm_head.products` makes of them, the tokens `[B]` that were drawn, IGNORED
    where a row has stopped, and what each was drawn among; each array of what it returns is `[B]`.
    """
    _check_prompts(model, prompt_ids, padding, keys)
    _check_tokens_asked_for(model, max_new_tokens, (*stop_ids, pad_id))
    (batch, width), stops = prompt_ids.shape, jnp.asarray(stop_ids, jnp.int32)
    score = logps_of(model, sampling) if score is None else score

    def scored(hidden: Array, index: Array, is_done: Array) -> tuple[Array, Any, AllowedTokens]:
        """Token `index` of each row from the hidden states of the last ones, and what is recorded of it."""
        token, allowed, products = _next_token(model, sampling, hidden, keys, index)
        logps = score(hidden, products, jnp.where(is_done, IGNORED, token), allowed)
        return jnp.where(is_done, pad_id, token), logps, allowed.where(~is_done)

    def with_next(so_far: _Drawn, hidden: Array) -> _Drawn:
        """One token more for each row that has not stopped."""
        index, is_done, found = so_far.steps, so_far.is_done, so_far.found
        new = scored(hidden, index, is_done)
        written = jax.tree.map(lambda x, new: x.at[:, index].set(new), (found.ids, found.logps, found.allowed), new)
        found = Completions(written[0], found.lengths + ~is_done, written[1], *written[2])
        return _Drawn(index + 1, new[0], is_done | (new[0][:, None] == stops).any(axis=1), found)

    def goes_on(carry: tuple[_Drawn, Any]) -> Array:
        return (carry[0].steps < max_new_tokens) & ~carry[0].is_done.all()

    def step(carry: tuple[_Drawn, Any]) -> tuple[_Drawn, Any]:
        so_far, cache = carry
        hidden, cache = model.extend(so_far.token[:, None], padding, cache, width + so_far.steps - 1)
        return with_next(so_far, hidden[:, 0]), cache

    hidden, cache = model.extend(prompt_ids, padding, model.empty_cache(batch, width + max_new_tokens), 0)
    hidden, nothing, nobody = hidden[:, -1], jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    shapes = jax.eval_shape(scored, hidden, nothing[0], nobody)
    ids, logps, allowed = jax.tree.map(lambda x: jnp.zeros((batch, max_new_tokens, *x.shape[1:]), x.dtype), shapes)
    none = Completions(ids + pad_id, nothing, logps, *allowed.where(jnp.zeros(ids.shape, bool)))
    if max_new_tokens == 0:
        return none
    # Inside shard_map, all of it becomes what a device alone has.
    start, *_ = equally_varying((_Drawn(jnp.int32(0), nothing, nobody, none), hidden, keys))
    first = with_next(start, hidden)
    return lax.while_loop(goes_on, step, (first, cache))[0].found


def _next_token(
    model: CausalLM, sampling: Sampling, hidden: Float[Array, "B D"], keys: PRNGKeyArray, index: Int[Array, ""]
) -> tuple[Int32[Array, "B"], AllowedTokens, Float32[Array, "B V"]]:
    """Token `index` of each row, drawn from the hidden states of the tokens before it; what it was drawn among; and the
    head's products.
    """
    products = model.lm_head.products(hidden)
    own = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
    return *sampling.draw(own, model.lm_head.capped(products)), products


@functools.partial(jax.jit, static_argnames=("graph", "sampling", "is_recorded"), donate_argnames="cache")
def _with_drawn(
    graph: nnx.GraphDef[CausalLM],
    state: nnx.State,
    tokens: Int[Array, "1 T"],
    cache: Cache,
    start: Int[Array, ""],
    keys: PRNGKeyArray,
    index: Int[Array, ""],
    *,
    sampling: Sampling,
    is_recorded: bool,
) -> tuple[Int[Array, "1"], tuple[Float32[Array, "1"], AllowedTokens] | None, Cache]:
    """Token `index`, drawn behind these tokens; its log-prob and what it was drawn among, if they are asked for; and
    the cache with these tokens added.
    """
    model = nnx.merge(graph, state)
    hidden, cache = model.extend(tokens, jnp.zeros(1, jnp.int32), cache, start)
    hidden = hidden[:, -1]
    token, allowed, products = _next_token(model, sampling, hidden, keys, index)
    recorded = (logps_of(model, sampling)(hidden, products, token, allowed), allowed) if is_recorded else None
    return token, recorded, cache


def stream(
    model: CausalLM,
    prompt_ids: Int[Array, "P"],
    key: PRNGKeyArray,
    *,
    max_new_tokens: int,
    sampling: Sampling = _AT_ONE,
    stop_ids: Sequence[int] = (),
) -> Iterator[int]:
    """The tokens that `sample` draws behind one prompt by this key, each as soon as it is drawn, for a person who
    waits. A stop token is the last one.

    One program takes the prompt, another one each token. A model of stock layers may round in them otherwise than in
    `sample`; the tokens of an invariant one are the same.
    """
    prompt = _checked_prompt(model, prompt_ids, key, max_new_tokens, stop_ids)
    return (token for token, _ in _streamed(model, *prompt, max_new_tokens, sampling, stop_ids, is_recorded=False))


def stream_recorded(
    model: CausalLM,
    prompt_ids: Int[Array, "P"],
    key: PRNGKeyArray,
    *,
    max_new_tokens: int,
    sampling: Sampling = _AT_ONE,
    stop_ids: Sequence[int] = (),
) -> Iterator[RecordedToken]:
    """The tokens of `stream`, each with the log-prob and the allowed tokens that `sample` records of it."""
    prompt = _checked_prompt(model, prompt_ids, key, max_new_tokens, stop_ids)
    streamed = _streamed(model, *prompt, max_new_tokens, sampling, stop_ids, is_recorded=True)
    return (RecordedToken(token, *jax.tree.map(lambda x: np.asarray(x)[0], recorded)) for token, recorded in streamed)


def _checked_prompt(
    model: CausalLM, prompt_ids: Int[Array, "P"], key: PRNGKeyArray, max_new_tokens: int, stop_ids: Sequence[int]
) -> tuple[Int[Array, "1 P"], PRNGKeyArray]:
    """The prompt and its key as a batch of one, after all that `stream` is given has been checked."""
    tokens, keys = np.asarray(prompt_ids)[None], key[None]
    _check_prompts(model, tokens, jnp.zeros(1, jnp.int32), keys)
    _check_tokens_asked_for(model, max_new_tokens, stop_ids)
    return jnp.asarray(tokens), keys


def _streamed(
    model: CausalLM,
    tokens: Int[Array, "1 P"],
    keys: PRNGKeyArray,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
    *,
    is_recorded: bool,
) -> Iterator[tuple[int, Any]]:
    """The tokens of `stream`, whose inputs have been checked, and what `_with_drawn` gives beside each."""
    graph, state = nnx.split(model)
    # A program makes each of its results anew; to be donated, the arrays of a cache must be different ones.
    cache = jax.jit(model.empty_cache, static_argnums=(0, 1))(1, tokens.shape[1] + max_new_tokens)
    start, draw = 0, functools.partial(_with_drawn, graph, sampling=sampling, is_recorded=is_recorded)
    for index in range(max_new_tokens):
        place = jnp.int32(start), keys, jnp.int32(index)
        start += tokens.shape[1]
        token, recorded, cache = draw(state, tokens, cache, *place)
        yield int(token[0]), recorded
        if int(token[0]) in stop_ids:
            return
        tokens = token[:, None]


def _check_prompts(model: CausalLM, prompt_ids: Any, padding: Any, keys: Any) -> None:
    """Prompts, their padding and their keys are of one batch; where values can be read, each prompt has a token, and
    all tokens are of the vocabulary.
    """
    for name, x in {"prompt_ids": prompt_ids, "padding": padding, "keys": keys}.items():
        as_array(name, x)
    require(
        prompt_ids.ndim == 2 and prompt_ids.shape[1] >= 1,
        f"prompt_ids must be [B, P] with at least one token, got shape {prompt_ids.shape}.",
    )
    batch, width = prompt_ids.shape
    require(padding.shape == (batch,), f"padding must be [B={batch}], a number per prompt, got shape {padding.shape}.")
    require(
        keys.shape == (batch,) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key),
        f"keys must be [B={batch}] of jax.random.split, a key per prompt, got {keys.dtype} of shape {keys.shape}.",
    )
    if is_concrete(padding):
        bad = [int(x) for x in np.asarray(padding) if not 0 <= x < width]
        require(not bad, f"padding must leave a prompt of P={width} slots at least one of them, got {bad[:1]}.")
    if is_concrete(prompt_ids):
        _check_ids("prompt_ids", np.unique(prompt_ids), model)


def _check_tokens_asked_for(model: CausalLM, max_new_tokens: int, ids: Sequence[int]) -> None:
    """The number of tokens is not negative; those that end a row or stand behind its end are of the vocabulary."""
    require(
        is_integer(max_new_tokens) and max_new_tokens >= 0,
        f"max_new_tokens must be an integer of at least 0, got {max_new_tokens!r}.",
    )
    _check_ids("stop_ids and pad_id", ids, model)


def _check_ids(name: str, ids: Iterable[Any], model: CausalLM) -> None:
    """Every id is a token of the model."""
    size = model.config.vocab_size
    bad = [x for x in ids if not (is_integer(x) and 0 <= x < size)]
    require(not bad, f"{name} must be integers in [0, V={size}), got {', '.join(map(str, bad[:1]))}.")


def logps_of(model: CausalLM, sampling: Sampling) -> Score:
    """The log-probs that `sample` records, as a `score`."""
    options: dict[str, Any] = {"temperature": sampling.scored_temperature, "logit_softcap": model.lm_head.softcap}
    options |= {"ignore_index": IGNORED, "validate": False}

    def score(hidden: Array, products: Array, ids: Array, allowed: AllowedTokens) -> Array:
        term, how = model.lm_head.low_rank, options | allowed._asdict()
        if not model.keeps_bits:
            return logp(products, ids, **how)
        if term is not None:
            head, how = (hidden, model.lm_head.weight[...], ids), {"low_rank": term.operands, **how}
            return linear_logp(*head, implementation=promising("linear_logp", *head, **how), **how)
        name = promising("logp", products, ids, as_linear_logp=True, **how)
        return logp(products, ids, as_linear_logp=True, implementation=name, **how)

    return score
