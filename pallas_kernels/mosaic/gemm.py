"""det_gemm: C = A·B, operands stored either way round. Nothing but the accumulators, rounded once.

Each element is one float32 chain over ascending K, from 0 or from a given C, whatever the tile and whichever operand
runs along wgmma's rows: tiles follow the size, bits do not.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import DEPTH, Machine, Plan, gemm_plan, padded
from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, Block, Product, multiply, store_through

Array = jax.Array
Ref = Any


class _Arguments(NamedTuple):
    """`rows` and `columns` are the operands along the rows and the columns of a tile."""

    rows: Ref
    columns: Ref
    start: Ref | None
    out: Ref


@dataclass(frozen=True)
class _Operand:
    array: Array
    depth_first: bool
    """`[K, ·]` in the place of `[·, K]`."""

    @property
    def size(self) -> int:
        return self.array.shape[1 if self.depth_first else 0]

    @property
    def depth(self) -> int:
        return self.array.shape[0 if self.depth_first else 1]

    def readable(self) -> Array:
        """Zeros behind it, up to what TMA can read."""
        shape = _stored_shape(*self.array.shape)
        return jnp.pad(self.array, [(0, to - size) for to, size in zip(shape, self.array.shape, strict=True)])

    def tile(self, ref: Ref, start: Array, width: int, k: Array) -> Ref:
        """Of the readable array, what step k of a tile multiplies."""
        across, depth = pl.ds(start, width), pl.ds(k * DEPTH, DEPTH)
        return ref.at[depth, across] if self.depth_first else ref.at[across, depth]


def _stored_shape(rows: int, columns: int) -> tuple[int, int]:
    """What TMA can read and write: a multiple of 64 columns and, beyond 8 rows, of 8 rows."""
    return (rows if rows <= 8 else padded(rows, 8)), padded(columns, 64)


@dataclass(frozen=True)
class _Result:
    """How tiles are stored into C, a strip of 128 bytes of each row at a time; of swapped operands, whole."""

    plan: Plan
    dtype: Any
    columns: int
    """As stored."""

    @property
    def width(self) -> int:
        return min(self.plan.tile.columns, 128 // jnp.dtype(self.dtype).itemsize)

    @property
    def strip(self) -> tuple[int, int]:
        if self.plan.swapped:
            return self.plan.tile.columns, WARPGROUP_ROWS
        return WARPGROUP_ROWS, self.width

    def store(self, out: Ref, block: Block, values: Array, staging: Ref, machine: Machine) -> None:
        width, columns = self.width, self.plan.tile.columns
        rows, first = pl.ds(block.row, WARPGROUP_ROWS), block.column_block * columns

        def strip_of(strip: int) -> Array:
            return values[:, strip * width : (strip + 1) * width].astype(self.dtype)

        def store_strip(strip: int, smem: Ref) -> None:
            # Mosaic drops the index of a dimension that is one tile wide, and with it the bounds check.
            if strip * width < self.columns:
                to = out.at[rows, pl.ds(first + strip * width, width)]
                plgpu.copy_smem_to_gmem(smem, to, commit_group=False)

        def transposed(_: int) -> Array:
            return plgpu.layout_cast(values.astype(self.dtype), plgpu.Layout.WGMMA_TRANSPOSED)

        def store_transposed(_: int, smem: Ref) -> None:
            plgpu.copy_smem_to_gmem(smem, out.at[pl.ds(first, columns), rows], commit_group=False)

        if self.plan.swapped:
            store_through(staging, block.warpgroup, machine, transposed, store_transposed, 1, transposed=True)
        else:
            store_through(staging, block.warpgroup, machine, strip_of, store_strip, columns // width)


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

    a `[M, K]`, or `[K, M]` if transposed; b `[K, N]`, or `[N, K]`; both bfloat16 or both float16. start float32
    `[M, N]` or None.
    """
    rows, columns = _Operand(a, a_transposed), _Operand(b, not b_transposed)
    m, n = rows.size, columns.size
    plan = gemm_plan(m, n, machine.sm_count, a_transposed=a_transposed, accumulates=start is not None)
    if plan.swapped:
        rows, columns = columns, rows
    tile, stored = plan.tile, _stored_shape(m, n)
    blocks = -(-rows.size // tile.cluster_rows), -(-columns.size // tile.columns)
    if start is not None:
        # Read without TMA: whole tiles.
        start = jnp.pad(start, ((0, blocks[0] * tile.cluster_rows - m), (0, blocks[1] * tile.columns - n)))
    result = _Result(plan, out_dtype, stored[1])

    def finish(refs: _Arguments, block: Block, product: Any, staging: Ref) -> None:
        so_far = None
        if refs.start is not None:
            there = pl.ds(block.row, WARPGROUP_ROWS), pl.ds(block.column_block * tile.columns, tile.columns)
            so_far = plgpu.load(refs.start.at[there], layout=plgpu.Layout.WGMMA, optimized=False)
        result.store(refs.out, block, product(so_far), staging, machine)

    product = Product(
        name="det_gemm",
        tile=tile,
        dtype=a.dtype,
        a_transposed=rows.depth_first,
        b_transposed=not columns.depth_first,
        max_blocks=blocks,
        blocks=lambda refs: blocks,
        steps=lambda refs: jnp.int32(-(-rows.depth // DEPTH)),
        load_a=lambda refs, block, k: rows.tile(refs.rows, block.row, tile.rows, k),
        load_b=lambda refs, block, k: columns.tile(refs.columns, block.column_block * tile.columns, tile.columns, k),
        finish=finish,
        store_dtype=out_dtype,
        strip=result.strip,
    )
    out = jax.new_ref(lax.empty(stored, out_dtype))
    multiply(product, machine, _Arguments(rows.readable(), columns.readable(), start, out))
    return jax.freeze(out)[:m, :n]
