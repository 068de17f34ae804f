"""The kernel of det_gemm: C = A·B, with each operand stored either way round and the accumulators rounded once.

Each element is one float32 chain over ascending K, from 0 or from a given C. Its bits depend neither on the tile, which
is chosen by the sizes, nor on which operand runs along wgmma's rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import GemmPlan, Machine, gemm_plan
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, Block, Product, Stretch, multiply
from pallas_kernels.mosaic.stores import store_through
from pallas_kernels.products import padded

Array = jax.Array
Ref = Any


class _GemmArguments(NamedTuple):
    """The kernel's references. `rows` and `columns` are the operands along the rows and the columns of a tile."""

    rows_gmem: Ref
    columns_gmem: Ref
    start_gmem: Ref | None
    out_gmem: Ref


@dataclass(frozen=True)
class _Operand:
    """One operand of the product, and how it is stored."""

    array: Array
    depth_first: bool
    """Whether it is stored `[K, ·]` instead of `[·, K]`."""

    @property
    def size(self) -> int:
        return self.array.shape[1 if self.depth_first else 0]

    @property
    def depth(self) -> int:
        return self.array.shape[0 if self.depth_first else 1]

    def readable(self) -> Array:
        """The array, padded with zeros to a shape that TMA can read."""
        shape = _stored_shape(*self.array.shape)
        return jnp.pad(self.array, [(0, to - size) for to, size in zip(shape, self.array.shape, strict=True)])

    def part(self, ref: Ref, start: Array, width: int, k: Array, depth: int) -> Ref:
        """The part of a reference to the readable array that a tile multiplies in step k, of so much depth."""
        across, along = pl.ds(start, width), pl.ds(k * depth, depth)
        return ref.at[along, across] if self.depth_first else ref.at[across, along]


def _stored_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape that TMA can read and write: a multiple of 64 columns and, above 8 rows, a multiple of 8 rows."""
    return (rows if rows <= 8 else padded(rows, 8)), padded(columns, 64)


@dataclass(frozen=True)
class _Result:
    """How tiles are stored into C: a strip of 128 bytes of each row at a time or, with swapped operands, whole."""

    plan: GemmPlan
    dtype: Any
    columns: int
    """Columns of C as it is stored."""

    @property
    def width(self) -> int:
        """Columns of C in one strip."""
        return min(self.plan.tile.columns, 128 // jnp.dtype(self.dtype).itemsize)

    @property
    def strip(self) -> tuple[int, int]:
        """The shape of what is staged in shared memory and stored at once."""
        if self.plan.swapped:
            return self.plan.tile.columns, WARPGROUP_ROWS
        return WARPGROUP_ROWS, self.width

    def store(self, out_gmem: Ref, block: Block, values: Array, staging_smem: Ref, machine: Machine) -> None:
        """Store the float32 tile `values` of this warpgroup, rounded to C's dtype."""
        width, columns = self.width, self.plan.tile.columns
        rows, first = pl.ds(block.row, WARPGROUP_ROWS), block.column_block * columns

        def strip_of(strip: int) -> Array:
            return values[:, strip * width : (strip + 1) * width].astype(self.dtype)

        def store_strip(strip: int, strip_smem: Ref) -> None:
            # Mosaic drops the index of a dimension that is one tile wide, and with it the bounds check.
            if strip * width < self.columns:
                to = out_gmem.at[rows, pl.ds(first + strip * width, width)]
                plgpu.copy_smem_to_gmem(strip_smem, to, commit_group=False)

        def transposed(_: int) -> Array:
            return plgpu.layout_cast(values.astype(self.dtype), plgpu.Layout.WGMMA_TRANSPOSED)

        def store_transposed(_: int, strip_smem: Ref) -> None:
            plgpu.copy_smem_to_gmem(strip_smem, out_gmem.at[pl.ds(first, columns), rows], commit_group=False)

        if self.plan.swapped:
            store_through(staging_smem, block.warpgroup, machine, transposed, store_transposed, 1, transposed=True)
        else:
            store_through(staging_smem, block.warpgroup, machine, strip_of, store_strip, columns // width)


def gemm(
    a: Array,
    b: Array,
    start: Array | None,
    *,
    a_transposed: bool,
    b_transposed: bool,
    out_dtype: Any,
    machine: Machine,
) -> Array:
    """start + A·B, `[M, N]` in out_dtype. No dimension may be 0.

    a is `[M, K]`, or `[K, M]` with a_transposed; b is `[K, N]`, or `[N, K]` with b_transposed; both are bfloat16, or
    both float16. start is float32 `[M, N]`, or None for sums that start from 0.
    """
    rows, columns = _Operand(a, a_transposed), _Operand(b, not b_transposed)
    m, n = rows.size, columns.size
    plan = gemm_plan(m, n, machine.sm_count, a_transposed=a_transposed, accumulates=start is not None)
    if plan.swapped:
        rows, columns = columns, rows
    tile, stored = plan.tile, _stored_shape(m, n)
    blocks = -(-rows.size // tile.cluster_rows), -(-columns.size // tile.columns)
    if start is not None:
        # start is read without TMA, in whole tiles, so it is padded to them.
        start = jnp.pad(start, ((0, blocks[0] * tile.cluster_rows - m), (0, blocks[1] * tile.columns - n)))
    result = _Result(plan, out_dtype, stored[1])

    def finish(refs: _GemmArguments, block: Block, product: Any, staging_smem: Ref) -> None:
        so_far = None
        if refs.start_gmem is not None:
            there = pl.ds(block.row, WARPGROUP_ROWS), pl.ds(block.column_block * tile.columns, tile.columns)
            so_far = plgpu.load(refs.start_gmem.at[there], layout=plgpu.Layout.WGMMA, optimized=False)
        result.store(refs.out_gmem, block, product(so_far), staging_smem, machine)

    def steps(refs: _GemmArguments, block: Block) -> Array:
        return jnp.int32(-(-rows.depth // tile.depth))

    def load_a(refs: _GemmArguments, block: Block, k: Array) -> tuple[Ref, ...]:
        return (rows.part(refs.rows_gmem, block.row, tile.rows, k, tile.depth),)

    def load_b(refs: _GemmArguments, block: Block, k: Array) -> tuple[Ref, ...]:
        first = block.column_block * tile.columns
        return (columns.part(refs.columns_gmem, first, tile.columns, k, tile.depth),)

    product = Product(
        name="det_gemm",
        tile=tile,
        dtype=a.dtype,
        a_transposed=rows.depth_first,
        b_transposed=not columns.depth_first,
        max_blocks=blocks,
        blocks=lambda refs: blocks,
        stretches=(Stretch(steps, load_a, load_b),),
        finish=finish,
        store_dtype=out_dtype,
        strip=result.strip,
    )
    out = jax.new_ref(lax.empty(stored, out_dtype))
    multiply(product, machine, _GemmArguments(rows.readable(), columns.readable(), start, out))
    return jax.freeze(out)[:m, :n]
