"""One device's shard of a head whose vocabulary is spread over mesh axes, inside shard_map.

The ops' own functions hold no collective: what stands here gathers the partial softmaxes, gives every rank the whole
gradient of the values, and sums the gradient of hidden, right under check_vma=True and False alike.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlk_jax._problem import Array, HiddenGradient, Options, Tokens
from rlk_jax._transforms import equally_varying, varying_axes, varying_like
from rlk_jax._tree import GROUPS, Tree, ordered_sum, tree

AxisName = str | tuple[str, ...]
Reduction = Literal["sum", "canonical"]


def axis_names(axes: Any) -> tuple[str, ...]:
    """The axes that one entry of a PartitionSpec names."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def explicit_spec(x: Any) -> PartitionSpec | None:
    """How an array, or the array in a variable, lies over Explicit mesh axes, an entry for each dimension; or None."""
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    spec = tuple(jax.typeof(x).sharding.spec) if isinstance(x, jax.Array) else ()
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec))) if any(spec) else None


@dataclass(frozen=True)
class Shard:
    """The static facts of a shard: it holds `columns` of the `vocab_size` columns that `count` ranks share."""

    axis: AxisName
    """A single axis by its name."""
    count: int
    columns: int
    vocab_size: int
    """The true vocabulary; columns behind it are padding."""
    reduction: Reduction
    reduce_hidden_grad: bool

    def __str__(self) -> str:
        return f"{self.count} shards of {self.columns} columns"

    @property
    def on_group_edges(self) -> bool:
        """Whether every rank owns whole groups of the unsharded head's tree: then sharding changes no bits."""
        if self.count == 1:
            return True
        return GROUPS % self.count == 0 and self.columns == shard_width(self.vocab_size, self.count)

    @property
    def tree(self) -> Tree:
        """The groups that this shard owns; off the edges, eight of its own."""
        if self.on_group_edges:
            return Tree(GROUPS // self.count, tree(self.vocab_size).width)
        return tree(self.columns)

    @property
    def least_real_columns(self) -> int:
        """Columns of the shard with the most padding that are none."""
        return max(0, min(self.columns, self.vocab_size - (self.count - 1) * self.columns))

    @property
    def hidden_gradient(self) -> HiddenGradient:
        return "groups" if self.reduction == "canonical" else "float32"

    def gather(self, tree: Any, order: Array | None) -> Any:
        """`[all groups, ...]` of all ranks from `[groups, ...]`, in vocabulary order, by one collective."""
        leaves, structure = jax.tree.flatten(tree)
        ranks = lax.all_gather(jnp.stack(leaves, axis=1), self.axis)
        if order is not None:
            ranks = ranks[order]
        whole = lax.collapse(ranks, 0, 2)
        return jax.tree.unflatten(structure, [whole[:, i] for i in range(len(leaves))])


def shard_width(vocab_size: int, n: int) -> int:
    """Columns of each of n equal shards that end where groups do; where they cannot, a multiple of 64."""
    whole = tree(vocab_size)
    return whole.width * (whole.groups // n) if whole.groups % n == 0 else -(-vocab_size // (64 * n)) * 64


def options_of(shard: Shard, options: Options) -> Options:
    """The static facts of a call on the whole head, for the shard."""
    return replace(
        options,
        vocab_size=shard.columns,
        real_vocab_size=shard.least_real_columns,
        tree=shard.tree,
        hidden_gradient=shard.hidden_gradient,
    )


class Place(NamedTuple):
    """Where in the vocabulary this rank's shard lies, known to the device only."""

    start: Array
    """int32 scalar: its first column."""
    order: Array | None
    """`[count]`: ranks in the order of their shards; None where that is the axis' own."""
    is_partition: Array | None
    """Whether all shards cover the vocabulary once; None where they do by construction."""


def place(shard: Shard, vocab_start_index: Any) -> Place:
    """Rank r holds columns r·columns …, or those from `vocab_start_index` on, which must add up to the vocabulary."""
    if vocab_start_index is None:
        return Place(lax.axis_index(shard.axis).astype(jnp.int32) * shard.columns, None, None)
    start = jnp.asarray(vocab_start_index).astype(jnp.int32)
    starts = lax.all_gather(start, shard.axis)
    order = jnp.argsort(starts)
    # Shards are equally wide, so only one set of starts covers the vocabulary; what lies behind it holds padding only.
    wanted = jnp.arange(shard.count, dtype=jnp.int32) * shard.columns
    covers = jnp.where(wanted < shard.vocab_size, starts[order] == wanted, starts[order] >= shard.vocab_size)
    is_partition = jnp.all(covers)
    checkify.debug_check(
        is_partition,
        f"TP vocab shards must form a contiguous [0, {shard.vocab_size}) partition; "
        f"got starts={{starts}} of {shard.columns} columns each.",
        starts=starts[order],
    )
    return Place(start, order, is_partition)


def real_columns(shard: Shard, start: Array) -> Array | None:
    """How many of this shard's columns are no padding; None where all are, on every rank."""
    if shard.least_real_columns == shard.columns:
        return None
    return jnp.clip(shard.vocab_size - start, 0, shard.columns)


def shares(shard: Shard, values: Any) -> Any:
    """What each rank adds to `total`: rank 0 the values, the others −0, which changes no bit of a sum."""
    is_first = lax.axis_index(shard.axis) == 0
    return jax.tree.map(lambda x: jnp.where(is_first, x, -0.0), values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(shard: Shard, share: Array) -> Array:
    """Σ of the ranks' shares, the same on every rank.

    Every rank's share gets the whole upstream gradient. Under check_vma=False a rank is given only its part of it, by
    JAX an n-th: added up in pairs, so that 2, 4 or 8 equal parts are exactly the whole.
    """
    return lax.psum(share, shard.axis)


def _total_fwd(shard: Shard, share: Array) -> tuple[Array, None]:
    return total(shard, share), None


def _total_bwd(shard: Shard, _: None, upstream: Array) -> tuple[Array]:
    if is_checked(shard.axis):
        return (varying_like(upstream, lax.axis_index(shard.axis)),)
    parts = lax.all_gather(upstream, shard.axis)
    while parts.shape[0] > 1:
        half = parts.shape[0] // 2
        parts = jnp.concatenate([parts[:half] + parts[half : 2 * half], parts[2 * half :]])
    return (parts[0],)


total.defvjp(_total_fwd, _total_bwd)


def is_covered(shard: Shard, tokens: Tokens, columns: Array | None) -> Array:
    """Which of the `local` tokens have their target in one shard alone: not so where ranks were given other ids. None
    has, where some ranks ignore a token that others do not: the rows that they send may be those of other tokens.
    """
    width = shard.columns if columns is None else columns
    is_mine = (tokens.target_ids >= 0) & (tokens.target_ids < width)
    owners, active = lax.psum(jnp.stack([is_mine, tokens.active]).astype(jnp.int32), shard.axis)
    covered = (owners == 1) & jnp.all((active == 0) | (active == shard.count))
    checkify.debug_check(
        jnp.all(covered),
        "target_ids must be covered by exactly one TP vocab shard; check vocab_start_index and global_vocab_size.",
    )
    return covered


def local(tokens: Tokens, place: Place) -> Tokens:
    """Ids counted from this shard's first column; where the shards are no partition, every row is poisoned."""
    temperature = tokens.temperature
    if place.is_partition is not None:
        temperature = jnp.where(place.is_partition, temperature, jnp.nan)
    return tokens._replace(target_ids=tokens.target_ids - place.start, temperature=temperature)


def entering(shard: Shard, hidden: Array) -> Array:
    """hidden as its gradient is given: the same on every rank, or a part of each rank's own."""
    if not shard.reduce_hidden_grad:
        return varying_like(hidden, lax.axis_index(shard.axis))
    if set(axis_names(shard.axis)) & varying_axes(hidden):
        raise ValueError(
            f"hidden varies over {shard.axis!r}, so JAX sums its gradient where it came to do so: pass "
            "reduce_hidden_grad=False, or a hidden that is the same on every rank of that axis."
        )
    return hidden


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def hidden_gradient_carrier(shard: Shard, hidden: Array, order: Array | None) -> Array:
    """Something whose gradient is this rank's float32 sums `[parts, N, D]`; hidden then gets their reduction."""
    parts = shard.tree.groups if shard.hidden_gradient == "groups" else 1
    # Computed from hidden, so that vmap batches it where hidden is batched.
    zeros = jnp.where(jnp.zeros(hidden.shape, bool), hidden, 0).astype(jnp.float32)
    carrier = jnp.broadcast_to(zeros, (parts, *hidden.shape))
    return equally_varying((carrier, hidden, lax.axis_index(shard.axis)))[0]


def _carrier_fwd(shard: Shard, hidden: Array, order: Array | None) -> tuple[Array, tuple[Array, Array | None]]:
    # Nothing of hidden is kept but its type.
    return hidden_gradient_carrier(shard, hidden, order), (hidden[:0, :0], order)


def _carrier_bwd(shard: Shard, saved: tuple[Array, Array | None], sums: Array) -> tuple[Array, None]:
    like, order = saved
    if not shard.reduce_hidden_grad:
        return ordered_sum(sums).astype(like.dtype), None
    whole = varying_like(reduced(shard, sums, order, like.dtype), like)
    # Without types JAX adds up what the ranks return.
    return (whole if is_checked(shard.axis) else jnp.where(lax.axis_index(shard.axis) == 0, whole, 0)), None


hidden_gradient_carrier.defvjp(_carrier_fwd, _carrier_bwd)


def reduced(shard: Shard, sums: Array, order: Array | None, dtype: Any) -> Array:
    """The sum `[N, D]` of all ranks' float32 `[parts, N, D]`, rounded once, on every rank.

    Each rank sums its share of the rows; 16-bit rows go back.
    """
    n, axis = sums.shape[1], shard.axis
    sums = jnp.pad(sums, ((0, 0), (0, -n % shard.count), (0, 0)))
    # Beside Explicit axes JAX 0.11 cannot lower a psum_scatter over manual ones.
    is_scattered = AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types
    if shard.reduction == "canonical" or not is_scattered:
        ranks = lax.all_to_all(sums[None], axis, split_axis=2, concat_axis=0, tiled=True)
        ranks = ranks if order is None else ranks[order]
        rows = ordered_sum(lax.collapse(ranks, 0, 2))
    else:
        rows = lax.psum_scatter(sums[0], axis, scatter_dimension=0, tiled=True)
    to = "invarying" if is_checked(axis) else "varying"
    return lax.all_gather(rows.astype(dtype), axis, tiled=True, to=to)[:n]


def is_checked(axis: AxisName) -> bool:
    """Whether the surrounding shard_map tracks over which axes values vary (check_vma=True)."""
    return bool(varying_axes(lax.axis_index(axis)))


def mesh_of_processes(arrays: Any) -> Mesh | None:
    """The mesh of concrete arrays that several processes share; None where there is none."""
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.is_fully_addressable:
            return x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None  # type: ignore[return-value]
    return None
