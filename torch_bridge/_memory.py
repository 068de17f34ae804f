"""JAX and torch share a GPU's memory: JAX must not take 75 % of it when its backend starts."""

import os
import warnings

import jax
from jax._src import xla_bridge

from rlk_jax.core import gpu_memory


def share_gpu_memory() -> None:
    """Make JAX take memory as it needs it, unless the user has set otherwise; warn where JAX has started already."""
    if not xla_bridge.backends_are_initialized():
        os.environ.setdefault(gpu_memory.PREALLOCATE, "false")
        return
    if jax.default_backend() == "gpu" and gpu_memory.is_taken_at_start():
        warnings.warn(
            "JAX was running on a GPU before torch_bridge was imported and holds most of its memory: import "
            f"torch_bridge before anything runs on JAX, or set {gpu_memory.PREALLOCATE}=false.",
            stacklevel=3,
        )
