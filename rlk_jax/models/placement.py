"""The parameters of a decoder on a mesh ("data", "tensor"): every device along "data" holds a part of each of them, and
gets the whole of one when it computes with it (FSDP; ZeRO stage 3, arXiv 1910.02054).
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


def spec_of(shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, over_vocab: bool) -> PartitionSpec:
    """How a parameter lies. One of layers is cut along its first axis over "data"; a matrix `[V, D]` along D, and along
    V over "tensor". An axis that does not divide evenly stays whole.
    """
    axes = ("tensor", "data") if over_vocab else ("data",)
    sizes = (mesh.shape.get(name, 0) for name in axes)
    cut = (name if count and size % count == 0 else None for name, count, size in zip(axes, sizes, shape, strict=False))
    return PartitionSpec(*cut)


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Numbers in a dtype that is as long or shorter.

    XLA drops a conversion to a shorter dtype and back, and would then compute from other numbers in one program than in
    another; it keeps what reduces precision.
    """
    bits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, bits.nexp, bits.nmant).astype(dtype)


@dataclass(frozen=True)
class Fetch:
    """What gives a device whole parameters, rounded to `dtype`, from the parts that `devices` along "data" hold.

    The gradient of a part is float32: what each device found, added in ascending order of the devices. These had
    different rows, so it has the bits of one device that takes their rows as micro-batches one after the other.
    """

    dtype: jnp.dtype
    devices: int

    def __call__[Tree](self, parts: Tree) -> Tree:
        """The whole parameters of layers."""
        return jax.tree.map(lambda part: self.copies(part, 0, 1)[0], parts)

    def copies(self, part: Float[Array, "..."], axis: int, count: int) -> tuple[Array, ...]:
        """The whole of a parameter that is cut along `axis`, once for each of its uses."""
        return _copies(self, axis, count, part)

    def _whole(self, part: Array, axis: int) -> Array:
        short = rounded(part, self.dtype)
        return short if self.devices == 1 else jax.lax.all_gather(short, "data", axis=axis, tiled=True)

    def _exchanged(self, gradient: Array, axis: int) -> list[Array]:
        """What each device found for the part that this one holds."""
        if self.devices == 1:
            return [gradient]
        parts = jax.lax.all_to_all(gradient, "data", split_axis=axis, concat_axis=axis, tiled=True)
        return jnp.split(parts, self.devices, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _copies(fetch: Fetch, axis: int, count: int, part: Array) -> tuple[Array, ...]:
    return (fetch._whole(part, axis),) * count


def _copies_fwd(fetch: Fetch, axis: int, count: int, part: Array) -> tuple[tuple[Array, ...], None]:
    return (fetch._whole(part, axis),) * count, None


def _copies_bwd(fetch: Fetch, axis: int, count: int, _: None, gradients: tuple[Array, ...]) -> tuple[Array]:
    exchanged = [[_widened(x) for x in fetch._exchanged(gradient, axis)] for gradient in gradients]
    found = (functools.reduce(jnp.add, of_device) for of_device in zip(*exchanged, strict=True))
    return (functools.reduce(jnp.add, found),)


def _widened(x: Array) -> Float32[Array, "..."]:
    """Numbers of a shorter dtype in float32, whatever they were computed in: `rounded` says why."""
    bits = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant)


_copies.defvjp(_copies_fwd, _copies_bwd)
