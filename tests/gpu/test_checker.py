"""`rlk check` on a GPU checks every implementation and the bridge against the contract of its architecture."""

import re

import pytest

import torch_bridge
from rlk_jax.checker.specs import SPECS
from rlk_jax.cli import main

LINE = (
    r"  case=\S+ output=0 logp relative norm \S+ of at most \S+ shape=\(1, 1\) dtype=float32 max_abs=\S+ .* "
    r"tol=\(atol=\S+, rtol=\S+\) passed=True"
)


def test_one_line_for_mosaic(capsys):
    options = "--device cuda --dtype bf16 --arch-key sm90 --batch 1 --seq 1 --vocab 4096"
    assert main(["check", "--op", "logp", "--candidate", "mosaic", *options.split()]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "suite=logp passed=True pass_rate=1.0000 (1 of 1 candidates)"
    assert said[1].startswith("candidate=mosaic backend=mosaic passed=True") and re.fullmatch(LINE, said[2])


@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op in SPECS for dtype in SPECS[op].dtypes])
def test_all_that_runs_here(op, dtype, capsys):
    options = ["--op", op, "--dtype", dtype, "--check-grad", "--check-invariance"]
    status, said = main(["check", "--all", *options]), capsys.readouterr().out
    assert status == 0, said
    assert ("bridge" in said) == hasattr(torch_bridge, SPECS[op].function)
