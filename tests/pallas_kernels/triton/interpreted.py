"""Stands in for `pallas_kernels.triton.call.launch` on a CPU: Triton's interpreter runs kernels on torch tensors."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rlk_jax import dispatch

_ONE_AT_A_TIME = threading.Lock()
"""Held while a kernel runs: the interpreter changes Triton's language then, and XLA may run two callbacks at once."""


@functools.cache
def _scalars_are_integers() -> None:
    """Make the interpreter's scalars usable as loop bounds.

    triton 3.6 takes loop bounds from arrays of one element, which NumPy 2.5 no longer converts to integers.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = and_index


def _to_torch(x: Any) -> Any:
    import torch

    x = np.array(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == jnp.bfloat16 else torch.from_numpy(x)


def _to_numpy(x: Any) -> np.ndarray:
    import torch

    return x.view(torch.int16).numpy().view(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def _nothing(spec: jax.ShapeDtypeStruct) -> Any:
    """New memory of this shape and dtype. On a GPU it may hold anything; here it holds NaN."""
    return _to_torch(np.full(spec.shape, np.nan).astype(spec.dtype))


def launch(
    kernel: Any,
    arguments: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    *,
    grid: int,
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    in_place = {out: argument for argument, out in (aliases or {}).items()}

    _scalars_are_integers()

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        given = [_to_torch(x) for x in arrays]
        new = [None if i in in_place else _nothing(spec) for i, spec in enumerate(outputs)]
        with _ONE_AT_A_TIME:
            kernel[(grid,)](*given, *new, **constants)
        return tuple(_to_numpy(given[in_place[i]] if x is None else x) for i, x in enumerate(new))

    return jax.pure_callback(run, tuple(outputs), *arguments)


@contextlib.contextmanager
def runs(op: str, *modules: ModuleType) -> Iterator[None]:
    """Make `triton` run an op on this CPU, whose kernels these modules launch. New memory holds NaN."""
    rows = [dataclasses.replace(x, obstacles=lambda facts: []) if x.name == "triton" else x for x in dispatch.TABLE[op]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.TABLE, op, tuple(rows))
        for module in modules:
            patch.setattr(module, "launch", launch)
        patch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
        yield


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Make a tile's products the same wherever its rows stand. NumPy's own depend on the place in their last bits."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, start: Any, *precision: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(start.data.dtype)
        return interpreter.TensorHandle(product + start.data, start.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield
