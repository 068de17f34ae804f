"""A tile of keys whose gradients are computed, and the queries that it meets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic.attention_tiles import Call, Run

Array = jax.Array
QUERIES = 64
"""Queries of a block."""


@dataclass(frozen=True)
class KeyTile:
    """The keys of a block of threads, and the queries that it meets; what all warpgroups compute alike."""

    call: Call
    first_key: Array
    end: Array
    """How many first queries belong to sequences that begin before the last key of the tile does."""

    @property
    def last_key(self) -> Array:
        """The slot of the last key."""
        return self.first_key + self.call.tile.queries - 1

    def runs(self, visit: Callable[[Run, Any], Any], start: Any) -> Any:
        """`visit(run, so far)` for the queries of each sequence that may see a key of the tile, the last one first."""
        call = self.call
        if not call.shape.holds_several:
            first_slot = call.places.first_slots[call.batch, 0]
            return visit(Run(first_slot, jnp.int32(0), jnp.int32(call.queries - 1)), start)

        def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
            last, so_far = state
            first = call.places.runs[call.batch, last]
            return first - 1, visit(Run(call.places.first_slots[call.batch, last], first, last), so_far)

        def goes_on(state: tuple[Array, Any]) -> Array:
            return (state[0] >= 0) & (call.slot(state[0]) >= self.first_key)

        return lax.while_loop(goes_on, body, (self.end - 1, start))[1]

    def first_of(self, run: Run, block: Array) -> Array:
        """The number of the first query of a block; that of the sequence's first token may be negative."""
        return run.first_slot - self.call.places.start[0] + block * QUERIES

    def blocks(self, run: Run) -> tuple[Array, Array]:
        """The first block of queries that may see a key of the tile, and the one behind the last."""
        base = self.first_of(run, jnp.int32(0))
        start = self.call.places.start[0]
        first = jnp.maximum(jnp.maximum(run.first_query, self.first_key - start), base)
        last = run.last_query
        if self.call.shape.sliding_window is not None:
            last = jnp.minimum(last, self.last_key + self.call.shape.sliding_window - 1 - start)
        size = jnp.int32(QUERIES)
        block = lax.div(first - base, size)
        return block, jnp.where(last < first, block, lax.div(last - base, size) + 1)

    def whole_blocks(self, run: Run, first: Array, end: Array) -> tuple[Array, Array]:
        """The first of the blocks first … end − 1 whose queries see all keys of the tile, and the one behind
        the last.
        """
        call, size, base = self.call, jnp.int32(QUERIES), self.first_of(run, jnp.int32(0))
        start = call.places.start[0]
        low = jnp.maximum(jnp.maximum(run.first_query, self.last_key - start) - base, 0)
        high = run.last_query + 1 - base
        if call.shape.sliding_window is not None:
            high = jnp.minimum(high, call.shape.sliding_window + self.first_key - start - base)
        low = jnp.minimum(jnp.maximum(lax.div(low + size - 1, size), first), end)
        high = jnp.where(self.first_key >= run.first_slot, lax.div(jnp.maximum(high, 0), size), 0)
        return low, jnp.minimum(jnp.maximum(high, low), end)
