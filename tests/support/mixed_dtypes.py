"""linear_logp where hidden, the head or both are float32, and its results on Hopper's tensor cores against float64."""

from typing import Any

import jax.numpy as jnp

from tests.support import helpers
from tests.support.helpers import Case, Problem, assert_within_contract


def make(case: Case, hidden: Any = jnp.float32, weight: Any = jnp.float32) -> Problem:
    """A problem with operands of these dtypes; a bias is float32."""
    problem = helpers.make(case, jnp.float32)
    return problem._replace(hidden=problem.hidden.astype(hidden), weight=problem.weight.astype(weight))


def assert_close_to_float64(case: Case, problem: Problem) -> None:
    """Values and gradients of `mosaic` are within the contract. Padding of the head holds NaN."""
    gold = helpers.gold(case, problem)
    values, gradients = helpers.with_padding(case, problem).values_and_gradients(case, "mosaic")
    for value, expected in zip(values, gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp_wgmma", jnp.float32, "forward")
    for gradient, expected in zip(gradients, gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_wgmma", gradient.dtype, "gradient")
