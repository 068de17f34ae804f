"""Blocks of whole sequences: which tokens a block has, and which block is the last that has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlk_jax.core.rows import fold_sequences

SEQUENCES, LENGTH = 6, 5
MASKS = st.lists(st.integers(0, 2**LENGTH - 1), min_size=SEQUENCES, max_size=SEQUENCES)


@functools.partial(jax.jit, static_argnums=(1, 2))
def blocks_of(active, rows, multiple):
    """How many blocks there are, and of each: the tokens that it has, and those that it is the last to have,
    `[blocks, N]`.
    """
    n = active.shape[0]

    def step(block, is_last, so_far):
        count, has, has_last = so_far
        return (
            count + 1,
            has.at[count, jnp.where(block.active, block.index, n)].set(True, mode="drop"),
            has_last.at[count, jnp.where(is_last, block.index, n)].set(True, mode="drop"),
        )

    none = jnp.zeros((n + 1, n), bool)
    return fold_sequences(active, LENGTH, rows, multiple, step, (0, none, none))


@settings(max_examples=60)
@given(masks=MASKS, rows=st.sampled_from((8, 9, 16)), multiple=st.sampled_from((1, 4)))
@example(masks=[0] * SEQUENCES, rows=8, multiple=4)
@example(masks=[31, 7, 31, 7, 31, 31], rows=8, multiple=4)  # sequences that end with blocks
def test_blocks_of_whole_sequences(masks, rows, multiple):
    active = np.array([[x >> i & 1 for i in range(LENGTH)] for x in masks], bool).reshape(-1)
    count, has, has_last = map(np.asarray, blocks_of(active, rows, multiple))
    assert count <= -(-SEQUENCES // ((rows - multiple + 1) // LENGTH))
    np.testing.assert_array_equal(has_last.sum(axis=0), active)
    assert not has[count:].any()
    begun = np.zeros(len(active), bool)
    for of_block, last in zip(has[:count], has_last[:count], strict=True):
        assert active[of_block].all() and of_block.sum() <= rows and last.any()
        # Gradients of tokens are formed once, in their order, from log-probs of all tokens of their sequences.
        begun |= of_block
        sequences = last.reshape(SEQUENCES, LENGTH).any(axis=1)
        np.testing.assert_array_equal(
            begun.reshape(SEQUENCES, LENGTH)[sequences], active.reshape(SEQUENCES, LENGTH)[sequences]
        )
    if count:
        assert not (has_last[: count - 1].sum(axis=1) % multiple).any()
        order = np.concatenate([np.flatnonzero(x) for x in has_last[:count]])
        np.testing.assert_array_equal(order, np.flatnonzero(active))
