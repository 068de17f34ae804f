"""Every static check of attention and its message, and the checks of the values that say where sequences are.

The docstring of a check says what must hold. Where it does not, the check raises ValueError before anything runs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlk_jax.core.checks import (
    FLOAT_DTYPES,
    INT32,
    as_array,
    check_devices,
    check_flags,
    is_integer,
    no_explicit_axes,
    require,
    require_positive,
    require_positive_integer,
)
from rlk_jax.core.tokens import as_int32, checked, fit
from rlk_jax.ops.attention.options import AttentionConfig, AttentionInputs, AttentionOptions, Operands, Places

Array = jax.Array


def check_call(inputs: AttentionInputs, options: AttentionOptions) -> tuple[AttentionInputs, AttentionConfig]:
    """All static checks of a call: its inputs as arrays, and what an implementation is compiled for."""
    check_flags(options)
    inputs = AttentionInputs(
        query=as_array("query", inputs.query),
        key=as_array("key", inputs.key),
        value=as_array("value", inputs.value),
        start=inputs.start if is_integer(inputs.start) else as_array("start", inputs.start),
        padding=None if inputs.padding is None else as_array("padding", inputs.padding),
        segment_starts=None if inputs.segment_starts is None else as_array("segment_starts", inputs.segment_starts),
    )
    _check_arrays(inputs)
    _check_places(inputs)
    if options.scale is not None:
        require_positive("scale", options.scale)
    if options.sliding_window is not None:
        require_positive_integer("sliding_window", options.sliding_window)
    if options.logit_softcap is not None:
        require_positive("logit_softcap", options.logit_softcap)
    no_explicit_axes("attention", inputs._replace(start=None))
    check_devices(inputs)
    scale = inputs.query.shape[3] ** -0.5 if options.scale is None else float(options.scale)
    # A window over all slots is as good as a larger one, whose sums with slots might overflow.
    window = None if options.sliding_window is None else min(int(options.sliding_window), inputs.key.shape[1])
    softcap = None if options.logit_softcap is None else float(options.logit_softcap)
    holds_several = inputs.segment_starts is not None
    begins = not holds_several and inputs.padding is None and is_integer(inputs.start) and inputs.start == 0
    is_whole = begins and inputs.query.shape[1] == inputs.key.shape[1]
    return inputs, AttentionConfig(scale, window, softcap, inputs.value.shape[3], holds_several, is_whole)


def _check_arrays(inputs: AttentionInputs) -> None:
    """query, key and value have shapes that fit each other, and one 16-bit dtype."""
    query, key, value = inputs[:3]
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(x.ndim == 4, f"{name} must be [batch, slots, heads, size], got shape {x.shape}.")
        require(x.dtype in FLOAT_DTYPES[:2], f"{name} must be bfloat16 or float16, got {x.dtype}.")
        require(x.dtype == query.dtype, f"{name} dtype {x.dtype} must match query dtype {query.dtype}.")
    batch, _, heads, size = query.shape
    require(
        key.shape[0] == batch and key.shape[3] == size and key.shape[:3] == value.shape[:3],
        f"query {query.shape}, key {key.shape} and value {value.shape} must share the batch, query and key their size, "
        "key and value their slots and heads.",
    )
    require(size >= 1 and value.shape[3] >= 1, f"heads must have at least one column, got {size} and {value.shape[3]}.")
    groups = key.shape[2]
    require(groups >= 1 and heads % groups == 0, f"{heads} query heads cannot share {groups} key heads evenly.")


def _check_places(inputs: AttentionInputs) -> None:
    """The queries fit into the slots, and at most one of padding and segment_starts says where sequences begin."""
    batch, length = inputs.query.shape[:2]
    slots, start = inputs.key.shape[1], inputs.start
    if is_integer(start):
        require(start >= 0 and start + length <= slots, _START.format(length=length, low=start, slots=slots))
    else:
        require(
            start.shape == () and jnp.issubdtype(start.dtype, jnp.integer),
            f"start must be an integer scalar, got {start.dtype} of shape {start.shape}.",
        )
        require(length <= slots, f"{length} queries do not fit into {slots} slots.")
    require(
        inputs.padding is None or inputs.segment_starts is None,
        "padding and segment_starts both say where sequences begin: give one of them.",
    )
    for name, shape in (("padding", (batch,)), ("segment_starts", (batch, length))):
        x = getattr(inputs, name)
        require(
            x is None or (x.shape == shape and jnp.issubdtype(x.dtype, jnp.integer)),
            f"{name} must be integers of shape {shape}, got {getattr(x, 'dtype', None)} of shape "
            f"{getattr(x, 'shape', None)}.",
        )


_START = "{length} queries from slot {low} on do not fit into {slots} slots."
_PADDING = "padding must lie in [0, {slots}], got [{low}, {high}]."
_SEGMENT_STARTS = "segment_starts must ascend along each row and not be negative, got values in [{low}, {high}]."


class _FoundPlaces(NamedTuple):
    """What one pass over the values finds: start and places in range, and what `fit` gives for start and for the slots
    where sequences begin.
    """

    start: Array
    places: Places
    start_fit: Array
    slots_fit: Array


@functools.partial(jax.jit, static_argnames=("length", "slots"))
def _find_places(start: Array, given: Array, *, length: int, slots: int) -> _FoundPlaces:
    """The findings for padding `[B]` or segment_starts `[B, T]`."""
    everywhere, limits = jnp.ones((), bool), (INT32.min, INT32.max)
    fits = (start >= 0) & (start <= slots - length)
    if given.ndim == 2:
        ascends = jnp.concatenate([given[:, :1] >= 0, given[:, 1:] >= given[:, :-1]], axis=1)
        is_good = ascends.all(axis=1)
    else:
        ascends = is_good = (given >= 0) & (given <= slots)
    is_good = is_good & fits
    return _FoundPlaces(
        jnp.where(fits, start, 0),
        # Queries of a row that is not good see slots from the first one on, so that NaN reaches all their gradients.
        Places(jnp.where(is_good if given.ndim == 1 else is_good[:, None], given, 0), is_good),
        fit(start, fits, everywhere, limits),
        fit(given, ascends, everywhere, limits),
    )


def checked_operands(inputs: AttentionInputs, validate: bool | None) -> Operands:
    """The operands, with the values that say where sequences are in range; a row whose values are not is not good.

    Values are checked as those of tokens are: they raise where they can be read, else they are reported to checkify.
    """
    query, key, value = (jnp.asarray(x) for x in inputs[:3])
    length, slots = query.shape[1], key.shape[1]
    start = jnp.asarray(inputs.start, jnp.int32) if is_integer(inputs.start) else as_int32(inputs.start)
    if inputs.segment_starts is not None:
        given, message = as_int32(inputs.segment_starts), _SEGMENT_STARTS
    else:
        given = jnp.zeros(len(query), jnp.int32) if inputs.padding is None else as_int32(inputs.padding)
        message = _PADDING.replace("{slots}", str(slots))
    found = _find_places(start, given, length=length, slots=slots)
    does_not_fit = _START.replace("{length}", str(length)).replace("{slots}", str(slots))
    checks = (found.start_fit, does_not_fit), (found.slots_fit, message)
    start = checked(found.start, checks, validate, "start, padding and segment_starts")
    return Operands(query, key, value, start, found.places)
