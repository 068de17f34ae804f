"""Programs that are compiled quickly, for tests that look neither at how fast they run nor at bits."""

import contextlib
from collections.abc import Iterator

import jax
import pytest


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """Programs, also those of processes that are started meanwhile, are hardly optimized, which halves the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", False)
