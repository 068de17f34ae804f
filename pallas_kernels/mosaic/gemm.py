"""det_gemm: C = A·B, operands stored either way round. Nothing but the accumulators, rounded once.

Each element is one float32 chain over ascending K, from 0 or from a given C, whatever the tile and whichever operand
runs along wgmma's rows: tiles follow the size, bits do not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.main_loop import WARPGROUP_ROWS, Block, Product, multiply, store_through
from pallas_kernels.mosaic.tiles import DEPTH, Machine, gemm_plan, padded

Array = jax.Array
Ref = Any


class _Arguments(NamedTuple):
    """`rows` and `columns` are the operands along the rows and the columns of a tile."""

    rows: Ref
    columns: Ref
    start: Ref | None
    out: Ref


def _readable(x: Array) -> Array:
    """`x` as TMA can read it: zeros up to a multiple of 64 columns and, beyond 8 rows, of 8 rows."""
    rows, columns = _stored_shape(*x.shape)
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))


def _stored_shape(rows: int, columns: int) -> tuple[int, int]:
    return (rows if rows <= 8 else padded(rows, 8)), padded(columns, 64)


def _tile_at(ref: Ref, depth_first: bool, start: Array, width: int, k: Array) -> Ref:
    across, depth = pl.ds(start, width), pl.ds(k * DEPTH, DEPTH)
    return ref.at[depth, across] if depth_first else ref.at[across, depth]


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
    (m, depth), n = a.shape[::-1] if a_transposed else a.shape, b.shape[0 if b_transposed else 1]
    plan = gemm_plan(
        m, n, machine.sm_count, a_rows=not a_transposed, b_rows=b_transposed, accumulates=start is not None
    )
    tile, swapped = plan.tile, plan.swapped
    row_blocks = -(-(n if swapped else m) // tile.cluster_rows)
    column_blocks = -(-(m if swapped else n) // tile.columns)
    if start is not None:
        # Read without TMA: whole tiles.
        behind = row_blocks * tile.cluster_rows - m, column_blocks * tile.columns - n
        start = jnp.pad(start, ((0, behind[0]), (0, behind[1])))
    out = jax.new_ref(lax.empty(_stored_shape(m, n), out_dtype))
    width = min(tile.columns, 128 // jnp.dtype(out_dtype).itemsize)

    def finish(refs: _Arguments, block: Block, product: Any, staging: Ref) -> None:
        first = block.column_block * tile.columns
        if refs.start is None:
            values = product()
        else:
            there = refs.start.at[pl.ds(block.row, WARPGROUP_ROWS), pl.ds(first, tile.columns)]
            values = product(plgpu.load(there, layout=plgpu.Layout.WGMMA, optimized=False))

        def store_swapped(_: int, smem: Ref) -> None:
            to = refs.out.at[pl.ds(first, tile.columns), pl.ds(block.row, WARPGROUP_ROWS)]
            plgpu.copy_smem_to_gmem(smem, to, commit_group=False)

        def strip_of(strip: int) -> Array:
            return values[:, strip * width : (strip + 1) * width].astype(out_dtype)

        def store(strip: int, smem: Ref) -> None:
            # Mosaic drops the index of a dimension that is one tile wide, and with it the bounds check.
            if strip * width >= out.shape[1]:
                return
            to = refs.out.at[pl.ds(block.row, WARPGROUP_ROWS), pl.ds(first + strip * width, width)]
            plgpu.copy_smem_to_gmem(smem, to, commit_group=False)

        if swapped:
            whole = plgpu.layout_cast(values.astype(out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            store_through(staging, block.warpgroup, machine, lambda _: whole, store_swapped, 1, transposed=True)
        else:
            store_through(staging, block.warpgroup, machine, strip_of, store, tile.columns // width)

    rows, columns = (b, a) if swapped else (a, b)
    rows_depth_first = not b_transposed if swapped else a_transposed
    columns_depth_first = a_transposed if swapped else not b_transposed
    product = Product(
        name="det_gemm",
        tile=tile,
        dtype=a.dtype,
        a_transposed=rows_depth_first,
        b_transposed=not columns_depth_first,
        max_blocks=(row_blocks, column_blocks),
        blocks=lambda refs: (row_blocks, column_blocks),
        steps=lambda refs: jnp.int32(-(-depth // DEPTH)),
        load_a=lambda refs, block, k: _tile_at(refs.rows, rows_depth_first, block.row, tile.rows, k),
        load_b=lambda refs, block, k: _tile_at(
            refs.columns, columns_depth_first, block.column_block * tile.columns, tile.columns, k
        ),
        finish=finish,
        store_dtype=out_dtype,
        strip=(tile.columns, WARPGROUP_ROWS) if swapped else (WARPGROUP_ROWS, width),
    )
    multiply(product, machine, _Arguments(_readable(rows), _readable(columns), start, out))
    return jax.freeze(out)[:m, :n]
