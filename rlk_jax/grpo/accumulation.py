"""Gradients of a batch as the sum of those of its parts, one after the other: the memory of one part is enough."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float


def accumulated_gradients[Params, Rows](
    loss_of: Callable[[Params, Rows], tuple[Float[Array, ""], Array]],
    params: Params,
    rows: Rows,
    *,
    parts: int,
    mesh: Mesh,
) -> tuple[Params, Array]:
    """Σ over parts of the gradients of `loss_of(params, part)`, and what it returns beside its loss, for all rows.

    Every array of `rows` is `[B, ...]`, spread over "data", of which a device has a multiple of `parts`. Part k holds
    rows k, k + parts, …, so no row leaves its device. Parts are added in ascending order.
    """
    gradients_of = jax.grad(loss_of, has_aux=True)
    if parts == 1:  # is no sum: XLA would only round otherwise around a loop
        return gradients_of(params, rows)
    spread = NamedSharding(mesh, PartitionSpec(None, "data"))

    def cut(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), spread)

    def add(total: Params, part: Rows) -> tuple[Params, Array]:
        gradients, beside = gradients_of(params, part)
        return jax.tree.map(jnp.add, total, gradients), beside

    total, beside = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), jax.tree.map(cut, rows))
    return total, beside.swapaxes(0, 1).reshape(-1, *beside.shape[2:])
