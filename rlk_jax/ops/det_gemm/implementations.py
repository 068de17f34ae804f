"""The rows of det_gemm's dispatch table. Dispatch never chooses one that promises no bits."""

import jax
import jax.numpy as jnp

from rlk_jax.core.devices import hopper_obstacles, is_hopper, with_cuda_library
from rlk_jax.core.dispatch import Implementation, TypicalCall
from rlk_jax.core.gemm import fixed_order_gemm, plain_gemm
from rlk_jax.ops.det_gemm import hopper

ROWS = (
    Implementation("mosaic", hopper.mosaic(), hopper_obstacles, meant_for=is_hopper, promises_bits=True),
    Implementation(
        "cuda",
        hopper.cuda(),
        with_cuda_library(hopper_obstacles),
        by_name_only="mosaic is as fast and needs no compiler",
        promises_bits=True,
    ),
    Implementation("deterministic", fixed_order_gemm, promises_bits=True),
    Implementation("reference", plain_gemm, by_name_only="promises no bits: the gold of the tests"),
)
"""The implementations of det_gemm, fastest first."""

TYPICAL = TypicalCall("bfloat16, K = 4096, N = 4096", (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 2)
