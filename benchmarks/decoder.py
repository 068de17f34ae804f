"""A decoder as Llama is built, of stock layers or of invariant ones, and the programs of a trainer on it.

The trainer's weights and Adam's moments are float32. Every program computes from a bfloat16 copy of the weights, and
its residual stream is bfloat16. Layers are stacked and scanned, so that one layer is compiled for all; decoding, which
would copy a layer's weights and cache out of the stack, has them apart.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.linear_logp import log_softmax_at
from rlk_jax import attention, det_gemm, linear_logp, logp, nn
from rlk_jax.grpo.layers import INVARIANT, STOCK, Layers
from rlk_jax.models.decoder import Stream
from rlk_jax.ops import promising

Array = jax.Array
_LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class DecoderSizes:
    """The numbers of a decoder. Its head is its embedding."""

    layers: int
    width: int
    heads: int
    groups: int
    inner: int
    vocab: int
    head_size: int = 64

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The rows and columns of a layer's matrices, by their names in `LayerWeights`."""
        heads = self.heads * self.head_size
        return {
            "query_key_value": (self.width, heads + 2 * self.groups * self.head_size),
            "out": (heads, self.width),
            "gate_up": (self.width, 2 * self.inner),
            "down": (self.inner, self.width),
        }

    @property
    def layer_parameters(self) -> int:
        """The parameters of the matrices of all layers."""
        return self.layers * sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.width


class LayerWeights(NamedTuple):
    """The weights of one layer, or of all, stacked. Matrices are `[in, out]`; query, key and value are one, and so are
    gate and up.
    """

    attention_norm: Array
    query_key_value: Array
    out: Array
    feed_forward_norm: Array
    gate_up: Array
    down: Array


class Weights(NamedTuple):
    """The embedding `[V, D]`, the layers, and the scale of the last norm.

    `layers` is a LayerWeights of stacked arrays; for decoding it is a tuple of them, one for each layer.
    """

    embedding: Array
    layers: Any
    norm: Array


class Cache(NamedTuple):
    """Rotated keys and values `[B, S, G, E]` of one layer, or of all, stacked."""

    keys: Array
    values: Array


class Rolled(NamedTuple):
    """Decoded tokens and the log-probs that they were chosen with, `[B, steps]`."""

    tokens: Array
    logps: Array


@dataclass(frozen=True)
class Operations:
    """What a decoder computes with."""

    layers: Layers
    """Whose norms, rotary embedding and SwiGLU it takes."""
    embed: Callable[[Array, Array], Array]
    dense: Callable[[Array, Array], Array]
    attend: Callable[[Array, Array, Array], Array]
    """Queries over the keys and values of whole sequences, causally."""
    attend_one: Callable[[Array, Array, Array, Array], Array]
    """One query of each sequence, in this slot, over a cache."""
    logits: Callable[[Array, Array], Array]
    """Logits of hidden states `[B, D]` under an embedding, to choose tokens from."""
    chosen_logps: Callable[[Array, Array], Array]
    """float32 log-probs of tokens `[B]` that were chosen from logits `[B, V]`."""
    logps: Callable[[Array, Array, Array], Array]
    """float32 log-probs of the tokens `[B, T]` that follow hidden states `[B, T, D]`, for training."""


def _fused_attention(query: Array, key: Array, value: Array) -> Array:
    implementation: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)


def _attend_one(query: Array, keys: Array, values: Array, slot: Array) -> Array:
    lengths = jnp.full(query.shape[0], slot + 1, jnp.int32)
    return jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=lengths, implementation="xla")


@jax.checkpoint
def _logps(hidden: Array, embedding: Array, token_ids: Array) -> Array:
    """A trainer's usual log-probs; its backward recomputes the logits."""
    return log_softmax_at(hidden @ embedding.T, token_ids)


def _invariant_attend(query: Array, key: Array, value: Array, start: int | Array = 0) -> Array:
    return attention(query, key, value, start=start, implementation=promising("attention", query, key, value))


def _invariant_chosen_logps(logits: Array, token_ids: Array) -> Array:
    """float32 log-probs of the chosen tokens, which have the bits that training gives them."""
    how: Any = {"as_linear_logp": True}
    return logp(logits, token_ids, implementation=promising("logp", logits, token_ids, **how), **how)


def _invariant_logps(hidden: Array, embedding: Array, token_ids: Array) -> Array:
    call = hidden, embedding, token_ids
    return linear_logp(*call, implementation=promising("linear_logp", *call))


OPERATIONS = {
    "stock": Operations(
        STOCK,
        embed=lambda table, ids: jnp.take(table, ids, axis=0),
        dense=jnp.matmul,
        attend=_fused_attention,
        attend_one=_attend_one,
        logits=lambda hidden, embedding: hidden @ embedding.T,
        chosen_logps=log_softmax_at,
        logps=_logps,
    ),
    "invariant": Operations(
        INVARIANT,
        embed=nn.embed,
        dense=det_gemm,
        attend=_invariant_attend,
        attend_one=_invariant_attend,
        logits=functools.partial(det_gemm, transpose_b=True, out_dtype=jnp.float32),
        chosen_logps=_invariant_chosen_logps,
        logps=_invariant_logps,
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def new_weights(sizes: DecoderSizes) -> Weights:
    """Random float32 weights."""
    *keys, last = jax.random.split(jax.random.key(0), 5)
    width = sizes.width
    matrices = {
        name: jax.random.normal(key, (sizes.layers, rows, columns)) * rows**-0.5
        for key, (name, (rows, columns)) in zip(keys, sizes.matrices.items(), strict=True)
    }
    embedding = jax.random.normal(last, (sizes.vocab, width)) * width**-0.5
    norms = {name: jnp.ones((sizes.layers, width)) for name in ("attention_norm", "feed_forward_norm")}
    layers = LayerWeights(**norms, **matrices)
    return Weights(embedding, layers, jnp.ones(width))


def in_bfloat16(weights: Weights) -> Weights:
    """The copy that a program computes from."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)


def unstacked[Tree: (LayerWeights, Cache)](stacked: Tree) -> tuple[Tree, ...]:
    """Each layer's own."""
    arrays, tree = jax.tree.flatten(stacked)
    return tuple(jax.tree.unflatten(tree, layer) for layer in zip(*arrays, strict=True))


def _begun(operations: Operations, weights: Weights, tokens: Array) -> Stream:
    """The stream of tokens `[B, T]` in front of the first layer."""
    x = operations.embed(weights.embedding, tokens)
    return Stream(x, jnp.zeros_like(x))


def _layer(
    operations: Operations,
    sizes: DecoderSizes,
    weights: LayerWeights,
    stream: Stream,
    rotation: nn.Rotation,
    attend: Callable[[Array, Array, Array], tuple[Array, Any]],
) -> tuple[Stream, Any]:
    """Pre-norm attention and SwiGLU on the stream, and what `attend` gives beside its output."""
    kind, dense = operations.layers, operations.dense
    x, normalized = kind.add_norm(*stream, weights.attention_norm, None)
    projected = dense(normalized, weights.query_key_value)
    attended, kept = attend(*kind.split_rotary(projected, rotation, sizes.heads, sizes.groups))
    branch = dense(attended.reshape(*x.shape[:2], -1), weights.out)
    x, normalized = kind.add_norm(x, branch, weights.feed_forward_norm, None)
    return Stream(x, dense(kind.swiglu(dense(normalized, weights.gate_up)), weights.down)), kept


def hidden_states(
    operations: Operations, sizes: DecoderSizes, weights: Weights, tokens: Array, *, remat: bool = False
) -> tuple[Array, Cache]:
    """Hidden states `[B, T, D]` of whole sequences, and the cache that they fill. With `remat`, a backward recomputes
    every layer.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    rotation = nn.rotation(positions, sizes.head_size)

    def attend(query: Array, key: Array, value: Array) -> tuple[Array, Cache]:
        return operations.attend(query, key, value), Cache(key, value)

    def layer(stream: Stream, layer_weights: LayerWeights) -> tuple[Stream, Cache]:
        return _layer(operations, sizes, layer_weights, stream, rotation, attend)

    step = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    stream, cache = lax.scan(step, _begun(operations, weights, tokens), weights.layers)
    return operations.layers.add_norm(*stream, weights.norm, None)[1], cache


OPTIMIZER = optax.adamw(_LEARNING_RATE)


def update(
    operations: Operations, sizes: DecoderSizes, state: Any, tokens: Array, advantages: Array
) -> tuple[Any, Array]:
    """A step of AdamW on the policy gradient of sequences `[B, T + 1]`: the new weights and moments, and the loss."""
    weights, moments = state

    def loss(weights: Weights) -> Array:
        rounded = in_bfloat16(weights)
        hidden, _ = hidden_states(operations, sizes, rounded, tokens[:, :-1], remat=True)
        logps = operations.logps(hidden, rounded.embedding, tokens[:, 1:])
        return -jnp.mean(advantages[:, None] * logps)

    value, gradients = jax.value_and_grad(loss)(weights)
    updates, moments = OPTIMIZER.update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), value


def prefill(operations: Operations, sizes: DecoderSizes, weights: Weights, tokens: Array) -> tuple[Array, Cache]:
    """The token that follows each of some prompts `[B, T]`, and their cache."""
    hidden, cache = hidden_states(operations, sizes, weights, tokens)
    return jnp.argmax(operations.logits(hidden[:, -1], weights.embedding), axis=-1), cache


def decode(
    operations: Operations, sizes: DecoderSizes, start: int, steps: int, state: Any, weights: Weights
) -> tuple[Any, Rolled]:
    """Greedy tokens of slots start + 1, …; the state is the token of slot `start` `[B]` and the layers' caches."""

    @jax.jit  # lowered once for all layers
    def extended(
        weights: LayerWeights, stream: Stream, cache: Cache, slot: Array, rotation: nn.Rotation
    ) -> tuple[Stream, Cache]:
        def attend(query: Array, key: Array, value: Array) -> tuple[Array, Cache]:
            new = (key, value)
            keys, values = (
                lax.dynamic_update_slice_in_dim(c, n, slot, axis=1) for c, n in zip(cache, new, strict=True)
            )
            return operations.attend_one(query, keys, values, slot), Cache(keys, values)

        return _layer(operations, sizes, weights, stream, rotation, attend)

    def step(state: Any, slot: Array) -> tuple[Any, Rolled]:
        token, caches = state
        stream, new = _begun(operations, weights, token[:, None]), []
        rotation = nn.rotation(jnp.full(stream.x.shape[:2], slot), sizes.head_size)
        for layer_weights, cache in zip(weights.layers, caches, strict=True):
            stream, cache = extended(layer_weights, stream, cache, slot, rotation)
            new.append(cache)
        hidden = operations.layers.add_norm(*stream, weights.norm, None)[1][:, 0]
        logits = operations.logits(hidden, weights.embedding)
        chosen = jnp.argmax(logits, axis=-1)
        logps = operations.chosen_logps(logits, chosen)
        return (chosen, tuple(new)), Rolled(chosen, logps)

    state, rolled = lax.scan(step, state, start + jnp.arange(steps))
    return state, jax.tree.map(jnp.transpose, rolled)
