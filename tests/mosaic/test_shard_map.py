"""The Mosaic implementation inside shard_map, lowered for an H200 on a machine without one."""

import pytest

from rlk_jax import dispatch
from tests import shards


@pytest.mark.parametrize(("tokens", "reduction"), [(0, "sum"), (300, "sum"), (300, "canonical")])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("vocab", [16384, 16000])
def test_lowers_in_several_slices(vocab, check_vma, reduction, tokens, monkeypatch):
    """Of whole chunks the slices are read in place, else copied; the types of what kernels write have to agree."""
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "H200", "9.0"))
    program = shards.lowered("mosaic", vocab, check_vma=check_vma, reduction=reduction, tokens=tokens)
    assert ("mosaic_gpu" in program) == (tokens > 0)
