"""RMSNorm's kernel in Pallas' interpreter: values, and a row's bits in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.mosaic.rms_norm import rms_norm
from tests.support.helpers import assert_same_bits, assert_within_contract

MACHINE = Machine(4, plgpu.InterpretGPUParams(detect_races=True))
EPSILON = 1e-5


MANY_ROWS = 35
"""Rows that make a machine of 4 SMs take several of them per block, the last block less."""


@pytest.mark.parametrize("columns", [72, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_against_float64(columns, dtype):
    """A row of 72 numbers is no whole chunk."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, scale = jax.random.normal(keys[0], (MANY_ROWS, columns), dtype), 1 + jax.random.normal(keys[1], (columns,))
    (found,) = rms_norm((x,), scale, EPSILON, dtype, MACHINE)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPSILON) * np.asarray(scale, np.float64)
    assert found.dtype == dtype
    assert_within_contract(found, expected, "rms_norm", dtype, "forward")
    assert_same_bits(rms_norm((x[33:34],), scale, EPSILON, dtype, MACHINE)[0], found[33:34])


def test_a_sum_of_another_dtype():
    """The bits are those of the addition, and of the norm of the sum."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, added = jax.random.normal(keys[0], (MANY_ROWS, 72)), jax.random.normal(keys[1], (MANY_ROWS, 72), jnp.bfloat16)
    scale = jax.random.normal(keys[2], (72,), jnp.bfloat16)
    normalized, total = rms_norm((x, added), scale, EPSILON, jnp.bfloat16, MACHINE)
    assert normalized.dtype == jnp.bfloat16
    assert_same_bits(total, x + added)
    assert_same_bits(normalized, rms_norm((total,), scale, EPSILON, jnp.bfloat16, MACHINE)[0])
