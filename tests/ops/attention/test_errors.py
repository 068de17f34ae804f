"""Every input of attention that a user can get wrong has one message, on every implementation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType

from rlk_jax import attention
from tests.support import helpers

QUERY, KEY, VALUE = (jnp.ones(shape, jnp.bfloat16) for shape in ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6)))
GOOD = {"query": QUERY, "key": KEY, "value": VALUE}
ZEROS = jnp.zeros(2, int)
SHARED = "must share the batch, query and key their size, key and value their slots and heads."
STATIC = {
    "no array": ({"query": [1.0]}, "query must be a JAX or NumPy array, got builtins.list."),
    "a shape": ({"key": jax.ShapeDtypeStruct(KEY.shape, KEY.dtype)}, "key is a ShapeDtypeStruct: use jax.eval_shape"),
    "three dims": ({"key": KEY[0]}, "key must be [batch, slots, heads, size], got shape (5, 2, 8)."),
    "float32": ({"query": QUERY.astype(jnp.float32)}, "query must be bfloat16 or float16, got float32."),
    "two dtypes": ({"value": VALUE.astype(jnp.float16)}, "value dtype float16 must match query dtype bfloat16."),
    "batch": (
        {"key": KEY[:1], "value": VALUE[:1]},
        f"query (2, 3, 4, 8), key (1, 5, 2, 8) and value (1, 5, 2, 6) {SHARED}",
    ),
    "size": ({"key": KEY[..., :4]}, f"query (2, 3, 4, 8), key (2, 5, 2, 4) and value (2, 5, 2, 6) {SHARED}"),
    "slots": ({"value": VALUE[:, :4]}, f"query (2, 3, 4, 8), key (2, 5, 2, 8) and value (2, 4, 2, 6) {SHARED}"),
    "no columns": ({"value": VALUE[..., :0]}, "heads must have at least one column, got 8 and 0."),
    "heads": ({"query": QUERY[:, :, :3]}, "3 query heads cannot share 2 key heads evenly."),
    "no key heads": (
        {"key": KEY[:, :, :0], "value": VALUE[:, :, :0]},
        "4 query heads cannot share 0 key heads evenly.",
    ),
    "start behind": ({"start": 3}, "3 queries from slot 3 on do not fit into 5 slots."),
    "start before": ({"start": -1}, "3 queries from slot -1 on do not fit into 5 slots."),
    "float start": ({"start": 0.5}, "start must be a JAX or NumPy array, got builtins.float."),
    "start vector": ({"start": jnp.zeros(2, int)}, "start must be an integer scalar, got int32 of shape (2,)."),
    "start dtype": ({"start": jnp.zeros(())}, "start must be an integer scalar, got float32 of shape ()."),
    "too few slots": ({"start": jnp.int32(0), "key": KEY[:, :2], "value": VALUE[:, :2]}, "3 queries do not fit into 2"),
    "both": (
        {"padding": ZEROS, "segment_starts": jnp.zeros((2, 3), int)},
        "padding and segment_starts both say where sequences begin: give one of them.",
    ),
    "padding shape": (
        {"padding": jnp.zeros(3, int)},
        "padding must be integers of shape (2,), got int32 of shape (3,).",
    ),
    "padding dtype": ({"padding": jnp.zeros(2)}, "padding must be integers of shape (2,), got float32 of shape (2,)."),
    "segment shape": ({"segment_starts": ZEROS}, "segment_starts must be integers of shape (2, 3), got int32 of shape"),
    "segment dtype": ({"segment_starts": jnp.zeros((2, 3), bool)}, "segment_starts must be integers of shape (2, 3),"),
    "scale": ({"scale": 0.0}, "scale must be a positive finite number, got 0.0."),
    "scale array": ({"scale": jnp.float32(1)}, "scale must be a positive finite number, got Array(1."),
    "window": ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0."),
    "float window": ({"sliding_window": 2.0}, "sliding_window must be a positive integer, got 2.0."),
    "softcap": ({"logit_softcap": -1.0}, "logit_softcap must be a positive finite number, got -1.0."),
    "validate": ({"validate": 2}, "validate must be None, True or False, got 2."),
}
ASCEND = "segment_starts must ascend along each row and not be negative, got values in"
VALUES = {
    "start behind": ("start", 3, "3 queries from slot 3 on do not fit into 5 slots.", [True, True]),
    "start before": ("start", -1, "3 queries from slot -1 on do not fit into 5 slots.", [True, True]),
    "padding behind": ("padding", [0, 6], "padding must lie in [0, 5], got [0, 6].", [False, True]),
    "padding before": ("padding", [-1, 0], "padding must lie in [0, 5], got [-1, 0].", [True, False]),
    "descending": ("segment_starts", [[0, 2, 1], [0, 0, 2]], f"{ASCEND} [0, 2].", [True, False]),
    "negative": ("segment_starts", [[0, 0, 1], [-1, 0, 0]], f"{ASCEND} [-1, 1].", [False, True]),
}
"""An argument, values of it that do not fit, what is said of them, and which rows of the batch they spoil."""
IMPLEMENTATIONS = (None, *helpers.IMPLEMENTATIONS)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "mosaic"])
@pytest.mark.parametrize("name", STATIC)
def test_static_facts(name, implementation):
    """They are checked before the implementation is asked whether it can run here."""
    given, message = STATIC[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(**{**GOOD, "implementation": implementation, **given})


def test_static_facts_are_checked_under_jit():
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads evenly"):
        jax.eval_shape(attention, QUERY[:, :, :3], KEY, VALUE)


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("cudnn", "implementation must be one of"),
        ("cuda", "attention cannot run 'cuda' here: attention has no such implementation"),
        (
            "mosaic",
            "attention cannot run 'mosaic' here: needs compute capability 9.0 (Hopper), not cpu; needs keys of a",
        ),
    ],
)
def test_implementations_that_cannot_run(implementation, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(**GOOD, implementation=implementation)


@pytest.mark.parametrize("name", ["key", "value", "start", "padding", "segment_starts"])
def test_devices_must_match(name):
    first, second = jax.devices("cpu")[:2]
    places = {"start": jnp.int32(0), "padding": ZEROS, "segment_starts": jnp.zeros((2, 3), int)}
    arrays = {**GOOD, name: (GOOD | places)[name]}
    arrays = {key: jax.device_put(x, second if key == name else first) for key, x in arrays.items()}
    with pytest.raises(ValueError, match=f"{name} device .* must match query device .*"):
        attention(**arrays)


@pytest.mark.parametrize("name", ["query", "padding"])
def test_explicit_axes_are_refused(name):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    arrays = {**GOOD, "padding": ZEROS}
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"{name} is sharded as .* over Explicit mesh axes, which"):
        attention(**{**arrays, name: jax.device_put(arrays[name], jax.P("data"))})


@pytest.mark.parametrize("validate", [None, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", VALUES)
def test_values_that_can_be_read(name, implementation, validate):
    argument, values, message, _ = VALUES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(**GOOD, **{argument: jnp.array(values)}, validate=validate, implementation=implementation)


# Values are checked in front of every implementation; test_values.py has NaN rows of all.
@pytest.mark.parametrize("name", VALUES)
def test_values_under_jit_are_nan_rows_and_are_reported(name):
    argument, values, message, is_bad = VALUES[name]
    values = jnp.array(values)

    def call(x):
        return attention(**GOOD, **{argument: x})

    output, pull_back = jax.vjp(jax.jit(lambda query, x: attention(query, KEY, VALUE, **{argument: x})), QUERY, values)
    np.testing.assert_array_equal(jnp.isnan(output).all(axis=(1, 2, 3)), is_bad)
    assert not jnp.isnan(output[~np.array(is_bad)]).any()
    gradient = pull_back(jnp.ones_like(output))[0]
    np.testing.assert_array_equal(jnp.isnan(gradient).all(axis=(1, 2, 3)), is_bad)
    assert not jnp.isnan(gradient[~np.array(is_bad)]).any()
    error, _ = checkify.checkify(jax.jit(call))(values)
    with pytest.raises(checkify.JaxRuntimeError, match=re.escape(message)):
        error.throw()


@pytest.mark.parametrize("argument", ["start", "padding", "segment_starts"])
def test_validate(argument):
    """True needs values, and False reads none."""
    name = {"start": "start behind", "padding": "padding behind", "segment_starts": "descending"}[argument]
    _, values, _, is_bad = VALUES[name]
    values = jnp.array(values)
    with pytest.raises(ValueError, match="validate=True needs concrete start, padding and segment_starts; under jit"):
        jax.eval_shape(lambda x: attention(**GOOD, **{argument: x}, validate=True), values)
    with jax.transfer_guard_device_to_host("disallow"):
        output = attention(**GOOD, **{argument: values}, validate=False)
    np.testing.assert_array_equal(jnp.isnan(output).all(axis=(1, 2, 3)), is_bad)


def test_good_values_are_not_reported():
    checked = checkify.checkify(jax.jit(lambda start: attention(**GOOD, start=start, padding=jnp.array([0, 5]))))
    error, output = checked(2)
    error.throw()
    assert jnp.isfinite(output).all()


def test_a_window_may_be_larger_than_int32():
    np.testing.assert_array_equal(attention(**GOOD, start=2, sliding_window=10**10), attention(**GOOD, start=2))
