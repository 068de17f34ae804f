"""Libraries that tests build with this machine's nvcc. Without an nvcc these tests are skipped."""

import pathlib
from collections.abc import Sequence

import pytest

from pallas_kernels.cuda import build

REAL = build.SOURCES
AS_SHIPPED = ("dlogits.cu", "rows.cu")
"""The sources that the quick library has machine code of: a product with an epilogue, and kernels without products."""
QUICK_FLAGS = {"-O3": "-O0", "-gencode=arch=compute_90a,code=sm_90a": "-gencode=arch=compute_90a,code=compute_90a"}


def built_library(folder: pathlib.Path, sources: pathlib.Path) -> pathlib.Path:
    """The library of the sources in a folder, built in a cache of its own below `folder`."""
    try:
        build.find_nvcc()
    except RuntimeError as problem:
        pytest.skip(str(problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", sources)
        patch.setenv("RLK_CACHE", str(folder))
        return build.library()


@pytest.fixture(scope="session")
def quick(tmp_path_factory):
    """The library of the sources that users build, but most of its device code is not optimised and stays PTX.

    It stands in the folder of the shipped library.
    """
    run = build._run

    def run_quickly(command: Sequence[str], makes: str) -> str:
        if makes.endswith(".cu") and makes not in AS_SHIPPED:
            # The source of the handlers has no device code, and a C++ compiler takes half the time.
            without_kernels = ("-x", "c++") if makes == "ffi.cu" else ()
            command = (*(QUICK_FLAGS.get(x, x) for x in command), "-Xcicc", "-O0", *without_kernels)
        return run(command, makes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_run", run_quickly)
        return built_library(tmp_path_factory.mktemp("quick"), REAL)


@pytest.fixture(scope="session")
def shipped(tmp_path_factory):
    """The library of the sources that users build."""
    return built_library(tmp_path_factory.mktemp("shipped"), REAL)
