"""jax.export of programs with kernels for Hopper: another process that loads them gets the same bits."""

import pytest

from pallas_kernels.cuda import build
from tests.gpu.hopper import needs_cuda
from tests.support import exported


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    runnable = ["mosaic"] if build.why_missing() else ["mosaic", "cuda"]
    return exported.in_another_process(exported.programs(*runnable), tmp_path_factory.mktemp("exported"))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *exported.programs("mosaic"),
        *(pytest.param(*x, marks=needs_cuda) for x in exported.programs("cuda")),
    ],
)
def test_same_bits_in_another_process(op, name, loaded):
    assert loaded[f"{op}-{name}"] == exported.calls()[op].hashes(name)
