"""RMSNorm: a warpgroup normalises one row, so that the row's bits depend on nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import Machine

Array = jax.Array
Ref = Any
_THREADS, _CHUNK = 128, 128
"""Threads of a warpgroup, and columns that TMA copies at once."""


def rms_norm(x: Array, scale: Array, epsilon: float, machine: Machine) -> Array:
    """x / √(mean(x²) + epsilon) · scale for rows `[N, D]` and float32 scale `[D]`, in x's dtype.

    pallas_kernels/hopper/rms_norm.py says which rows it takes.
    """
    rows, columns = x.shape
    padded = -(-columns // _CHUNK) * _CHUNK
    width = next(width for width in (8, 4, 2, 1) if padded % (_THREADS * width) == 0)
    layout = plgpu.Layout.WG_STRIDED((padded,), vec_size=width)

    def body(x_gmem: Ref, scale_gmem: Ref, out_gmem: Ref, row_smem: Ref, loaded: Ref) -> None:
        row = lax.axis_index("rows")
        # A start that is traced may lie so near the end that the chunk goes on behind it: TMA reads zeros there, and
        # writes nothing.
        chunks = [(pl.ds(row * 0 + x, _CHUNK), pl.ds(x, _CHUNK)) for x in range(0, padded, _CHUNK)]
        for in_gmem, in_smem in chunks:
            plgpu.copy_gmem_to_smem(x_gmem.at[row, in_gmem], row_smem.at[in_smem], loaded)
        scales = plgpu.load(scale_gmem, layout=layout, optimized=False)
        plgpu.barrier_wait(loaded)
        wide = plgpu.load(row_smem, layout=layout, optimized=False).astype(jnp.float32)
        inverse = lax.rsqrt((wide * wide).sum() * (1 / columns) + epsilon)
        row_smem[...] = (wide * inverse * scales).astype(x.dtype)
        plgpu.commit_smem()
        for in_gmem, in_smem in chunks:
            plgpu.copy_smem_to_gmem(row_smem.at[in_smem], out_gmem.at[row, in_gmem])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM((padded,), x.dtype), plgpu.Barrier(num_arrivals=padded // _CHUNK)],
        grid=(rows,),
        grid_names=("rows",),
        kernel_name="rms_norm",
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x, jnp.pad(scale, (0, padded - columns)))
