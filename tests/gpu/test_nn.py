"""rlk_jax.nn on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax import nn
from rlk_jax.core.fixed_order import sum_rows_by_id
from tests.support.helpers import assert_same_bits, assert_within_contract


def test_the_gradient_of_embed_is_added_up_in_one_order():
    """The same bits every time, and those of a CPU; of ids that come many times."""
    keys = jax.random.split(jax.random.key(0), 2)
    ids, upstream = jax.random.randint(keys[0], (8, 4096), 0, 50), jax.random.normal(keys[1], (8, 4096, 64))
    gradient = jax.jit(jax.grad(lambda table: jnp.vdot(nn.embed(table, ids), upstream)))
    found = [gradient(jnp.zeros((60, 64))) for _ in range(20)]
    for again in found[1:]:
        assert_same_bits(again, found[0])
    cpu = jax.device_put((ids.reshape(-1), upstream.reshape(-1, 64)), jax.devices("cpu")[0])
    assert_same_bits(found[0], sum_rows_by_id(*cpu, 60))


@pytest.mark.parametrize("columns", [576, 2048, 8192])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rms_norm_by_its_kernel(columns, dtype):
    """It is near float64, and a row has the same bits alone, in a batch of any shape, and under vmap."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, scale = jax.random.normal(keys[0], (3, 700, columns), dtype), jax.random.normal(keys[1], (columns,))
    found = nn.rms_norm(x, scale)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)
    assert_within_contract(found, expected, "rms_norm", dtype, "forward")
    assert_same_bits(nn.rms_norm(x[1, 5], scale), found[1, 5])
    assert_same_bits(nn.rms_norm(x[:, 7:9], scale), found[:, 7:9])
    assert_same_bits(jax.vmap(lambda x: nn.rms_norm(x, scale))(x), found)
    added = jax.random.normal(keys[1], x.shape, jnp.bfloat16)
    total, normalized = nn.add_rms_norm(x, added, scale, dtype=jnp.bfloat16)
    assert_same_bits(total, jax.jit(nn.isolated(jnp.add))(x, added))
    assert_same_bits(normalized, nn.rms_norm(total, scale, dtype=jnp.bfloat16))
    assert_same_bits(nn.add_rms_norm(x[1, 5], added[1, 5], scale, dtype=jnp.bfloat16), (total[1, 5], normalized[1, 5]))
