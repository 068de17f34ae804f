"""The log-probs of all tokens and the gradients of a loss of them in one pass over blocks of tokens.

Once the log-probs of a sequence are known, so are the loss's gradients of them, if the loss is a sum over sequences or
over tokens. A block's logits are therefore needed no longer than until its part of dH, dW and db is formed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands, head_dim
from rlk_jax.core.rows import Block, fold_sequences
from rlk_jax.core.softmax import values_of_no_tokens
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.ops.linear_logp.options import BlockFunctions, LinearLogpFunctions, TokenBlocks

Array = jax.Array


def values_and_gradients_by_blocks(
    functions: LinearLogpFunctions,
    of_blocks: BlockFunctions,
    config: HeadConfig,
    blocks: TokenBlocks,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    slopes: Callable[[LinearLogp], Array],
) -> tuple[LinearLogp, Gradients]:
    """The values of all tokens, and the float32 gradients of what `slopes` gives the derivatives of.

    `slopes(values)` is the derivative of a loss by every token's log-prob `[N]`. A token's must depend on no values but
    those of its sequence of `blocks.length` tokens: those of later sequences are still 0 when it is asked.

    A block of whole sequences hands its last tokens on where its sums would not end at `blocks.multiple`: the next one
    has their logits once more, and gives their gradients.
    """
    n = operands.hidden.shape[0]
    own = of_blocks.config(config, head_dim(config, operands), n)

    def step(block: Block, is_last: Array, so_far: Any) -> Any:
        values, d_hidden, sums = so_far
        part = operands._replace(hidden=block.take_hidden(operands.hidden))
        of_block = block.take_tokens(tokens)
        found, _, residual, kept = functions.forward(own, part, of_block, lambda groups: groups)
        values = jax.tree.map(block.store, values, found)
        upstream = LinearLogp(jnp.where(is_last, block.take(slopes(values)), 0), None, None)
        counting = of_block.with_upstream(upstream)
        d_rows, sums = of_blocks.add(own, needs, part, counting, residual, kept, upstream, sums)
        return values, None if d_rows is None else block.store(d_hidden, d_rows), sums

    d_hidden = jnp.zeros(operands.hidden.shape, jnp.float32) if needs.hidden else None
    start = values_of_no_tokens(config, (n,)), d_hidden, of_blocks.start(config, needs, operands)
    values, d_hidden, sums = fold_sequences(tokens.active, blocks.length, blocks.rows, blocks.multiple, step, start)
    return values, of_blocks.complete(config, operands, sums)._replace(hidden=d_hidden)
