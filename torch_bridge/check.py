"""`rlk check` on tensors: how they come and go."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from rlk_jax.checker.candidates import ArrayLibrary
from rlk_jax.checker.options import default_device


def _send(x: np.ndarray) -> Tensor:
    """On the device that JAX uses."""
    on_gpu = default_device().platform == "gpu"
    # NumPy's own bfloat16 is unknown to torch.
    found = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == jnp.bfloat16 else torch.from_numpy(x)
    return found.clone().to("cuda" if on_gpu else "cpu")


def _fetch(x: Tensor) -> np.ndarray:
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def _forward(fn: Callable[..., Any], inputs: Sequence[Tensor], places: Sequence[int]) -> tuple[list[Tensor], Any]:
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
