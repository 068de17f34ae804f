"""A small Flax NNX decoder: rotary attention, RMSNorm, SwiGLU, untied LM head. It returns hidden states, not logits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rlk_jax import nn
from rlk_jax.grpo.layers import ROTARY_BASE, STOCK, Layers
from rlk_jax.models.decoder import Cache, LayerCache, Stream, unless_outside
from rlk_jax.models.kinds import Slots


class _Places(NamedTuple):
    """Where the tokens of a call stand, and what their queries and keys are turned by: the same for all layers."""

    slots: Slots
    rotation: nn.Rotation


class Attention(nnx.Module):
    """Causal multi-head attention over the slots of a KV cache."""

    def __init__(self, width: int, heads: int, kind: Layers, *, rngs: nnx.Rngs):
        self.heads, self.kind = heads, kind
        self.query_key_value = kind.dense(width, 3 * width, use_bias=False, dtype=kind.dtype, rngs=rngs)
        self.out = kind.dense(width, width, use_bias=False, dtype=kind.dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], places: _Places, cache: LayerCache) -> tuple[Array, LayerCache]:
        projected = self.query_key_value(x)
        query, key, value = self.kind.split_rotary(projected, places.rotation, self.heads, self.heads)
        cache = cache.with_tokens(key, value, places.slots.start)
        attended = self.kind.attend(query, *cache, places.slots)
        return self.out(attended.reshape(x.shape)), cache


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) · up(x))` (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, kind: Layers, *, rngs: nnx.Rngs):
        self.kind, inner = kind, _FEED_FORWARD * width
        self.gate_up = kind.dense(width, 2 * inner, use_bias=False, dtype=kind.dtype, rngs=rngs)
        self.down = kind.dense(inner, width, use_bias=False, dtype=kind.dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(self.kind.swiglu(self.gate_up(x)))


_FEED_FORWARD = 3  # The feed-forward layer is so many times as wide as the model.


class Scale(nnx.Module):
    """The scale of an RMSNorm."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (width,), jnp.float32))


class DecoderBlock(nnx.Module):
    """Pre-norm residual attention and feed-forward."""

    def __init__(self, width: int, heads: int, kind: Layers, *, rngs: nnx.Rngs):
        self.kind = kind
        self.attention_norm = Scale(width, rngs=rngs)
        self.attention = Attention(width, heads, kind, rngs=rngs)
        self.feed_forward_norm = Scale(width, rngs=rngs)
        self.feed_forward = SwiGLU(width, kind, rngs=rngs)

    def __call__(self, stream: Stream, places: _Places, cache: LayerCache) -> tuple[Stream, LayerCache]:
        kind = self.kind
        x, normalized = kind.add_norm(*stream, self.attention_norm.scale[...], kind.dtype)
        attended, cache = self.attention(normalized, places, cache)
        x, normalized = kind.add_norm(x, attended, self.feed_forward_norm.scale[...], kind.dtype)
        return Stream(x, self.feed_forward(normalized)), cache


@functools.partial(jax.jit, static_argnums=0)
def _extend_layer(
    block: nnx.GraphDef[DecoderBlock], parameters: nnx.State, stream: Stream, places: _Places, cache: LayerCache
) -> tuple[Stream, LayerCache]:
    """What a block gives. All blocks of a decoder have one graph, so that one function is lowered for all of them."""
    return nnx.merge(block, parameters)(stream, places, cache)


class Decoder(nnx.Module):
    """Token ids to hidden states `[B, T, D]`; `lm_head.kernel` is `[D, V]` (`weight_layout="dv"` of linear_logp)."""

    def __init__(
        self, vocab_size: int, width: int, layers: int, heads: int, *, kind: Layers = STOCK, rngs: nnx.Rngs
    ) -> None:
        self.kind, self.cache_shape = kind, (heads, width // heads)
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.blocks = nnx.List([DecoderBlock(width, heads, kind, rngs=rngs) for _ in range(layers)])
        self.norm = Scale(width, rngs=rngs)
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

        Raises ValueError for slots that the cache does not have. Where `start` is traced, they give NaN.
        """
        slots, x, extended = Slots(start, padding), nn.embed(self.embed.embedding[...], tokens), []
        x = unless_outside(x, start, cache[0].keys.shape[1])
        stream = Stream(x, jnp.zeros_like(x, self.kind.dtype))
        positions, size = slots.positions(tokens.shape[1]), self.cache_shape[1]
        places = _Places(slots, nn.rotation(positions, size, base=ROTARY_BASE))
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            stream, layer_cache = _extend_layer(*nnx.split(block), stream, places, layer_cache)
            extended.append(layer_cache)
        return self.kind.add_norm(*stream, self.norm.scale[...], None)[1], tuple(extended)

    def empty_cache(self, batch: int, slots: int) -> Cache:
        """A KV cache for `slots` tokens per row."""
        zeros = jnp.zeros((batch, slots, *self.cache_shape), self.kind.dtype)
        return tuple(LayerCache(zeros, zeros) for _ in self.blocks)
