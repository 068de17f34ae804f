"""`xla` on a GPU, of which JAX only asks what it can: where cuDNN is taken, also for gradients, and where it is not."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from rlk_jax import attention
from rlk_jax.core.dispatch import Device
from rlk_jax.ops.attention import xla


@pytest.fixture(params=["8.0", "9.0"])
def capability(request, monkeypatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda asked: asked <= request.param)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda asked: asked == request.param)
    monkeypatch.setattr(xla, "device_of", lambda arrays: Device("gpu", "a GPU", request.param))
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def has_cudnn(length, size, **options) -> bool:
    """Whether cuDNN is in the traced program of a gradient, which JAX must not refuse."""
    x = jax.ShapeDtypeStruct((2, length, 4, size), jnp.bfloat16)

    def loss(*arrays):
        return attention(*arrays, implementation="xla", **options).astype(jnp.float32).sum()

    return "dot_product_attention" in str(jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x).jaxpr)


def test_cudnn_is_taken_where_it_has_gradients(capability):
    assert has_cudnn(128, 64) and has_cudnn(2, 8) and has_cudnn(128, 64, sliding_window=1)
    assert has_cudnn(128, 256) == (capability == "9.0")


# JAX 0.11.2 refuses the gradient of cuDNN's attention for odd lengths.
@pytest.mark.parametrize("length", [1, 3, 127])
def test_odd_lengths_have_gradients(capability, length):
    assert not has_cudnn(length, 64)


def test_what_cudnn_does_not_take_is_the_formula(capability):
    assert not has_cudnn(128, 20) and not has_cudnn(128, 64, logit_softcap=2.0)
    assert not has_cudnn(128, 64, start=jnp.int32(0)) and not has_cudnn(128, 64, padding=jnp.zeros(2, int))
