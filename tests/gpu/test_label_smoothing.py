"""Smoothed targets by Mosaic's, Triton's and CUDA's kernels: values and gradients, and raw bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlk_jax
from rlk_jax import linear_cross_entropy
from tests.support import helpers, shards
from tests.support.helpers import Case, assert_same_bits, assert_within_contract

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
SMOOTHING = {"label_smoothing": 0.1}
SHAPES = (
    Case("one row", (1,), 64, 1000, bias=True),
    Case("few rows", (12,), 192, 5000),
    Case("tiny vocabulary", (9,), 64, 5, scale=0.2),
    Case("ragged groups", (300,), 192, 1000, bias=True, temperature="per token"),
    Case("odd vocabulary", (130,), 64, 50257 // 16),
    Case("dv", (300,), 128, 4096, options={"weight_layout": "dv"}),
    Case("padded", (200,), 128, 1024, bias=True, options={"global_vocab_size": 1001}),
    Case("softcap", (700,), 128, 5000, options={"logit_softcap": 30.0}, temperature=0.7),
    Case("large softcap", (200,), 128, 5000, bias=True, options={"logit_softcap": 1e3}),
)
every_dtype = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [*(("mosaic", x) for x in DTYPES), *(("triton", x) for x in DTYPES[:2]), *(("cuda", x) for x in DTYPES[:2])],
    ids=lambda x: x if isinstance(x, str) else np.dtype(x).name,
    indirect=["implementation"],
)


@every_dtype
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_against_float64(case, implementation, dtype):
    case = helpers.with_options(case, **SMOOTHING)
    case, problem = helpers.without_entropy(case, helpers.make(case, dtype))
    found = helpers.with_padding(case, problem).values_and_gradients(case, implementation)
    gold = helpers.gold(case, problem)
    for value, expected in zip(found[0][:2], gold.values[:2], strict=True):
        assert_within_contract(value, expected, "linear_logp_wgmma", dtype, "forward")
    for gradient, expected in zip(found[1], gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_wgmma", dtype, "gradient")


@every_dtype
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_no_budget_and_no_batch_changes_a_bit(implementation, dtype, softcap):
    """What is kept, what is computed again, and which rows stand beside one another."""
    case = Case("bits", (700,), 192, 5000, bias=True, options={"logit_softcap": softcap, **SMOOTHING})
    case, problem = helpers.without_entropy(case, helpers.make(case, dtype))
    expected = helpers.outputs(case, problem, implementation)
    for budget in (2**21, 2**24):
        assert_same_bits(helpers.outputs(case, problem, implementation, memory_budget=budget), expected)
    few = np.asarray([640, 3, 3, 69])
    small = Case("few", (4,), 192, 5000, options=case.options)
    part = helpers.rows_of(problem, few)
    rows, _ = helpers.outputs(small, part, implementation)
    assert_same_bits(rows, [x[few] for x in expected[0]])
    # A forward alone makes the products of few rows before their softmax.
    assert_same_bits(part.call(small, implementation).logp, expected[0][0][few])


@pytest.mark.parametrize("implementation", ["mosaic", "triton"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_two_shards(layout, dtype, implementation):
    shards.check_two(implementation, 512, layout, dtype, "linear_logp_wgmma", label_smoothing=0.1)


def test_mosaic_is_chosen_and_an_impossible_token_makes_the_loss_infinite():
    case = Case("impossible", (64,), 64, 1000, bias=True)
    problem = helpers.make(case, jnp.bfloat16)
    bias, ids = problem.bias.at[7].set(-jnp.inf), jnp.where(problem.target_ids == 7, 8, problem.target_ids)

    def loss(hidden, smoothing):
        return linear_cross_entropy(hidden, problem.weight, ids, bias, label_smoothing=smoothing, reduction="sum")

    operands = problem.hidden, problem.weight, ids, bias
    assert rlk_jax.explain("linear_cross_entropy", *operands, **SMOOTHING).choice == "mosaic"
    assert np.isfinite(loss(problem.hidden, 0.0))
    value, gradient = jax.value_and_grad(loss)(problem.hidden, 0.1)
    assert value == np.inf and np.isfinite(gradient.astype(jnp.float32)).all()
