"""Reports of bad values from inside a program. They reach `jax.experimental.checkify`, and nothing else sees them.

`checkify.debug_check` would do the same, but gives each program an effect that jax.export cannot serialise.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import checkify as jax_checkify
from jax._src.core import Primitive  # jax.extend, which is public, imports all of Pallas.
from jax.interpreters import batching, mlir

Array = jax.Array

_reported = Primitive("reported")
_reported.def_impl(lambda x, *checked, **message: x)
_reported.def_abstract_eval(lambda x, *checked, **message: x)
mlir.register_lowering(_reported, lambda context, x, *checked, **message: [x])


def reported(x: Array, is_good: Array, message: str, **values: Array) -> Array:
    """x; and where the bool scalar is_good is False, an error in a program under `checkify.checkify`.

    The message is formatted with `values`. Under vmap the first bad element of the batch is reported. A program that
    does not use the result reports nothing: x has to be what results are computed from.
    """
    checked = lax.stop_gradient((is_good, *values.values()))
    return _reported.bind(x, *checked, message=message, names=tuple(values))


def _batched(arguments: Any, axes: Any, **message: Any) -> tuple[Array, int | None]:
    """One report for the whole batch: `is_good` and the values have the batch in front."""
    (size,) = {x.shape[axis] for x, axis in zip(arguments, axes, strict=True) if axis is not None}
    checked = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arguments[1:], axes[1:], strict=True)
    ]
    return _reported.bind(arguments[0], *checked, **message), axes[0]


batching.primitive_batchers[_reported] = _batched


def _discharged(
    context: Any,
    error: Any,
    enabled_errors: Any,
    x: Array,
    is_good: Array,
    *values: Array,
    message: str,
    names: tuple[str, ...],
) -> tuple[Any, Array]:
    """What a report becomes under checkify: an error with the values of the first element that is bad."""
    if jax_checkify.FailedCheckError not in enabled_errors:
        return error, x
    first = jnp.argmin(is_good.reshape(-1))
    shown = [value.reshape(-1, *value.shape[is_good.ndim :])[first] for value in values]
    found = jax_checkify.FailedCheckError(jax_checkify.get_traceback(), message, **dict(zip(names, shown, strict=True)))
    return jax_checkify.assert_func(context, error, ~jnp.all(is_good), found), x


jax_checkify.error_checks[_reported] = _discharged
