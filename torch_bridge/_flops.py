"""What torch's FlopCounterMode counts for the ops: their matrix products, as it counts torch's own.

A forward is one product of 2·M·N·K operations, and the gradient of each of its two factors is one more. What a backward
computes anew is not counted, so that the counts are those of the same model without this package. The small products of
a low-rank term are not counted either.

The module that counts imports Triton, a third of the time that `import torch_bridge` would take. So the formulas wait
until somebody imports that module.
"""

import math
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[str, tuple[Callable[..., int], bool]] = {}
"""The formula of each custom op, and whether it takes shapes, not tensors."""


def register(op: str, formula: Callable[..., int], *, of_shapes: bool = True) -> None:
    """Have FlopCounterMode count the custom op `rlk_jax::<op>` by a formula of its arguments, or of their shapes."""
    _formulas[op] = formula, of_shapes
    if (counter := sys.modules.get(_COUNTER)) is not None:
        _hand_over(counter, op)


def _hand_over(counter: ModuleType, op: str) -> None:
    formula, of_shapes = _formulas[op]
    counter.register_flop_formula(getattr(torch.ops.rlk_jax, op), get_raw=not of_shapes)(formula)


class _WaitForCounter(MetaPathFinder):
    """Hands all formulas to the module that counts each time that it has run; finds no other module."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _COUNTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            for op in _formulas:
                _hand_over(module, op)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WaitForCounter())


def product_flops(rows: Sequence[int], matrix: Sequence[int], *_: Any, **__: Any) -> int:
    """The operations of a product of rows `[*lead, K]` with a matrix `[K, N]` or `[N, K]`."""
    return 2 * math.prod(rows[:-1]) * math.prod(matrix)


def gradient_flops(_: Tensor, tensors: Sequence[Tensor | None], __: Any, needs: Sequence[bool], **___: Any) -> int:
    """The operations of a backward. An op on logits has one differentiable tensor and no product, and counts as 0."""
    if len(tensors) == 1 or tensors[0] is None or tensors[1] is None:
        return 0
    return sum(needs[:2]) * product_flops(tensors[0].shape, tensors[1].shape)
