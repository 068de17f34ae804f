"""Kernels over the products with two heads, of which neither is brought to memory as a whole.

A block makes the tile of one head, stores it, and makes that of the other head. Then its epilogue walks both, strip by
strip of 32 columns. What a block stores is its own and is overwritten by its next tile, so that all of it stays in the
L2 cache. Only the thread that stored a value loads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import LogitsConfig, VocabSlice
from pallas_kernels.hopper.divergence import STORED_COLUMNS, HeadRows, TwoSlices, stored_tiles
from pallas_kernels.hopper.tiles import COLUMNS, Tile, statistics_tile
from pallas_kernels.mosaic.main_loop import Block, Product, multiply
from pallas_kernels.mosaic.statistics import column_bias, product_with_head, with_bias

Array = jax.Array
Ref = Any
FEW_COLUMNS = 32
"""Columns of a strip: with more of them, their temporaries spill registers beside the accumulators."""
_STRIPS = COLUMNS // FEW_COLUMNS
TOGETHER = 2
"""Strips that a turn of the loop over them takes. Code of all strips in a row would not fit the instruction cache."""


class TwoHeadsArguments(NamedTuple):
    """The references that a kernel is given. `rows_gmem` and `out_gmem` are for its epilogue."""

    where_gmem: VocabSlice
    heads_gmem: tuple[HeadRows, HeadRows]
    tiles_gmem: Ref
    rows_gmem: Any
    out_gmem: Any


class Strip(NamedTuple):
    """A strip of both tiles: its first column in the tile, its number modulo `TOGETHER`, and the products with both
    heads `[64, 32]`, with their bias.
    """

    first: Any
    number: int
    products: list[Array]


Step = Callable[[Strip, Any], Any]
"""`step(strip, so far)` returns what the next strip is given; None is given to the first."""


def over_two_heads(
    name: str,
    two: TwoSlices,
    rows: Any,
    out: Any,
    slice_chunks: int,
    finish: Callable[[TwoHeadsArguments, Block, Callable[[Step], Any], Ref], None],
    store_dtype: Any = None,
) -> None:
    """Call the epilogue `finish(refs, block, over_strips, staging_smem)` for all 64 rows and each chunk of a slice, of
    at most `slice_chunks`.

    It loads what it needs, the latency of which hides behind the products, and calls `over_strips(step)`, which makes
    them, calls `step` for each strip and returns what the last one did. With a store_dtype it may store strips of 32
    columns through shared memory. rows is a tree of arrays, out one of references.
    """
    row_count = two.heads[0].hidden.shape[0]
    tile = statistics_tile(row_count)

    def finish_tile(refs: TwoHeadsArguments, block: Block, product: Callable[[], Array], staging_smem: Ref) -> None:
        def over_strips(step: Step) -> Any:
            tile_gmem = refs.tiles_gmem.at[_place_of_tile(tile, block)]
            _store(tile_gmem, product())
            loaded = _load(tile_gmem, 0)
            values = product()
            strips = [values[:, first : first + FEW_COLUMNS] for first in range(0, COLUMNS, FEW_COLUMNS)]

            def some(place: Any, so_far: Any, loaded: Array, strips: Sequence[Array]) -> tuple[Any, Array]:
                """The steps of the next few strips, the first of which is strip `place` and is loaded."""
                for number in range(TOGETHER):
                    strip, own = place + number, loaded
                    # The latency of memory hides behind the work on the strip before.
                    loaded = _load(tile_gmem, jnp.minimum(strip + 1, _STRIPS - 1))
                    first = strip * FEW_COLUMNS
                    of_heads = zip((own, strips[number]), refs.heads_gmem, strict=True)
                    columns = block.column_block * COLUMNS + first
                    products = [with_bias(x, column_bias(head.bias, columns, FEW_COLUMNS)) for x, head in of_heads]
                    so_far = step(Strip(first, number, products), so_far)
                return so_far, loaded

            def body(i: Array, carry: tuple[Any, Array, list[Array]]) -> tuple[Any, Array, list[Array]]:
                so_far, loaded, strips = carry
                so_far, loaded = some(i * TOGETHER, so_far, loaded, strips)
                # Registers have no index: those of the next strips take the place of these.
                return so_far, loaded, [*strips[TOGETHER:], *strips[-TOGETHER:]]

            so_far, loaded = some(0, None, loaded, strips)
            return lax.fori_loop(1, _STRIPS // TOGETHER, body, (so_far, loaded, strips[TOGETHER:]))[0]

        finish(refs, block, over_strips, staging_smem)

    def product_of(number: int, config: LogitsConfig) -> Product:
        def operands_of(refs: TwoHeadsArguments) -> tuple[Ref, Ref]:
            return refs.heads_gmem[number].hidden, refs.heads_gmem[number].weight

        own = two.heads[number]
        of_product = own.hidden, own.weight, None, slice_chunks, finish_tile
        return product_with_head(name, config.head, tile, *of_product, store_dtype, FEW_COLUMNS, operands_of)

    first, second = (product_of(*x) for x in enumerate(two.logits))
    tiles = jax.new_ref(lax.empty(stored_tiles(row_count, two.machine), jnp.float32))
    multiply(replace(first, second=second), two.machine, TwoHeadsArguments(two.where, two.heads, tiles, rows, out))


def _place_of_tile(tile: Tile, block: Block) -> Array:
    """The number of a warpgroup of the machine, which has one tile at a time."""
    cta = lax.axis_index("blocks") * tile.cluster + lax.axis_index("cluster")
    return cta * tile.warpgroups + block.warpgroup


def _store(tile_gmem: Ref, values: Array) -> None:
    for piece in range(COLUMNS // STORED_COLUMNS):
        tile_gmem[piece] = values[:, piece * STORED_COLUMNS : (piece + 1) * STORED_COLUMNS]


def _load(tile_gmem: Ref, strip: Any) -> Array:
    """A strip of a stored tile."""
    pieces = FEW_COLUMNS // STORED_COLUMNS
    places = [tile_gmem.at[strip * pieces + i] for i in range(pieces)]
    return jnp.concatenate([plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False) for x in places], axis=1)
