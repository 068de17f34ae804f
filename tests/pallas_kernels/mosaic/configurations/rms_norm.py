"""RMSNorm's kernel."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.rms_norm import rms_norm
from tests.pallas_kernels.mosaic.configurations import MACHINE, Configuration


def configurations() -> Iterator[Configuration]:
    """One row and several per block; one term and two; rows that are no multiple of 128, and the longest ones."""
    shape = jax.ShapeDtypeStruct
    for rows, columns, terms, dtype in (
        (1, 576, 1, jnp.bfloat16),
        (5000, 576, 2, jnp.bfloat16),
        (5000, 2048, 2, jnp.float32),
        (5000, 8192, 2, jnp.float32),
    ):

        def run(scale, terms=terms, dtype=dtype, **arrays):
            return rms_norm(tuple(arrays.values())[:terms], scale, 1e-6, dtype, MACHINE)

        arrays = {"x": shape((rows, columns), dtype), "added": shape((rows, columns), jnp.bfloat16)}
        options = {
            "kernel": "rms_norm",
            "rows": rows,
            "columns": columns,
            "terms": terms,
            "dtype": jnp.dtype(dtype).name,
        }
        yield Configuration(options, run, {**arrays, "scale": shape((columns,), jnp.float32)})
