"""rlk_jax.nn on a GPU."""

import jax
import jax.numpy as jnp

from rlk_jax import nn
from rlk_jax.core.fixed_order import sum_rows_by_id
from tests.support.helpers import assert_same_bits


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
