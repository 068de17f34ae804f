"""A batch in parts, one after the other: the memory of one part is enough."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float


def in_parts[Carry, Rows](
    step: Callable[[Carry, Rows], tuple[Carry, Array]],
    carry: Carry,
    rows: Rows,
    *,
    parts: int,
    mesh: Mesh,
    counts: Callable[[Rows], Bool[Array, ""]] | None = None,
) -> tuple[Carry, Array]:
    """The last carry of `carry, beside = step(carry, part)` over all parts, and what `beside [B / parts, ...]` was of
    all rows.

    Every array of `rows` is `[B, ...]`, spread over "data", of which a device has a multiple of `parts`. Its k-th run
    of rows belongs to part k, so no row leaves its device. Of two parts or more, one that does not count is left out:
    beside is 0 there.
    """
    if parts == 1:  # XLA would only round otherwise around a loop
        return step(carry, rows)
    shards, spread = mesh.shape["data"], NamedSharding(mesh, PartitionSpec(None, "data"))

    def cut(x: Array) -> Array:
        runs = x.reshape(shards, parts, -1, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(runs.reshape(parts, -1, *x.shape[1:]), spread)

    def join(x: Array) -> Array:
        return x.reshape(parts, shards, -1, *x.shape[2:]).swapaxes(0, 1).reshape(-1, *x.shape[2:])

    def leave_out(carry: Carry, part: Rows) -> tuple[Carry, Array]:
        beside = jax.eval_shape(step, carry, part)[1]
        return carry, jnp.zeros(beside.shape, beside.dtype)

    def step_or_not(carry: Carry, part: tuple[Array, Rows]) -> tuple[Carry, Array]:
        return jax.lax.cond(part[0], step, leave_out, carry, part[1])

    each = jax.tree.map(cut, rows)
    if counts is None:
        carry, beside = jax.lax.scan(step, carry, each)
    else:  # all are counted before the loop, in which devices would have to agree on each
        carry, beside = jax.lax.scan(step_or_not, carry, (jax.vmap(counts)(each), each))
    return carry, join(beside)


def accumulated_gradients[Params, Rows](
    loss_of: Callable[[Params, Rows], tuple[Float[Array, ""], Array]],
    params: Params,
    rows: Rows,
    *,
    parts: int,
    mesh: Mesh,
    counts: Callable[[Rows], Bool[Array, ""]] | None = None,
) -> tuple[Params, Array]:
    """Σ over parts of the gradients of `loss_of(params, part)`, and what it returns beside its loss, for all rows.

    Parts are those of `in_parts`, added in ascending order.
    """

    gradients_of = jax.grad(loss_of, has_aux=True)
    if parts == 1:  # is no sum
        return gradients_of(params, rows)

    def add(total: Params, part: Rows) -> tuple[Params, Array]:
        gradients, beside = gradients_of(params, part)
        return jax.tree.map(jnp.add, total, gradients), beside

    zeros = jax.tree.map(jnp.zeros_like, params)
    return in_parts(add, zeros, rows, parts=parts, mesh=mesh, counts=counts)
