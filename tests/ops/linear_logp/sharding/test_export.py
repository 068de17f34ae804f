"""jax.export of calls on several devices."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rlk_jax import linear_logp, vocab_parallel


def operands(mesh, *specs):
    """hidden, head and ids, which lie over the mesh as the specs say."""
    random = np.random.default_rng(0)
    arrays = (random.normal(size=(8, 16)), random.normal(size=(1024, 16)), random.integers(0, 1000, 8))
    return [
        jax.device_put(jnp.asarray(x, jnp.int32 if x.ndim == 1 else jnp.float32), NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def value_and_gradients(function):
    return jax.jit(jax.value_and_grad(lambda h, w, ids: function(h, w, ids).sum(), argnums=(0, 1)))


def test_a_sharded_head_keeps_its_bits():
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    arrays = operands(mesh, P(), P("tp"), P())
    function = value_and_gradients(
        lambda h, w, ids: vocab_parallel.linear_logp(h, w, ids, mesh=mesh, vocab_axis="tp", global_vocab_size=1000)
    )
    loaded = jax.export.deserialize(jax.export.export(function)(*arrays).serialize())
    assert loaded.nr_devices == 4
    jax.tree.map(np.testing.assert_array_equal, jax.jit(loaded.call)(*arrays), function(*arrays))


def test_a_bare_call_over_explicit_axes_keeps_its_bits():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    arrays = operands(mesh, P("data"), P(), P("data"))
    function = value_and_gradients(linear_logp)
    with jax.set_mesh(mesh):
        loaded = jax.export.deserialize(jax.export.export(function)(*arrays).serialize())
        jax.tree.map(np.testing.assert_array_equal, jax.jit(loaded.call)(*arrays), function(*arrays))


def test_a_bare_call_over_auto_axes_cannot_be_exported():
    """XLA asks a function of the exporting process how to cut it; no other process has that function."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="CustomSPMDPartitioning"):
        jax.export.export(jax.jit(linear_logp))(*operands(mesh, P("data"), P(), P("data")))
