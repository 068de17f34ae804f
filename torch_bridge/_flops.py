"""What torch's FlopCounterMode counts for the ops: their matrix products, as it counts torch's own.

A forward is one product of 2·M·N·K operations, and the gradient of each of its two factors is one more. What a backward
computes anew is not counted, so that the counts are those of the same model without this package. The small products of
a low-rank term are not counted either.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter


def register(op: str, formula: Callable[..., int], *, of_shapes: bool = True) -> None:
    """Have FlopCounterMode count the custom op `rlk_jax::<op>` by a formula of its arguments, or of their shapes."""
    flop_counter.register_flop_formula(getattr(torch.ops.rlk_jax, op), get_raw=not of_shapes)(formula)


def product_flops(rows: Sequence[int], matrix: Sequence[int], *_: Any, **__: Any) -> int:
    """The operations of a product of rows `[*lead, K]` with a matrix `[K, N]` or `[N, K]`."""
    return 2 * math.prod(rows[:-1]) * math.prod(matrix)


def gradient_flops(_: Tensor, tensors: Sequence[Tensor | None], __: Any, needs: Sequence[bool], **___: Any) -> int:
    """The operations of a backward. An op on logits has one differentiable tensor and no product, and counts as 0."""
    if len(tensors) == 1 or tensors[0] is None or tensors[1] is None:
        return 0
    return sum(needs[:2]) * product_flops(tensors[0].shape, tensors[1].shape)
