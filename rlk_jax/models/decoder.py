"""A decoder driven by a `ModelConfig`, in Flax NNX modules that can be read and used alone."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from rlk_jax import nn
from rlk_jax.core.checks import is_concrete, require
from rlk_jax.models.config import LayerConfig, ModelConfig, config_of
from rlk_jax.models.kinds import KINDS, LayerKind, Reach, Slots
from rlk_jax.models.low_rank import LowRankTerm
from rlk_jax.models.placement import Fetch
from rlk_jax.models.rope import Rope
from rlk_jax.ops.det_gemm.checks import check_gemm_dtype


class LayerCache(NamedTuple):
    """The rotated keys and the values of one layer, one row for each slot of the KV cache."""

    keys: Float[Array, "B S G E"]
    values: Float[Array, "B S G E"]

    def with_tokens(self, keys: Array, values: Array, start: int | Int[Array, ""]) -> "LayerCache":
        """The cache with the keys and values of tokens `[B, T, G, E]` in the slots from `start` on."""
        new = zip(self, (keys, values), strict=True)
        return LayerCache(*(lax.dynamic_update_slice_in_dim(x, tokens, start, axis=1) for x, tokens in new))


Cache = tuple[LayerCache, ...]


class Stream(NamedTuple):
    """The residual stream between two blocks: what it was, and what the last branch gave, which the next norm adds."""

    x: Float[Array, "B T D"]
    branch: Float[Array, "B T D"]


class _TokenPlaces(NamedTuple):
    """Where the tokens of a call stand, and what queries and keys of each of the model's ropes are turned by."""

    slots: Slots
    rotations: tuple[nn.Rotation, ...]


class Linear(nnx.Module):
    """`x·Wᵀ + bias`, and a low-rank term where there is one; the weight is `[out, in]`."""

    low_rank: LowRankTerm | None = None

    def __init__(
        self, inputs: int, outputs: int, kind: LayerKind, dtype: DTypeLike, *, bias: bool, rngs: nnx.Rngs
    ) -> None:
        self.kind = kind
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (outputs, inputs), dtype) * inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        product = self.kind.dense(x, self.weight[...], None if self.bias is None else self.bias[...])
        return product if self.low_rank is None else self.kind.plus(product, self.low_rank(x))


class Norm(nnx.Module):
    """RMSNorm; with `offset`, by 1 + its scale (Gemma)."""

    def __init__(self, width: int, config: ModelConfig, kind: LayerKind, dtype: DTypeLike) -> None:
        self.kind, self.offset, self.epsilon = kind, config.has_offset_norms, config.norm_epsilon
        self.scale = nnx.Param(jnp.full(width, 0 if self.offset else 1, dtype))

    @property
    def multiplier(self) -> Float32[Array, "D"]:
        """What normalized numbers are multiplied by."""
        scale = self.scale[...].astype(jnp.float32)
        return 1 + scale if self.offset else scale

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        return self.kind.norm(x, self.multiplier, self.epsilon)

    def of_sum(self, stream: Stream) -> tuple[Array, Array]:
        """The residual stream with its branch added, and the norm of it."""
        return self.kind.add_norm(*stream, self.multiplier, self.epsilon)


class SelfAttention(nnx.Module):
    """Causal attention over the slots of a KV cache, with grouped keys and rotary embeddings."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, kind: LayerKind, dtype: DTypeLike, *, rngs: nnx.Rngs
    ) -> None:
        self.heads, self.groups, self.size, self.kind = config.heads, config.groups, config.head_size, kind
        self.reach = Reach(config.attention_scale, layer.window, config.attention_softcap)
        self.rope = ropes_of(config).index(layer.rope)
        outputs = (self.heads + 2 * self.groups) * self.size
        linear = functools.partial(Linear, kind=kind, dtype=dtype, rngs=rngs)
        self.query_key_value = linear(config.width, outputs, bias=config.query_key_value_bias)
        self.out = linear(self.heads * self.size, config.width, bias=config.out_bias)
        self.query_norm = Norm(self.size, config, kind, dtype) if config.has_head_norms else None
        self.key_norm = Norm(self.size, config, kind, dtype) if config.has_head_norms else None

    def __call__(self, x: Float[Array, "B T D"], places: _TokenPlaces, cache: LayerCache) -> tuple[Array, LayerCache]:
        by_head = self.query_key_value(x).reshape(*x.shape[:2], -1, self.size)
        query, key, value = jnp.split(by_head, (self.heads, self.heads + self.groups), axis=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        rotation = places.rotations[self.rope]
        cache = cache.with_tokens(self.kind.rotated(key, rotation), value, places.slots.start)
        attended = self.kind.attend(self.kind.rotated(query, rotation), *cache, places.slots, self.reach)
        return self.out(attended.reshape(*x.shape[:2], -1)), cache


class FeedForward(nnx.Module):
    """`down(activation(gate(x)) · up(x))`."""

    def __init__(self, config: ModelConfig, kind: LayerKind, dtype: DTypeLike, *, rngs: nnx.Rngs) -> None:
        self.kind, self.activation = kind, config.activation
        linear = functools.partial(Linear, kind=kind, dtype=dtype, bias=config.feed_forward_bias, rngs=rngs)
        self.gate_up = linear(config.width, 2 * config.inner)
        self.down = linear(config.inner, config.width)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(self.kind.gated(self.activation, self.gate_up(x)))


class DecoderLayer(nnx.Module):
    """Attention and feed-forward on the residual stream, each behind a norm and, in Gemma, before one too."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, kind: LayerKind, dtype: DTypeLike, *, rngs: nnx.Rngs
    ) -> None:
        norm = functools.partial(Norm, config.width, config, kind, dtype)
        self.attention_norm, self.feed_forward_norm = norm(), norm()
        self.attention = SelfAttention(config, layer, kind, dtype, rngs=rngs)
        self.feed_forward = FeedForward(config, kind, dtype, rngs=rngs)
        self.attention_post_norm = norm() if config.has_post_norms else None
        self.feed_forward_post_norm = norm() if config.has_post_norms else None

    def __call__(self, stream: Stream, places: _TokenPlaces, cache: LayerCache) -> tuple[Stream, LayerCache]:
        x, normalized = self.attention_norm.of_sum(stream)
        branch, cache = self.attention(normalized, places, cache)
        if self.attention_post_norm is not None:
            branch = self.attention_post_norm(branch)
        x, normalized = self.feed_forward_norm.of_sum(Stream(x, branch))
        branch = self.feed_forward(normalized)
        if self.feed_forward_post_norm is not None:
            branch = self.feed_forward_post_norm(branch)
        return Stream(x, branch), cache


@jax.custom_vjp
def _with_gradients_together[Tree](tree: Tree) -> Tree:
    """The same arrays. Their gradients are there when all of them are: else XLA puts off products that give gradients
    of weights, and holds what they need of all layers.
    """
    return tree


_with_gradients_together.defvjp(lambda tree: (tree, None), lambda _, gradients: (lax.optimization_barrier(gradients),))


def _through_layer(
    block: nnx.GraphDef[DecoderLayer],
    fetch: Fetch | None,
    parameters: nnx.State,
    stream: Stream,
    places: _TokenPlaces,
    cache: LayerCache,
) -> tuple[Stream, LayerCache]:
    trained, frozen = nnx.split_state(parameters, nnx.LoRAParam, ...)
    if jax.tree.leaves(trained):
        trained, stream = _with_gradients_together((trained, stream))
    else:
        frozen, stream = _with_gradients_together((frozen, stream))
    parameters = nnx.merge_state(trained, frozen)
    parameters = parameters if fetch is None else fetch(parameters)
    return nnx.merge(block, parameters)(stream, places, cache)


_KEEPING = jax.jit(_through_layer, static_argnums=(0, 1))
"""What a block gives. Blocks with the same window and rope have one graph, and are lowered once together."""
_RECOMPUTING = jax.jit(jax.checkpoint(_through_layer, static_argnums=(0, 1)), static_argnums=(0, 1))
"""The same; a backward fetches the parameters and computes it once more."""


class LogitsHead(nnx.Module):
    """The head of a model, whose weight is `[V, D]`; where it is tied, the embedding's own."""

    low_rank: LowRankTerm | None = None

    def __init__(self, weight: nnx.Param, softcap: float | None, kind: LayerKind) -> None:
        self.weight, self.softcap, self.kind = weight, softcap, kind

    def __call__(self, hidden: Float[Array, "*lead D"]) -> Float32[Array, "*lead V"]:
        """float32 logits, as sampling takes them. Training takes `rlk_jax.linear_logp` of `weight` and `softcap`."""
        return self.capped(self.products(hidden))

    def products(self, hidden: Float[Array, "*lead D"]) -> Float32[Array, "*lead V"]:
        """float32 hidden·Wᵀ, in front of the softcap: what `rlk_jax.logp` takes with `as_linear_logp`."""
        products = self.kind.logits(hidden, self.weight[...])
        return products if self.low_rank is None else self.kind.plus(products, self.low_rank.products(hidden))

    def capped(self, products: Float32[Array, "*lead V"]) -> Float32[Array, "*lead V"]:
        """Logits from products."""
        return products if self.softcap is None else self.kind.capped(products, self.softcap)


def ropes_of(config: ModelConfig) -> list[Rope]:
    """The different ropes of a model's layers, in the order of their first layers."""
    return list(dict.fromkeys(layer.rope for layer in config.layers))


class CausalLM(nnx.Module):
    """Token ids to hidden states `[B, T, D]`, and `lm_head` from these to logits.

    kind is "stock" or "invariant": with the latter a token has the same bits alone, in a batch, padded, packed, and
    decoded through the KV cache. It computes in `dtype`, which is bfloat16 or float16 for "invariant". With `remat`, a
    backward recomputes every layer from what went into it, which is all that is kept. Where `fetch` is set, the
    parameters of blocks are parts, of which each block gets its whole ones when it computes.
    """

    fetch: Fetch | None = None

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        kind: str = "stock",
        remat: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        _check_kind(config, kind, dtype)
        self.config, self.dtype, self.kind = config, jnp.dtype(dtype), KINDS[kind]
        self.keeps_bits, self.remat = kind == "invariant", remat
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.width), dtype) * 0.02)
        self.blocks = nnx.List([DecoderLayer(config, layer, self.kind, dtype, rngs=rngs) for layer in config.layers])
        self.norm = Norm(config.width, config, self.kind, dtype)
        head = self.embedding
        if not config.is_tied:
            shape = (config.vocab_size, config.width)
            head = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * config.width**-0.5)
        self.lm_head = LogitsHead(head, config.final_softcap, self.kind)
        self.frequencies = nnx.List([nnx.Variable(jnp.zeros(rope.size // 2)) for rope in ropes_of(config)])
        self.set_frequencies()

    def set_frequencies(self) -> None:
        """Compute the frequencies of the ropes, which are no parameters: a model that is only shapes has none."""
        for rope, frequencies in zip(ropes_of(self.config), self.frequencies, strict=True):
            frequencies.set_value(jnp.asarray(rope.frequencies()))

    def add_low_rank(self, rank: int, *, rngs: nnx.Rngs) -> None:
        """Give all linear layers and the head low-rank terms, whose parameters are `nnx.LoRAParam`."""
        for linear in self._with_weights():
            linear.low_rank = LowRankTerm(linear.weight, rank, self.kind, self.dtype, rngs=rngs)

    def merge_low_rank(self) -> None:
        """Add low-rank terms to the weights beside them. A head that was tied has a weight of its own then."""
        terms = [(linear, linear.low_rank) for linear in self._with_weights() if linear.low_rank is not None]
        for linear, term in terms:
            linear.weight = nnx.Param(term.added_to(linear.weight[...]))
            linear.low_rank = None
        if terms:
            self.config = config_of({**self.config.fields, "tie_word_embeddings": False})

    def _with_weights(self) -> Iterator[Linear | LogitsHead]:
        for block in self.blocks:
            attention, feed_forward = block.attention, block.feed_forward
            yield from (attention.query_key_value, attention.out, feed_forward.gate_up, feed_forward.down)
        yield self.lm_head

    def __call__(
        self, tokens: Int[Array, "B T"], padding: Int[Array, "B"] | Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Hidden states of whole sequences. `padding` is how many slots of a row stand before its sequence; where a row
        holds several sequences, it is given for each token. None: there is none.
        """
        padding = jnp.zeros(len(tokens), jnp.int32) if padding is None else padding
        return self.extend(tokens, padding, self.empty_cache(*tokens.shape), 0)[0]

    def extend(
        self,
        tokens: Int[Array, "B T"],
        padding: Int[Array, "B"] | Int[Array, "B T"],
        cache: Cache,
        start: int | Int[Array, ""],
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Hidden states of tokens in slots `start..start+T`, which follow the slots that the cache holds already, and
        the cache with these tokens added.

        Raises ValueError for slots that the cache does not have. Where `start` is traced, they give NaN, in the hidden
        states and in the cache.
        """
        x, slots, extended = self.embedded(tokens), Slots(start, padding), []
        x = unless_outside(x, start, cache[0].keys.shape[1])
        stream = Stream(x, jnp.zeros_like(x))
        places = _TokenPlaces(slots, self._rotations(slots.positions(tokens.shape[1])))
        through_layer = _RECOMPUTING if self.remat else _KEEPING
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            graph, parameters = nnx.split(block)
            stream, layer_cache = through_layer(graph, self.fetch, parameters, stream, places, layer_cache)
            extended.append(layer_cache)
        return self.norm.of_sum(stream)[1], tuple(extended)

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the residual stream begins with."""
        x = self.kind.embed(self.embedding[...], tokens)
        return self.kind.scaled(x, self.config.width**0.5) if self.config.scales_embedding else x

    def _rotations(self, positions: Int[Array, "B T"]) -> tuple[nn.Rotation, ...]:
        """What queries and keys of each rope are turned by. A dynamic one is as long as the last position of the call
        says; keys in the cache stay as they were turned.
        """

        def rotation(rope: Rope, frequencies: Array) -> nn.Rotation:
            if rope.type == "dynamic":
                frequencies = rope.stretched(frequencies, positions.max() + 1)
            return nn.rotation_by(positions, frequencies, factor=rope.attention)

        return tuple(rotation(rope, x[...]) for rope, x in zip(ropes_of(self.config), self.frequencies, strict=True))

    def empty_cache(self, batch: int, slots: int) -> Cache:
        """A KV cache for `slots` tokens per row."""
        zeros = jnp.zeros((batch, slots, self.config.groups, self.config.head_size), self.dtype)
        return tuple(LayerCache(zeros, zeros) for _ in self.blocks)


def unless_outside(x: Float[Array, "B T D"], start: int | Int[Array, ""], slots: int) -> Float[Array, "B T D"]:
    """What the stream of tokens begins with, and NaN where their slots are not among those of the cache: writing there
    would be clamped.
    """
    last = slots - x.shape[1]
    fits = (start >= 0) & (start <= last)
    if last < 0 or is_concrete(fits):
        require(
            last >= 0 and fits, f"extend got {x.shape[1]} tokens from slot {start} on, and a cache of {slots} slots."
        )
        return x
    return jnp.where(fits, x, jnp.nan)


def _check_kind(config: ModelConfig, kind: str, dtype: DTypeLike) -> None:
    """The kind exists, and keeps its promise on such a model."""
    if kind not in KINDS:
        raise ValueError(f"kind must be 'stock' or 'invariant', got {kind!r}.")
    if kind == "stock":
        return
    check_gemm_dtype(jnp.dtype(dtype))
    if any(layer.rope.type == "dynamic" for layer in config.layers):
        raise ValueError(
            "kind 'invariant' refuses rope_type 'dynamic': its frequencies change with the length, and keys that are "
            "cached already do not."
        )
