"""Every input of linear_kl that a user can get wrong has one message."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType

from pallas_kernels.triton import call
from rlk_jax import explain, linear_kl
from rlk_jax.core import dispatch
from tests.support import helpers

HIDDEN, WEIGHT, TEACHER_HIDDEN, TEACHER_WEIGHT = (jnp.ones(x) for x in ((2, 3, 8), (10, 8), (2, 3, 4), (12, 4)))
GOOD = {
    "hidden": HIDDEN,
    "lm_head_weight": WEIGHT,
    "teacher_hidden": TEACHER_HIDDEN,
    "teacher_weight": TEACHER_WEIGHT,
    "teacher_global_vocab_size": 10,
}
SHARED = "student and teacher must share one vocabulary, got"
LISTED = {"teacher_hidden": None, "teacher_weight": None, "teacher_global_vocab_size": None}
LISTED |= {"teacher_ids": jnp.zeros((2, 3, 1), int), "teacher_logps": jnp.full((2, 3, 1), -1.0)}
NO_HEAD = "teacher_ids and teacher_logps replace a teacher's head: leave out"
BAD = {
    "kind": ({"kind": "symmetric"}, "kind must be one of ('forward', 'reverse', 'jsd'), got 'symmetric'."),
    "beta": ({"beta": 1.5}, "beta must be a number in [0, 1], got 1.5."),
    "beta array": ({"beta": jnp.float32(0.5)}, "beta must be a number in [0, 1], got Array(0.5"),
    "layout": ({"weight_layout": "DV"}, "weight_layout must be one of ('vd', 'dv'), got 'DV'."),
    "teacher's layout": ({"teacher_weight_layout": 1}, "teacher_weight_layout must be one of ('vd', 'dv'), got 1."),
    "validate": ({"validate": 2}, "validate must be None, True or False, got 2."),
    "budget": ({"memory_budget": 0}, "memory_budget must be a positive number of bytes, such as 2**30, got 0."),
    "no array": ({"teacher_hidden": [1.0]}, "teacher_hidden must be a JAX or NumPy array, got builtins.list."),
    "a shape": ({"hidden": jax.ShapeDtypeStruct((2, 3, 8), jnp.float32)}, "hidden is a ShapeDtypeStruct: use"),
    "scalar": ({"hidden": jnp.ones(())}, "hidden must be [*lead, D], got a scalar."),
    "teacher's scalar": ({"teacher_hidden": jnp.ones(())}, "teacher_hidden must be [*lead, D], got a scalar."),
    "one dim": ({"lm_head_weight": WEIGHT[0]}, "lm_head_weight must be 2-D, got shape (8,)."),
    "no vocabulary": ({"teacher_weight": TEACHER_WEIGHT[:0]}, "teacher_weight must contain at least one vocab row."),
    "no columns": ({"hidden": HIDDEN[..., :0]}, "hidden dim must be at least 1, got 0."),
    "width": ({"hidden": HIDDEN[..., :4]}, "hidden dim 4 must match lm_head_weight dim 8."),
    "the other layout": (
        {"lm_head_weight": WEIGHT.T},
        'hidden dim 8 must match lm_head_weight dim 10. For a weight [D, V], pass weight_layout="dv".',
    ),
    "teacher's other layout": (
        {"teacher_weight_layout": "dv"},
        'teacher_weight dim 12. For a weight [V, D], pass teacher_weight_layout="vd".',
    ),
    "teacher's width": ({"teacher_weight": WEIGHT}, "teacher_hidden dim 4 must match teacher_weight dim 8."),
    "bias": ({"bias": jnp.ones(12)}, "bias must have V=10 elements, got shape (12,)."),
    "teacher's bias": ({"teacher_bias": jnp.ones(10)}, "teacher_bias must have V=12 elements, got shape (10,)."),
    "softcap": ({"logit_softcap": 0.0}, "logit_softcap must be a positive finite number, got 0.0."),
    "teacher's softcap": ({"teacher_logit_softcap": -1}, "teacher_logit_softcap must be a positive finite number,"),
    "vocabulary": ({"global_vocab_size": 11}, "global_vocab_size must be in [1, V=10], got 11."),
    "teacher's vocabulary": (
        {"teacher_global_vocab_size": 0},
        "teacher_global_vocab_size must be in [1, V=12], got 0.",
    ),
    "two vocabularies": ({"teacher_global_vocab_size": None}, f"{SHARED} 10 and 12 tokens: where a head is padded,"),
    "lead": (
        {"teacher_hidden": TEACHER_HIDDEN[0]},
        "teacher_hidden leading shape (3,) must match hidden leading shape (2, 3).",
    ),
    "temperature shape": (
        {"temperature": jnp.ones(3)},
        "temperature must be a scalar or have hidden leading shape (2, 3), got (3,).",
    ),
    "teacher's temperature shape": (
        {"teacher_temperature": jnp.ones(3)},
        "teacher_temperature must be a scalar or have hidden leading shape (2, 3), got (3,).",
    ),
    "temperature": ({"temperature": 0.0}, "temperature must be positive and finite, got values in [0.0, 0.0]"),
    "teacher's temperature": (
        {"teacher_temperature": -1.0},
        "teacher_temperature must be positive and finite, got values in [-1.0, -1.0]",
    ),
    "mask shape": (
        {"completion_mask": jnp.ones(3)},
        "completion_mask must have hidden leading shape (2, 3), got (3,).",
    ),
    "mask dtype": (
        {"completion_mask": jnp.ones((2, 3), complex)},
        "completion_mask must be bool, integer or float, got complex64.",
    ),
    "half a list": (
        LISTED | {"teacher_logps": None},
        "teacher_ids and teacher_logps go together: teacher_logps is None.",
    ),
    "half a head": (
        {"teacher_weight": None},
        "teacher_hidden and teacher_weight go together: teacher_weight is None.",
    ),
    "list shapes": (
        LISTED | {"teacher_logps": jnp.zeros((2, 3))},
        "teacher_ids and teacher_logps must both be [*lead, k], k >= 1, got shapes (2, 3, 1) and (2, 3).",
    ),
    "list lead": (
        LISTED | {"teacher_ids": jnp.zeros((3, 1), int), "teacher_logps": jnp.zeros((3, 1))},
        "teacher_ids leading shape (3,) must match hidden leading shape (2, 3).",
    ),
    "an array of kinds": ({"kind": np.array(["forward", "jsd"])}, "kind must be one of ('forward', 'reverse', 'jsd'),"),
    "an array of softcaps beside a list": (
        LISTED | {"logit_softcap": np.array([1.0, 2.0])},
        "logit_softcap must be a positive finite number, got [1. 2.].",
    ),
    "a teacher's array of softcaps beside a list": (
        LISTED | {"teacher_logit_softcap": np.array([1.0, 2.0])},
        f"{NO_HEAD} teacher_logit_softcap.",
    ),
    "list dtype": (LISTED | {"teacher_ids": jnp.zeros((2, 3, 1))}, "teacher_ids must be integers, got float32."),
    "list dtype of log-probs": (
        LISTED | {"teacher_logps": jnp.zeros((2, 3, 1), int)},
        "teacher_logps must be bfloat16, float16 or float32, got int32.",
    ),
    "neither head nor list": (
        {"teacher_hidden": None, "teacher_weight": None},
        "linear_kl needs a teacher: teacher_hidden and teacher_weight, or teacher_ids and teacher_logps.",
    ),
    "list and head": (LISTED | {"teacher_hidden": TEACHER_HIDDEN}, f"{NO_HEAD} teacher_hidden."),
    "list and temperature": (LISTED | {"teacher_temperature": 1.0}, f"{NO_HEAD} teacher_temperature."),
    "list and options": (
        LISTED | {"teacher_weight_layout": "dv", "teacher_logit_softcap": 3.0},
        f"{NO_HEAD} teacher_logit_softcap, teacher_weight_layout.",
    ),
    "dtype": ({"hidden": jnp.ones((2, 3, 8), int)}, "hidden must be bfloat16, float16 or float32, got int32."),
    "implementation": ({"implementation": "torch"}, "implementation must be one of"),
    "an implementation of another device": (
        {"implementation": "cuda"},
        "linear_kl cannot run 'cuda' here: needs compute capability 9.0 (Hopper), not cpu; ",
    ),
}


@pytest.mark.parametrize(
    ("kind", "choice", "of_list"), [("8.0", "xla", "xla"), ("9.0", "mosaic", "mosaic"), ("7.5", "xla", "xla")]
)
def test_what_gpus_choose(kind, choice, of_list, monkeypatch):
    monkeypatch.setattr(call, "why_missing", lambda: None)
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "some GPU", kind))
    bfloat16 = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 8), (10, 8), (3, 5), (10, 5))]
    assert explain("linear_kl", *bfloat16).choice == choice
    listed = {"teacher_ids": jnp.zeros((3, 1), int), "teacher_logps": jnp.zeros((3, 1))}
    assert explain("linear_kl", *bfloat16[:2], **listed).choice == of_list


def test_triton_says_everything_that_it_lacks(monkeypatch):
    monkeypatch.setattr(call, "why_missing", lambda: "needs a pair")
    operands = [jnp.ones(shape, dtype) for shape, dtype in (((3, 7), jnp.float16), ((10, 7), jnp.float32))] * 2
    dtypes = "both bfloat16 or both float16, not float16 and float32"
    reasons = (
        "needs an NVIDIA GPU of compute capability 8.0 or later, not cpu; needs a pair; "
        f"needs hidden and lm_head_weight {dtypes}; needs teacher_hidden and teacher_weight {dtypes}; "
        "needs a hidden dim that is a multiple of 8, not 7."
    )
    with pytest.raises(ValueError, match=re.escape(f"linear_kl cannot run 'triton' here: {reasons}")):
        linear_kl(*operands, implementation="triton")


@pytest.mark.parametrize("name", BAD)
def test_static_facts(name):
    given, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_kl(**{**GOOD, **given})
    if name != "a shape":
        with pytest.raises(ValueError, match=re.escape(message)):
            explain("linear_kl", **{**GOOD, **given})


def test_static_facts_are_checked_under_jit():
    with pytest.raises(ValueError, match="hidden dim 4 must match lm_head_weight dim 8"):
        jax.eval_shape(lambda h: linear_kl(**{**GOOD, "hidden": h}), HIDDEN[..., :4])


@pytest.mark.parametrize("name", ["lm_head_weight", "teacher_hidden", "teacher_bias", "completion_mask", "temperature"])
def test_devices_must_match(name):
    first, second = jax.devices("cpu")[:2]
    extras = {"teacher_bias": jnp.ones(12), "completion_mask": jnp.ones((2, 3)), "temperature": jnp.float32(1)}
    arrays = {key: x for key, x in (GOOD | extras).items() if isinstance(x, jax.Array)}
    arrays = {key: jax.device_put(x, second if key == name else first) for key, x in arrays.items()}
    with pytest.raises(ValueError, match=f"{name} device .* must match hidden device .*"):
        linear_kl(**arrays, teacher_global_vocab_size=10)


@pytest.mark.parametrize("name", ["hidden", "teacher_weight"])
def test_explicit_axes_are_refused(name):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"{name} is sharded as .* over Explicit mesh axes, which"):
        linear_kl(**{**GOOD, name: jax.device_put(GOOD[name], jax.P("data"))})


VALUES = {
    "temperature": "temperature must be positive and finite, got values in [0.0, 1.0]",
    "teacher_temperature": "teacher_temperature must be positive and finite, got values in [0.0, 1.0]",
}
ONE_BAD = jnp.ones((2, 3)).at[0, 1].set(0)


TWO = jnp.array([3, -1])
LISTS = {
    "range": (TWO.at[1].set(10), jnp.log(jnp.array([0.5, 0.1])), "teacher_ids out of range: expected [0, 9], or -1 as"),
    "sign": (TWO.at[1].set(-2), jnp.log(jnp.array([0.5, 0.1])), "padding, got values in [-2, 3]."),
    "twice": (
        TWO.at[1].set(3),
        jnp.log(jnp.array([0.5, 0.1])),
        "teacher_ids must be distinct: rows 1 to 1 of",
    ),
    "sum": (
        TWO.at[1].set(4),
        jnp.log(jnp.array([0.5, 0.6])),
        "teacher_logps must be log-probabilities, of 1.02",
    ),
    "NaN": (TWO, jnp.array([jnp.nan, 0.1]), "those of rows 1 to 1 of the flat tokens are not."),
}


@jax.jit
def from_list(hidden, weight, ids, logps):
    return linear_kl(hidden, weight, teacher_ids=ids, teacher_logps=logps)


reported_from_list = jax.jit(checkify.checkify(from_list))


@pytest.mark.parametrize("name", LISTS)
def test_values_of_a_list(name):
    """They raise where they can be read. Under jit they make NaN of their row, of its gradient and of dW, and are
    reported; in a row that the mask leaves out they do nothing.
    """
    ids, logps, message = LISTS[name]
    ids, logps = jnp.stack([TWO, ids, TWO]), jnp.stack([jnp.log(jnp.array([0.5, 0.1])), logps, jnp.zeros(2)])
    hidden, listed = HIDDEN[0], {"teacher_ids": ids, "teacher_logps": logps}
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_kl(hidden, WEIGHT, **listed)
    values, pull_back = jax.vjp(lambda hidden, weight: from_list(hidden, weight, ids, logps), hidden, WEIGHT)
    d_hidden, d_weight = pull_back(jnp.ones(3))
    np.testing.assert_array_equal(np.isnan(values), [False, True, False])
    np.testing.assert_array_equal(np.isnan(d_hidden).all(axis=1), [False, True, False])
    assert np.isnan(d_weight).all()
    error, _ = reported_from_list(hidden, WEIGHT, ids, logps)
    with pytest.raises(checkify.JaxRuntimeError, match=re.escape(message)):
        error.throw()
    with jax.debug_nans(True):
        mask = jnp.array([True, False, True])
        assert not np.isnan(linear_kl(hidden, WEIGHT, **listed, completion_mask=mask)).any()


@pytest.mark.parametrize("validate", [None, True])
@pytest.mark.parametrize("name", VALUES)
def test_values_that_can_be_read(name, validate):
    with pytest.raises(ValueError, match=re.escape(VALUES[name])):
        linear_kl(**GOOD, **{"teacher_temperature": 1.0, name: ONE_BAD}, validate=validate)


@pytest.mark.parametrize("implementation", helpers.IMPLEMENTATIONS)
def test_values_under_jit_are_nan_rows(implementation):
    """One row has a bad temperature of the student, and another one of the teacher."""
    teachers = jnp.ones((2, 3)).at[1, 0].set(0)

    @jax.jit
    def found(hidden, *temperatures):
        def call(hidden):
            given = dict(zip(VALUES, temperatures, strict=True))
            return linear_kl(**{**GOOD, "hidden": hidden}, **given, implementation=implementation)

        values, pull_back = jax.vjp(call, hidden)
        return values, pull_back(jnp.ones_like(values))[0]

    values, gradient = found(HIDDEN, ONE_BAD, teachers)
    is_bad = np.array([[False, True, False], [True, False, False]])
    np.testing.assert_array_equal(np.isnan(values), is_bad)
    np.testing.assert_array_equal(np.isnan(gradient).all(axis=-1), is_bad)


@pytest.mark.parametrize("name", VALUES)
def test_values_under_jit_are_reported(name):
    """Before the call is given to any implementation."""

    def call(temperature):
        return linear_kl(**GOOD, **{"teacher_temperature": 1.0, name: temperature})

    error, _ = checkify.checkify(jax.jit(call))(ONE_BAD)
    with pytest.raises(checkify.JaxRuntimeError, match=re.escape(VALUES[name])):
        error.throw()


def test_bad_values_of_tokens_that_do_not_count():
    with jax.debug_nans(True):
        assert jnp.isfinite(linear_kl(**GOOD, temperature=ONE_BAD, completion_mask=ONE_BAD)).all()


def test_validate():
    """True needs values, and False reads none."""
    with pytest.raises(ValueError, match="validate=True needs concrete temperature and teacher_temperature; under jit"):
        jax.eval_shape(lambda x: linear_kl(**GOOD, temperature=x, validate=True), ONE_BAD)
    with jax.transfer_guard_device_to_host("disallow"):
        values = linear_kl(**GOOD, temperature=ONE_BAD, validate=False)
    np.testing.assert_array_equal(jnp.isnan(values), ONE_BAD == 0)
