"""RMSNorm: a warpgroup normalises one row after the other, so that a row's bits depend on nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.rms_norm import block_rows, row_tile
from pallas_kernels.hopper.tiles import THREADS, Machine

Array = jax.Array
Ref = Any


def rms_norm(terms: tuple[Array, ...], scale: Array, epsilon: float, dtype: Any, machine: Machine) -> tuple[Array, ...]:
    """x / √(mean(x²) + epsilon) · scale in a dtype, where x is the sum of one or two terms `[N, D]`; and x, where there
    are two.

    pallas_kernels/hopper/rms_norm.py says which rows it takes.
    """
    count, columns = terms[0].shape
    dtypes = (jnp.dtype(dtype), jnp.result_type(*terms))[: len(terms)]
    tile = row_tile(columns)
    own_pieces = columns // tile.columns
    row_bytes = tile.size * sum(x.itemsize for x in (*dtypes, *(term.dtype for term in terms)))
    rows = block_rows(count, row_bytes, machine.sm_count)
    width = next(width for width in (8, 4, 2, 1) if tile.size % (THREADS * width) == 0)
    layout = plgpu.Layout.WG_STRIDED((tile.pieces, tile.columns), vec_size=width)

    def values(smem: Ref) -> Array:
        return plgpu.load(smem, layout=layout, optimized=False).astype(jnp.float32)

    def body(*gmem: Ref, terms_smem: list[Ref], results_smem: list[Ref], scale_smem: Ref, loaded: Ref) -> None:
        block = lax.axis_index("blocks")
        terms_gmem, scale_gmem, results_gmem = gmem[: len(terms)], gmem[len(terms)], gmem[len(terms) + 1 :]
        # Pieces behind a row and rows behind the last one: where a start is traced, TMA reads zeros there. Stores must
        # end with the row: one that goes on behind it is no tensor copy for Mosaic, and writes over the next row.
        pieces = pl.ds(block * 0, tile.pieces)
        here = pl.ds(block * rows, rows), pieces
        for from_gmem, to_smem in zip(terms_gmem, terms_smem, strict=True):
            plgpu.copy_gmem_to_smem(from_gmem.at[here], to_smem, loaded)
        plgpu.copy_gmem_to_smem(scale_gmem.at[pieces], scale_smem, loaded)
        plgpu.barrier_wait(loaded)
        scales = values(scale_smem)
        for row in range(rows):
            x = values(terms_smem[0].at[row])
            if len(terms) == 2:
                x = (x + values(terms_smem[1].at[row])).astype(dtypes[1])
                results_smem[1].at[row][...] = x
                x = x.astype(jnp.float32)
            inverse = lax.rsqrt((x * x).sum() * (1 / columns) + epsilon)
            results_smem[0].at[row][...] = (x * inverse * scales).astype(dtypes[0])
        plgpu.commit_smem()
        for row in range(rows):

            @pl.when(block * rows + row < count)
            def _(row: int = row) -> None:
                for from_smem, to_gmem in zip(results_smem, results_gmem, strict=True):
                    plgpu.copy_smem_to_gmem(from_smem.at[row, pl.ds(0, own_pieces)], to_gmem.at[block * rows + row])

        plgpu.wait_smem_to_gmem(0)

    def rows_of(dtype: Any) -> Any:
        return plgpu.SMEM((rows, tile.pieces, tile.columns), dtype)

    in_pieces = (own_pieces, tile.columns)
    results = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((count, *in_pieces), x) for x in dtypes),
        scratch_types={
            "terms_smem": [rows_of(x.dtype) for x in terms],
            "results_smem": [rows_of(x) for x in dtypes],
            "scale_smem": plgpu.SMEM((tile.pieces, tile.columns), scale.dtype),
            "loaded": plgpu.Barrier(num_arrivals=len(terms) + 1),
        },
        grid=(-(-count // rows),),
        grid_names=("blocks",),
        kernel_name="rms_norm",
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*(x.reshape(count, *in_pieces) for x in terms), scale.reshape(in_pieces))
    return tuple(x.reshape(count, columns) for x in results)
