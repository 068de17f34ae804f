"""Checks that every op makes alike, each with its message.

The docstring of a check says what must hold. Where it does not, the check raises ValueError before anything runs.
"""

import functools
import numbers
from collections.abc import Collection
from typing import Any, Protocol, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax.core.gemm import WeightLayout
from rlk_jax.core.mesh import explicit_spec

FLOAT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
INT32 = np.iinfo(np.int32)
SMALLEST = float(np.finfo(np.float32).tiny)
"""The smallest positive number that survives in float32 everywhere; smaller ones may count as 0."""
BAD_TEMPERATURE = "temperature must be positive and finite, got values in [{low}, {high}]"


class NamedArrays(Protocol):
    """The arrays of one call by the names of its arguments: a NamedTuple of arrays or None."""

    @property
    def _fields(self) -> tuple[str, ...]: ...

    def _asdict(self) -> dict[str, Any]: ...


def require(condition: Any, message: str) -> None:
    """Raises ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def type_name(x: Any) -> str:
    """The full name of a value's type, for messages."""
    kind = type(x)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_concrete(x: Any) -> bool:
    """Whether the values of `x` can be read now."""
    return not isinstance(x, jax.core.Tracer)


def as_array(name: str, x: Any) -> Any:
    """`x` as a JAX or NumPy array or a ShapeDtypeStruct; nnx variables are unwrapped."""
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    require(
        isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct),
        f"{name} must be a JAX or NumPy array, got {type_name(x)}.",
    )
    return x


def check_dtypes(inputs: NamedArrays, *, integers: Collection[str], unchecked: Collection[str] = ()) -> None:
    """Inputs named in `integers` hold integers; all others but the `unchecked` are bfloat16, float16 or float32."""
    for name, x in inputs._asdict().items():
        if x is None or name in unchecked:
            continue
        if name in integers:
            require(jnp.issubdtype(x.dtype, jnp.integer), f"{name} must be integers, got {x.dtype}.")
        else:
            require(x.dtype in FLOAT_DTYPES, f"{name} must be bfloat16, float16 or float32, got {x.dtype}.")


def checked_vocab_size(
    names: tuple[str, str], hidden: Any, weight: Any, layout: WeightLayout, option: str = "weight_layout"
) -> int:
    """The vocabulary size of a head whose hidden states are [*lead, D]: the head is 2-D and has as many columns.
    `option` is the argument that gives the layout.
    """
    require(hidden.ndim >= 1, f"{names[0]} must be [*lead, D], got a scalar.")
    require(weight.ndim == 2, f"{names[1]} must be 2-D, got shape {weight.shape}.")
    vocab_size: int = weight.shape[0 if layout == "vd" else 1]
    require(vocab_size > 0, f"{names[1]} must contain at least one vocab row.")
    require(hidden.shape[-1] > 0, f"{names[0]} dim must be at least 1, got 0.")
    check_inner_dim(names, hidden, weight, layout, option)
    return vocab_size


def check_inner_dim(
    names: tuple[str, str], hidden: Any, weight: Any, layout: WeightLayout, option: str = "weight_layout"
) -> None:
    """Hidden states have as many columns as the head; the message names the other layout where that one fits."""
    own, (dim, other_dim) = hidden.shape[-1], weight.shape[::-1] if layout == "vd" else weight.shape
    shape, other = ("[D, V]", "dv") if layout == "vd" else ("[V, D]", "vd")
    hint = f' For a weight {shape}, pass {option}="{other}".' if own == other_dim else ""
    require(own == dim, f"{names[0]} dim {own} must match {names[1]} dim {dim}.{hint}")


def _committed_devices(x: Any) -> set[str] | None:
    """The devices that a concrete array is committed to; None for anything that can follow another array."""
    return set(map(str, x.sharding.device_set)) if isinstance(x, jax.Array) and is_concrete(x) and x.committed else None


def check_devices(inputs: NamedArrays) -> None:
    """All inputs that are committed to devices are on the devices of the first input."""
    given = inputs._asdict()
    first = inputs._fields[0]
    home = _committed_devices(given[first])
    for name, x in given.items():
        here = _committed_devices(x)
        if home is not None and here is not None:
            require(home == here, f"{name} device {sorted(here)} must match {first} device {sorted(home)}.")


def check_temperature_shape(temperature: Any, name: str, ids: Any) -> None:
    """The temperature is a scalar or has the shape of the ids, which the caller knows as `name`."""
    require(
        temperature.shape in ((), ids.shape),
        f"temperature must be a scalar or have {name} shape {ids.shape}, got {temperature.shape}.",
    )


def is_integer(x: Any) -> bool:
    """Whether x is an integer of Python or NumPy, and not a bool."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether x is a real number of Python or NumPy, and not a bool."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def holds_reals(x: Any) -> bool:
    """Whether an array holds bools or real numbers."""
    return any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.bool, jnp.integer, jnp.floating))


def fits_float32(x: float) -> bool:
    """Whether x is positive and finite, and still is as a float32."""
    return SMALLEST <= x <= float(np.finfo(np.float32).max)


def is_static(x: Any) -> bool:
    """Whether `x` is a number of Python or NumPy, which is the same on every rank of one program."""
    return isinstance(x, numbers.Number | np.generic | np.ndarray)


def checked_temperature(temperature: Any, whose: str = "") -> Any:
    """The temperature as an array. A number is a static fact and is checked here; values of arrays are checked later,
    by `core.tokens.checked_tokens`. `whose` stands before its name in messages.
    """
    if not is_number(temperature):
        return as_array(f"{whose}temperature", temperature)
    require(fits_float32(temperature), whose + BAD_TEMPERATURE.format(low=temperature, high=temperature))
    return np.float32(temperature)


def check_vocabulary_options(
    vocab_size: int,
    logit_softcap: float | None,
    ignore_index: int | None,
    global_vocab_size: int | None,
    whose: str = "",
) -> None:
    """The softcap is positive, and ignore_index and global_vocab_size fit a vocabulary of this many columns. `whose`
    stands before their names in messages.
    """
    require(
        logit_softcap is None or (is_number(logit_softcap) and fits_float32(logit_softcap)),
        f"{whose}logit_softcap must be a positive finite number, got {logit_softcap}.",
    )
    require(
        global_vocab_size is None or (is_integer(global_vocab_size) and 1 <= global_vocab_size <= vocab_size),
        f"{whose}global_vocab_size must be in [1, V={vocab_size}], got {global_vocab_size!r}.",
    )
    real = global_vocab_size or vocab_size
    check_ignore_index(ignore_index)
    require(
        ignore_index is None or not 0 <= ignore_index < real,
        f"ignore_index {ignore_index} is a valid token id; it must lie outside [0, {real - 1}].",
    )


def check_ignore_index(ignore_index: int | None) -> None:
    """ignore_index is None or an integer that an id can be compared with."""
    require(
        ignore_index is None or (is_integer(ignore_index) and INT32.min <= ignore_index <= INT32.max),
        f"ignore_index must be a 32-bit integer, got {ignore_index}.",
    )


def check_memory_budget(memory_budget: int | None) -> None:
    """The memory budget is None or a positive number of bytes."""
    require(
        memory_budget is None or (is_integer(memory_budget) and memory_budget >= 1),
        f"memory_budget must be a positive number of bytes, such as 2**30, got {memory_budget!r}.",
    )


def check_flag(name: str, x: Any, *, may_be_none: bool = False) -> None:
    """The option is True or False, or None where it may be."""
    values = "None, True or False" if may_be_none else "True or False"
    require(isinstance(x, bool) or (may_be_none and x is None), f"{name} must be {values}, got {x!r}.")


def check_flags(options: Any) -> None:
    """Every field of a dataclass of options that is annotated as a bool, or as a bool or None, is one."""
    kind: Any = type(options)
    for name, may_be_none in _flags_of(kind):
        check_flag(name, getattr(options, name), may_be_none=may_be_none)


@functools.cache
def _flags_of(kind: type) -> tuple[tuple[str, bool], ...]:
    """The fields that are flags, and whether each may be None."""
    hints = get_type_hints(kind).items()
    return tuple((name, hint is not bool) for name, hint in hints if hint in (bool, bool | None))


def check_mask_dtype(mask: Any) -> None:
    """A completion mask holds bools or real numbers."""
    require(holds_reals(mask), f"completion_mask must be bool, integer or float, got {mask.dtype}.")


def no_explicit_axes(op: str, inputs: NamedArrays) -> None:
    """No input lies over Explicit mesh axes: the op would not keep it where it is."""
    for name, x in inputs._asdict().items():
        require(
            (spec := explicit_spec(x)) is None,
            f"{name} is sharded as {spec} over Explicit mesh axes, which {op} does not take: call it inside "
            "jax.shard_map.",
        )


def require_values(inputs: NamedArrays) -> None:
    """No input is a ShapeDtypeStruct: only `rlk_jax.explain` takes shapes in the place of arrays."""
    for name, x in inputs._asdict().items():
        require(
            not isinstance(x, jax.ShapeDtypeStruct),
            f"{name} is a ShapeDtypeStruct: use jax.eval_shape, or rlk_jax.explain.",
        )


def require_one_of(name: str, x: Any, allowed: tuple[Any, ...]) -> None:
    """The option is one of the values that exist, each of which is a name or None."""
    require((x is None or isinstance(x, str)) and x in allowed, f"{name} must be one of {allowed}, got {x!r}.")


def require_positive_integer(name: str, x: Any) -> None:
    """x is an integer of at least 1."""
    require(is_integer(x) and x >= 1, f"{name} must be a positive integer, got {x!r}.")


def require_positive(name: str, x: Any) -> None:
    """x is a number above 0 that is finite as a float32."""
    require(is_number(x) and fits_float32(x), f"{name} must be a positive finite number, got {x!r}.")


def require_not_negative(name: str, x: Any) -> None:
    """x is 0, or a number above 0 that is finite as a float32."""
    require(is_number(x) and (x == 0 or fits_float32(x)), f"{name} must be 0 or a positive finite number, got {x!r}.")
