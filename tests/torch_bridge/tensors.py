"""What the tests of torch_bridge share: problems as tensors and as the same arrays, and raw bits of both."""

from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from tests.support import helpers
from torch_bridge import _exchange

JAX_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def array(x: Tensor | None) -> Any:
    """A copy of the tensor as a JAX array."""
    return None if x is None else jax.numpy.array(_exchange.to_jax(x))


def assert_same_bits(tensors: Any, arrays: Any) -> None:
    """Tensors and arrays, in order; None stands beside None."""
    for tensor, expected in zip(tensors, arrays, strict=True):
        assert (tensor is None) == (expected is None)
        if tensor is not None:
            assert JAX_DTYPES[tensor.dtype] == expected.dtype and tensor.shape == expected.shape
            np.testing.assert_array_equal(helpers.bits(array(tensor)), helpers.bits(expected))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype and bits."""
    return a.dtype == b.dtype and np.array_equal(helpers.bits(array(a)), helpers.bits(array(b)))


def assert_close(tensor: Tensor, gold: Tensor, op_class: str, kind: str) -> None:
    """Within the contract's tolerance for the tensor's dtype, or what dtype the problem was of."""
    dtype = JAX_DTYPES[tensor.dtype]
    found, expected = (x.detach().double().cpu().numpy() for x in (tensor, gold))
    helpers.assert_within_contract(found, expected, op_class, dtype, kind)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """The same numbers on torch's default device, whichever that is."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, device="cpu") * scale
    return drawn.to(torch.get_default_device(), dtype)


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(high, shape, generator=generator, device="cpu").to(torch.get_default_device())


def head(lead: tuple[int, ...], dim: int = 16, vocab: int = 70, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """hidden, weight, ids and bias, of which the floats require gradients."""
    hidden, weight = randn(*lead, dim, dtype=dtype), randn(vocab, dim, dtype=dtype, seed=1, scale=dim**-0.5)
    bias = randn(vocab, dtype=dtype, seed=2)
    return [hidden.requires_grad_(), weight.requires_grad_(), randint(vocab, *lead), bias.requires_grad_()]


def policies(lead: tuple[int, ...], vocab: int = 70) -> list[Tensor]:
    """policy (requires a gradient), ref, ids, mask, old."""
    policy = randn(*lead, vocab, scale=2.0)
    mask = randn(*lead, seed=4) < 0.5
    old = randn(*lead, seed=5) - 4
    return [policy.requires_grad_(), policy.detach() + randn(*lead, vocab, seed=3), randint(vocab, *lead), mask, old]
