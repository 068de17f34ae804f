"""Micro-batches: a batch is computed in equal parts, one after the other, in the memory that one part needs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float


def scan_micro_batches[Carry, Rows, Output](
    step: Callable[[Carry, Rows], tuple[Carry, Output]],
    carry: Carry,
    rows: Rows,
    *,
    micro_batches: int,
    mesh: Mesh,
    is_active: Callable[[Rows], Bool[Array, ""]] | None = None,
) -> tuple[Carry, Output]:
    """Run `carry, output = step(carry, micro_batch)` over all micro-batches.

    Returns the last carry, and the outputs `[B / micro_batches, ...]` of all steps joined to `[B, ...]`, in the order
    of the rows.

    Every array of `rows` is `[B, ...]` and sharded over "data"; the number of rows of a device is a multiple of
    `micro_batches`. A device cuts its own rows into equal runs and gives the k-th run to micro-batch k, so no row
    leaves its device. Where there is more than one micro-batch, those for which `is_active` is false are skipped, and
    their outputs are 0.
    """
    if micro_batches == 1:  # A loop around the step would only change how XLA rounds it.
        return step(carry, rows)
    shards, sharding = mesh.shape["data"], NamedSharding(mesh, PartitionSpec(None, "data"))

    def split(x: Array) -> Array:
        runs = x.reshape(shards, micro_batches, -1, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(runs.reshape(micro_batches, -1, *x.shape[1:]), sharding)

    def join(x: Array) -> Array:
        return x.reshape(micro_batches, shards, -1, *x.shape[2:]).swapaxes(0, 1).reshape(-1, *x.shape[2:])

    def skip(carry: Carry, micro_batch: Rows) -> tuple[Carry, Output]:
        output = jax.eval_shape(step, carry, micro_batch)[1]
        return carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), output)

    def step_or_skip(carry: Carry, flagged: tuple[Array, Rows]) -> tuple[Carry, Output]:
        active, micro_batch = flagged
        return jax.lax.cond(active, step, skip, carry, micro_batch)

    stacked = jax.tree.map(split, rows)
    if is_active is None:
        carry, outputs = jax.lax.scan(step, carry, stacked)
    else:  # All flags are computed before the loop; inside it, devices would have to agree on each of them.
        carry, outputs = jax.lax.scan(step_or_skip, carry, (jax.vmap(is_active)(stacked), stacked))
    return carry, jax.tree.map(join, outputs)


def accumulated_gradients[Params, Rows, Output](
    loss_fn: Callable[[Params, Rows], tuple[Float[Array, ""], Output]],
    params: Params,
    rows: Rows,
    *,
    micro_batches: int,
    mesh: Mesh,
    is_active: Callable[[Rows], Bool[Array, ""]] | None = None,
) -> tuple[Params, Output]:
    """Σ over micro-batches of the gradients of `loss_fn(params, micro_batch)`, added in ascending order.

    The second result is the auxiliary output of `loss_fn`, for all rows. `scan_micro_batches` says how rows are cut
    and which micro-batches are skipped.
    """

    gradients_fn = jax.grad(loss_fn, has_aux=True)
    if micro_batches == 1:  # There is nothing to add up.
        return gradients_fn(params, rows)

    def add(total: Params, micro_batch: Rows) -> tuple[Params, Output]:
        gradients, output = gradients_fn(params, micro_batch)
        return jax.tree.map(jnp.add, total, gradients), output

    zeros = jax.tree.map(jnp.zeros_like, params)
    return scan_micro_batches(add, zeros, rows, micro_batches=micro_batches, mesh=mesh, is_active=is_active)
