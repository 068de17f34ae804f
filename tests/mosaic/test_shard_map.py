"""The Mosaic implementation inside shard_map, lowered for an H200 on a machine without one."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import rlk_jax
from rlk_jax import dispatch


@pytest.mark.parametrize("tokens", [0, 300])
@pytest.mark.parametrize("reduction", ["sum", "canonical"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("vocab", [16384, 16000])
def test_lowers_in_several_slices(vocab, check_vma, reduction, tokens, monkeypatch):
    """Of whole chunks the slices are read in place, else copied; the types of what kernels write have to agree."""
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "H200", "9.0"))
    mesh = Mesh(jax.devices()[:2], ("tp",))

    def on_rank(hidden, weight, target_ids, bias):
        return rlk_jax.linear_logp(
            hidden,
            weight,
            target_ids,
            bias,
            axis_name="tp",
            global_vocab_size=vocab - 3,
            return_lse=True,
            return_entropy=True,
            memory_budget=2**20,
            reduction=reduction,
            implementation="mosaic",
        )

    def loss(*arrays):
        specs = (P(), P("tp", None), P(), P("tp"))
        return sum(
            x.sum()
            for x in jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)(*arrays)
        )

    shapes = (
        ((tokens, 1024), jnp.bfloat16),
        ((vocab, 1024), jnp.bfloat16),
        ((tokens,), jnp.int32),
        ((vocab,), jnp.bfloat16),
    )
    gradients = jax.jit(jax.grad(loss, (0, 1, 3))).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    program = gradients.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in program) == (tokens > 0)
