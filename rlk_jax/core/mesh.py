"""Meshes as every op sees them: the names of axes, and how arrays lie over them."""

import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlk_jax.core.transforms import varying_axes

AxisName = str | tuple[str, ...]
"""One mesh axis, or several that count as one, the most significant first."""


def axis_names(axes: Any) -> tuple[str, ...]:
    """The axes that one entry of a PartitionSpec names."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def evenly_spread(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The first of these axes, as many as `size` elements can be spread over evenly."""
    while size % math.prod(mesh.shape[name] for name in axes):
        axes = axes[:-1]
    return axes


def explicit_spec(x: Any) -> PartitionSpec | None:
    """How an array, or the array in an nnx variable, lies over Explicit mesh axes; None where it lies over none.

    The spec has an entry for each dimension.
    """
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    spec = tuple(jax.typeof(x).sharding.spec) if isinstance(x, jax.Array) else ()
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec))) if any(spec) else None


def whole_on_every_device[Tree](tree: Tree) -> Tree:
    """The tree, with every array that lies over Explicit mesh axes made whole on each device.

    Sums in one fixed order need this: JAX does not choose how the steps of a sum over a cut axis lie.
    """
    return jax.tree.map(lambda x: x if explicit_spec(x) is None else jax.sharding.reshard(x, PartitionSpec()), tree)


def mesh_of_processes(arrays: Any) -> Mesh | None:
    """The mesh of the first concrete array that several processes share; None where there is none, or no mesh."""
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.is_fully_addressable:
            return x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None  # type: ignore[return-value]
    return None


def lies_over_a_mesh(arrays: Any) -> bool:
    """Whether a call is inside shard_map, or an array of it is known to lie over several devices of a mesh."""
    arrays = list(arrays)
    is_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    return is_manual or any(map(explicit_spec, arrays)) or mesh_of_processes(arrays) is not None


def is_checked(axis: AxisName) -> bool:
    """Whether the surrounding shard_map tracks over which axes values vary (check_vma=True)."""
    return bool(varying_axes(lax.axis_index(axis)))
