"""The plan of linear_logp on Hopper: slices of the vocabulary that are as wide as the memory budget holds.

Everything here is a pure function of static facts. No choice changes a bit.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, THREADS, statistics_tile
from pallas_kernels.hopper.vocabulary import Vocabulary
from pallas_kernels.products import padded
from rlk_jax.ops.linear_logp.options import HeadConfig, Needs, kernel_memory_budget


@dataclass(frozen=True)
class ChunkRange:
    """Chunks first … end − 1 of the vocabulary, in slices of `width` chunks that read the head in place or copy it."""

    first: int
    end: int
    width: int
    copied: bool
    chain: range
    """The chunks that dH sums up in one chain; the chunks of this range are among them."""
    is_kept: bool = False
    """Whether the forward kept the exponentials of these chunks."""

    @property
    def slices(self) -> int:
        """How many slices there are in the range."""
        return -(-(self.end - self.first) // self.width)


@dataclass(frozen=True)
class HopperPlan:
    """The static facts of one pass: how many rows the kernels see, and the vocabulary in ranges of slices."""

    config: HeadConfig
    dim: int
    tokens: int
    ranges: tuple[ChunkRange, ...]

    @property
    def slices(self) -> int:
        """How many slices there are in all ranges."""
        return sum(x.slices for x in self.ranges)

    @property
    def matrix_rows(self) -> int:
        """Rows of hidden and of dlogits: whole tiles."""
        return padded(self.tokens, statistics_tile(self.tokens).cluster_rows)

    @property
    def rows(self) -> int:
        """Rows of arrays with one number per token: a multiple of a warpgroup's threads, each of which has a row."""
        return padded(self.matrix_rows, THREADS)


def vocabulary_of(config: HeadConfig) -> Vocabulary:
    """The columns as the kernels cut them."""
    return Vocabulary(config.real_vocab_size, config.groups.count, config.groups.width)


def reads_in_place(config: HeadConfig, dim: int) -> bool:
    """Whether TMA can read the head where it is: its strides and every chunk's first column suit TMA's tiles."""
    if config.weight_layout == "vd":
        return dim % DEPTH == 0 and config.vocab_size % 8 == 0
    return config.vocab_size % 64 == 0 and config.groups.width % 64 == 0


def chunks_in_place(config: HeadConfig, dim: int) -> int:
    """Chunks from the first on whose K steps of 64 columns read no padding row: 0·NaN must not reach dH."""
    vocabulary = vocabulary_of(config)
    if not reads_in_place(config, dim):
        return 0
    if config.real_vocab_size == config.vocab_size:
        return vocabulary.chunks
    return vocabulary.chunk_of(max(0, config.real_vocab_size - DEPTH))


@dataclass(frozen=True)
class BufferSizes:
    """Bytes that a pass holds at a time."""

    chunk: int
    """Bytes for each chunk of a slice."""
    copy: int
    """Further bytes for each chunk of a slice where the head is copied."""
    fixed: int = 0
    """Bytes for the whole pass, whatever its slices."""
    exponentials: int = 0
    """Bytes of kept exponentials, which are held while slices of kept chunks are worked on."""


def kept_bytes(tokens: int) -> int:
    """Bytes of one chunk's kept exponentials and their shifts."""
    rows = padded(tokens, statistics_tile(tokens).cluster_rows)
    return 2 * COLUMNS * rows + 4 * padded(rows, THREADS)


def kept_chunks(config: HeadConfig, dim: int, tokens: int, dtype: Any) -> int:
    """How many chunks, from the first on, the forward keeps the exponentials of.

    It keeps all that the budget holds beside hidden. Where the gradients are not made in their place
    (`replaces_kept`), it keeps half of that, and slices of dlogits take the rest.

    With up to 64 tokens the backward reads the head and does little else, and keeping would spill registers beside an
    entropy.
    """
    if not config.keeps or tokens <= 64:
        return 0
    sizes = backward_sizes(dim, tokens, Needs(True, True, True), dtype)
    room, block = kernel_memory_budget(config, dim, tokens) - sizes.fixed, sizes.chunk + sizes.copy
    if room < block:
        return 0
    if replaces_kept(config, dim):
        return min(chunks_in_place(config, dim), room // kept_bytes(tokens))
    return min(vocabulary_of(config).chunks, (room - block) // 2 // kept_bytes(tokens))


def replaces_kept(config: HeadConfig, dim: int) -> bool:
    """Whether one slice can hold all kept chunks, with the gradients in the place of the exponentials: dH must be one
    chain, and the head must not be copied.
    """
    return config.hidden_gradient_parts == 1 and chunks_in_place(config, dim) > 0


def _plan(config: HeadConfig, dim: int, tokens: int, in_place: int, kept: int, sizes: BufferSizes) -> HopperPlan:
    """A plan whose slices are as wide as the budget holds, at least one chunk, and equally wide but for rounding within
    each range.
    """
    chunks = vocabulary_of(config).chunks
    budget = kernel_memory_budget(config, dim, tokens)

    def width(count: int, fixed: int, per_chunk: int) -> int:
        affordable = max(1, (budget - fixed) // per_chunk) if per_chunk else count
        return -(-count // -(-count // affordable))

    def chunk_range(chain: range, first: int, end: int) -> ChunkRange:
        copied, is_kept = first >= in_place, first < kept
        if is_kept and replaces_kept(config, dim):
            return ChunkRange(first, end, end - first, copied, chain, is_kept)
        per_chunk = sizes.chunk + (sizes.copy if copied else 0)
        fixed = sizes.fixed + (sizes.exponentials if is_kept else 0)
        return ChunkRange(first, end, width(end - first, fixed, per_chunk), copied, chain, is_kept)

    each = chunks // config.hidden_gradient_parts
    ranges = []
    for start in range(0, chunks, each):
        chain = range(start, start + each)
        bounds = sorted({chain.start, chain.stop, *(x for x in (in_place, kept) if x in chain)})
        ranges += [chunk_range(chain, *ends) for ends in itertools.pairwise(bounds)]
    return HopperPlan(config, dim, tokens, tuple(ranges))


def forward_plan(config: HeadConfig, dim: int, tokens: int, kept: int = 0) -> HopperPlan:
    """One slice where the head is read in place; else slices whose copies fit the budget beside kept exponentials."""
    in_place = vocabulary_of(config).chunks if reads_in_place(config, dim) else 0
    return _plan(config, dim, tokens, in_place, 0, BufferSizes(0, _head_chunk_bytes(dim), kept * kept_bytes(tokens)))


def backward_plan(config: HeadConfig, dim: int, tokens: int, *, needs: Needs, dtype: Any, kept: int = 0) -> HopperPlan:
    """Slices whose dlogits, and copies of the head where it needs them, fit the budget beside the compacted rows and
    the exponentials of `kept` chunks until their gradients are made.

    A padded head that is read in place is copied only in the chunks that end within 64 columns of the padding.
    """
    sizes = replace(backward_sizes(dim, tokens, needs, dtype), exponentials=kept * kept_bytes(tokens))
    return _plan(config, dim, tokens, chunks_in_place(config, dim), kept, sizes)


def backward_sizes(dim: int, tokens: int, needs: Needs, dtype: Any) -> BufferSizes:
    """What a backward without kept exponentials holds. In float16, dW needs rescaled rows of hidden too."""
    rows = padded(tokens, statistics_tile(tokens).cluster_rows)
    hidden_copies = 2 if dtype == jnp.float16 and needs.weight else 1
    copies = _head_chunk_bytes(dim) * (2 if needs.weight else 1)
    return BufferSizes(2 * COLUMNS * rows, copies, 2 * rows * padded(dim, DEPTH) * hidden_copies)


def _head_chunk_bytes(dim: int) -> int:
    """Bytes of one chunk of a copied head, and of the gather that makes it."""
    return 2 * 2 * COLUMNS * padded(dim, DEPTH)
