"""Launches a CUDA kernel by the name of its FFI target, and gives its attributes as numbers.

The results of a call alias the arrays that the kernel writes into. Operands that a call may leave out follow the
others, and the attribute `given` has a bit for each of them that says whether it is there.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.cuda import build
from pallas_kernels.hopper.arrays import LogitsConfig
from pallas_kernels.hopper.tiles import DEPTH, Machine, Tile
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary

Array = jax.Array


def call_kernel(
    name: str, results: Sequence[Any], operands: Sequence[Any], optional: Sequence[Any] = (), **attributes: Any
) -> list[Array]:
    """Launch one kernel by its FFI target's name. A result is a shape, or an array that is written in place."""
    build.register()
    written = [x for x in results if isinstance(x, jax.Array)]
    there = [x for x in optional if x is not None]
    given = sum(1 << i for i, x in enumerate(optional) if x is not None)
    first = len(operands) + len(there)
    places = [i for i, x in enumerate(results) if isinstance(x, jax.Array)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    call = jax.ffi.ffi_call(name, shapes, input_output_aliases={first + i: place for i, place in enumerate(places)})
    return list(call(*operands, *there, *written, given=np.int64(given), **attributes))


def write_into(
    references: Iterable[Any], name: str, operands: Sequence[Any], optional: Sequence[Any] = (), **attributes: Any
) -> None:
    """Launch a kernel that writes into what these references stand for, in place; None stands for nothing."""
    there = [x for x in references if x is not None]
    found = call_kernel(name, [x[...] for x in there], operands, optional, **attributes)
    for reference, array in zip(there, found, strict=True):
        reference[...] = array


def numbers(*values: int) -> np.ndarray:
    """The numbers as one attribute."""
    return np.asarray(values, np.int64)


def tile_numbers(tile: Tile, machine: Machine) -> np.ndarray:
    """What `Tile` of kernels.cuh is made of."""
    # A step of these kernels is DEPTH deep, whatever the tile's is.
    return numbers(tile.rows, tile.stages * tile.depth // DEPTH, tile.cluster, tile.band, machine.sm_count)


def vocabulary_numbers(vocabulary: Vocabulary) -> tuple[int, int, int]:
    """What `Vocabulary` of kernels.cuh is made of."""
    return vocabulary.size, vocabulary.groups, vocabulary.group_width


def head_numbers(head: HeadAccess) -> np.ndarray:
    """What `Head` of kernels.cuh is made of, but for its weight."""
    return numbers(*vocabulary_numbers(head.vocabulary), head.layout == "dv", head.copied)


def softcap_number(logits: LogitsConfig) -> np.float64:
    """The softcap, 0 for none."""
    return np.float64(logits.softcap or 0)
