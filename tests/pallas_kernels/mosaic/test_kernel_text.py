"""Programs with kernels have the same text each time they are lowered, whatever the process has lowered before."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlk_jax import attention, det_gemm, linear_kl, linear_logp, logp
from tests.support import shards
from tests.support.helpers import cover

MOSAIC = {"implementation": "mosaic"}


def spec(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def in_shard_map() -> str:
    return shards.lowered("mosaic", 16384, check_vma=False, reduction="sum", tokens=300)


def lowered(function: Callable[..., jax.Array], *arrays: jax.ShapeDtypeStruct) -> str:
    """The program of the gradients of every array of numbers."""
    numbers = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
    gradients = jax.jit(jax.grad(lambda *x: function(*x).astype(jnp.float32).sum(), numbers))
    return gradients.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


HEAD = spec(300, 512), spec(4096, 512)
IDS = spec(300, dtype=jnp.int32)
PROGRAMS: dict[str, Callable[[], str]] = {
    "linear_logp": lambda: lowered(lambda h, w, t: linear_logp(h, w, t, **MOSAIC), *HEAD, IDS),
    "linear_logp in shard_map": in_shard_map,
    "linear_kl": lambda: lowered(lambda h, w: linear_kl(h, w, h, w, **MOSAIC), *HEAD),
    "logp": lambda: lowered(lambda x, t: logp(x, t, **MOSAIC), spec(300, 4096), IDS),
    "det_gemm": lambda: lowered(lambda a, b: det_gemm(a, b, **MOSAIC), spec(300, 512), spec(512, 1024)),
    "attention": lambda: lowered(lambda q: attention(q, q, q, **MOSAIC), spec(2, 200, 4, 64)),
}


# In make test these lower everything that lowers kernels: on one device, without a head, and in a loop of their own.
IN_MAKE_TEST = ("linear_logp", "logp", "attention")


@cover("name", [(x,) for x in PROGRAMS], lambda name: name in IN_MAKE_TEST)
def test_a_program_has_the_same_text_again(name, for_h200):
    """JAX's compilation cache finds it in any process, and the runtime compiles its kernels once."""
    texts = []
    for _ in range(2):
        jax.clear_caches()
        texts.append(PROGRAMS[name]())
    assert texts[0] == texts[1] and "mosaic_gpu" in texts[0]
