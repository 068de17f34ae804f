"""What only torch can get wrong about an argument; the rest is checked by `rlk_jax`, in its words."""

import functools
import math
import numbers
import sys
from collections.abc import Hashable, Mapping
from typing import Any, Literal, TypeGuard

import jax
import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

import rlk_jax
from rlk_jax.ops.linear_logp.options import HeadOptions
from torch_bridge import _exchange
from torch_bridge._programs import Options

_OPTIONAL = frozenset({"bias", "temperature", "row_indices", "out", "accumulate_into", "rewards", "advantages"})


def check_tensors(**tensors: Any) -> None:
    """Dense tensors of dtypes that JAX knows, all on one CPU or GPU."""
    home: tuple[str, torch.device] | None = None
    distributed = sys.modules.get("torch.distributed.tensor")
    for name, x in tensors.items():
        if x is None and name in _OPTIONAL:
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__module__}.{type(x).__qualname__}.")
        if distributed is not None and isinstance(x, distributed.DTensor):
            raise ValueError(f"{name} is a DTensor: pass its full_tensor(), or call this where its module is gathered.")
        if x.is_nested:
            raise ValueError(f"{name} must be a dense tensor, got a nested one.")
        if x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}.")
        if x.dtype not in _exchange.DTYPES:
            raise ValueError(f"{name} has dtype {x.dtype}, which this op cannot take.")
        if x.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} must be on a CPU or a CUDA device, got {x.device}.")
        home = home or (name, x.device)
        if x.device != home[1]:
            raise ValueError(f"{name} device {x.device} must match {home[0]} device {home[1]}.")
    if home is not None and home[1].type == "cuda" and not torch.compiler.is_compiling():
        _exchange.check_not_captured()


def check_constants(op: str, **tensors: Any) -> None:
    """Tensors that the op would not send a gradient to must not ask for one, nor bring a tangent."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and ((x.requires_grad and torch.is_grad_enabled()) or _has_tangent(x)):
            raise ValueError(f"{name} requires a gradient, which {op} does not give it: pass {name}.detach().")


def _has_tangent(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None


def temperature(x: Any) -> tuple[Tensor | None, float]:
    """As a tensor, or as a number."""
    if isinstance(x, Tensor):
        return x, 1.0
    if not isinstance(x, numbers.Real) or isinstance(x, bool):
        raise ValueError(f"temperature must be a number or a torch.Tensor, got {type(x).__name__}.")
    try:
        return None, float(x)
    except OverflowError:
        return None, math.inf


def check_static(op: str, tensors: Mapping[str, Tensor | None], **options: Hashable) -> None:
    """The static checks of `rlk_jax.<op>`: ValueErrors in its words, for the tensors as they were given. A number
    stands for a temperature that is no tensor.

    A graph of torch.compile has sizes that may change; what it is called with is checked when its custom op runs.
    """
    if torch.compiler.is_compiling():
        return
    specs = tuple([(name, None if x is None else spec(x)) for name, x in tensors.items()])
    first = next(x for x in tensors.values() if x is not None)
    # -100 and -100.0 are equal, and one is refused.
    types = tuple(map(_types, options.values()))
    given = op, first.device, specs, tuple(options.items()), types
    try:
        _check_static(*given)
    except TypeError:  # An option that is a list, say, is no key of the cache: the op has something to say of it.
        _check_static.__wrapped__(*given)


def check_options(op: str, tensors: Mapping[str, Tensor | None], options: Any, temperature: float) -> None:
    """`check_static` with the fields of a dataclass of options."""
    if not torch.compiler.is_compiling():  # torch.compile takes no vars() of a dataclass.
        check_static(op, tensors, **vars(options), temperature=temperature)


def _types(option: Any) -> Any:
    return tuple(map(_types, option)) if isinstance(option, tuple) else type(option)


def check_arguments(op: str, given: dict[str, Any]) -> None:
    """`check_static` of a custom op's arguments, by their names in `rlk_jax.<op>`; a temperature is `per_token` or a
    number.
    """
    given = {**given, "temperature": given["per_token"]} if given.get("per_token") is not None else given
    named = {name: x for name, x in given.items() if name not in ("per_token", "needs")}
    tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
    options = {name: _hashable(x) for name, x in named.items() if name not in tensors}
    check_static(op, tensors, **options)


def _hashable(option: Any) -> Hashable:
    """An option of a custom op, as JAX takes it."""
    if isinstance(option, torch.dtype):
        return _exchange.DTYPES.get(option, option)
    return tuple(option) if isinstance(option, list) else option


def check_head(tensors: dict[str, Any], scale: Any, options: HeadOptions) -> tuple[Tensor | None, float]:
    """All checks of linear_logp that look at no value; the temperature `scale` comes back as `temperature` gives it."""
    per_token, number = temperature(scale)
    tensors = {**tensors, "temperature": per_token}
    check_tensors(**tensors)
    check_constants("linear_logp", temperature=per_token)
    check_options("linear_logp", tensors, options, number)
    return per_token, number


def spec(x: Tensor) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype, as JAX names them."""
    return tuple(x.shape), _exchange.DTYPES[x.dtype]


@functools.lru_cache(maxsize=4096)
def _check_static(op: str, device: torch.device, tensors: Any, options: Options, types: tuple[Any, ...]) -> None:
    given: dict[str, Any] = dict(options)
    for name, spec in tensors:
        if spec is not None:
            given[name] = jax.ShapeDtypeStruct(*spec)
        else:
            given.setdefault(name, None)
    with jax.default_device(_exchange.jax_device(device)):
        rlk_jax.explain(op, **given)


def check_out(out: Tensor, shape: torch.Size, needs_gradient: bool) -> None:
    """Whether `logp` can write into it."""
    if out.dtype != torch.float32 or out.shape != shape:
        raise ValueError(f"out must be float32 of token_ids shape {shape}, got {out.dtype} of shape {out.shape}.")
    if needs_gradient or out.requires_grad:
        raise ValueError("out= carries no gradient: call logp under torch.no_grad(), or without out.")


def must_check(validate: bool | None, tensor: Tensor) -> bool:
    """Whether values are checked before launch: by default where that does not wait for a GPU."""
    return tensor.device.type == "cpu" if validate is None else validate


def autocast[*Tensors](*tensors: *Tensors) -> tuple[*Tensors]:
    """Under autocast, float tensors in its dtype, but for float64, as torch's own products have them; their gradients
    come back in their own dtypes.
    """
    device = next(x.device.type for x in tensors if isinstance(x, Tensor))
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if _is_autocast(x) else x for x in tensors)  # type: ignore[return-value]


def _is_autocast(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def is_transposed(x: Tensor) -> bool:
    """Whether a matrix is a view of one that XLA reads in place: DLPack has no strides that it does."""
    return not x.is_contiguous() and x.t().is_contiguous()


def in_place(weight: Tensor, layout: Literal["vd", "dv"]) -> tuple[Tensor, Literal["vd", "dv"]]:
    """The head that a transposed view is of, in the other layout."""
    if not is_transposed(weight):
        return weight, layout
    return weight.t(), "dv" if layout == "vd" else "vd"


def needs(*tensors: Tensor | None) -> list[bool]:
    """Which tensors a backward will want gradients of."""
    enabled = torch.is_grad_enabled()
    return [enabled and x is not None and x.requires_grad for x in tensors]
