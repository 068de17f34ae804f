"""Libraries that tests build with the nvcc of this machine; without one they are skipped."""

import pathlib

import pytest

from pallas_kernels.cuda import build

REAL = build.SOURCES


def built_library(folder: pathlib.Path, sources: pathlib.Path) -> pathlib.Path:
    """Of these sources, in a cache of its own."""
    try:
        build.find_nvcc()
    except RuntimeError as problem:
        pytest.skip(str(problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", sources)
        patch.setenv("RLK_CACHE_DIR", str(folder))
        return build.library()


@pytest.fixture(scope="session")
def shipped(tmp_path_factory):
    """The library of the sources that users build."""
    return built_library(tmp_path_factory.mktemp("shipped"), REAL)
