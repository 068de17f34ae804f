"""Which columns of the vocabulary a row's softmax is taken over, in the form that Hopper's kernels read.

A thread holds, in each row of an accumulator, 2 neighbouring columns of every 8. Bits are therefore kept by column
modulo 8: word j of a chunk's 8 has in bit i whether column 8·i + j of the chunk is allowed. A thread then loads two
words for a row of 256 columns.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.vocabulary import Vocabulary

Array = jax.Array
BIT_COLUMNS = 8
"""Words for each row of a chunk, and neighbouring columns that no two of share a word."""
_WORD = 32
_BYTES = 0x01010101
_GATHER = 0x01020408
"""Multiplied by this, the lowest bits of a word's bytes stand side by side from bit 24 on; no carry reaches them."""


def allowed_bits(vocabulary: Vocabulary, packed: Array) -> Array:
    """`[N, chunks · 8]` int32 from `packed [N, words]` int32, of which bit i of word j is column 32·j + i.

    Chunks may begin inside a word. Bits of places that hold no column may be of other columns.
    """
    words = packed.astype(jnp.uint32)
    count = vocabulary.columns // _WORD
    start = vocabulary.start(jnp.arange(vocabulary.chunks, dtype=jnp.int32))
    index = start[:, None] // _WORD + jnp.arange(count + 1, dtype=jnp.int32)
    shift = (start % _WORD).astype(jnp.uint32)[:, None]
    found = words.at[:, index].get(mode="fill", fill_value=0)
    # The word behind is shifted in two steps, for none shifts by all of its 32 bits.
    aligned = (found[..., :-1] >> shift) | ((found[..., 1:] << 1) << (_WORD - 1 - shift))
    column = jnp.arange(BIT_COLUMNS, dtype=jnp.uint32)
    lowest = (aligned[..., None] >> column) & jnp.uint32(_BYTES)
    four_bits = (lowest * jnp.uint32(_GATHER)) >> 24
    place = 4 * jnp.arange(count, dtype=jnp.uint32)[:, None]
    bits = jnp.sum((four_bits & 15) << place, axis=2, dtype=jnp.uint32)
    return bits.astype(jnp.int32).reshape(len(packed), -1)
