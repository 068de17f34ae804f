"""The two kinds of layers that a decoder is built from: stock layers, whose bits depend on the shapes of a batch, and
those of `rlk_jax.nn`, whose bits do not.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rlk_jax import nn

ROTARY_BASE = 10_000.0


class Slots(NamedTuple):
    """Where the tokens of one call stand in their rows; attention and rotary embedding need it."""

    start: int | Int[Array, ""]
    """The slot of the first token of the call."""
    padding: Int[Array, "B"] | Int[Array, "B T"]
    """How many slots stand before a sequence: one number per row, or one per token where a row holds several."""

    def positions(self, length: int) -> Int[Array, "B T"]:
        """The position of each token in its sequence: its slot minus the slots before the sequence."""
        return self.start + jnp.arange(length) - self.token_padding

    @property
    def token_padding(self) -> Int[Array, "B #T"]:
        """`padding` of every token."""
        return self.padding if self.padding.ndim == 2 else self.padding[:, None]


@dataclass(frozen=True)
class Layers:
    """One kind of layers. Dense layers and attention compute in `dtype`; parameters and residual stream are float32."""

    dtype: DTypeLike
    dense: type[nnx.Linear]
    norm: type[nnx.RMSNorm]
    rotate: Callable[[Array, Array], Array]
    """x `[B, T, H, E]` at positions `[B, T]`: each pair (x_i, x_{i+E/2}) turned by position · base^(−2i/E)."""
    attend: Callable[[Array, Array, Array, Slots], Array]
    """Queries `[B, T, H, E]` over keys and values `[B, S, H, E]` of a KV cache, causally."""
    add: Callable[[Array, Array], Array]
    swiglu: Callable[[Array, Array], Array]
    """`silu(gate) · up` (Shazeer, arXiv 2002.05202)."""


def _rotate(x: Float[Array, "B T H E"], positions: Int[Array, "B T"]) -> Float[Array, "B T H E"]:
    """The rotary embedding of RoFormer (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half) / half)
    angles = (positions[..., None] * frequencies)[:, :, None, :]
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(query: Array, keys: Array, values: Array, slots: Slots) -> Array:
    key, own = jnp.arange(keys.shape[1]), slots.start + jnp.arange(query.shape[1])
    visible = (key <= own[:, None]) & (key >= slots.token_padding[..., None])
    return jax.nn.dot_product_attention(query, keys, values, mask=visible[:, None])


def _invariant_attend(query: Array, keys: Array, values: Array, slots: Slots) -> Array:
    return nn.attention(query, keys, values, start=slots.start, padding=slots.padding)


def _swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


class _InvariantNorm(nnx.RMSNorm):
    def __call__(self, x: Float[Array, "*lead D"], mask: Array | None = None) -> Float[Array, "*lead D"]:
        assert self.scale is not None  # nnx.RMSNorm has a scale by default.
        return nn.rms_norm(x, self.scale[...])


STOCK = Layers(jnp.float32, nnx.Linear, nnx.RMSNorm, _rotate, _attend, jnp.add, _swiglu)
INVARIANT = Layers(
    jnp.bfloat16,
    nn.DetDense,
    _InvariantNorm,
    functools.partial(nn.rotary, base=ROTARY_BASE),
    _invariant_attend,
    nn.isolated(jnp.add),
    nn.isolated(_swiglu),
)
"""A token has the same bits in any batch, with any padding, and when it is decoded through the KV cache. The dtype is
bfloat16 because det_gemm takes 16-bit operands only.
"""
