"""attention's kernels."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.attention import AttentionShape, SequencePlaces
from pallas_kernels.mosaic.attention import attend
from pallas_kernels.mosaic.attention_decode import decode
from pallas_kernels.mosaic.attention_key_gradient import key_gradients
from pallas_kernels.mosaic.attention_query_gradient import query_gradient
from tests.pallas_kernels.mosaic.configurations import MACHINE, Configuration

BATCH, QUERIES, HEADS, GROUPS = 2, 1000, 16, 4
SPILLS = {"forward": 124, "dQ": 40, "dK and dV": 160}
"""Bytes that a kernel may spill for heads of at most 128 columns: in blocks at the edge of what a query sees, or with a
softcap. Registers hold two gradients beside the products in flight, and numbers of spans beside a sum.
"""
WIDE_SPILLS = {"forward": 160, "decode": 12, "dQ": 660, "dK and dV": 520}
"""Bytes that a kernel may spill for wider heads."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """One configuration of one of attention's kernels."""

    kernel: str
    size: int
    dtype: Any
    slots: int
    several: bool
    window: int | None
    softcap: float | None

    def configuration(self) -> Configuration:
        groups = HEADS // GROUPS
        facts = AttentionShape(self.size**-0.5, self.window, self.softcap, groups, self.several), MACHINE

        def run(places, **arrays):
            places = SequencePlaces(*places)
            if self.kernel == "dQ":
                return query_gradient(*facts, **arrays, places=places)
            if self.kernel == "dK and dV":
                return key_gradients(*facts, **arrays, places=places)
            return (decode if self.kernel == "decode" else attend)(*facts, **arrays, places=places)

        options = dataclasses.asdict(self) | {"dtype": jnp.dtype(self.dtype).name}
        options["kernel"] = f"attention, {self.kernel}"
        spills = SPILLS if self.size <= 128 else WIDE_SPILLS
        return Configuration(options, run, self.arguments(), spills.get(self.kernel, 0))

    def arguments(self) -> dict[str, Any]:
        """The operands, as shapes."""
        queries = 1 if self.kernel == "decode" else QUERIES
        shape, numbers = jax.ShapeDtypeStruct, (BATCH, HEADS, -(-queries // 128) * 128)
        of_queries = shape((BATCH, queries, HEADS, self.size), self.dtype)
        of_keys = shape((BATCH, self.slots, GROUPS, self.size), self.dtype)
        each = shape((BATCH, queries if self.several else 1), jnp.int32)
        found: dict[str, Any] = {"query": of_queries, "key": of_keys, "value": of_keys}
        if self.kernel in ("dQ", "dK and dV"):
            found |= {"log_total": shape(numbers, jnp.float32), "upstream": of_queries}
            other = {"output": of_queries} if self.kernel == "dQ" else {"center": shape(numbers, jnp.float32)}
            found |= other
        return found | {"places": (shape((1,), jnp.int32), each, each)}


def configurations() -> Iterator[Configuration]:
    """Every kernel with every tile and every option, over one span of keys and over several."""
    for kernel, size, dtype, slots, several, window, softcap in itertools.product(
        ("forward", "decode", "dQ", "dK and dV"),
        (64, 80, 128, 192, 256),
        (jnp.bfloat16, jnp.float16),
        (1024, 4097),
        (False, True),
        (None, 1000),
        (None, 30.0),
    ):
        # Rows of several sequences have heads of whole chunks, and what is decoded is one sequence.
        if not several or (size % 64 == 0 and kernel != "decode"):
            yield Attention(kernel, size, dtype, slots, several, window, softcap).configuration()
