"""Tests here need a GPU; without one they are skipped, visibly."""

import jax
import pytest

from pallas_kernels.cuda import build
from pallas_kernels.triton import call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    has_gpu = jax.default_backend() == "gpu"
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; jax found none"))


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> str:
    """The implementation of a test that is given it indirectly: Triton's need jax-triton, and CUDA's nvcc."""
    needs = {"triton": call.why_missing, "cuda": build.why_missing}.get(request.param)
    if needs and (missing := needs()):
        pytest.skip(missing)
    return request.param
