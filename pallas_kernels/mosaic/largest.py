"""The largest products of each row, from those of one slice of the vocabulary after the other.

A block has one row. It merges the list of earlier slices with the products of this one: each step takes the first of
the list or, where that is smaller, the largest product that is left. Of its chunk alone the products are read, and the
largest that is left of the chunk is found. Those that were taken stand before all that are left, by value and column,
and so need no mark.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import LIST, LargestProducts, SliceProducts, VocabSlice
from pallas_kernels.hopper.tiles import THREADS, Machine
from pallas_kernels.hopper.vocabulary import Vocabulary
from pallas_kernels.mosaic.launch import all_threads, launch
from pallas_kernels.products import padded

Array = jax.Array
Ref = Any
_NOWHERE = jnp.iinfo(jnp.int32).max


class _Search(NamedTuple):
    """Where the search of a row stands.

    largest: what is largest in each chunk of the slice, of what is left there. first: the largest of them. value,
    column: what was taken last of the slice. from_list: how many were taken of the list. new: the list that is made.
    """

    largest: Array
    first: Array
    value: Array
    column: Array
    from_list: Array
    new: LargestProducts


def add_largest(
    vocabulary: Vocabulary,
    machine: Machine,
    where: VocabSlice,
    products: SliceProducts,
    count: int,
    best: LargestProducts,
) -> None:
    """Add the products of a slice to the `count` largest products of each row, in `best`.

    Slices are given in ascending order, and chunks are those of the vocabulary. Rows behind those that count are left
    as they are. What a row with NaN gets is undefined.
    """
    columns, size = vocabulary.columns, padded(products.largest.shape[0], THREADS)
    of_slice = products.largest[...].T
    largest = jnp.pad(of_slice, ((0, 0), (0, size - of_slice.shape[1])), constant_values=-jnp.inf)

    def body(
        where_gmem: VocabSlice, values_gmem: Ref, largest_gmem: Ref, best_gmem: LargestProducts, _outputs: tuple[()]
    ) -> None:
        row = lax.axis_index("blocks")
        chunk_number, place, list_number = (_numbers(x) for x in (size, columns, LIST))
        chunks = vocabulary.chunks_in(where_gmem.chunks[0])

        def load(ref: Ref, start: Any, count: int) -> Array:
            return plgpu.load(ref.at[row, pl.ds(start, count)], layout=_layout(count), optimized=False)

        def step(i: Array, so_far: _Search) -> _Search:
            listed = best_gmem.values[row, so_far.from_list]

            def of_list() -> tuple[Array, ...]:
                column = best_gmem.columns[row, so_far.from_list]
                return so_far.largest, so_far.first, so_far.value, so_far.column, jnp.int32(1), listed, column

            def of_slice() -> tuple[Array, ...]:
                value = so_far.first
                chunk = jnp.where(so_far.largest == value, chunk_number, _NOWHERE).min()
                # A row with NaN has no such chunk.
                chunk = jnp.minimum(chunk, chunks - 1)
                values = load(values_gmem, chunk * columns, columns)
                start = vocabulary.start(vocabulary.chunks_in(where_gmem.first_chunk[0]) + chunk)
                is_left = (value != so_far.value) | (place + start > so_far.column)
                there = jnp.where((values == value) & is_left, place, _NOWHERE).min()
                is_behind = (values < value) | ((values == value) & (place > there))
                rest = jnp.where(is_behind, values, -jnp.inf).max()
                largest = jnp.where(chunk_number == chunk, rest, so_far.largest)
                column = start + there
                return largest, largest.max(), value, column, jnp.int32(0), value, column

            found = lax.cond(listed >= so_far.first, of_list, of_slice)
            largest, first, value, column, from_list, own, own_column = found
            new = LargestProducts(
                jnp.where(list_number == i, own, so_far.new.values),
                jnp.where(list_number == i, own_column, so_far.new.columns),
            )
            return _Search(largest, first, value, column, so_far.from_list + from_list, new)

        @pl.when(row < where_gmem.rows[0])
        def _() -> None:
            # A slice may have fewer chunks than it has memory for.
            largest = jnp.where(chunk_number < chunks, load(largest_gmem, 0, size), -jnp.inf)
            new = LargestProducts(_full(LIST, -jnp.inf, jnp.float32), _full(LIST, -1, jnp.int32))
            start = _Search(largest, largest.max(), jnp.float32(jnp.inf), jnp.int32(-1), jnp.int32(0), new)
            done = lax.fori_loop(0, count, step, start)
            # Every thread has read what is overwritten.
            all_threads()
            best_gmem.values[row, pl.ds(0, LIST)] = done.new.values
            best_gmem.columns[row, pl.ds(0, LIST)] = done.new.columns

    arguments = where, products.values, largest, best
    launch(body, "linear_logp_largest", machine, (), (products.values.shape[0],), *arguments)


def _layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((count,), vec_size=2 if count == 2 * THREADS else 1)


def _numbers(count: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=_layout(count))


def _full(count: int, value: float, dtype: Any) -> Array:
    return plgpu.layout_cast(jnp.full((count,), value, dtype), _layout(count))
