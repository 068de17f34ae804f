"""Lists of ids as tensors: as `allowed_ids`, and beyond 32 bits."""

import re

import numpy as np
import pytest
import torch

import rlk_jax
import torch_bridge
from tests.torch_bridge.tensors import head, randn
from torch_bridge import padded_allowed_ids

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.uint64]
IDS, OFFSETS = torch.tensor([7, 3, 9, 4]), torch.tensor([0, 2, 2, 3, 4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_vllm_gives(dtype):
    """Those of rlk_jax, in memory that ops of the bridge read in place."""
    found = padded_allowed_ids(IDS.to(dtype), OFFSETS.to(dtype))
    assert found.dtype == torch.int32 and found.is_contiguous() and found.device == IDS.device
    np.testing.assert_array_equal(found, rlk_jax.padded_allowed_ids(IDS.to(dtype).numpy(), OFFSETS.numpy()))
    hidden, weight, targets, _ = head((4,))
    targets[:] = torch.tensor([3, 0, 9, 4])
    logp = torch_bridge.linear_logp(hidden, weight, targets, allowed_ids=found, validate=False)
    assert logp.isnan().tolist() == [False, True, False, False] and logp[2] == logp[3] == 0


OUT_OF_RANGE = "ids out of range: expected [0, 2147483647], or -1 as padding, got values in"


def test_rows_without_ids():
    assert padded_allowed_ids(IDS[:0], torch.zeros(3, dtype=torch.int64)).tolist() == [[-1], [-1]]


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (IDS, torch.tensor([0, 2]), "offsets must ascend from 0 to the number of ids, 4."),
        (IDS, OFFSETS[:0], "offsets must ascend from 0 to the number of ids, 4."),
        (IDS[None], OFFSETS, "ids must be 1-D, got shape (1, 4)."),
        (IDS.bfloat16(), OFFSETS, "ids must be integers, got bfloat16."),
        (IDS, OFFSETS.bool(), "offsets must be integers, got bool."),
        (IDS + 2**32, OFFSETS, f"{OUT_OF_RANGE} [4294967299, 4294967305]."),
        (IDS - 5, OFFSETS, f"{OUT_OF_RANGE} [-2, 4]."),
        (IDS.numpy(), OFFSETS, "ids must be a torch.Tensor, got numpy.ndarray."),
        (IDS, OFFSETS.to("meta"), "offsets must be on a CPU or a CUDA device, got meta."),
    ],
)
def test_messages_of_padded_allowed_ids(ids, offsets, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        padded_allowed_ids(ids, offsets)


@pytest.mark.parametrize("name", ["allowed_ids", "teacher_ids"])
def test_a_list_beyond_int32_does_not_wrap(name):
    """Its row is NaN, and those beside it are not."""
    hidden, weight, ids, _ = head((3,))
    lists = torch.stack([ids, (ids + 1) % 70], dim=1)
    lists[0, 1] += 2**32

    def call(validate):
        if name == "allowed_ids":
            return torch_bridge.linear_logp(hidden, weight, ids, allowed_ids=lists, validate=validate)
        logps = randn(3, 2).log_softmax(dim=1) - 1
        return torch_bridge.linear_kl(hidden, weight, teacher_ids=lists, teacher_logps=logps, validate=validate)

    assert call(False).isnan().tolist() == [True, False, False]
    with pytest.raises(ValueError, match=f"{name} out of range"):
        call(True)
