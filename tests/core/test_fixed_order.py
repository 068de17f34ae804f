"""Sums in a fixed order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_jax.core.fixed_order import pairwise_spread, pairwise_sum, sum_of_squares
from tests.support import helpers


def by_pairs(values: np.ndarray) -> np.ndarray:
    """The definition, halving from the top; float32."""
    if len(values) <= 1:
        return np.append(values, np.float32(0))[0] + np.float32(0)
    half = 1 << (len(values) - 1).bit_length() - 1
    return by_pairs(values[:half]) + by_pairs(values[half:])


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), count=st.integers(0, 40), appended=st.integers(0, 40))
def test_sum_is_by_pairs_and_appended_zeros_change_no_bit(seed, count, appended):
    values = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    helpers.assert_same_bits(pairwise_sum(jnp.asarray(values)), by_pairs(values))
    helpers.assert_same_bits(pairwise_sum(jnp.pad(values, (0, appended))), by_pairs(values))


@pytest.mark.parametrize("values", [[], [-0.0], [-0.0, -0.0, -0.0], [-0.0, 0.0], [1.0, -1.0]])
@pytest.mark.parametrize("function", [pairwise_sum, jax.jit(pairwise_sum)])
def test_a_zero_sum_is_plus_zero_and_has_the_derivative_of_a_sum(function, values):
    values = jnp.asarray(values, jnp.float32)
    helpers.assert_same_bits(function(values), np.float32(0))
    np.testing.assert_array_equal(jax.grad(function)(values), np.ones_like(values))


def test_products_are_rounded_before_they_are_summed():
    x, y = np.random.default_rng(0).normal(size=(2, 1001)).astype(np.float32)
    helpers.assert_same_bits(jax.jit(lambda x, y: pairwise_sum(x * y))(x, y), by_pairs(x * y))


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_spread_repeats_and_its_derivative_is_the_pairwise_sum(count):
    values = jnp.asarray([1.0, 2.0, 3.0])
    weights = np.random.default_rng(1).normal(size=(3, count)).astype(np.float32)
    np.testing.assert_array_equal(pairwise_spread(values, count), np.repeat(values[:, None], count, axis=1))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(pairwise_spread(x, count) * weights)))(values)
    helpers.assert_same_bits(gradient, np.array([by_pairs(row) for row in weights]))


def sum_of_squares_by_numpy(x: np.ndarray) -> np.float32:
    sums = np.square(x).reshape(-1)
    while sums.size > 1:
        sums = np.pad(sums, (0, -sums.size % 64)).reshape(64, -1)
        while len(sums) > 1:
            sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
        sums = sums[0]
    return sums[0]


@pytest.mark.parametrize("shape", [(1,), (64,), (3, 43), (70, 130), (5, 7, 200)], ids=str)
def test_squares_are_summed_in_a_written_order_however_they_were_computed(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    transposed = jax.jit(lambda x: sum_of_squares(x.T * 2))(x.T / 2)
    expected = sum_of_squares_by_numpy(x)
    helpers.assert_same_bits(jax.jit(sum_of_squares)(x), expected)
    helpers.assert_same_bits(transposed, expected)
    whole = np.round(x * 4)  # Sums of such squares are exact.
    assert sum_of_squares(whole) == np.square(whole.astype("d")).sum()
