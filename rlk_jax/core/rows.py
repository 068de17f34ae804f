"""Two ways to spend work on active tokens alone: blocks of constant shape, and rows in front of all others."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.fixed_order import zeros_behind
from rlk_jax.core.tokens import Tokens
from rlk_jax.core.transforms import varying_like

Array = jax.Array
MEMORY_BUDGET = 256 * 2**20
"""Default bytes that one block of logits and its gradient may take under XLA, whatever N is; a head of more bytes
raises it.
"""
_ROWS_OF_LEAST_BLOCK = 16


@dataclass(frozen=True)
class Block:
    """A block of tokens: their places `index` in ascending order, and whether each is `active`.

    A row that is not active only fills the block and must contribute nothing.
    """

    index: Array
    active: Array

    def take[Tree](self, tree: Tree) -> Tree:
        """The block's rows of every `[N, ...]` leaf."""
        return jax.tree.map(lambda x: x[self.index], tree)

    def take_hidden(self, hidden: Array) -> Array:
        """The block's rows of hidden, zero where they only fill the block: 0·NaN must not reach a sum over rows."""
        return jnp.where(self.active[:, None], hidden[self.index], 0)

    def take_tokens(self, tokens: Tokens) -> Tokens:
        """The block's tokens; rows that only fill the block are not active."""
        return self.take(tokens)._replace(active=self.active)

    def store(self, into: Array, rows: Array) -> Array:
        """`into [N, ...]` with the block's active rows set."""
        nowhere = into.shape[0] + jnp.arange(self.index.shape[0], dtype=jnp.int32)
        index = jnp.where(self.active, self.index, nowhere)
        return into.at[index].set(rows.astype(into.dtype), mode="drop", unique_indices=True)


def fold_blocks[Carry](active: Array, rows: int, step: Callable[[Block, Carry], Carry], start: Carry) -> Carry:
    """What `step(block, carry)` gives in the end, called in ascending order for as many blocks of `rows` tokens as hold
    every token that is `active [N]`.
    """
    padding = -active.shape[0] % rows
    order = _active_first(active)
    is_active = jnp.pad(active[order], (0, padding))
    order = jnp.pad(order, (0, padding))
    count = (jnp.sum(active, dtype=jnp.int32) + rows - 1) // rows

    def body(i: Array, carry: Carry) -> Carry:
        block = Block(*(lax.dynamic_slice_in_dim(x, i * rows, rows) for x in (order, is_active)))
        return step(block, carry)

    return lax.fori_loop(0, count, body, varying_like(start, active))


def fold_sequences[Carry](
    active: Array,
    length: int,
    rows: int,
    multiple: int,
    step: Callable[[Block, Array, Carry], Carry],
    start: Carry,
) -> Carry:
    """What `step(block, is_last, carry)` gives in the end, for blocks that end with sequences of `length` tokens each.

    A block has as many of the tokens that are `active [N]` as end with a sequence and fit `rows`. The next one begins
    at a multiple of `multiple` active tokens: it has up to `multiple` − 1 tokens of the block once more. `is_last`
    `[rows]` says of which tokens the block is the last that has them.
    """
    assert length + multiple - 1 <= rows, "a sequence must fit a block behind what is left of the one before it"
    ends = _counts(jnp.sum(active.reshape(-1, length), axis=1, dtype=jnp.int32))
    order, count = jnp.pad(_active_first(active), (0, rows)), ends[-1]

    def body(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        first, carry = state
        row = first + jnp.arange(rows, dtype=jnp.int32)
        end = jnp.max(ends, where=ends <= first + rows, initial=0)
        next_first = jnp.where(end < count, end - end % multiple, end)
        block = Block(lax.dynamic_slice_in_dim(order, first, rows), row < end)
        return next_first, step(block, row < next_first, carry)

    state = jnp.zeros((), jnp.int32), start
    return lax.while_loop(lambda state: state[0] < count, body, varying_like(state, active))[1]


def _active_first(active: Array) -> Array:
    """The places of all tokens: first of those that are `active [N]`, in ascending order."""
    return jnp.argsort(~active, stable=True).astype(jnp.int32)


def rows_within(memory_budget: int, bytes_of_row: int, tokens: int) -> int:
    """Rows of a block: as many as the budget holds, a multiple of 16, and no more than there are tokens."""
    affordable = memory_budget // bytes_of_row // _ROWS_OF_LEAST_BLOCK * _ROWS_OF_LEAST_BLOCK
    return max(min(affordable, -(-tokens // _ROWS_OF_LEAST_BLOCK) * _ROWS_OF_LEAST_BLOCK), _ROWS_OF_LEAST_BLOCK)


def store_by_block(active: Array, rows: int, of_block: Callable[[Block], Any], start: Any) -> Any:
    """`start`, a tree of arrays `[N, ...]`, with the rows of active tokens replaced by those that `of_block` gives."""
    return fold_blocks(active, rows, lambda block, so_far: jax.tree.map(block.store, so_far, of_block(block)), start)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("count", "active", "index", "place"), meta_fields=("size",)
)
@dataclass(frozen=True)
class Compacted:
    """N tokens whose active ones stand, in their own order, at the front of `size` rows.

    `count [1]` is the number of active tokens. `index` says which token a row holds, and `place` in which row a token
    is; both are None where all tokens are active and stay where they are.
    """

    size: int
    count: Array
    active: Array
    index: Array | None
    place: Array | None

    def take(self, x: Array, fill: float = 0) -> Array:
        """The rows `[size, ...]` of `x [N, ...]`: active tokens first, then `fill`."""
        if self.index is None:
            padding = ((0, self.size - x.shape[0]), *((0, 0),) * (x.ndim - 1))
            return jnp.pad(x, padding, constant_values=fill)
        is_row = jnp.arange(self.size, dtype=jnp.int32) < self.count
        return jnp.where(is_row.reshape(-1, *(1,) * (x.ndim - 1)), x[self.index], jnp.asarray(fill, x.dtype))

    def spread(self, rows: Array) -> Array:
        """The inverse of `take`: `[N, ...]` from `rows [size, ...]`, 0 where a token is not active."""
        if self.place is None:
            return rows[: self.active.shape[0]]
        return jnp.where(self.active.reshape(-1, *(1,) * (rows.ndim - 1)), rows[self.place], 0)


def _counts(x: Array) -> Array:
    """The sums of `x [n]` up to and with each element, by blocks of 64. `jnp.cumsum` is the same; on a GPU XLA compiles
    it for seconds.
    """
    blocks = zeros_behind(x, 0, 64).reshape(-1, 64)
    within = jnp.sum(jnp.where(jnp.tri(64, dtype=bool), blocks[:, None, :], 0), axis=-1, dtype=jnp.int32)
    if len(blocks) > 1:
        within += (_counts(within[:, -1]) - within[:, -1])[:, None]
    return within.reshape(-1)[: len(x)]


def compact(active: Array, size: int, *, all_active: bool = False) -> Compacted:
    """Moves the tokens that are `active [N]` to the front of `size` rows; all_active says that all of them are."""
    n = active.shape[0]
    if all_active:
        return Compacted(size, jnp.full(1, n, jnp.int32), active, None, None)
    # Without the barrier XLA would count anew for every element of a row that is moved.
    place = lax.optimization_barrier(_counts(active.astype(jnp.int32)) - 1)
    tokens = jnp.arange(n, dtype=jnp.int32)
    index = (
        jnp.zeros(size, jnp.int32)
        .at[jnp.where(active, place, size + tokens)]
        .set(tokens, mode="drop", unique_indices=True)
    )
    return Compacted(size, jnp.sum(active, dtype=jnp.int32, keepdims=True), active, index, jnp.maximum(place, 0))
