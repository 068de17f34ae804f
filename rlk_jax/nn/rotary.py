"""Rotary position embedding."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from rlk_jax.core.checks import require
from rlk_jax.core.exports import exportable
from rlk_jax.core.fixed_order import rounded_product
from rlk_jax.core.transforms import isolated
from rlk_jax.nn.rows import check_floats_of_a_row


@exportable
class Rotation(NamedTuple):
    """The cosines and sines that tokens are turned by, one of each for a pair of numbers of a head."""

    cos: Float32[Array, "B T E/2"]
    sin: Float32[Array, "B T E/2"]


@isolated
def rotation(positions: Int[Array, "B T"], size: int, *, base: float = 10_000.0) -> Rotation:
    """cos and sin of position · base^(−2i/E) for heads of E = `size` numbers: what `split_rotary` turns tokens by.

    It is computed once for all layers. Raises ValueError for an odd size.
    """
    _check_rotation(positions, size)
    half = size // 2
    frequencies = lax.optimization_barrier(jnp.float32(base) ** (-jnp.arange(half, dtype=jnp.float32) / half))
    return _rotation(positions, frequencies)


@isolated
def rotation_by(positions: Int[Array, "B T"], frequencies: Float32[Array, "E/2"], *, factor: float = 1.0) -> Rotation:
    """`rotation` with frequencies of one's own: factor·cos and factor·sin of position · frequency.

    A checkpoint's rotary embedding has other frequencies than powers of a base, and YaRN a factor. Raises ValueError
    for positions that are no integers `[B, T]`.
    """
    _check_rotation(positions, 2 * len(frequencies))
    found = _rotation(positions, frequencies)
    return found if factor == 1 else Rotation(*(x * jnp.float32(factor) for x in found))


def _rotation(positions: Array, frequencies: Array) -> Rotation:
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


@isolated
def rotary(
    x: Float[Array, "B T H E"], positions: Int[Array, "B T"], *, base: float = 10_000.0
) -> Float[Array, "B T H E"]:
    """Rotary position embedding: each pair (x_i, x_{i+E/2}) turned by position · base^(−2i/E).

    A token at a position has the same bits whatever its slot. Raises ValueError for an odd E, and shapes that do not
    fit. Source: RoFormer, arXiv 2104.09864.
    """
    _check_rotary(x, positions)
    return _turned(x, rotation(positions, x.shape[3], base=base))


@isolated
def rotated(x: Float[Array, "B T H E"], rotation: Rotation) -> Float[Array, "B T H E"]:
    """Heads turned by a rotation, as `rotary` does. Raises ValueError for shapes that do not fit."""
    _check_rotated(x, rotation)
    return _turned(x, rotation)


def split_rotary(
    projected: Float[Array, "B T heads*E"], rotation: Rotation, heads: int, groups: int
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T G E"], Float[Array, "B T G E"]]:
    """Query, key and value out of one projection, whose columns are the heads of query, key and value in this order;
    query and key are turned as `rotary` does, with its bits.

    It is not isolated, so that XLA writes a key and a value into a cache as it computes them: what takes the results
    has to be a copy, attention, or `isolated`. Raises ValueError for a projection of other columns than
    (heads + 2·groups) · 2·(columns of `rotation`), and for fewer than one head or group.
    """
    _check_split(projected, rotation, heads, groups)
    size = 2 * rotation.cos.shape[-1]
    by_head = projected.reshape(*projected.shape[:2], heads + 2 * groups, size)
    query, key, value = jnp.split(by_head, (heads, heads + groups), axis=2)
    return _turned(query, rotation), _turned(key, rotation), value


def _turned(x: Array, rotation: Rotation) -> Array:
    """The heads `[B, T, ·, E]` of tokens, turned."""
    half = x.shape[-1] // 2
    cos, sin = (angles[:, :, None, :] for angles in rotation)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = (
        rounded_product(first, cos) - rounded_product(second, sin),
        rounded_product(second, cos) + rounded_product(first, sin),
    )
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _check_rotary(x: Any, positions: Any) -> None:
    """The static checks of `rotary`."""
    check_floats_of_a_row("rotary", x)
    require(
        x.ndim == 4 and x.shape[3] % 2 == 0 and positions.shape == x.shape[:2],
        f"rotary needs x [B, T, H, E] of an even E and positions [B, T], got shapes {x.shape} and {positions.shape}.",
    )


def _check_rotated(x: Any, rotation: Any) -> None:
    """The static checks of `rotated`."""
    check_floats_of_a_row("rotated", x)
    wanted = (*x.shape[:2], x.shape[-1] // 2)
    require(
        x.ndim == 4 and x.shape[3] % 2 == 0 and rotation.cos.shape == rotation.sin.shape == wanted,
        f"rotated needs x [B, T, H, E] of an even E and a rotation of [B, T, E/2], got shape {x.shape} and a rotation "
        f"of {rotation.cos.shape}.",
    )


def _check_rotation(positions: Any, size: Any) -> None:
    """The static checks of `rotation`."""
    require(
        positions.ndim == 2 and jnp.issubdtype(positions.dtype, jnp.integer) and size > 0 and size % 2 == 0,
        f"rotation needs integer positions [B, T] and an even size, got {positions.dtype} of shape {positions.shape} "
        f"and {size}.",
    )


def _check_split(projected: Any, rotation: Rotation, heads: int, groups: int) -> None:
    """The static checks of `split_rotary`."""
    check_floats_of_a_row("split_rotary", projected)
    half = rotation.cos.shape[-1]
    require(
        heads >= 1
        and groups >= 1
        and projected.ndim == 3
        and rotation.cos.shape == rotation.sin.shape == (*projected.shape[:2], half)
        and projected.shape[2] == (heads + 2 * groups) * 2 * half,
        f"split_rotary needs projected [B, T, (heads + 2·groups)·E] and a rotation of [B, T, E/2], got shape "
        f"{projected.shape}, a rotation of {rotation.cos.shape}, {heads} heads and {groups} groups.",
    )
