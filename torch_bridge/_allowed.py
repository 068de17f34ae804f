"""padded_allowed_ids for tensors: the lists of ids that samplers give, as `allowed_ids`."""

import jax
import torch
from torch import Tensor

from rlk_jax.core.allowed import checked_lists, padded_lists
from torch_bridge import _inputs


def padded_allowed_ids(ids: Tensor, offsets: Tensor) -> Tensor:
    """The `allowed_ids` of N rows that stand one behind the other, as vLLM gives them: row r has ids[offsets[r] :
    offsets[r + 1]]; `rlk_jax.padded_allowed_ids` for tensors.

    Args:
      ids: `[total]`, any integer dtype.
      offsets: `[N + 1]`, any integer dtype, on the device of ids; they ascend from 0 to the number of ids.

    Returns:
      int32 `[N, K]` on the device of ids, with −1 behind each row's ids, where K is the length of the longest row, and
      at least 1. Lists of any K have few programs: the ops pad them to one of a few widths.

    Raises:
      ValueError: for every argument that does not fit, in rlk_jax's words; for ids below −1, which is padding, and
        for those beyond int32.

    K depends on the values, which are read on the host: of CUDA tensors, this waits for the device.
    """
    _inputs.check_tensors(ids=ids, offsets=offsets)
    checked_lists(*(jax.ShapeDtypeStruct(*_inputs.spec(x)) for x in (ids, offsets)))
    return torch.from_numpy(padded_lists(ids.cpu().numpy(), offsets.cpu().numpy())).to(ids.device)
