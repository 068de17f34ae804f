"""Every input of linear_logp that a user can get wrong: one check, one message, on every implementation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from rlk_jax import linear_logp
from tests.support import helpers

N, D, V = 4, 8, 20
GOOD = {
    "hidden": jnp.ones((N, D)),
    "lm_head_weight": jnp.ones((V, D)),
    "target_ids": jnp.arange(N),
    "bias": jnp.ones(V),
}
PER_TOKEN = jnp.ones(N)
OUT_OF_RANGE = "Mask or filter padding / ignore-index values (e.g. -100) before this op."
BUDGET = "memory_budget must be a positive number of bytes, such as 2**30"

BAD_INPUTS = {
    "leading shape": ({"target_ids": jnp.arange(3)}, "hidden leading shape (4,) must match target_ids shape (3,)."),
    "same numel, other shape": (
        {"target_ids": jnp.zeros((2, 2), int)},
        "hidden leading shape (4,) must match target_ids shape (2, 2).",
    ),
    "hidden dim": ({"hidden": jnp.ones((N, 7))}, "hidden dim 7 must match lm_head_weight dim 8."),
    "hidden dim, dv": (
        {"weight_layout": "dv"},
        'hidden dim 8 must match lm_head_weight dim 20. For a weight [V, D], pass weight_layout="vd".',
    ),
    "bias length": ({"bias": jnp.ones(V - 1)}, "bias must have V=20 elements, got shape (19,)."),
    "bias rank": ({"bias": jnp.ones((V, 1))}, "bias must have V=20 elements, got shape (20, 1)."),
    "target below 0": (
        {"target_ids": jnp.asarray([0, 1, -100, 2])},
        f"target_ids out of range: expected [0, 19], got [-100, 2]. {OUT_OF_RANGE}",
    ),
    "target V": (
        {"target_ids": jnp.asarray([0, 1, 20, 2])},
        f"target_ids out of range: expected [0, 19], got [0, 20]. {OUT_OF_RANGE}",
    ),
    "target in the padding": (
        {"target_ids": jnp.asarray([0, 1, 17, 2]), "global_vocab_size": 17},
        f"target_ids out of range: expected [0, 16], got [0, 17]. {OUT_OF_RANGE}",
    ),
    "another ignore_index": (
        {"target_ids": jnp.asarray([0, -1, -100, 2]), "ignore_index": -100},
        f"target_ids out of range: expected [0, 19], got [-1, 2]. {OUT_OF_RANGE}",
    ),
    "int64 target that would wrap": (
        {"target_ids": np.asarray([0, 1, 2**32 + 3, 2])},
        f"target_ids out of range: expected [0, 19], got [0, 2147483647]. {OUT_OF_RANGE}",
    ),
    "no vocab row": (
        {"lm_head_weight": jnp.ones((0, D)), "bias": None},
        "lm_head_weight must contain at least one vocab row.",
    ),
    "D = 0": (
        {"hidden": jnp.ones((N, 0)), "lm_head_weight": jnp.ones((V, 0))},
        "hidden dim must be at least 1, got 0.",
    ),
    "weight not 2-D": ({"lm_head_weight": jnp.ones(D)}, "lm_head_weight must be 2-D, got shape (8,)."),
    "scalar hidden": ({"hidden": jnp.ones(())}, "hidden must be [*lead, D], got a scalar."),
    "float ids": ({"target_ids": jnp.ones(N)}, "target_ids must be integers, got float32."),
    "bool ids": ({"target_ids": jnp.ones(N, bool)}, "target_ids must be integers, got bool."),
    "float64 hidden": (
        {"hidden": np.ones((N, D))},
        "hidden must be bfloat16, float16 or float32, got float64.",
    ),
    "int weight": (
        {"lm_head_weight": jnp.ones((V, D), int)},
        "lm_head_weight must be bfloat16, float16 or float32, got int32.",
    ),
    "int bias": ({"bias": jnp.ones(V, int)}, "bias must be bfloat16, float16 or float32, got int32."),
    "list": ({"target_ids": [0, 1, 2, 3]}, "target_ids must be a JAX or NumPy array, got builtins.list."),
    "None": ({"hidden": None}, "hidden must be a JAX or NumPy array, got builtins.NoneType."),
    "temperature 0": ({"temperature": 0.0}, "temperature must be positive and finite, got values in [0.0, 0.0]"),
    "temperature < 0": ({"temperature": -1}, "temperature must be positive and finite, got values in [-1, -1]"),
    "temperature NaN": ({"temperature": float("nan")}, "temperature must be positive and finite"),
    "temperature inf": ({"temperature": float("inf")}, "temperature must be positive and finite"),
    "per-token temperature 0": (
        {"temperature": PER_TOKEN.at[1].set(0)},
        "temperature must be positive and finite, got values in [0.0, 1.0]",
    ),
    "per-token temperature NaN": (
        {"temperature": PER_TOKEN.at[1].set(jnp.nan)},
        "temperature must be positive and finite, got values in [nan, nan]",
    ),
    "temperature shape": (
        {"temperature": jnp.ones(3)},
        "temperature must be a scalar or have target_ids shape (4,), got (3,).",
    ),
    "temperature text": ({"temperature": "1"}, "temperature must be a JAX or NumPy array, got builtins.str."),
    "int temperature array": (
        {"temperature": jnp.ones(N, int)},
        "temperature must be bfloat16, float16 or float32, got int32.",
    ),
    "temperature lost in float32": ({"temperature": 1e-46}, "temperature must be positive and finite"),
    "temperature subnormal": ({"temperature": 1e-40}, "temperature must be positive and finite"),
    "temperature beyond float32": ({"temperature": 1e39}, "temperature must be positive and finite"),
    "temperature bool": ({"temperature": True}, "temperature must be a JAX or NumPy array, got builtins.bool."),
    "softcap beyond float32": ({"logit_softcap": 1e39}, "logit_softcap must be a positive finite number, got 1e+39."),
    "vocab bool": ({"global_vocab_size": True}, "global_vocab_size must be in [1, V=20], got True."),
    "a shape": (
        {"hidden": jax.ShapeDtypeStruct((N, D), jnp.float32)},
        "hidden is a ShapeDtypeStruct: use jax.eval_shape, or rlk_jax.explain.",
    ),
    "softcap 0": ({"logit_softcap": 0.0}, "logit_softcap must be a positive finite number, got 0.0."),
    "softcap < 0": ({"logit_softcap": -30.0}, "logit_softcap must be a positive finite number, got -30.0."),
    "softcap NaN": ({"logit_softcap": float("nan")}, "logit_softcap must be a positive finite number, got nan."),
    "softcap array": ({"logit_softcap": jnp.ones(())}, "logit_softcap must be a positive finite number, got 1.0."),
    "budget text": ({"memory_budget": "1GB"}, f"{BUDGET}, got '1GB'."),
    "budget 0": ({"memory_budget": 0}, f"{BUDGET}, got 0."),
    "budget bool": ({"memory_budget": True}, f"{BUDGET}, got True."),
    "budget float": ({"memory_budget": 1e9}, f"{BUDGET}, got 1000000000.0."),
    "vocab 0": ({"global_vocab_size": 0}, "global_vocab_size must be in [1, V=20], got 0."),
    "vocab > V": ({"global_vocab_size": 21}, "global_vocab_size must be in [1, V=20], got 21."),
    "vocab float": ({"global_vocab_size": 3.5}, "global_vocab_size must be in [1, V=20], got 3.5."),
    "ignore_index is an id": (
        {"ignore_index": 3},
        "ignore_index 3 is a valid token id; it must lie outside [0, 19].",
    ),
    "ignore_index float": ({"ignore_index": -1.5}, "ignore_index must be a 32-bit integer, got -1.5."),
    "ignore_index huge": ({"ignore_index": 2**40}, "ignore_index must be a 32-bit integer, got 1099511627776."),
    "layout": ({"weight_layout": "vh"}, "weight_layout must be one of ('vd', 'dv'), got 'vh'."),
    "validate": ({"validate": "yes"}, "validate must be None, True or False, got 'yes'."),
}


@helpers.bad_inputs(BAD_INPUTS)
def test_bad_input(what, implementation):
    changes, message = BAD_INPUTS[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_logp(**{**GOOD, **changes}, implementation=implementation)


def test_static_facts_are_checked_under_jit():
    with pytest.raises(ValueError, match="hidden dim 7 must match"):
        jax.eval_shape(linear_logp, jnp.ones((N, 7)), GOOD["lm_head_weight"], GOOD["target_ids"])
    with pytest.raises(ValueError, match="temperature must be positive"):
        jax.jit(lambda h: linear_logp(h, GOOD["lm_head_weight"], GOOD["target_ids"], temperature=0.0))(GOOD["hidden"])


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"implementation must be one of .* or None, got 'cudnn'"):
        linear_logp(**GOOD, implementation="cudnn")


@pytest.mark.parametrize("name", ["lm_head_weight", "target_ids", "bias", "temperature"])
def test_devices_must_match(name):
    first, second = jax.devices("cpu")[:2]
    arrays = {key: jax.device_put(x, first) for key, x in {**GOOD, "temperature": PER_TOKEN}.items()}
    arrays[name] = jax.device_put(arrays[name], second)
    with pytest.raises(ValueError, match=f"{name} device .* must match hidden device .*"):
        linear_logp(**arrays)


def test_torch_tensors_are_named():
    class Tensor:
        shape, dtype, ndim = (N, D), "torch.float32", 2

    with pytest.raises(ValueError, match=r"hidden must be a JAX or NumPy array, got .*Tensor"):
        linear_logp(**{**GOOD, "hidden": Tensor()})


def test_validate_true_needs_values():
    with pytest.raises(ValueError, match="validate=True needs concrete target_ids and temperature; under jit use"):
        jax.jit(lambda t: linear_logp(GOOD["hidden"], GOOD["lm_head_weight"], t, validate=True))(GOOD["target_ids"])


def test_validate_false_reads_nothing_back():
    bad = jnp.asarray([0, 1, 20, 2])
    with jax.transfer_guard_device_to_host("disallow"):
        logp = linear_logp(GOOD["hidden"], GOOD["lm_head_weight"], bad, validate=False)
    np.testing.assert_array_equal(jnp.isnan(logp), bad == 20)


def test_ignored_tokens_are_not_out_of_range():
    ids = jnp.asarray([0, 1, -100, 2])
    assert linear_logp(GOOD["hidden"], GOOD["lm_head_weight"], ids, ignore_index=-100)[2] == 0


# In `make test`, the plain case has a jitted gradient, and test_checkify_reports_bad_temperatures a jitted call: both
# catch an error that jit loses. Remat calls the same rules; an error that it alone loses is left to `make test-full`.
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda f: f, id="plain"),
        pytest.param(jax.jit, id="jit", marks=pytest.mark.full),
        pytest.param(jax.vmap, id="vmap"),
        pytest.param(jax.checkpoint, id="remat", marks=pytest.mark.full),
    ],
)
def test_checkify_reports_what_jit_cannot_raise(transform):
    def logp(h, t):
        return linear_logp(h, GOOD["lm_head_weight"], t, validate=False)

    checked = checkify.checkify(transform(logp))
    error, _ = checked(GOOD["hidden"], GOOD["target_ids"])
    assert error.get() is None
    error, values = checked(GOOD["hidden"], jnp.asarray([0, 1, 20, 2]))
    assert "target_ids out of range: expected [0, 19]" in error.get()
    assert jnp.isnan(values[2])
    gradient = checkify.checkify(jax.jit(jax.grad(lambda h, t: transform(logp)(h, t).sum())))
    assert "target_ids out of range" in gradient(GOOD["hidden"], jnp.asarray([0, 1, -1, 2]))[0].get()


def test_checkify_reports_bad_temperatures():
    checked = checkify.checkify(jax.jit(lambda t: linear_logp(**GOOD, temperature=t)))
    assert checked(PER_TOKEN)[0].get() is None
    assert "temperature must be positive and finite" in checked(PER_TOKEN.at[0].set(-1))[0].get()


@helpers.implementations("xla")  # autodiff refuses it for all
def test_second_derivatives_and_forward_mode(implementation):
    def total(h):
        return linear_logp(h, GOOD["lm_head_weight"], GOOD["target_ids"], implementation=implementation).sum()

    for second in (jax.hessian(total), jax.grad(lambda h: jax.grad(total)(h).sum()), jax.jit(jax.hessian(total))):
        with pytest.raises(ValueError, match="linear_logp has no second derivative"):
            second(GOOD["hidden"])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(total, (GOOD["hidden"],), (GOOD["hidden"],))
