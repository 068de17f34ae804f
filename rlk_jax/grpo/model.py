"""A small Flax NNX decoder: rotary attention, RMSNorm, SwiGLU, untied LM head. It returns hidden states, not logits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rlk_jax import nn
from rlk_jax.grpo.layers import STOCK, Layers, Slots


class LayerCache(NamedTuple):
    """The rotated keys and the values of one layer, one row for each slot of the KV cache."""

    keys: Float[Array, "B S H E"]
    values: Float[Array, "B S H E"]


Cache = tuple[LayerCache, ...]


class Attention(nnx.Module):
    """Causal multi-head attention over the slots of a KV cache."""

    def __init__(self, width: int, heads: int, kind: Layers, *, rngs: nnx.Rngs):
        self.heads, self.kind = heads, kind
        self.query_key_value = kind.dense(width, 3 * width, use_bias=False, dtype=kind.dtype, rngs=rngs)
        self.out = kind.dense(width, width, use_bias=False, dtype=kind.dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], slots: Slots, cache: LayerCache) -> tuple[Array, LayerCache]:
        batch, length, width = x.shape
        positions = slots.positions(length)
        projected = self.query_key_value(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected[:, :, 0], projected[:, :, 1], projected[:, :, 2]
        cache = LayerCache(
            jax.lax.dynamic_update_slice_in_dim(cache.keys, self.kind.rotate(key, positions), slots.start, axis=1),
            jax.lax.dynamic_update_slice_in_dim(cache.values, value, slots.start, axis=1),
        )
        attended = self.kind.attend(self.kind.rotate(query, positions), cache.keys, cache.values, slots)
        return self.out(attended.reshape(batch, length, width)), cache


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) · up(x))` (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, kind: Layers, *, rngs: nnx.Rngs):
        self.kind, inner = kind, _FEED_FORWARD * width
        self.gate_up = kind.dense(width, 2 * inner, use_bias=False, dtype=kind.dtype, rngs=rngs)
        self.down = kind.dense(inner, width, use_bias=False, dtype=kind.dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(self.kind.swiglu(gate, up))


_FEED_FORWARD = 3  # The feed-forward layer is so many times as wide as the model.


class DecoderBlock(nnx.Module):
    """Pre-norm residual attention and feed-forward."""

    def __init__(self, width: int, heads: int, kind: Layers, *, rngs: nnx.Rngs):
        self.kind = kind
        self.attention_norm = kind.norm(width, rngs=rngs)
        self.attention = Attention(width, heads, kind, rngs=rngs)
        self.feed_forward_norm = kind.norm(width, rngs=rngs)
        self.feed_forward = SwiGLU(width, kind, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], slots: Slots, cache: LayerCache) -> tuple[Array, LayerCache]:
        attended, cache = self.attention(self.attention_norm(x), slots, cache)
        x = self.kind.add(x, attended)
        return self.kind.add(x, self.feed_forward(self.feed_forward_norm(x))), cache


@functools.partial(jax.jit, static_argnums=0)
def _extend_layer(
    block: nnx.GraphDef[DecoderBlock], parameters: nnx.State, x: Array, slots: Slots, cache: LayerCache
) -> tuple[Array, LayerCache]:
    """What a block gives. All blocks of a decoder have one graph, so that one function is lowered for all of them."""
    return nnx.merge(block, parameters)(x, slots, cache)


class Decoder(nnx.Module):
    """Token ids to hidden states `[B, T, D]`; `lm_head.kernel` is `[D, V]` (`weight_layout="dv"` of linear_logp)."""

    def __init__(
        self, vocab_size: int, width: int, layers: int, heads: int, *, kind: Layers = STOCK, rngs: nnx.Rngs
    ) -> None:
        self.cache_shape, self.cache_dtype = (heads, width // heads), kind.dtype
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.blocks = nnx.List([DecoderBlock(width, heads, kind, rngs=rngs) for _ in range(layers)])
        self.norm = kind.norm(width, rngs=rngs)
        # Logits are returned in float32, as log-probs are, whatever dtype they are computed in.
        self.lm_head = kind.dense(
            width, vocab_size, use_bias=False, dtype=kind.dtype, preferred_element_type=jnp.float32, rngs=rngs
        )

    def __call__(
        self, tokens: Int[Array, "B T"], padding: Int[Array, "B"] | Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Hidden states of whole sequences. `padding` is how many slots of a row stand before its sequence (what they
        hold means nothing); where a row holds several sequences, it is given for each token.
        """
        hidden, _ = self.extend(tokens, padding, self.empty_cache(*tokens.shape), 0)
        return hidden

    def extend(
        self,
        tokens: Int[Array, "B T"],
        padding: Int[Array, "B"] | Int[Array, "B T"],
        cache: Cache,
        start: int | Int[Array, ""],
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Hidden states of tokens in slots `start..start+T`, which follow the slots that the cache holds already, and
        the cache with these tokens added.
        """
        slots, x, extended = Slots(start, padding), nn.embed(self.embed.embedding[...], tokens), []
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            x, layer_cache = _extend_layer(*nnx.split(block), x, slots, layer_cache)
            extended.append(layer_cache)
        return self.norm(x), tuple(extended)

    def empty_cache(self, batch: int, slots: int) -> Cache:
        """A KV cache for `slots` tokens per row."""
        zeros = jnp.zeros((batch, slots, *self.cache_shape), self.cache_dtype)
        return tuple(LayerCache(zeros, zeros) for _ in self.blocks)
