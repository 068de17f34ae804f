"""Checks of what can be wrong about a torch tensor only; `rlk_jax` checks the rest of an argument, in its words."""

import functools
import math
import numbers
import sys
from collections.abc import Hashable, Mapping
from typing import Any, Literal, NamedTuple, TypeGuard

import jax
import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

import rlk_jax
from rlk_jax.ops.linear_logp.options import HeadOptions
from torch_bridge import _exchange
from torch_bridge._programs import Options

_OPTIONAL = frozenset(
    (
        *("bias", "temperature", "allowed_ids", "allowed_mask", "row_indices", "out", "accumulate_into"),
        *("rewards", "advantages", "token_weights"),
    )
)


def check_tensors(**tensors: Any) -> None:
    """Raise unless all are dense tensors of dtypes that JAX knows, on one CPU or GPU."""
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
    """Raise where a tensor that gets no gradient from the op requires one, or carries a forward-mode tangent."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and ((x.requires_grad and torch.is_grad_enabled()) or _has_tangent(x)):
            raise ValueError(f"{name} requires a gradient, which {op} does not give it: pass {name}.detach().")


def _has_tangent(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None


def temperature(x: Any, whose: str = "") -> tuple[Tensor | None, float]:
    """The temperature as `(tensor, 1.0)` or as `(None, number)`."""
    if isinstance(x, Tensor):
        return x, 1.0
    if not isinstance(x, numbers.Real) or isinstance(x, bool):
        raise ValueError(f"{whose}temperature must be a number or a torch.Tensor, got {type(x).__name__}.")
    try:
        return None, float(x)
    except OverflowError:
        return None, math.inf


def check_static(op: str, tensors: Mapping[str, Tensor | None], **options: Hashable) -> None:
    """Run the static checks of `rlk_jax.<op>`, which raise ValueErrors in its words, on the tensors as they were given.

    A temperature that is a number is one of the options. Under torch.compile nothing is checked: sizes in a graph may
    change, and the custom op checks its arguments when it runs.
    """
    if torch.compiler.is_compiling():
        return
    specs = tuple([(name, None if x is None else spec(x)) for name, x in tensors.items()])
    first = next(x for x in tensors.values() if x is not None)
    # Types belong to the key of the cache: -100 and -100.0 are equal, and only -100 is accepted.
    types = tuple(map(_types, options.values()))
    key = op, first.device, specs, tuple(options.items()), types
    try:
        _check_static(*key)
    except TypeError:  # An option that cannot be hashed, as a list, is left to the op's own checks.
        _check_static.__wrapped__(*key)


def check_options(op: str, tensors: Mapping[str, Tensor | None], options: Any, **scalars: float) -> None:
    """`check_static` with the fields of a dataclass of options, and options that are numbers."""
    if not torch.compiler.is_compiling():  # torch.compile takes no vars() of a dataclass.
        check_static(op, tensors, **vars(options), **scalars)


def _types(option: Any) -> Any:
    return tuple(map(_types, option)) if isinstance(option, tuple) else type(option)


def check_arguments(op: str, arguments: dict[str, Any]) -> None:
    """Run `check_static` on a custom op's arguments, by their names in `rlk_jax.<op>`.

    The argument `per_token` is the temperature where it is a tensor; otherwise the number `temperature` is.
    """
    per_token = arguments.get("per_token")
    arguments = arguments if per_token is None else {**arguments, "temperature": per_token}
    named = {name: x for name, x in arguments.items() if name not in ("per_token", "needs")}
    tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
    options = {name: _hashable(x) for name, x in named.items() if name not in tensors}
    check_static(op, tensors, **options)


def _hashable(option: Any) -> Hashable:
    """An option of a custom op in the type that the op of `rlk_jax` takes."""
    if isinstance(option, torch.dtype):
        return _exchange.DTYPES.get(option, option)
    return tuple(option) if isinstance(option, list) else option


class HeadArguments(NamedTuple):
    """The arguments of `linear_logp` that are no options of a program, and not about a rank."""

    hidden: Tensor
    lm_head_weight: Tensor
    target_ids: Tensor
    bias: Tensor | None
    temperature: float | Tensor
    low_rank: tuple[Tensor | float | None, ...] | None
    allowed_ids: Tensor | None
    allowed_mask: Tensor | None


class LowRankTerm(NamedTuple):
    """The parts of `low_rank`; None without one."""

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    inputs: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors that are given, by the names that checks know them by."""
        if self.a is None and self.b is None:
            return {}
        given = {"low_rank_a": self.a, "low_rank_b": self.b}
        return given if self.inputs is None else {**given, "low_rank_inputs": self.inputs}


def low_rank_term(low_rank: Any) -> LowRankTerm:
    """`low_rank` as a user gives it."""
    if low_rank is None:
        return LowRankTerm()
    if not isinstance(low_rank, tuple) or not 2 <= len(low_rank) <= 4:
        raise ValueError(f"low_rank must be (A, B, scale) or (A, B, scale, inputs), got {type(low_rank).__name__}.")
    term = LowRankTerm(*low_rank)
    if not isinstance(term.scale, numbers.Real):
        raise ValueError(f"low_rank's scale must be a number, got {type(term.scale).__name__}.")
    return term._replace(scale=float(term.scale))


def check_head(
    tensors: dict[str, Any], scale: Any, options: HeadOptions, low_rank_scale: float = 1.0
) -> tuple[Tensor | None, float]:
    """Run all checks of linear_logp that read no values, and return `temperature(scale)`."""
    per_token, number = temperature(scale)
    tensors = {**tensors, "temperature": per_token}
    check_tensors(**tensors)
    check_constants("linear_logp", temperature=per_token)
    check_options("linear_logp", tensors, options, temperature=number, low_rank_scale=low_rank_scale)
    return per_token, number


def spec(x: Tensor) -> tuple[tuple[int, ...], np.dtype]:
    """A tensor's shape, and its dtype as JAX names it."""
    return tuple(x.shape), _exchange.DTYPES[x.dtype]


@functools.lru_cache(maxsize=4096)
def _check_static(op: str, device: torch.device, tensors: Any, options: Options, types: tuple[Any, ...]) -> None:
    arguments: dict[str, Any] = dict(options)
    for name, spec in tensors:
        if spec is not None:
            arguments[name] = jax.ShapeDtypeStruct(*spec)
        else:
            arguments.setdefault(name, None)
    with jax.default_device(_exchange.jax_device(device)):
        op, arguments = _of_smoothed_labels(op, _with_low_rank(arguments))
        rlk_jax.explain(op, **arguments)


def _of_smoothed_labels(op: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The op of `rlk_jax` that has these arguments: `linear_cross_entropy` smooths labels, and returns a loss alone."""
    smoothing = arguments.pop("label_smoothing", 0.0)
    if smoothing == 0:
        return op, arguments
    values = ("return_lse", "return_entropy", "return_top_k", "return_target_rank")
    others = {name: x for name, x in arguments.items() if name not in values}
    return "linear_cross_entropy", {**others, "label_smoothing": smoothing}


def _with_low_rank(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `rlk_jax.<op>`, whose low-rank term is one of them; a custom op takes its parts."""
    parts = {
        name: arguments.pop(name, None) for name in ("low_rank_a", "low_rank_b", "low_rank_scale", "low_rank_inputs")
    }
    return arguments if parts["low_rank_a"] is None else {**arguments, "low_rank": tuple(parts.values())}


def check_out(out: Tensor, shape: torch.Size, needs_gradient: bool) -> None:
    """Raise unless `logp` can write into `out`."""
    if out.dtype != torch.float32 or out.shape != shape:
        raise ValueError(f"out must be float32 of token_ids shape {shape}, got {out.dtype} of shape {out.shape}.")
    if needs_gradient or out.requires_grad:
        raise ValueError("out= carries no gradient: call logp under torch.no_grad(), or without out.")


def should_validate(validate: bool | None, tensor: Tensor) -> bool:
    """Whether values are checked before launch. By default they are on a CPU, where no check waits for a GPU."""
    return tensor.device.type == "cpu" if validate is None else validate


def autocast[*Tensors](*tensors: *Tensors) -> tuple[*Tensors]:
    """Float tensors other than float64 in autocast's dtype where it is enabled, as torch's own products take them.

    Torch differentiates the casts, so gradients come in the dtypes of the tensors that were given.
    """
    device = next(x.device.type for x in tensors if isinstance(x, Tensor))
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if _is_autocast(x) else x for x in tensors)  # type: ignore[return-value]


def _is_autocast(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def is_transposed(x: Tensor) -> bool:
    """Whether a matrix is a transposed view of one that XLA can read in place; XLA reads no strides of DLPack."""
    return not x.is_contiguous() and x.t().is_contiguous()


def without_transpose(weight: Tensor, layout: Literal["vd", "dv"]) -> tuple[Tensor, Literal["vd", "dv"]]:
    """The head's weight and layout. A transposed view becomes the contiguous weight below it, in the other layout."""
    if not is_transposed(weight):
        return weight, layout
    return weight.t(), "dv" if layout == "vd" else "vd"


def needs(*tensors: Tensor | None) -> list[bool]:
    """Which tensors need a gradient in the backward."""
    enabled = torch.is_grad_enabled()
    return [enabled and x is not None and x.requires_grad for x in tensors]
