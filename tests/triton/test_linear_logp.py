"""linear_logp in Triton, its kernels interpreted, against float64 NumPy; bits need a GPU (tests/gpu/test_triton.py)."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels.triton import linear_logp as kernels
from rlk_jax import dispatch
from tests import helpers
from tests.helpers import Case, assert_within_contract
from tests.triton import interpreted

CASES = (
    Case("plain", (40,), 128, 300),
    Case("one row", (1,), 64, 5),
    Case("two row tiles, bias, odd", (140,), 72, 301, bias=True),
    Case("softcap", (40,), 64, 1000, options={"logit_softcap": 2.0}, temperature="per token"),
    Case("dv", (40,), 72, 512, options={"weight_layout": "dv"}),
    Case("dv, odd", (40,), 64, 301, bias=True, options={"weight_layout": "dv"}),
    Case("padded vocabulary", (40,), 64, 320, bias=True, options={"global_vocab_size": 257}),
    Case("slices", (40,), 136, 1500, options={"memory_budget": 2**17}),
)


@pytest.fixture(autouse=True, scope="module")
def on_this_cpu():
    before = dispatch.TABLE["linear_logp"]
    runs = [dataclasses.replace(x, why_not=lambda problem: []) if x.name == "triton" else x for x in before]
    dispatch.TABLE["linear_logp"] = tuple(runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "launch", interpreted.launch)
        patch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
        yield
    dispatch.TABLE["linear_logp"] = before


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case):
    """In float16: the interpreter truncates to bfloat16 where a GPU rounds."""
    problem = helpers.make(case, jnp.float16)
    gold = helpers.gold(case, problem)
    for value, expected in zip(problem.call(case, "triton"), gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp", jnp.float16, "forward")
    for gradient, expected in zip(problem.gradients(case, "triton"), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp", jnp.float16, "gradient")
