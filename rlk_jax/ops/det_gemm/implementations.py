"""The rows of det_gemm's dispatch table. Dispatch never chooses one that promises no bits."""

import jax
import jax.numpy as jnp

from rlk_jax.core.devices import cuda_library_obstacles, hopper_obstacles, is_hopper
from rlk_jax.core.dispatch import CallFacts, Implementation, TypicalCall
from rlk_jax.ops.det_gemm import hopper
from rlk_jax.ops.det_gemm.deterministic import deterministic
from rlk_jax.ops.det_gemm.reference import reference


def _cuda_obstacles(facts: CallFacts) -> list[str]:
    """Why the CUDA kernels cannot run. A compiler, which takes long to find, is looked for only where all else fits."""
    return hopper_obstacles(facts) or cuda_library_obstacles()


ROWS = (
    Implementation("mosaic", hopper.mosaic(), hopper_obstacles, meant_for=is_hopper, promises_bits=True),
    Implementation(
        "cuda",
        hopper.cuda(),
        _cuda_obstacles,
        by_name_only="mosaic is as fast and needs no compiler",
        promises_bits=True,
    ),
    Implementation("deterministic", deterministic, promises_bits=True),
    Implementation("reference", reference, by_name_only="promises no bits: the gold of the tests"),
)
"""The implementations of det_gemm, fastest first."""

TYPICAL = TypicalCall("bfloat16, K = 4096, N = 4096", (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 2)
