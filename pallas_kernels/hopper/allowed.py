"""Which columns of the vocabulary a row's softmax is taken over, in the forms that Hopper's kernels read.

In each row of an accumulator a thread holds 2 neighbouring columns of every 8. Bits are therefore kept by column
modulo 8: word j of a chunk's 8 has in bit i whether column 8·i + j of the chunk is allowed. A thread then loads two
words for a row of 256 columns. In kernels that stream a row in pieces, a thread holds the same places of every piece.
There bits are kept by place, in words of 32 pieces each.
"""

import jax
import jax.numpy as jnp
from jax import lax

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
    aligned = _words_from(words, start, count)
    column = jnp.arange(BIT_COLUMNS, dtype=jnp.uint32)
    lowest = (aligned[..., None] >> column) & jnp.uint32(_BYTES)
    four_bits = (lowest * jnp.uint32(_GATHER)) >> 24
    place = 4 * jnp.arange(count, dtype=jnp.uint32)[:, None]
    bits = jnp.sum((four_bits & 15) << place, axis=2, dtype=jnp.uint32)
    return bits.astype(jnp.int32).reshape(len(packed), -1)


def bits_of_pieces(packed: Array, starts: Array, piece: int) -> Array:
    """`[N, ceil(P / 32) · piece]` int32 from `packed [N, words]`, of which bit i of word j is column 32·j + i.

    Bit i of the word at place c of group g is column starts[32·g + i] + c: pieces of `piece` columns, a multiple of 32,
    begin at `starts [P]`, or at a row's own `[N, P]`, which are not negative. Columns behind the last word have 0.
    """
    words, padding = packed.astype(jnp.uint32), (0, -starts.shape[-1] % _WORD)
    starts = jnp.pad(starts, (*((0, 0),) * (starts.ndim - 1), padding))
    if starts.ndim == 1:
        words = _words_from(words, starts, piece // _WORD)
    else:
        words = jax.vmap(lambda own, first: _words_from(own[None], first, piece // _WORD)[0])(words, starts)
    # Eight pieces at a time: four bits of a word, one of each of its bytes, make four bytes of eight pieces each.
    eights = words.reshape(len(words), -1, 4, BIT_COLUMNS, piece // _WORD, 1)
    lowest = (eights >> jnp.arange(BIT_COLUMNS, dtype=jnp.uint32)) & jnp.uint32(_BYTES)
    place = jnp.arange(BIT_COLUMNS, dtype=jnp.uint32)[:, None, None]
    of_columns = lax.bitcast_convert_type(jnp.sum(lowest << place, axis=3, dtype=jnp.uint32), jnp.uint8)
    # These are [rows, groups, byte of the result, word, column modulo 8, column over 8].
    return lax.bitcast_convert_type(of_columns.transpose(0, 1, 3, 5, 4, 2), jnp.int32).reshape(len(words), -1)


def _words_from(words: Array, starts: Array, count: int) -> Array:
    """`[N, P, count]`: words of the columns from `starts [P]` on, which need not be the first bit of a word."""
    index = starts[:, None] // _WORD + jnp.arange(count + 1, dtype=jnp.int32)
    shift = (starts % _WORD).astype(jnp.uint32)[:, None]
    found = words.at[:, index].get(mode="fill", fill_value=0)
    # The word behind is shifted in two steps, for none shifts by all of its 32 bits.
    return (found[..., :-1] >> shift) | ((found[..., 1:] << 1) << (_WORD - 1 - shift))
