"""The plan of a head on Hopper: slices of the vocabulary that are as wide as the memory budget holds.

Everything here is a pure function of static facts. No choice changes a bit.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, THREADS, statistics_tile
from pallas_kernels.hopper.vocabulary import Vocabulary
from pallas_kernels.products import padded
from rlk_jax.core.head import HeadConfig, Needs, kernel_memory_budget, least_columns, room_for_slices

_FEW_TILES = 96
"""Tiles of dH, of 128 rows and 256 columns, below which the multiprocessors of a Hopper GPU have too little to do."""


@dataclass(frozen=True)
class ChunkRange:
    """Chunks first … end − 1 of the vocabulary, in slices of `width` chunks that read the head in place or copy it."""

    first: int
    end: int
    width: int
    copied: bool
    is_kept: bool = False
    """Whether the forward kept the exponentials of these chunks."""

    @property
    def slices(self) -> int:
        """How many slices there are in the range."""
        return -(-(self.end - self.first) // self.width)

    def most_groups(self, group_chunks: int) -> int:
        """The largest number of groups, of so many chunks each, that one slice has chunks of."""
        starts = range(self.first, self.end, self.width)
        lasts = (min(start + self.width, self.end) - 1 for start in starts)
        return max(last // group_chunks - start // group_chunks + 1 for start, last in zip(starts, lasts, strict=True))


@dataclass(frozen=True)
class HopperPlan:
    """The static facts of one pass: how many rows the kernels see, and the vocabulary in ranges of slices."""

    config: HeadConfig
    dim: int
    tokens: int
    ranges: tuple[ChunkRange, ...]
    groups_at_once: bool = False
    """Whether every group of the vocabulary has a sum of dH of its own, and these are folded after the last slice.
    Otherwise a slice's groups are added to one total in ascending order."""

    @property
    def cuts_groups(self) -> bool:
        """Whether a slice ends inside a group, whose chain of dH the next slice goes on with."""
        each = vocabulary_of(self.config).group_chunks
        return any(x.first % each or (x.slices > 1 and x.width % each) for x in self.ranges)

    def buffer_chunks(self, chunks: ChunkRange) -> int:
        """Chunks that the memory for a slice's dlogits holds: kernels are made for its size, which is the same in all
        ranges that read the head in place.
        """
        return max(x.width for x in self.ranges if x is chunks or not (x.copied or chunks.copied))

    @property
    def slices(self) -> int:
        """How many slices there are in all ranges."""
        return sum(x.slices for x in self.ranges)

    @property
    def matrix_rows(self) -> int:
        """Rows of hidden and of dlogits."""
        return matrix_rows(self.tokens)

    @property
    def rows(self) -> int:
        """Rows of arrays with one number per token: a multiple of a warpgroup's threads, each of which has a row."""
        return padded(self.matrix_rows, THREADS)


def matrix_rows(tokens: int) -> int:
    """Rows of hidden and of dlogits for so many tokens: whole tiles; where one is not full, as few as a load can bring.

    What is loaded for nothing slows the stream of the head.
    """
    tile = statistics_tile(tokens)
    return padded(tokens, 8 if tokens <= 64 else tile.cluster_rows)


def vocabulary_of(config: HeadConfig) -> Vocabulary:
    """The columns as slices are cut from them, in chunks of 256."""
    return Vocabulary(config.real_vocab_size, config.groups.count, config.groups.width)


def softmax_vocabulary(config: HeadConfig) -> Vocabulary:
    """The columns as the softmax is summed up over them: where logits are in two parts, in chunks of 128."""
    return vocabulary_of(config).cut(COLUMNS // config.logit_parts)


def logits_dtype(config: HeadConfig, dtype: Any) -> Any:
    """What exponentials and gradients of logits are rounded to, beside a hidden of this dtype."""
    return jnp.float32 if config.logit_parts > 1 else dtype


def reads_in_place(config: HeadConfig, dim: int) -> bool:
    """Whether TMA reads the head where it is, not in parts."""
    return config.weight_parts == 1 and stores_in_place(config, dim)


def stores_in_place(config: HeadConfig, dim: int) -> bool:
    """Whether TMA can write dW where it belongs: strides and every chunk's first column suit TMA's tiles."""
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
    chain: int = 0
    """Bytes of the chain of dH of a group that slices end inside."""


def kept_bytes(config: HeadConfig, tokens: int) -> int:
    """Bytes of one chunk's kept exponentials and their shifts. In two parts there are two shifts for 256 columns."""
    rows = matrix_rows(tokens)
    return config.logit_parts * (2 * COLUMNS * rows + 4 * padded(rows, THREADS))


def kept_chunks(config: HeadConfig, dim: int, tokens: int, dtype: Any) -> int:
    """How many chunks, from the first on, the forward keeps the exponentials of.

    It keeps all that the budget holds beside hidden. Where the gradients are not made in their place
    (`replaces_kept`), it keeps half of that, and slices of dlogits take the rest. Where a slice of the backward ends
    inside a group, the budget also holds that group's chain of dH; a few chunks more are not worth it. A
    forward with a ranking keeps none, for its products take the budget.
    """
    # A smoothed target needs the softcap's derivative alone, which is kept in a product.
    is_whole = config.smoothing is None or config.logit_softcap is None
    if not config.keeps or config.ranking is not None or not is_whole:
        return 0
    needs = Needs(True, True, True)
    sizes = backward_sizes(config, dim, tokens, needs, dtype)
    budget, each = kernel_memory_budget(config, dim, tokens), vocabulary_of(config).group_chunks

    def affordable(fixed: int) -> int:
        room, block = budget - fixed, sizes.chunk + sizes.copy
        if room < block:
            return 0
        if replaces_kept(config, dim):
            return min(chunks_in_place(config, dim), room // kept_bytes(config, tokens))
        return min(vocabulary_of(config).chunks, (room - block) // 2 // kept_bytes(config, tokens))

    most, cut = affordable(sizes.fixed), affordable(sizes.fixed + chain_bytes(dim, tokens))
    if sums_groups_at_once(config, dim, tokens):
        return most
    whole = most - most % each
    cuts_groups = backward_plan(config, dim, tokens, needs=needs, dtype=dtype, kept=whole).cuts_groups
    return cut if cuts_groups or cut > whole + each // 8 else whole


def replaces_kept(config: HeadConfig, dim: int) -> bool:
    """Whether one slice can hold all kept chunks, with the gradients in the place of the exponentials.

    A head that is copied would have to be copied whole.
    """
    return chunks_in_place(config, dim) > 0


def chain_bytes(dim: int, tokens: int) -> int:
    """Bytes of one float32 sum of dH."""
    return 4 * padded(matrix_rows(tokens), THREADS) * padded(dim, COLUMNS)


def sums_groups_at_once(config: HeadConfig, dim: int, tokens: int) -> bool:
    """Whether every group of the vocabulary has a sum of dH of its own: where a caller needs them, and where the tiles
    of one sum are too few for the machine, unless all sums take more than half of the budget.
    """
    if config.sums_by_group:
        return True
    few = -(-tokens // 128) * -(-dim // COLUMNS) < _FEW_TILES
    every = config.groups.count * chain_bytes(dim, tokens)
    return few and every <= kernel_memory_budget(config, dim, tokens) // 2


def sliced_plan(
    config: HeadConfig, dim: int, tokens: int, in_place: int, kept: int, sizes: BufferSizes, unit: int
) -> HopperPlan:
    """A plan whose slices are as wide as the budget holds, or as `room_for_slices` has it beside a chain of dH.

    They have at least one chunk, and are equally wide but for rounding within each range. Slices that can hold `unit`
    chunks are a multiple of it wide.
    """
    budget = kernel_memory_budget(config, dim, tokens)
    least = least_columns(config, dim, tokens) // COLUMNS

    def width(count: int, room: int, per_chunk: int) -> int:
        affordable = max(1, room // per_chunk) if per_chunk else count
        multiple = unit if affordable >= unit else 1
        units = -(-count // multiple)
        return min(count, multiple * -(-units // -(-units // (affordable // multiple))))

    def chunk_range(first: int, end: int) -> ChunkRange:
        copied, is_kept = first >= in_place, first < kept
        if is_kept and replaces_kept(config, dim):
            return ChunkRange(first, end, end - first, copied, is_kept)
        per_chunk = sizes.chunk + (sizes.copy if copied else 0)
        room = budget - sizes.fixed
        if is_kept:
            room -= sizes.chain + sizes.exponentials
        else:
            room = room_for_slices(room, sizes.chain, least * per_chunk)
        return ChunkRange(first, end, width(end - first, room, per_chunk), copied, is_kept)

    bounds = sorted({0, vocabulary_of(config).chunks, in_place, kept})
    ranges = tuple(chunk_range(*ends) for ends in itertools.pairwise(bounds))
    return HopperPlan(config, dim, tokens, ranges, sums_groups_at_once(config, dim, tokens))


def forward_plan(config: HeadConfig, dim: int, tokens: int, kept: int = 0) -> HopperPlan:
    """One slice where the head is read in place; else slices whose copies fit the budget beside hidden's rows and kept
    exponentials. For a ranking, the budget holds the products of a slice.
    """
    in_place = vocabulary_of(config).chunks if reads_in_place(config, dim) else 0
    products = 0 if config.ranking is None else 4 * COLUMNS * matrix_rows(tokens)
    fixed = hidden_bytes(config, dim, tokens) + kept * kept_bytes(config, tokens)
    sizes = BufferSizes(products, copied_chunk_bytes(dim), fixed)
    return sliced_plan(config, dim, tokens, in_place, 0, sizes, 1)


def backward_plan(config: HeadConfig, dim: int, tokens: int, *, needs: Needs, dtype: Any, kept: int = 0) -> HopperPlan:
    """Slices whose dlogits, and copies of the head where it needs them, fit the budget beside the compacted rows and
    the exponentials of `kept` chunks until their gradients are made.

    A padded head that is read in place is copied only in the chunks that end within 64 columns of the padding.
    """
    sizes = backward_sizes(config, dim, tokens, needs, dtype)
    sizes = replace(sizes, exponentials=kept * kept_bytes(config, tokens))
    return plan_of_sums(config, dim, tokens, sizes, needs, kept)


def plan_of_sums(
    config: HeadConfig, dim: int, tokens: int, sizes: BufferSizes, needs: Needs, kept: int = 0
) -> HopperPlan:
    """The plan of a backward that holds so many bytes. Slices end with groups of the vocabulary, or leave room for the
    chain of dH of the group that they end inside, as `room_for_slices` has it.
    """
    of_call = (config, dim, tokens, chunks_in_place(config, dim), kept)
    if not needs.hidden or sums_groups_at_once(config, dim, tokens):
        return sliced_plan(*of_call, sizes, 1)
    plan = sliced_plan(*of_call, sizes, vocabulary_of(config).group_chunks)
    if not plan.cuts_groups:
        return plan
    return sliced_plan(*of_call, replace(sizes, chain=chain_bytes(dim, tokens)), 1)


def backward_sizes(config: HeadConfig, dim: int, tokens: int, needs: Needs, dtype: Any) -> BufferSizes:
    """What a backward without kept exponentials holds. In float16, dW needs rescaled rows of hidden too. Sums of dH for
    every group are held where they are not what the caller asks for.
    """
    rows = matrix_rows(tokens)
    copies_of_hidden = 2 if dtype == jnp.float16 and needs.weight else 1
    copies = copied_chunk_bytes(dim)
    if needs.weight and not (config.weight_parts > 1 and stores_in_place(config, dim)):
        copies += config.weight_parts * copied_chunk_bytes(dim)
    fixed = copies_of_hidden * hidden_bytes(config, dim, tokens)
    if sums_groups_at_once(config, dim, tokens) and not config.sums_by_group:
        fixed += (config.groups.count - 1) * chain_bytes(dim, tokens)
    return BufferSizes(2 * COLUMNS * rows * config.logit_parts, copies, fixed)


def hidden_bytes(config: HeadConfig, dim: int, tokens: int) -> int:
    """Bytes of the compacted rows of hidden, in as many parts as the kernels see."""
    return 2 * matrix_rows(tokens) * padded(dim, DEPTH) * config.hidden_parts


def copied_chunk_bytes(dim: int) -> int:
    """Bytes of one chunk of a copied head, and of the gather that makes it; or of its two parts, which XLA gathers and
    makes in one kernel.
    """
    return 2 * 2 * COLUMNS * padded(dim, DEPTH)
