"""JAX and torch share a GPU's memory: JAX must not take 75 % of it when its backend starts."""

import os
import warnings

import jax
from jax._src import xla_bridge

_SETTING = "XLA_PYTHON_CLIENT_PREALLOCATE"
_OFF = ("0", "false", "False")


def share_gpu_memory() -> None:
    """Make JAX take memory as it needs it, unless the user has set otherwise; warn where JAX has started already."""
    if not xla_bridge.backends_are_initialized():
        os.environ.setdefault(_SETTING, "false")
        return
    preallocates = os.environ.get(_SETTING, "true") not in _OFF
    takes_all = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default") in ("default", "bfc")
    if jax.default_backend() == "gpu" and preallocates and takes_all:
        warnings.warn(
            "JAX was running on a GPU before torch_bridge was imported and holds most of its memory: import "
            f"torch_bridge before anything runs on JAX, or set {_SETTING}=false.",
            stacklevel=3,
        )
