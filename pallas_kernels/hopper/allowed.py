"""Which columns of the vocabulary a row's softmax is taken over, in the forms that Hopper's kernels read.

In each row of an accumulator a thread holds 2 neighbouring columns of every 8. Bits are therefore kept by column
modulo 8: word j of a chunk's 8 has in bit i whether column 8·i + j of the chunk is allowed. A thread then loads two
words for a row of 256 columns. In kernels that stream a row in pieces, a thread holds the same places of every piece.
There bits are kept by place, in words of 32 pieces each.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

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
    words, each = packed.astype(jnp.uint32), vocabulary.group_chunks
    starts = [
        g * vocabulary.group_width + c * vocabulary.columns for g in range(vocabulary.groups) for c in range(each)
    ]
    # A run at a time: XLA then makes the bits in one pass over the words.
    runs = [_words_of_run(words, run, vocabulary.columns) for run in _runs(starts, vocabulary.columns)]
    return jnp.concatenate([_chunk_bits(run) for run in runs], axis=1).astype(jnp.int32)


def _chunk_bits(words: Array) -> Array:
    """The bits `[N, chunks · 8]` of chunks that have the words `[N, chunks, count]`."""
    column = jnp.arange(BIT_COLUMNS, dtype=jnp.uint32)

    def of_word(m: int) -> Array:
        lowest = (words[..., m, None] >> column) & jnp.uint32(_BYTES)
        four_bits = (lowest * jnp.uint32(_GATHER)) >> 24
        return (four_bits & 15) << jnp.uint32(4 * m)

    # Unrolled: XLA gives a sum over an axis this short and far inside to few threads.
    return functools.reduce(jnp.bitwise_or, map(of_word, range(words.shape[2]))).reshape(len(words), -1)


def bits_of_pieces(packed: Array, starts: Sequence[int], piece: int) -> Array:
    """`[N, ceil(P / 32) · piece]` int32 from `packed [N, words]`, of which bit i of word j is column 32·j + i.

    Bit i of the word at place c of group g is column starts[32·g + i] + c: pieces of `piece` columns, a multiple of 32,
    begin at `starts`, which are not negative. Columns behind the last word have 0.
    """
    words = packed.astype(jnp.uint32)
    pieces = jnp.concatenate([_words_of_run(words, run, piece) for run in _runs(starts, piece)], axis=1)
    pieces = jnp.pad(pieces, ((0, 0), (0, -len(starts) % _WORD), (0, 0)))
    groups = pieces.reshape(len(words), -1, _WORD, piece // _WORD, 1)
    column = jnp.arange(_WORD, dtype=jnp.uint32)

    def of_piece(i: int) -> Array:
        return ((groups[:, :, i] >> column) & 1) << jnp.uint32(i)

    return functools.reduce(jnp.bitwise_or, map(of_piece, range(_WORD))).astype(jnp.int32).reshape(len(words), -1)


class _Run(NamedTuple):
    """Stretches of columns that stand one behind the other: the first column, and how many stretches there are."""

    first: int
    stretches: int


def _runs(starts: Sequence[int], columns: int) -> list[_Run]:
    """The runs of stretches of so many columns that begin at `starts`."""
    runs: list[_Run] = []
    for start in starts:
        if runs and start == runs[-1].first + runs[-1].stretches * columns:
            runs[-1] = runs[-1]._replace(stretches=runs[-1].stretches + 1)
        else:
            runs.append(_Run(start, 1))
    return runs


def _words_of_run(words: Array, run: _Run, columns: int) -> Array:
    """`[N, stretches, columns / 32]`: the words of a run, which need not begin at the first bit of a word."""
    (index, shift), size = divmod(run.first, _WORD), run.stretches * columns // _WORD
    found = jnp.pad(words, ((0, 0), (0, max(0, index + size + 1 - words.shape[1]))))[:, index : index + size + 1]
    found = (found[:, :-1] >> shift) | (found[:, 1:] << (_WORD - shift)) if shift else found[:, :-1]
    return found.reshape(len(words), run.stretches, columns // _WORD)
