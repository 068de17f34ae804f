"""How epilogues store tiles by TMA: through shared memory, one strip of columns at a time."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.parts import parts_of
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from pallas_kernels.mosaic.main_loop import STRIP, STRIPS_IN_FLIGHT, WARPGROUP_ROWS

Array = jax.Array
Ref = Any


def store_through(
    staging_smem: Ref,
    warpgroup: Array,
    machine: Machine,
    strip_of: Callable[[int], Array],
    store: Callable[[int, Ref], None],
    strips: int = COLUMNS // STRIP,
    *,
    transposed: bool = False,
) -> None:
    """Store a tile by TMA, one strip of columns at a time.

    `strip_of(strip)` computes a strip, and `store(strip, strip_smem)` issues the copies of it from shared memory
    without committing them, so that each strip is one group however many copies it takes. Strips are computed one after
    the other, which keeps an epilogue's temporaries few. transposed: a strip is stored as `[columns, rows]`.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for strip in range(strips):
        values = strip_of(strip)
        if strip >= STRIPS_IN_FLIGHT:
            wait_for_place(machine)
        strip_smem = staging_smem.at[warpgroup, strip % STRIPS_IN_FLIGHT]
        store_strip(strip_smem, values, functools.partial(store, strip), transposed=transposed)


def wait_for_place(machine: Machine) -> None:
    """Wait until of `STRIPS_IN_FLIGHT` strips in shared memory only those after the first may be unread."""
    # The interpreter counts copies instead of groups, and a strip may take none or several: there it waits for all.
    unread = STRIPS_IN_FLIGHT - 1 if machine.interpret is None else 0
    plgpu.wait_smem_to_gmem(unread, wait_read_only=True)


def store_strip(strip_smem: Ref, values: Array, store: Callable[[Ref], None], *, transposed: bool = False) -> None:
    """Store one strip by TMA, as one group. `store(strip_smem)` issues the copies of it without committing them."""
    if transposed:
        strip_smem.transpose((1, 0))[...] = values
    else:
        strip_smem[...] = values
    plgpu.commit_smem()
    store(strip_smem)
    plgpu.commit_smem_to_gmem_group()


def store_rows(strip_smem: Ref, out_gmem: Ref, row: Array, columns: Any) -> None:
    """Issue the copy of a strip to the rows from `row` on, for `store_through`; those that `out_gmem` does not have are
    left out.
    """
    rows = min(WARPGROUP_ROWS, out_gmem.shape[0])
    to_gmem = out_gmem.at[pl.ds(row, rows), columns]
    plgpu.copy_smem_to_gmem(strip_smem.at[pl.ds(0, rows)], to_gmem, commit_group=False)


def storing(out_gmem: Any, row: Array, first: Any) -> Callable[[int, Ref], None]:
    """What stores strips of a matrix's columns from `first` on by `store_through`, each in all of its parts."""
    parts = parts_of(out_gmem)

    def store(number: int, strip_smem: Ref) -> None:
        strip, part = divmod(number, len(parts))
        store_rows(strip_smem, parts[part], row, pl.ds(first + strip * STRIP, STRIP))

    return store
