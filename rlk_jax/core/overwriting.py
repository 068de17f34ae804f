"""Arguments that a program overwrites, so that what a forward kept and a backward writes over is held once.

XLA writes to an argument's memory where the argument is donated and a result takes its place; elsewhere it writes to a
copy. A program that has no such result returns `room` besides its own results, and its caller drops that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax._src.interpreters import pxla

LEAST_BYTES = 2**20
"""Handing over a smaller array costs more time than its memory is worth."""


def large(arrays: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the arrays that are worth overwriting."""
    return tuple(i for i, x in enumerate(arrays) if x.size * x.dtype.itemsize >= LEAST_BYTES)


def donating(function: Callable[..., Any], donated: Sequence[int]) -> Any:
    """The jitted function, with the arguments at these positions donated.

    One that it does not use is donated, too: else its room would take memory of its own.
    """
    return jax.jit(function, donate_argnums=donated, keep_unused=True)


def lowered(function: Callable[..., Any], donated: Sequence[int], specs: Sequence[Any]) -> jax.stages.Lowered:
    """`donating` for arguments of these shapes. What is compiled from it lives as long as the caller holds it.

    Where unused arguments are kept, an entry in a cache of JAX's refers to its own key, by which JAX would hold the
    compiled program after its caller has let go of it: such entries are deleted from a full cache alone.
    """
    traced = donating(function, donated).trace(*specs)
    found = traced.lower()
    pxla._dce_jaxpr.evict_weakref(traced.jaxpr)
    return found


def room(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Results that take the memory of the large arrays, one for each: nothing writes to them."""
    return [lax.empty(arrays[i].shape, arrays[i].dtype) for i in large(arrays)]


def spared[T](arrays: T) -> T:
    """A tree of arrays with copies of the large ones, for a program to overwrite while the given ones stay whole."""
    leaves, tree = jax.tree.flatten(arrays)
    copies = {i: leaves[i].copy() for i in large(leaves)}
    return jax.tree.unflatten(tree, [copies.get(i, x) for i, x in enumerate(leaves)])
