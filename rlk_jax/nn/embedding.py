"""Embedding tables."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rlk_jax.core.checks import require
from rlk_jax.core.fixed_order import sum_rows_by_id
from rlk_jax.core.tokens import row_ids
from rlk_jax.core.transforms import equally_varying, varying_like


def embed(table: Float[Array, "V D"], ids: Int[Array, "*lead"]) -> Float[Array, "*lead D"]:
    """Rows of an embedding table, `jnp.take(table, ids, axis=0)` of ids in [0, V).

    A row's gradient is added up in float32 and in one order, with the same bits run to run; XLA's scatter has no fixed
    order on GPUs. Reverse mode only. Other ids, negative ones too, give NaN, and no gradient. Raises ValueError for a
    table that is not `[V, D]` of a float dtype with D at least 1, and for ids that are not integers.
    """
    _check_embedding(table, ids)
    return _embed(*equally_varying((jnp.asarray(table), row_ids(ids, len(table)))))


@jax.custom_vjp
def _embed(table: Array, ids: Array) -> Array:
    return jnp.take(table, ids, axis=0)


def _embed_fwd(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return _embed(table, ids), (table[:, :0], ids)  # the backward only needs the table's length and dtype


def _embed_bwd(residuals: tuple[Array, Array], upstream: Array) -> tuple[Array, None]:
    table, ids = residuals
    rows = upstream.reshape(-1, upstream.shape[-1])
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))

    def scattered(ids: Array, rows: Array) -> Array:
        """XLA's own scatter, which adds up in order on CPUs and TPUs."""
        zeros = varying_like(jnp.zeros((len(table), rows.shape[1]), rows.dtype), rows)
        return jax.linear_transpose(lambda table: jnp.take(table, ids, axis=0), zeros)(rows)[0]

    def ordered(ids: Array, rows: Array) -> Array:
        return sum_rows_by_id(ids, rows, len(table))

    sums = lax.platform_dependent(ids.reshape(-1), wide, cpu=scattered, tpu=scattered, default=ordered)
    return sums.astype(table.dtype), None


_embed.defvjp(_embed_fwd, _embed_bwd)


def _check_embedding(table: Any, ids: Any) -> None:
    """The static checks of `embed`."""
    require(
        jnp.ndim(table) == 2 and table.shape[1] >= 1 and jnp.issubdtype(table.dtype, jnp.floating),
        f"embed needs a float table [V, D], D at least 1, got {jnp.result_type(table)} of shape {jnp.shape(table)}.",
    )
    require(jnp.issubdtype(jnp.result_type(ids), jnp.integer), f"embed needs integer ids, got {jnp.result_type(ids)}.")
