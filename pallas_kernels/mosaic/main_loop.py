"""The one main loop of all products: it computes tiles of A·B on Hopper's tensor cores and runs an epilogue on each.

One producer warpgroup keeps a ring of shared-memory stages full by TMA. The compute warpgroups, 64 rows each, multiply
from the ring with wgmma. The grid is persistent and the ring never drains between tiles: while an epilogue runs, the
stages of the next tile are already in flight. A product of several layers has a cluster for each tile instead. K
ascends in one unsplit chain of float32 accumulators.

Where A or B is in two parts (parts.py), a step multiplies every pair of parts but low·low from one stage. Every few
steps the accumulators are added to float32 registers and begin anew, because tensor cores cut off digits.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import COLUMNS, SHARED_MEMORY, SUM_STEPS, Machine, Tile

Array = jax.Array
Ref = Any
"""A reference to memory inside a kernel, or a slice of one."""
Refs = tuple[Ref, ...]
"""The same for each part of a matrix."""

ROW = plgpu.Layout.WGMMA.reduce(1)
"""The layout of one value for each row of an accumulator."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""The layout of one value for each column of an accumulator."""
WARPGROUP_ROWS = 64
"""Rows of a tile that one compute warpgroup holds."""
STRIP = 64
"""Columns that an epilogue computes and stores together."""
STRIPS_IN_FLIGHT = 2
"""Strips of a warpgroup in shared memory: one is filled while the other is stored."""


class Block(NamedTuple):
    """The position of a tile in the product.

    layer is the number of its layer. row is its first row: in loads that of the block, in the epilogue that of the
    warpgroup. column_block is the number of its block of columns. warpgroup is the compute warpgroup.
    """

    layer: Array
    row: Array
    column_block: Array
    warpgroup: Array


@dataclass(frozen=True)
class Stretch:
    """A part of K along which both operands of a tile lie in one array each. `refs` are references to the arguments."""

    steps: Callable[[Any, Block], Any]
    """`steps(refs, block)` returns how many steps of 64 along K there are."""
    load_a: Callable[[Any, Block, Array], Refs]
    """`load_a(refs, block, k)` returns what step k of a tile multiplies of A, in each of its parts."""
    load_b: Callable[[Any, Block, Array], Refs]
    """`load_b(refs, block, k)` returns what step k of a tile multiplies of B, in each of its parts."""


@dataclass(frozen=True)
class Product:
    """A kernel: which parts of A and B each tile multiplies, and an epilogue. `refs` are references to its arguments.

    A tile of A is `[rows, K]`, or `[K, rows]` with `a_transposed`. A tile of B is `[K, columns]`, or `[columns, K]`
    with `b_transposed`.
    """

    name: str
    tile: Tile
    dtype: Any
    a_transposed: bool
    b_transposed: bool
    max_blocks: tuple[int, int]
    """The largest numbers of row blocks (one per cluster) and of column blocks, of all layers together."""
    blocks: Callable[[Any], tuple[Any, Any]]
    """`blocks(refs)` returns how many row blocks (one per cluster) and column blocks there are in a layer."""
    stretches: tuple[Stretch, ...]
    """The whole of K, in the order in which it is summed up."""
    finish: Callable[[Any, Block, Callable[..., Array], Ref], None]
    """The epilogue `finish(refs, block, product, staging_smem)`. It loads what it needs, calls `product(start=None)`
    once for the float32 tile `[64, columns]`, and then stores. Where there is a second product, it calls it twice."""
    loaded_rows: int | None = None
    """How many rows of a tile of A are loaded, where A has fewer than a tile. Products of the others are undefined."""
    layers: Callable[[Any], Any] | None = None
    """`layers(refs)` returns how many layers of tiles there are; None for one. All tiles of a layer are begun before
    those of the next: each tile has a cluster of its own, and a GPU begins clusters in ascending order. A tile may wait
    for one of a layer before, however few clusters run at a time."""
    store_dtype: Any = None
    """The dtype of what `finish` stores by `store_through`, or None where it stores without shared memory."""
    strip: tuple[int, int] = (WARPGROUP_ROWS, STRIP)
    """The shape of a strip that `store_through` stores."""
    parts: tuple[int, int] = (1, 1)
    """How many parts A and B are in, one or two each."""
    second: "Product | None" = None
    """A product of other operands that has the same tiles, or None. Its `finish` is not called."""

    @property
    def every(self) -> tuple["Product", ...]:
        """The products of a tile, in the order in which they are made."""
        return (self,) if self.second is None else (self, self.second)

    @property
    def terms(self) -> list[tuple[int, int]]:
        """The parts of A and of B that a step multiplies, in order: small terms come first, while the sum is small."""
        return [(a, b) for a, b in ((1, 0), (0, 1), (0, 0)) if a < self.parts[0] and b < self.parts[1]]


def tiled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The layout of a tile in shared memory that both TMA and wgmma read."""
    item = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * item * 8)
    transforms: Any = plgpu
    return transforms.TilingTransform((8, swizzle // item)), transforms.SwizzleTransform(swizzle)


def _stages(product: Product) -> tuple[Any, Any]:
    """The shared memory of the ring, for A and for B, as one product of a tile sees it."""
    tile = product.tile
    a = (tile.depth, tile.rows) if product.a_transposed else (tile.rows, tile.depth)
    b = (tile.columns, tile.depth) if product.b_transposed else (tile.depth, tile.columns)

    def of_operand(shape: tuple[int, int], parts: int) -> Any:
        return plgpu.SMEM((tile.stages * parts, *shape), product.dtype, transforms=tiled(shape[1], product.dtype))

    return of_operand(a, product.parts[0]), of_operand(b, product.parts[1])


def _scratch(product: Product, machine: Machine) -> dict[str, Any]:
    """The shared memory and the barriers of one block, by the names of the kernel's parameters. `a_smem` and `b_smem`
    hold what each product of a tile sees.
    """
    tile = product.tile
    views = zip(*map(_stages, product.every), strict=True)
    # The interpreter takes an access to one stage of a union for one to all: there the products share no memory.
    ring: dict[str, Any] = {
        name: plgpu.RefUnion(*of_products) if len(of_products) > 1 and machine.interpret is None else of_products
        for name, of_products in zip(("a_smem", "b_smem"), views, strict=True)
    }
    if product.store_dtype is not None:
        shape = (tile.warpgroups, STRIPS_IN_FLIGHT, *product.strip)
        transforms = tiled(product.strip[1], product.store_dtype)
        ring["staging_smem"] = plgpu.SMEM(shape, product.store_dtype, transforms=transforms)
    empty: Any
    if tile.cluster > 1:
        empty = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=tile.warpgroups, num_barriers=tile.stages
        )
    else:
        empty = plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages)
    full = plgpu.Barrier(num_arrivals=sum(product.parts), num_barriers=tile.stages)
    return {**ring, "full_barriers": full, "empty_barriers": empty}


def _shared_bytes(product: Product) -> int:
    """Bytes of shared memory that the ring and the strips of the epilogue take."""
    tile = product.tile
    of_a, of_b = product.parts
    ring = tile.stages * (of_a * tile.rows + of_b * tile.columns) * tile.depth * jnp.dtype(product.dtype).itemsize
    if product.store_dtype is None:
        return ring
    strip = product.strip[0] * product.strip[1] * jnp.dtype(product.store_dtype).itemsize
    return ring + tile.warpgroups * STRIPS_IN_FLIGHT * strip


@dataclass(frozen=True)
class _StageRing:
    """The stages of one block. Each has a barrier for when it is loaded, and one for when all readers have read it."""

    product: Product
    a_smem: Ref
    b_smem: Ref
    full_barriers: Ref
    empty_barriers: Ref

    def slot(self, step: Array) -> Array:
        """The stage that a step uses; steps are counted over all tiles of the block."""
        return lax.rem(step, jnp.int32(self.product.tile.stages))

    def load(self, first: Array, steps: Array, a_of: Callable[[Array], Refs], b_of: Callable[[Array], Refs]) -> Array:
        """For the producer: issue the loads of one tile. `first` counts the steps before it; returns the new count."""
        stages, cluster = self.product.tile.stages, self.product.tile.cluster

        def step(k: Array, count: Array) -> Array:
            slot = self.slot(count)

            @pl.when(count >= stages)
            def _() -> None:
                plgpu.barrier_wait(self.empty_barriers.at[slot])

            shared = "cluster" if cluster > 1 else None
            full = self.full_barriers.at[slot]
            a_parts, b_parts = self.product.parts
            for part, a in enumerate(a_of(k)):
                a_smem = self.a_smem.at[_place(slot, part, a_parts)]
                if self.product.loaded_rows is not None:
                    a_smem = a_smem.at[pl.ds(0, self.product.loaded_rows)]
                plgpu.copy_gmem_to_smem(a, a_smem, full)
            for part, b in enumerate(b_of(k)):
                plgpu.copy_gmem_to_smem(b, self.b_smem.at[_place(slot, part, b_parts)], full, collective_axes=shared)
            return count + 1

        return lax.fori_loop(0, steps, step, first)

    def drain(self, count: Array) -> None:
        """For the producer at its end: wait until every stage is read, so that no block of a cluster ends before others
        have read what it shares with them.
        """

        def step(i: Array, _: None) -> None:
            plgpu.barrier_wait(self.empty_barriers.at[self.slot(i)])

        lax.fori_loop(jnp.maximum(count - self.product.tile.stages, 0), count, step, None)

    def multiply(self, first: Array, steps: Array, warpgroup: Array, acc: Ref) -> Array:
        """For a compute warpgroup: acc += A·B over steps of one tile, with the wgmma groups of one step in flight.

        `first` counts the steps before them; returns the new count.
        """
        rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        (a_parts, b_parts), terms = self.product.parts, self.product.terms

        def operands(slot: Array, a_part: int, b_part: int) -> tuple[Ref, Ref]:
            a, b = _place(slot, a_part, a_parts), _place(slot, b_part, b_parts)
            a_smem, b_smem = self.a_smem, self.b_smem.at[b]
            a_smem = a_smem.at[a, :, rows].transpose((1, 0)) if self.product.a_transposed else a_smem.at[a, rows]
            return a_smem, b_smem.transpose((1, 0)) if self.product.b_transposed else b_smem

        def step(k: Array, count: Array) -> Array:
            slot = self.slot(count)
            plgpu.barrier_wait(self.full_barriers.at[slot])
            for term in terms:
                plgpu.wgmma(acc, *operands(slot, *term))
            plgpu.wgmma_wait(len(terms))

            @pl.when(k > 0)
            def _() -> None:
                plgpu.barrier_arrive(self.empty_barriers.at[self.slot(count - 1)])

            return count + 1

        count = lax.fori_loop(0, steps, step, first)
        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def _() -> None:
            plgpu.barrier_arrive(self.empty_barriers.at[self.slot(count - 1)])

        return count


def _place(slot: Array, part: int, parts: int) -> Array:
    """The place of one part of a stage in shared memory."""
    return slot if parts == 1 else slot * parts + part


def _summed(ring: _StageRing, first: Array, steps: Array, warpgroup: Array, start: Array | None) -> tuple[Array, Array]:
    """start + A·B over the steps of one tile, by sums of a few steps each; also returns the new count."""
    shape = WARPGROUP_ROWS, ring.product.tile.columns
    if start is None:
        start = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    def add(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        total, count = so_far

        def few_steps(acc: Ref) -> tuple[Array, Array]:
            after = ring.multiply(count, jnp.minimum(steps - i * SUM_STEPS, SUM_STEPS), warpgroup, acc)
            return total + acc[...], after

        return pl.run_scoped(few_steps, plgpu.ACC(shape, jnp.float32))

    return lax.fori_loop(0, lax.div(steps + (SUM_STEPS - 1), jnp.int32(SUM_STEPS)), add, (start, first))


def multiply(product: Product, machine: Machine, arguments: Any) -> None:
    """Launch `product`. `arguments` is a tree of arrays and of `jax.new_ref` references, which the kernel writes."""
    tile = product.tile
    if _shared_bytes(product) > SHARED_MEMORY:
        # Such a launch would fail silently and leave the results unwritten.
        raise ValueError(f"{product.name}: {tile} takes {_shared_bytes(product)} bytes of shared memory.")
    clusters = product.max_blocks[0] * product.max_blocks[1]
    if product.layers is None:
        clusters = min(machine.sm_count // tile.cluster, clusters)
    leaves, tree = jax.tree.flatten(arguments)

    def body(
        *leaves_gmem: Ref, a_smem: Refs, b_smem: Refs, full_barriers: Ref, empty_barriers: Ref, staging_smem: Ref = None
    ) -> None:
        refs = jax.tree.unflatten(tree, leaves_gmem)
        rings = [
            _StageRing(*own, full_barriers, empty_barriers) for own in zip(product.every, a_smem, b_smem, strict=True)
        ]
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cluster")
        row_blocks, column_blocks = product.blocks(refs)
        layers = () if product.layers is None else (product.layers(refs),)

        def over_tiles(visit: Callable[[Block, Array], Array]) -> Array:
            @plgpu.nd_loop((*layers, row_blocks * column_blocks), collective_axes="blocks", init_carry=jnp.int32(0))
            def count(loop: Any, carry: Array) -> Array:
                *layer, place = loop.index
                row_block, column_block = plgpu.planar_snake(place, (row_blocks, column_blocks), 0, tile.band)
                row = (row_block * tile.cluster + cta) * tile.rows
                return visit(Block(layer[0] if layer else jnp.int32(0), row, column_block, warpgroup), carry)

            return count

        @pl.when(warpgroup == tile.warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def visit(block: Block, count: Array) -> Array:
                for ring in rings:
                    for stretch in ring.product.stretches:
                        load_a, load_b = (functools.partial(x, refs, block) for x in (stretch.load_a, stretch.load_b))
                        count = ring.load(count, stretch.steps(refs, block), load_a, load_b)
                return count

            rings[0].drain(over_tiles(visit))

        @pl.when(warpgroup < tile.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")

            def visit(block: Block, count: Array) -> Array:
                counts, unmade = [count], iter(rings)

                def tile_of(start: Array | None = None) -> Array:
                    ring, count = next(unmade), counts[-1]
                    stretches = ring.product.stretches
                    steps = functools.reduce(operator.add, (stretch.steps(refs, block) for stretch in stretches))

                    def accumulate(acc: Ref) -> tuple[Array, Array]:
                        if start is not None and machine.interpret is None:
                            acc[...] = start
                        after = ring.multiply(count, steps, warpgroup, acc)
                        # The interpreter cannot store to accumulators, and adds C after the products instead.
                        return acc[...] if start is None or machine.interpret is None else acc[...] + start, after

                    if len(product.terms) > 1:
                        values, after = _summed(ring, count, steps, warpgroup, start)
                    else:
                        shape = WARPGROUP_ROWS, tile.columns
                        values, after = pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))
                    counts.append(after)
                    return values

                own = block._replace(row=block.row + warpgroup * WARPGROUP_ROWS)
                product.finish(refs, own, tile_of, staging_smem)
                return counts[-1]

            over_tiles(visit)
            if product.store_dtype is not None:
                plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=_scratch(product, machine),
        grid=(clusters,),
        grid_names=("blocks",),
        cluster=(tile.cluster,),
        cluster_names=("cluster",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=product.name,
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*leaves)


def row_vector(vector_gmem: Ref, row: Array | int) -> Array:
    """64 values of a `[rows]` array from `row` on, one for each row of an accumulator."""
    return plgpu.load(vector_gmem.at[pl.ds(row, WARPGROUP_ROWS)], layout=ROW, optimized=False)


def over_columns(rows: Array, columns: int = COLUMNS) -> Array:
    """A value for each row, repeated in all columns."""
    return lax.broadcast_in_dim(rows, (WARPGROUP_ROWS, columns), [0])


def over_rows(columns: Array) -> Array:
    """A value for each column, repeated in all rows."""
    return lax.broadcast_in_dim(columns, (WARPGROUP_ROWS, columns.shape[0]), [1])


def column_numbers(columns: int = COLUMNS) -> Array:
    """The numbers 0, 1, 2, … along the columns of an accumulator."""
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS, columns), 1, layout=plgpu.Layout.WGMMA)
