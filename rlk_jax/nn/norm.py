"""RMSNorm, alone and behind the addition of a residual stream: one row has the same bits in any batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.hopper.rms_norm import takes_rows
from rlk_jax.core.checks import FLOAT_DTYPES, require
from rlk_jax.core.devices import default_machine, is_hopper
from rlk_jax.core.dispatch import device_of
from rlk_jax.core.fixed_order import rounded_product
from rlk_jax.core.transforms import as_replicated, equally_varying, isolated, varying_like, vmap_folds_rows
from rlk_jax.nn.rows import check_floats_of_a_row, ordered_sum

_Terms = tuple[Array, ...]
"""Rows `[N, D]` that are normalized, or two whose sum is."""


@isolated
def rms_norm(
    x: Float[Array, "*lead D"], scale: Float[Array, " D"], *, epsilon: float = 1e-6, dtype: DTypeLike | None = None
) -> Float[Array, "*lead D"]:
    """x / √(mean(x²) + ε) · scale, computed in float32 and returned in `dtype`, None for x's; in reverse mode only.

    A row has the same bits whatever the lead shape. On a Hopper GPU a kernel gives it, for rows of at most 8192 numbers
    that are a multiple of 32 (up to 2048, of 8). Raises ValueError for an x that is no array of floats, and a scale of
    another size. Source: RMSNorm, arXiv 1910.07467.
    """
    _check_rms_norm("rms_norm", x, scale)
    (normalized,) = _of_rows(_Options(epsilon, dtype), (x,), scale)
    return normalized


@isolated
def add_rms_norm(
    x: Float[Array, "*lead D"],
    added: Float[Array, "*lead D"],
    scale: Float[Array, " D"],
    *,
    epsilon: float = 1e-6,
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D"]]:
    """The sum x + added, and `rms_norm` of it: what stands behind a branch of a residual stream, in one kernel.

    The sum has the dtype that JAX's addition gives, and so has its norm, unless `dtype` is given. Both have the bits of
    `isolated(jnp.add)` and `rms_norm` one after the other. Raises ValueError as `rms_norm` does, and for an `added` of
    another shape.
    """
    _check_rms_norm("add_rms_norm", x, scale)
    _check_added(x, added)
    normalized, total = _of_rows(_Options(epsilon, dtype), (x, added), scale)
    return total, normalized


class _Options(NamedTuple):
    """What a norm adds to the mean of squares, and the dtype that it returns; None stands for that of the sum."""

    epsilon: float
    dtype: DTypeLike | None


_Normalize = Callable[[_Options, _Terms, Array], _Terms]
"""From terms and a scale, the normalized sum, and where there are two terms, the sum."""


def _of_rows(options: _Options, terms: _Terms, scale: Array) -> _Terms:
    """The terms' sum normalized, and where there are two, the sum; in the shape of the terms."""
    shape = terms[0].shape
    options = options._replace(dtype=jnp.dtype(options.dtype or jnp.result_type(*terms)))
    if 0 in shape:
        total = functools.reduce(jnp.add, terms)
        return (total.astype(options.dtype), total)[: len(terms)]
    rows = tuple(x.reshape(-1, shape[-1]) for x in terms)
    normalize = _by_kernel if _has_kernel(options, terms, scale) else _in_order
    return tuple(x.reshape(shape) for x in _rms_norm(normalize, options, *equally_varying((rows, scale))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(normalize: _Normalize, options: _Options, terms: _Terms, scale: Array) -> _Terms:
    """The terms' sum normalized by `normalize`, and where there are two terms, the sum. Under vmap, the batch is folded
    into the rows.
    """

    def of_rows(scale: Array, terms: _Terms) -> _Terms:
        return varying_like(normalize(options, terms, scale), terms[0])

    return vmap_folds_rows(of_rows, outputs_are_rows=True)(scale, terms)


def _rms_norm_fwd(
    normalize: _Normalize, options: _Options, terms: _Terms, scale: Array
) -> tuple[_Terms, tuple[_Terms, Array]]:
    return _rms_norm(normalize, options, terms, scale), (terms, scale)


def _rms_norm_bwd(
    normalize: _Normalize, options: _Options, saved: tuple[_Terms, Array], upstream: _Terms
) -> tuple[_Terms, Array]:
    """The gradient of the definition, whose sums XLA orders: no bits are promised for it."""

    def definition(terms: _Terms, scale: Array) -> _Terms:
        total = functools.reduce(jnp.add, terms)
        wide = total.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normalized = wide * lax.rsqrt(mean + options.epsilon) * scale
        return (normalized.astype(options.dtype), total)[: len(terms)]

    return jax.vjp(definition, *saved)[1](upstream)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


def _has_kernel(options: _Options, terms: _Terms, scale: Array) -> bool:
    """Whether the kernel for Hopper normalises rows of the terms, which no number of rows decides."""
    dtypes = [jnp.dtype(options.dtype), scale.dtype, *(x.dtype for x in terms)]
    fit = all(x in FLOAT_DTYPES and takes_rows(scale.size, x.itemsize) for x in dtypes)
    return fit and is_hopper(device_of(list(terms)))


def _by_kernel(options: _Options, terms: _Terms, scale: Array) -> _Terms:
    from pallas_kernels.mosaic.rms_norm import rms_norm as normalized

    return normalized(*as_replicated((terms, scale)), *options, default_machine())


def _in_order(options: _Options, terms: _Terms, scale: Array) -> _Terms:
    """The sums of squares are those of `ordered_sum`."""
    total = lax.optimization_barrier(functools.reduce(jnp.add, terms))
    wide = total.astype(jnp.float32)
    squares = ordered_sum(rounded_product(wide, wide))
    mean = rounded_product(squares, jnp.float32(1 / wide.shape[-1]))
    inverse = lax.optimization_barrier(lax.rsqrt(mean + options.epsilon))[..., None]
    return ((wide * inverse * scale.astype(jnp.float32)).astype(options.dtype), total)[: len(terms)]


def _check_rms_norm(name: str, x: Any, scale: Any) -> None:
    """The static checks of `rms_norm`, which also `add_rms_norm` has."""
    check_floats_of_a_row(name, x)
    require(scale.shape == x.shape[-1:], f"{name} needs a scale of shape {x.shape[-1:]}, got {scale.shape}.")


def _check_added(x: Any, added: Any) -> None:
    """Both terms of `add_rms_norm` are floats of one shape."""
    require(
        jnp.shape(added) == x.shape and jnp.issubdtype(jnp.result_type(added), jnp.floating),
        f"add_rms_norm needs floats of shape {x.shape} to add, got {jnp.result_type(added)} of shape "
        f"{jnp.shape(added)}.",
    )
