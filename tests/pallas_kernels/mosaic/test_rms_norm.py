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


@pytest.mark.parametrize("columns", [72, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_against_float64(columns, dtype):
    """A row of 72 numbers is no whole chunk."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, scale = jax.random.normal(keys[0], (5, columns), dtype), 1 + jax.random.normal(keys[1], (columns,))
    found = rms_norm(x, scale, EPSILON, MACHINE)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPSILON) * np.asarray(scale, np.float64)
    assert found.dtype == dtype
    assert_within_contract(found, expected, "rms_norm", dtype, "forward")
    assert_same_bits(rms_norm(x[3:4], scale, EPSILON, MACHINE), found[3:4])
