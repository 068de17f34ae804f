"""Libraries that tests build with this machine's nvcc. Without an nvcc these tests are skipped."""

import pathlib

import pytest

from pallas_kernels.cuda import build

REAL = build.SOURCES


def built_library(folder: pathlib.Path, sources: pathlib.Path) -> pathlib.Path:
    """The library of the sources in a folder, built in a cache of its own below `folder`."""
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
