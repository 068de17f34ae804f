"""The two kinds of layers that a decoder is built from: stock layers, whose bits depend on the shapes of a batch, and
those of `rlk_jax.nn`, whose bits do not.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from rlk_jax import nn
from rlk_jax.models.kinds import KINDS, Slots

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Layers:
    """One kind of layers. Dense layers and attention compute in `dtype`; parameters and residual stream are float32."""

    dtype: DTypeLike
    dense: type[nnx.Linear]
    add_norm: Callable[[Array, Array, Array, DTypeLike | None], tuple[Array, Array]]
    """The sum of two arrays `[*lead, D]`, and its RMSNorm by a scale `[D]`, in a dtype; None stands for the sum's."""
    split_rotary: Callable[[Array, nn.Rotation, int, int], tuple[Array, Array, Array]]
    """Query, key and value out of one projection `[B, T, (heads + 2·groups)·E]`; query and key have a rotary embedding.
    """
    attend: Callable[[Array, Array, Array, Slots], Array]
    """Queries `[B, T, H, E]` over keys and values `[B, S, H, E]` of a KV cache, causally."""
    swiglu: Callable[[Array], Array]
    """`silu(gate) · up` of both side by side (Shazeer, arXiv 2002.05202)."""


def _add_norm(x: Array, added: Array, scale: Array, dtype: DTypeLike | None) -> tuple[Array, Array]:
    total = x + added
    return total, KINDS["stock"].norm(total, scale, 1e-6).astype(dtype or total.dtype)


def _split_rotary(projected: Array, rotation: nn.Rotation, heads: int, groups: int) -> tuple[Array, Array, Array]:
    """Query and key get the rotary embedding of RoFormer (arXiv 2104.09864)."""
    by_head = projected.reshape(*projected.shape[:2], -1, 2 * rotation.cos.shape[-1])
    query, key, value = jnp.split(by_head, (heads, heads + groups), axis=2)
    turned = KINDS["stock"].rotated
    return turned(query, rotation), turned(key, rotation), value


def _attend(query: Array, keys: Array, values: Array, slots: Slots) -> Array:
    key, own = jnp.arange(keys.shape[1]), slots.start + jnp.arange(query.shape[1])
    visible = (key <= own[:, None]) & (key >= slots.token_padding[..., None])
    return jax.nn.dot_product_attention(query, keys, values, mask=visible[:, None])


def _invariant_attend(query: Array, keys: Array, values: Array, slots: Slots) -> Array:
    return nn.attention(query, keys, values, start=slots.start, padding=slots.padding)


def _invariant_add_norm(x: Array, added: Array, scale: Array, dtype: DTypeLike | None) -> tuple[Array, Array]:
    return nn.add_rms_norm(x, added, scale, dtype=dtype)


STOCK = Layers(
    dtype=jnp.float32,
    dense=nnx.Linear,
    add_norm=_add_norm,
    split_rotary=_split_rotary,
    attend=_attend,
    swiglu=functools.partial(KINDS["stock"].gated, "silu"),
)
INVARIANT = Layers(
    dtype=jnp.bfloat16,
    dense=nn.DetDense,
    add_norm=_invariant_add_norm,
    split_rotary=nn.split_rotary,
    attend=_invariant_attend,
    swiglu=functools.partial(KINDS["invariant"].gated, "silu"),
)
"""A token has the same bits in any batch, with any padding, and when it is decoded through the KV cache. The dtype is
bfloat16 because det_gemm takes 16-bit operands only.
"""
