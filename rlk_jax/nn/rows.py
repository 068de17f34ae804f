"""Reductions along a row, in one order whatever its length and lead shape."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from rlk_jax.core.checks import require
from rlk_jax.core.fixed_order import zeros_behind
from rlk_jax.core.transforms import isolated, varying_like

BLOCK = 64
"""Places of a block of `ordered_sum`."""


@isolated
def ordered_sum(x: Float[Array, "*lead S"]) -> Float32[Array, "*lead"]:
    """Σ along the last axis in float32, in one order: by halves within blocks of 64, then blocks in ascending order.

    Zeros behind the last value change no bits, so a sum does not depend on how long a sequence was padded. Raises
    ValueError for an x that is no array of floats, or a scalar.
    """
    check_floats_of_a_row("ordered_sum", x)
    if 0 in x.shape:
        return jnp.zeros(x.shape[:-1], jnp.float32)
    blocks = zeros_behind(x.astype(jnp.float32), -1, BLOCK).reshape(*x.shape[:-1], -1, BLOCK)
    while blocks.shape[-1] > 1:
        half = blocks.shape[-1] // 2
        blocks = blocks[..., :half] + blocks[..., half:]
    sums = jnp.moveaxis(blocks[..., 0], -1, 0)
    start = varying_like(jnp.zeros(x.shape[:-1], jnp.float32), x)
    return lax.scan(lambda total, block: (total + block, None), start, sums)[0]


@isolated
def softmax(x: Float[Array, "*lead S"], where: Bool[Array, "*lead S"] | None = None) -> Float32[Array, "*lead S"]:
    """exp(x − max) / Σ exp(x − max) over the places where `where` holds; 0 elsewhere, and in rows without any.

    A row has the same bits whatever the lead shape, and however many masked places follow the last one that counts.
    Raises ValueError for an x that is no array of floats, and a `where` that is not bool of its shape.
    """
    _check_softmax(x, where)
    visible = jnp.ones(x.shape, bool) if where is None else where
    logits = jnp.where(visible, x.astype(jnp.float32), -jnp.inf)
    largest = logits.max(axis=-1, keepdims=True, initial=-jnp.inf)
    shifted = logits - lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    exponentials = lax.optimization_barrier(jnp.exp(shifted))
    total = ordered_sum(exponentials)[..., None]
    return exponentials * lax.optimization_barrier(1 / jnp.where(total > 0, total, 1))


def check_floats_of_a_row(op: str, x: Any) -> None:
    """x is an array of floats with a last dimension to reduce."""
    require(
        jnp.ndim(x) >= 1 and jnp.issubdtype(jnp.result_type(x), jnp.floating),
        f"{op} needs floats [*lead, size], got {jnp.result_type(x)} of shape {jnp.shape(x)}.",
    )


def _check_softmax(x: Any, where: Any) -> None:
    """The static checks of `softmax`."""
    check_floats_of_a_row("softmax", x)
    if where is not None:
        require(
            where.shape == x.shape and where.dtype == jnp.bool,
            f"softmax needs bool where of shape {x.shape}, got {where.dtype} of shape {where.shape}.",
        )
