"""The two kinds of layers that a model is computed by: stock ones, whose bits depend on the shapes of a batch, and
those of `rlk_jax.nn`, whose bits do not.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rlk_jax import det_gemm, nn
from rlk_jax.core.tokens import row_ids

Activation = Callable[[Array], Array]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Slots(NamedTuple):
    """Where the tokens of one call stand in their rows."""

    start: int | Int[Array, ""]
    """The slot of the first token of the call."""
    padding: Int[Array, "B"] | Int[Array, "B T"]
    """How many slots stand before a sequence: one number per row, or one per token where a row holds several."""

    def positions(self, length: int) -> Int[Array, "B T"]:
        """The position of each token in its sequence; those of padding are negative."""
        return self.start + jnp.arange(length) - self.token_padding

    @property
    def token_padding(self) -> Int[Array, "B #T"]:
        """`padding` of every token."""
        return self.padding if self.padding.ndim == 2 else self.padding[:, None]


@dataclass(frozen=True)
class Reach:
    """How a layer's attention weighs what it sees."""

    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class LayerKind:
    """One kind of layers. Matrices are `[out, in]`, as checkpoints have them."""

    dense: Callable[[Array, Array, Array | None], Array]
    """x·Wᵀ + bias."""
    plus: Callable[[Array, Array], Array]
    embed: Callable[[Array, Array], Array]
    """Rows of an embedding; NaN for ids that it does not have."""
    norm: Callable[[Array, Array, float], Array]
    """RMSNorm by a float32 scale and an epsilon, in x's dtype."""
    add_norm: Callable[[Array, Array, Array, float], tuple[Array, Array]]
    """The sum of a residual stream and a branch, and its norm."""
    rotated: Callable[[Array, nn.Rotation], Array]
    attend: Callable[[Array, Array, Array, Slots, Reach], Array]
    """Queries over keys and values of a KV cache, causally."""
    gated: Callable[[str, Array], Array]
    """activation(gate)·up of both side by side."""
    scaled: Callable[[Array, float], Array]
    """x times a number that is rounded to x's dtype first."""
    logits: Callable[[Array, Array], Array]
    """float32 hidden·Wᵀ."""
    capped: Callable[[Array, float], Array]
    """c·tanh(x / c)."""


def _dense(x: Array, weight: Array, bias: Array | None) -> Array:
    product = jnp.matmul(x, weight.T)
    return product if bias is None else product + bias


def _norm(x: Array, scale: Array, epsilon: float) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + epsilon) * scale).astype(x.dtype)


def _norm_of_sum(x: Array, branch: Array, scale: Array, epsilon: float) -> tuple[Array, Array]:
    total = x + branch
    return total, _norm(total, scale, epsilon)


def _rotated(x: Array, rotation: nn.Rotation) -> Array:
    cos, sin = (angles[:, :, None].astype(x.dtype) for angles in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _weighted_values(query: Array, keys: Array, values: Array, slots: Slots, reach: Reach) -> Array:
    """Scores and softmax are float32. A query of padding sees itself alone."""
    batch, length, heads, _ = query.shape
    groups = keys.shape[2]
    key, own = jnp.arange(keys.shape[1]), (slots.start + jnp.arange(length))[:, None]
    visible = (key <= own) & (key >= slots.token_padding[..., None])
    if reach.window is not None:
        visible &= key > own - reach.window
    visible |= key == own
    grouped = query.reshape(batch, length, groups, heads // groups, -1)
    scores = jnp.einsum("btgre,bsge->bgrts", grouped, keys, preferred_element_type=jnp.float32) * reach.scale
    if reach.softcap is not None:
        scores = _capped(scores, reach.softcap)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf)).astype(values.dtype)
    return jnp.einsum("bgrts,bsgf->btgrf", weights, values).reshape(batch, length, heads, -1)


def _gated(activation: str, gate_up: Array) -> Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return _ACTIVATIONS[activation](gate) * up


def _times(x: Array, number: float) -> Array:
    return x * jnp.asarray(number, x.dtype)


def _logits(hidden: Array, weight: Array) -> Array:
    return jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)


def _capped(x: Array, softcap: float) -> Array:
    return softcap * jnp.tanh(x / softcap)


def _invariant_dense(x: Array, weight: Array, bias: Array | None) -> Array:
    product = det_gemm(x, weight, transpose_b=True)
    return product if bias is None else _added(product, bias)


_added = nn.isolated(jnp.add)


def _invariant_values(query: Array, keys: Array, values: Array, slots: Slots, reach: Reach) -> Array:
    options: dict[str, Any] = {"scale": reach.scale, "sliding_window": reach.window, "logit_softcap": reach.softcap}
    return nn.attention(query, keys, values, start=slots.start, padding=slots.padding, **options)


KINDS = {
    "stock": LayerKind(
        dense=_dense,
        plus=jnp.add,
        embed=lambda table, ids: jnp.take(table, row_ids(ids, len(table)), axis=0),
        norm=_norm,
        add_norm=_norm_of_sum,
        rotated=_rotated,
        attend=_weighted_values,
        gated=_gated,
        scaled=_times,
        logits=_logits,
        capped=_capped,
    ),
    "invariant": LayerKind(
        dense=_invariant_dense,
        plus=_added,
        embed=nn.embed,
        norm=lambda x, scale, epsilon: nn.rms_norm(x, scale, epsilon=epsilon),
        add_norm=lambda x, branch, scale, epsilon: nn.add_rms_norm(x, branch, scale, epsilon=epsilon),
        rotated=nn.rotated,
        attend=_invariant_values,
        gated=nn.isolated(_gated),
        scaled=nn.isolated(_times),
        logits=functools.partial(det_gemm, transpose_b=True, out_dtype=jnp.float32),
        capped=nn.isolated(_capped),
    ),
}
"""The kinds by name. With "invariant" a token has the same bits in any batch, with any padding, and when it is decoded
through the KV cache.
"""
