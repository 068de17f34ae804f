"""`rlk check` on torch tensors: how a candidate of PyTorch gets its arguments and gives its results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from rlk_jax.checker.candidates import ArrayLibrary
from rlk_jax.checker.options import default_device


def _send(x: np.ndarray) -> Tensor:
    """A copy of `x` as a tensor on the device that JAX uses."""
    on_gpu = default_device().platform == "gpu"
    # torch cannot read NumPy arrays of ml_dtypes' bfloat16, so the bits travel as int16.
    found = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == jnp.bfloat16 else torch.from_numpy(x)
    return found.clone().to("cuda" if on_gpu else "cpu")


def _fetch(x: Tensor) -> np.ndarray:
    """The values of a tensor on the host."""
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def _forward(fn: Callable[..., Any], inputs: Sequence[Tensor], places: Sequence[int]) -> tuple[list[Tensor], Any]:
    """The outputs of `fn`, and a function that takes their upstream gradients to those of the inputs at `places`."""
    differentiated = [inputs[place].requires_grad_() for place in places]
    with torch.set_grad_enabled(bool(places)):
        found = fn(*inputs)
    outputs = [found] if isinstance(found, Tensor) else list(found)

    def gradients(upstream: Sequence[Tensor]) -> Sequence[Tensor | None]:
        pairs = [(x, g) for x, g in zip(outputs, upstream, strict=True) if x.requires_grad]
        if not pairs:
            return [None] * len(places)
        return torch.autograd.grad([x for x, _ in pairs], differentiated, [g for _, g in pairs], allow_unused=True)

    return outputs, gradients


TORCH = ArrayLibrary(_send, _fetch, _forward)
"""Candidates that take and give torch tensors."""
