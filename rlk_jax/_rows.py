"""Active tokens in blocks of constant shape, a dynamic number of them: cost follows the active tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax._problem import Array, Tokens
from rlk_jax._transforms import start_of_loop


@dataclass(frozen=True)
class Block:
    """Tokens `index`, in their own order; where not `active`, a row fills the block and must contribute nothing."""

    index: Array
    active: Array

    def take[Tree](self, tree: Tree) -> Tree:
        """The block's rows of every `[N, ...]` leaf."""
        return jax.tree.map(lambda x: x[self.index], tree)

    def take_hidden(self, hidden: Array) -> Array:
        """The block's rows, zero where they only fill the block: 0·NaN must not reach a sum over rows."""
        return jnp.where(self.active[:, None], hidden[self.index], 0)

    def take_tokens(self, tokens: Tokens) -> Tokens:
        return self.take(tokens)._replace(active=self.active)

    def store(self, into: Array, rows: Array) -> Array:
        """`into [N, ...]` with the block's active rows set."""
        nowhere = into.shape[0] + jnp.arange(self.index.shape[0], dtype=jnp.int32)
        index = jnp.where(self.active, self.index, nowhere)
        return into.at[index].set(rows.astype(into.dtype), mode="drop", unique_indices=True)


def fold_blocks[Carry](active: Array, rows: int, step: Callable[[Block, Carry], Carry], start: Carry) -> Carry:
    """`step` over as many blocks of `rows` tokens as hold every active token `[N]`, in ascending order."""
    n = active.shape[0]
    if n == 0:
        return start
    padding = -n % rows
    order = jnp.argsort(~active, stable=True).astype(jnp.int32)
    is_active = jnp.pad(active[order], (0, padding))
    order = jnp.pad(order, (0, padding))
    count = (jnp.sum(active, dtype=jnp.int32) + rows - 1) // rows

    def body(i: Array, carry: Carry) -> Carry:
        block = Block(*(lax.dynamic_slice_in_dim(x, i * rows, rows) for x in (order, is_active)))
        return step(block, carry)

    return lax.fori_loop(0, count, body, start_of_loop(start, active))
