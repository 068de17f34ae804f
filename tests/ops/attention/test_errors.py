"""Every input of attention that a user can get wrong has one message, on every implementation."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from rlk_jax.ops.attention.api import attention

QUERY, KEY, VALUE = (jnp.ones(shape, jnp.bfloat16) for shape in ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6)))
ARRAYS = {
    "no array": ({"query": [1.0]}, "query must be a JAX or NumPy array"),
    "three dims": ({"key": KEY[0]}, r"key must be \[batch, slots, heads, size\], got shape \(5, 2, 8\)."),
    "float32": ({"query": QUERY.astype(jnp.float32)}, "query must be bfloat16 or float16, got float32."),
    "two dtypes": ({"value": VALUE.astype(jnp.float16)}, "value dtype float16 must match query dtype bfloat16."),
    "batch": ({"key": KEY[:1], "value": VALUE[:1]}, "must share the batch"),
    "size": ({"key": KEY[..., :4]}, "query and key their size"),
    "slots": ({"value": VALUE[:, :4]}, "key and value their slots and heads"),
    "no columns": ({"value": VALUE[..., :0]}, "heads must have at least one column, got 8 and 0."),
    "heads": ({"query": QUERY[:, :, :3]}, "3 query heads cannot share 2 key heads evenly."),
}
PLACES = {
    "start behind": ({"start": 3}, "3 queries from slot 3 on do not fit into 5 slots."),
    "start before": ({"start": -1}, "3 queries from slot -1 on do not fit into 5 slots."),
    "start array": ({"start": jnp.int32(4)}, "3 queries from slot 4 on do not fit into 5 slots."),
    "float start": ({"start": 0.5}, "start must be a JAX or NumPy array"),
    "start vector": ({"start": jnp.zeros(2, int)}, r"start must be an integer scalar, got int32 of shape \(2,\)."),
    "both": ({"padding": jnp.zeros(2, int), "segment_starts": jnp.zeros((2, 3), int)}, "give one of them"),
    "padding shape": ({"padding": jnp.zeros(3, int)}, r"padding must be integers of shape \(2,\)"),
    "padding dtype": ({"padding": jnp.zeros(2)}, "padding must be integers"),
    "padding range": ({"padding": jnp.array([0, 6])}, r"padding must lie in \[0, 5\], got \[0, 6\]."),
    "segment shape": ({"segment_starts": jnp.zeros(2, int)}, r"segment_starts must be integers of shape \(2, 3\)"),
    "descending": ({"segment_starts": jnp.array([[0, 2, 1]] * 2)}, "segment_starts must ascend along each row"),
    "negative": ({"segment_starts": jnp.array([[-1, 0, 0]] * 2)}, "not be negative"),
}
OPTIONS = {
    "scale": ({"scale": 0.0}, "scale must be a positive finite number, got 0.0."),
    "window": ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0."),
    "softcap": ({"logit_softcap": -1.0}, "logit_softcap must be a positive finite number, got -1.0."),
    "validate": ({"validate": 2}, "validate must be None, True or False"),
    "implementation": ({"implementation": "cudnn"}, "implementation must be one of"),
}
BAD = ARRAYS | PLACES | OPTIONS


@pytest.mark.parametrize("implementation", ["reference", "xla", "deterministic"])
@pytest.mark.parametrize("name", BAD)
def test_messages(name, implementation):
    given, message = BAD[name]
    arrays = {"query": QUERY, "key": KEY, "value": VALUE}
    with pytest.raises(ValueError, match=message):
        attention(**{**arrays, "implementation": implementation, **given})


def test_values_are_not_read_where_they_need_not_be():
    padding = jnp.array([0, 6])
    assert jnp.isnan(attention(QUERY, KEY, VALUE, padding=padding, validate=False)[1]).all()
    with pytest.raises(ValueError, match="validate=True needs concrete"):
        jax.jit(lambda p: attention(QUERY, KEY, VALUE, padding=p, validate=True))(padding)
    checked = checkify.checkify(jax.jit(lambda p: attention(QUERY, KEY, VALUE, padding=p)), checkify.user_checks)
    error, _ = checked(padding)
    with pytest.raises(checkify.JaxRuntimeError, match="padding must lie in"):
        error.throw()
