"""Tests here need a GPU; without one they are skipped, visibly."""

import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    has_gpu = jax.default_backend() == "gpu"
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; jax found none"))
