"""What XLA makes of calls of the CUDA implementation for an H200, compiled on a machine without one."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels.cuda import build


@pytest.fixture(scope="module")
def programs(quick, tmp_path_factory):
    if "RLK_SM90_PLUGINS" not in os.environ:
        pytest.skip("needs jax's CUDA plugins, whose folder RLK_SM90_PLUGINS names")
    folder = tmp_path_factory.mktemp("dump")
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.cuda.h200", folder],
        env=os.environ
        | {"RLK_CACHE": str(quick.parent.parent), "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


RANKING = {"rlk_products", "rlk_statistics_of_products", "rlk_add_largest"}
HEAD = set(build.TARGETS) - RANKING - {"rlk_gemm"}
DLOGITS = {"rlk_coefficients", "rlk_dlogits", "rlk_dlogits_from_kept_exponentials"}
SUMS = HEAD - DLOGITS - {"rlk_statistics"}
LIST = {"rlk_products", "rlk_statistics", "rlk_statistics_of_products", "rlk_coefficients", "rlk_dlogits"}


@pytest.mark.parametrize(
    ("program", "kernels"),
    [
        ("kept", HEAD - {"rlk_dlogits"}),
        ("masked", HEAD - {"rlk_dlogits"}),
        ("recomputed", HEAD - {"rlk_dlogits_from_kept_exponentials"}),
        ("smoothed", HEAD - {"rlk_dlogits"}),
        ("ranked", RANKING | {"rlk_fold_chunks", "rlk_fold_groups"}),
        ("low_rank", (HEAD | {"rlk_gemm"}) - {"rlk_dlogits_from_kept_exponentials"}),
        ("divergence", (SUMS - {"rlk_column_sums"}) | {"rlk_products", "rlk_statistics"}),
        ("divergence_from_a_list", (SUMS - {"rlk_column_sums"}) | LIST),
        ("products", {"rlk_gemm"}),
    ],
)
def test_programs_are_our_kernels_alone_in_one_cuda_graph(program, kernels, programs):
    found = programs[program]
    assert set(found["calls"]) - {"AllocateBuffer"} == kernels
    assert found["thunks"] == ["kCommandBuffer"]
    assert found["exports"]
