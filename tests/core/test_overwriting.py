"""A donated argument's memory becomes a result's.

On a CPU XLA fills the room, and so copies what is overwritten. tests/pallas_kernels/mosaic/sm90.py looks for copies in
programs for a GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp

from rlk_jax.core import overwriting, program_cache

BYTES = overwriting.LEAST_BYTES
SPEC = jax.ShapeDtypeStruct((BYTES // 4,), jnp.float32)


def overwritten(kept: jax.Array) -> tuple[Any, jax.Array]:
    """The room for `kept`, and a sum for which it is overwritten in part."""
    written = jax.new_ref(kept)
    written[:3] = jnp.full(3, 2.0)
    return overwriting.room([kept]), written[...].sum()


def test_what_is_large():
    small = jax.ShapeDtypeStruct((BYTES // 4 - 1,), jnp.float32)
    assert overwriting.large([small, SPEC, small]) == (1,) and len(overwriting.room([jnp.ones(3)])) == 0


def test_the_room_for_what_is_not_used_takes_no_memory():
    program = overwriting.donating(lambda kept: overwriting.room([kept]), (0,)).lower(SPEC).compile()
    assert program.memory_analysis().alias_size_in_bytes == BYTES


def test_what_is_spared_stays_whole(recwarn):
    large, small = jnp.ones(SPEC.shape), jnp.ones(3)
    spared = overwriting.spared({"large": large, "small": small, "none": None})
    _, total = jax.jit(overwritten, donate_argnums=0)(spared["large"])
    assert spared["small"] is small and spared["large"].is_deleted() and not recwarn
    assert total == BYTES // 4 + 3 and large.sum() == BYTES // 4


def test_a_program_on_disk_overwrites(monkeypatch, tmp_path):
    monkeypatch.setenv("RLK_CACHE", str(tmp_path))
    made = [program_cache.Made(overwritten, None)]
    for _ in range(2):  # It is made once.
        program, _ = program_cache.compiled("sum", [SPEC], jax.devices()[0], made.pop, donated=(0,))
        assert program.memory_analysis().alias_size_in_bytes == BYTES
        kept = jnp.ones(SPEC.shape)
        assert program(kept)[1] == BYTES // 4 + 3 and kept.is_deleted()
