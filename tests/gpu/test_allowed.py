"""linear_logp over the columns that each row is allowed, by kernels: values and raw bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.hopper import by_kernels_and_dtype
from tests.support import helpers
from tests.support.allowed import allowed_of, ids_of, mask_of
from tests.support.helpers import Case, assert_same_bits, assert_within_contract

SHAPES = (
    # The norm of one row is no norm over many: float32 operands in two parts leave 4e-6 of a logit of standard size.
    Case("one row", (1,), 64, 1000, bias=True, scale=0.2),
    Case("few rows", (12,), 192, 5000),
    Case("tiny vocabulary", (9,), 64, 5, scale=0.2),
    Case("ragged groups", (300,), 192, 1000, bias=True, temperature="per token"),
    Case("odd vocabulary", (130,), 64, 50257 // 16),
    Case("dv", (300,), 128, 4096, options={"weight_layout": "dv"}),
    Case("padded", (200,), 128, 1024, options={"global_vocab_size": 1001}),
    Case("softcap", (700,), 128, 5000, options={"logit_softcap": 30.0}, temperature=0.7),
    Case("softcap, bias, ragged", (70,), 64, 1000, bias=True, options={"logit_softcap": 2.0}, temperature="per token"),
)
every_kernel_and_dtype = by_kernels_and_dtype(jnp.float32)
every_shape = pytest.mark.parametrize("case", SHAPES, ids=str)


@every_kernel_and_dtype
@every_shape
def test_against_float64(case, kernels, dtype):
    problem = helpers.make(case, dtype)
    allowed = allowed_of(case, problem)
    gold = helpers.gold(helpers.with_options(case, allowed=allowed), problem)
    found = problem.values_and_gradients(case, kernels, allowed_ids=ids_of(allowed))
    for value, expected in zip(found[0], gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp_wgmma", dtype, "forward")
    for gradient, expected in zip(found[1], gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_wgmma", dtype, "gradient")


@every_kernel_and_dtype
@every_shape
def test_a_mask_that_allows_everything_gives_the_bits_of_no_mask(case, kernels, dtype):
    """With a backward, and in a forward alone."""
    problem = helpers.make(case, dtype)
    every = jnp.full((*case.lead, -(-case.vocab // 32)), -1, jnp.int32)
    found = problem.values_and_gradients(case, kernels, allowed_mask=every)
    assert_same_bits(found, problem.values_and_gradients(case, kernels))
    assert_same_bits(problem.call(case, kernels, allowed_mask=every), problem.call(case, kernels))


@every_kernel_and_dtype
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_no_budget_and_no_batch_changes_a_bit(kernels, dtype, softcap):
    """What is kept, what is computed again, and which rows stand beside one another."""
    case = Case("bits", (700,), 192, 5000, bias=True, options={"logit_softcap": softcap})
    case, problem = helpers.without_entropy(case, helpers.make(case, dtype))
    mask = mask_of(allowed_of(case, problem))
    expected = helpers.outputs(case, problem, kernels, allowed_mask=mask)
    for budget in (2**21, 2**24):
        assert_same_bits(helpers.outputs(case, problem, kernels, allowed_mask=mask, memory_budget=budget), expected)
    few = np.asarray([640, 3, 3, 69])
    small = Case("few", (4,), 192, 5000, options=case.options)
    rows, _ = helpers.outputs(small, helpers.rows_of(problem, few), kernels, allowed_mask=mask[few])
    assert_same_bits(rows, [x[few] for x in expected[0]])
