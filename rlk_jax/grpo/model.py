"""A small Flax NNX decoder: rotary attention, RMSNorm, SwiGLU, untied LM head. It returns hidden states, not logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

ROTARY_BASE = 10_000.0


class LayerCache(NamedTuple):
    """Keys (already rotated) and values of one layer, one row per slot."""

    keys: Float[Array, "B S H E"]
    values: Float[Array, "B S H E"]


Cache = tuple[LayerCache, ...]


class Slots(NamedTuple):
    """Where the tokens of one call stand: what every layer needs besides their features."""

    start: int | Int[Array, ""]  # slot of the first token
    positions: Int[Array, "B T"]  # slot minus left padding
    visible: Bool[Array, "B 1 T S"]  # which slots each token attends to


class Attention(nnx.Module):
    """Causal multi-head attention over the slots of a KV cache."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        self.query_key_value = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], slots: Slots, cache: LayerCache) -> tuple[Array, LayerCache]:
        batch, length, width = x.shape
        projected = self.query_key_value(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected[:, :, 0], projected[:, :, 1], projected[:, :, 2]
        cache = LayerCache(
            jax.lax.dynamic_update_slice_in_dim(cache.keys, rotate(key, slots.positions), slots.start, axis=1),
            jax.lax.dynamic_update_slice_in_dim(cache.values, value, slots.start, axis=1),
        )
        query = rotate(query, slots.positions)
        attended = jax.nn.dot_product_attention(query, cache.keys, cache.values, mask=slots.visible)
        return self.out(attended.reshape(batch, length, width)), cache


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) · up(x))` (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.gate_up = nnx.Linear(width, 2 * _FEED_FORWARD * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(_FEED_FORWARD * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


_FEED_FORWARD = 3  # width of the feed-forward layer in model widths


class Block(nnx.Module):
    """Pre-norm residual attention and feed-forward."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, heads, rngs=rngs)
        self.feed_forward_norm = nnx.RMSNorm(width, rngs=rngs)
        self.feed_forward = SwiGLU(width, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], slots: Slots, cache: LayerCache) -> tuple[Array, LayerCache]:
        attended, cache = self.attention(self.attention_norm(x), slots, cache)
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class Decoder(nnx.Module):
    """Token ids to hidden states `[B, T, D]`; `lm_head.kernel` is `[D, V]` (`weight_layout="dv"` of linear_logp)."""

    def __init__(self, vocab_size: int, width: int, layers: int, heads: int, *, rngs: nnx.Rngs):
        self.width, self.heads = width, heads
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.lm_head = nnx.Linear(width, vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], padding: Int[Array, "B"]) -> Float[Array, "B T D"]:
        """Hidden states of whole sequences whose first `padding[b]` slots are padding (their rows mean nothing)."""
        hidden, _ = self.extend(tokens, padding, self.empty_cache(*tokens.shape), 0)
        return hidden

    def extend(
        self, tokens: Int[Array, "B T"], padding: Int[Array, "B"], cache: Cache, start: int | Int[Array, ""]
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Hidden states of tokens in slots `start..start+T`, after the slots that the cache already holds."""
        positions = start + jnp.arange(tokens.shape[1])
        keys = jnp.arange(cache[0].keys.shape[1])
        visible = (keys <= positions[:, None]) & (keys >= padding[:, None, None])
        slots = Slots(start, positions - padding[:, None], visible[:, None])
        x = self.embed(tokens)
        extended = []
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            x, layer_cache = block(x, slots, layer_cache)
            extended.append(layer_cache)
        return self.norm(x), tuple(extended)

    def empty_cache(self, batch: int, slots: int) -> Cache:
        """A cache for `slots` tokens per sequence."""
        zeros = jnp.zeros((batch, slots, self.heads, self.width // self.heads), self.embed.embedding.dtype)
        return tuple(LayerCache(zeros, zeros) for _ in self.blocks)


def rotate(x: Float[Array, "B T H E"], positions: Int[Array, "B T"]) -> Float[Array, "B T H E"]:
    """Rotary position embedding: each pair (x_i, x_{i+E/2}) turned by position · base^(−2i/E).

    Source: RoFormer, arXiv 2104.09864.
    """
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half) / half)
    angles = (positions[..., None] * frequencies)[:, :, None, :]
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
