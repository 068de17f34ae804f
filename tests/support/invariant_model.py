"""A small decoder of rlk_jax.nn's layers, or of nnx's stock layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from rlk_jax import nn


class Layers:
    """The layers and functions that a decoder is made of."""

    dtype = jnp.bfloat16
    head = nn.LMHead
    dense = nn.DetDense
    attention = staticmethod(nn.attention)
    norm = staticmethod(nn.rms_norm)
    silu_times = staticmethod(nn.isolated(lambda gate, up: jax.nn.silu(gate) * up))
    add = staticmethod(nn.isolated(jnp.add))


def _stock_attention(query, key, value, *, start, padding):
    slot, position = jnp.arange(key.shape[1]), start + jnp.arange(query.shape[1])
    visible = (slot <= position[:, None]) & (slot >= padding[:, None, None])
    return jax.nn.dot_product_attention(query, key, value, mask=visible[:, None])


class _StockHead(nnx.Linear):
    def __init__(self, features, vocab, *, rngs):
        super().__init__(features, vocab, use_bias=False, rngs=rngs)

    def logits(self, hidden):
        return super().__call__(hidden)

    def __call__(self, hidden, target_ids):
        logps = jax.nn.log_softmax(self.logits(hidden))
        return jnp.take_along_axis(logps, target_ids[..., None], axis=-1)[..., 0]


class StockLayers(Layers):
    """Stock layers in float32: rounding to bfloat16 after every layer would hide most differences at this size."""

    dtype = jnp.float32
    head = _StockHead
    dense = nnx.Linear
    attention = staticmethod(_stock_attention)
    norm = staticmethod(lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale)
    silu_times = staticmethod(lambda gate, up: jax.nn.silu(gate) * up)
    add = staticmethod(jnp.add)


class Block(nnx.Module):
    def __init__(self, width, heads, groups, layers, *, rngs):
        self.layers, self.heads, self.groups, self.size = layers, heads, groups, width // heads
        self.norms = nnx.Param(jnp.ones((2, width)))
        self.qkv = layers.dense(width, (heads + 2 * groups) * self.size, rngs=rngs)
        self.out = layers.dense(width, width, rngs=rngs)
        self.gate_up = layers.dense(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = layers.dense(2 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x, cache, start, padding):
        layers, (batch, length, width) = self.layers, x.shape
        heads = self.qkv(layers.norm(x, self.norms[0])).reshape(batch, length, -1, self.size)
        query, key, value = jnp.split(heads, [self.heads, self.heads + self.groups], axis=2)
        position = start + jnp.arange(length) - padding[:, None]
        keys = jax.lax.dynamic_update_slice_in_dim(cache[0], nn.rotary(key, position), start, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(cache[1], value, start, axis=1)
        attended = layers.attention(nn.rotary(query, position), keys, values, start=start, padding=padding)
        x = layers.add(x, self.out(attended.reshape(batch, length, width)).astype(jnp.float32))
        gate, up = jnp.split(self.gate_up(layers.norm(x, self.norms[1])), 2, axis=-1)
        return layers.add(x, self.down(layers.silu_times(gate, up)).astype(jnp.float32)), (keys, values)


class Decoder(nnx.Module):
    """Token ids to hidden states, with a float32 residual stream."""

    def __init__(self, vocab, *, width, layers, heads, groups, rngs, kind=Layers):
        self.shape, self.dtype = (groups, width // heads), kind.dtype
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (vocab, width)))
        self.blocks = nnx.List([Block(width, heads, groups, kind, rngs=rngs) for _ in range(layers)])
        self.head = kind.head(width, vocab, rngs=rngs)

    def empty_cache(self, batch, slots):
        zeros = jnp.zeros((batch, slots, *self.shape), self.dtype)
        return [(zeros, zeros) for _ in self.blocks]

    def extend(self, ids, cache, start, padding):
        x, extended = self.embed[...][ids], []
        for block, part in zip(self.blocks, cache, strict=True):
            x, part = block(x, part, start, padding)
            extended.append(part)
        return x, extended

    def __call__(self, ids, padding):
        return self.extend(ids, self.empty_cache(*ids.shape), 0, padding)[0]


def stock(*args, **options):
    """A decoder of stock layers."""
    return Decoder(*args, kind=StockLayers, **options)


@nnx.jit
def _extend(decoder, ids, cache, start, padding):
    hidden, cache = decoder.extend(ids, cache, start, padding)
    return decoder.head.logits(hidden), cache


def decode(decoder, ids, padding, *, prompt, slots):
    """Logits of a prompt at once, then of one token at a time through a cache that is longer than the sequence."""
    cache = decoder.empty_cache(ids.shape[0], slots)
    logits, cache = _extend(decoder, ids[:, :prompt], cache, jnp.int32(0), padding)
    found = [logits]
    for slot in range(prompt, ids.shape[1]):
        logits, cache = _extend(decoder, ids[:, slot : slot + 1], cache, jnp.int32(slot), padding)
        found.append(logits)
    return jnp.concatenate(found, axis=1)
