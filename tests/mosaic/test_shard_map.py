"""The Mosaic implementation inside shard_map, lowered for an H200 on a machine without one."""

import pytest

from rlk_jax import dispatch
from tests import shards


@pytest.fixture
def for_h200(monkeypatch):
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "H200", "9.0"))


@pytest.mark.parametrize(("tokens", "reduction"), [(0, "sum"), (300, "sum"), (300, "canonical")])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("vocab", [16384, 16000])
def test_lowers_in_several_slices(vocab, check_vma, reduction, tokens, for_h200):
    """Of whole chunks the slices are read in place, else copied; the types of what kernels write have to agree."""
    program = shards.lowered("mosaic", vocab, check_vma=check_vma, reduction=reduction, tokens=tokens)
    assert ("mosaic_gpu" in program) == (tokens > 0)


@pytest.mark.parametrize(("changes", "keeps"), [({}, True), ({"return_entropy": True}, False)])
def test_ranks_keep_exponentials(changes, keeps, for_h200):
    """As many as the budget holds; the gradient of an entropy wants none."""
    options = {"return_entropy": False, "memory_budget": 2**28} | changes
    program = shards.lowered("mosaic", 16384, check_vma=True, reduction="sum", tokens=300, **options)
    assert ("linear_logp_from_powers" in program) == keeps
