"""A partial softmax for each row and chunk of 256 columns, as epilogues of linear_logp's kernels compute it (fold.py
folds them), and what the products with the head of forward (partials.py) and backward (dlogits.py) share.

Logits z are scaled to y = z·log2(e), so that exponentials are powers of two. A partial is (k, s, t, u): the integer
k = round(max y), s = Σ 2^(y − k), t = y of the target if it is among the columns, and u = Σ 2^(y − k)·(k − y), from
which the entropy follows. Smoothed targets ask for Σ y, too: Σ (y − k) plus k for each column. Rescaling a partial is
exact because k is an integer. The exponentials 2^(y − k) may be kept, rounded to 16 bits, so that the backward need not
compute them again. Those of a softcap are kept times the softcap's derivative, which takes one rounding for both.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.allowed import BIT_COLUMNS
from pallas_kernels.hopper.arrays import LogitsConfig, Partials, VocabSlice, exponential_scale
from pallas_kernels.hopper.parts import Matrix, in_parts, parts_of
from pallas_kernels.hopper.tiles import DEPTH, Tile, of_parts, statistics_tile
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.mosaic.main_loop import (
    COLUMN,
    STRIP,
    WARPGROUP_ROWS,
    Block,
    Product,
    Stretch,
    column_numbers,
    over_columns,
    over_rows,
    row_vector,
)
from pallas_kernels.mosaic.softcap import softcapped
from pallas_kernels.products import LowRankTerm, padded

Array = jax.Array
Ref = Any


class ExponentScaling(NamedTuple):
    """How each row's values in one chunk become exponents y − shift, `[64]` each.

    y is value·scale, largest the row's largest value, shift the integer nearest to its rounded y, and rest = y − shift
    there, which is exact. The largest exponential 2^(y − shift) lies between √½ and √2.
    """

    largest: Array
    scale: Array
    shift: Array
    rest: Array

    def exponents(self, values: Array) -> Array:
        """y − shift, computed from the distance to the largest value.

        values·scale − shift would be far from 0 at the largest value where y is too large to have fractional digits.
        """
        columns = values.shape[1]
        below = values - over_columns(self.largest, columns)
        return below * over_columns(self.scale, columns) + over_columns(self.rest, columns)


def exponent_scaling(largest: Array, scale: Array) -> ExponentScaling:
    """The scaling of rows whose largest values are `largest`, which is −∞ for a row without a finite value."""
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    # Compilers would fuse the product into the difference, which could be above ½ where y, once rounded, is half-way
    # between two integers, and is far above ½ where y has no fractional digits.
    y = lax.optimization_barrier(largest * scale)
    shift = lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN)
    return ExponentScaling(largest, scale, shift, y - shift)


def logit_scaling(logits: LogitsConfig, largest: Array, scale: Array) -> ExponentScaling:
    """The scaling of rows whose largest products, with their bias, are `largest`: a softcap is monotonic."""
    return exponent_scaling(softcapped(largest, logits.softcap)[0], scale)


def logit_exponents(logits: LogitsConfig, scaling: ExponentScaling, products: Array) -> tuple[Array, Array | None]:
    """y − shift of products that hold their bias, and the derivative of the softcap or None without one."""
    values, derivative = softcapped(products, logits.softcap)
    if derivative is not None:
        # The softcap is monotonic but for its rounding. The minimum also keeps compilers from fusing the softcap's last
        # product into the difference to the largest value, which they would not do in every kernel.
        values = jnp.minimum(values, over_columns(scaling.largest, values.shape[1]))
    return scaling.exponents(values), derivative


def rounded_exponentials(exponentials: Array, derivative: Array | None, dtype: Any) -> tuple[Array, ...]:
    """What gradients are made from, and what the forward keeps: exponentials times the softcap's derivative, if any,
    and times `exponential_scale`, rounded once, or in two parts for float32.
    """
    if derivative is not None:
        exponentials = exponentials * derivative
    if dtype == jnp.float32:
        # Compilers would fuse the product above into the difference that is the low part, though not in every kernel.
        exponentials = jnp.maximum(exponentials, 0.0)
    # The barrier makes one instruction round two values; one for each value would be as slow as exp2.
    return lax.optimization_barrier(in_parts(exponentials * exponential_scale(dtype), dtype))


def with_bias(products: Array, bias: Array | None) -> Array:
    """The products plus the bias of their columns, if any."""
    return products if bias is None else products + over_rows(bias)


def may_be_masked(logits: LogitsConfig) -> bool:
    """Whether kernels branch on a chunk's width. With a softcap the branch stays even where no chunk needs it: without
    the branch ptxas spills registers.
    """
    return logits.head.vocabulary.is_ragged or logits.softcap is not None


def bits_of_tile(
    logits: LogitsConfig, where_gmem: VocabSlice, block: Block, *, has_room: bool = True
) -> Callable[[], Array] | None:
    """What gives the words `[64, 8]` (`allowed_bits`) of which of a tile's columns its 64 rows are allowed; None where
    they are allowed all.

    It is called before the product, where the latency of memory hides. With a softcap, or without room for four more
    registers, each use loads them anew.
    """
    if where_gmem.allowed is None:
        return None
    chunk = chunk_and_width(logits.head.vocabulary, where_gmem, block)[0]
    there = pl.ds(block.row, WARPGROUP_ROWS), pl.ds(chunk * BIT_COLUMNS, BIT_COLUMNS)

    def load() -> Array:
        return plgpu.load(where_gmem.allowed.at[there], layout=plgpu.Layout.WGMMA, optimized=False)

    if logits.softcap is not None or not has_room:
        return load
    words = load()
    return lambda: words


def only_allowed(values: Array, bits: Callable[[], Array] | None, first: int, fill: float) -> Array:
    """The values of a chunk's columns from `first` on, with `fill` where `bits` says that the column is not allowed.

    Bit i of a thread's words is for the columns that the thread holds among 8·i … 8·i + 7.
    """
    if bits is None:
        return values
    other, words = jnp.asarray(fill, values.dtype), bits()

    def eight(column: int) -> Array:
        bit = np.uint32(1 << (first + column) // BIT_COLUMNS).astype(np.int32)
        return jnp.where((words & bit) != 0, values[:, column : column + BIT_COLUMNS], other)

    return jnp.concatenate([eight(column) for column in range(0, values.shape[1], BIT_COLUMNS)], axis=1)


def masked(logits: LogitsConfig, values: Array, width: Array, fill: float, *, branches: bool = False) -> Array:
    """The values with `fill` in the columns from `width` on, which a chunk of fewer than 256 columns does not have.

    Rows of several chunks have a width each. With `branches` the kernel branches on the width in any case.
    """
    if not (branches or may_be_masked(logits)):
        return values
    columns = values.shape[1]
    other = jnp.asarray(fill, values.dtype)
    if width.ndim:
        return jnp.where(column_numbers(columns) < over_columns(width, columns), values, other)
    return lax.cond(width < columns, lambda: jnp.where(column_numbers(columns) < width, values, other), lambda: values)


def _sum_inside(values: Array, width: Array) -> Array:
    """The sum of each row's values in columns before `width`; others may hold anything."""
    columns = values.shape[1]

    def inside() -> Array:
        end = over_columns(width, columns) if width.ndim else width
        return jnp.where(column_numbers(columns) < end, values, 0.0).sum(axis=1)

    # The branch stays where all chunks are full, too: without it ptxas spills a register.
    return inside() if width.ndim else lax.cond(width < columns, inside, lambda: values.sum(axis=1))


def column_bias(bias_gmem: Ref | None, first: Array, columns: int) -> Array | None:
    """The bias of some columns. Where it is loaded before the product, the latency of memory hides there."""
    if bias_gmem is None:
        return None
    return plgpu.load(bias_gmem.at[pl.ds(first, columns)], layout=COLUMN, optimized=False)


def chunk_and_width(vocabulary: Vocabulary, where_gmem: VocabSlice, block: Block) -> tuple[Array, Array]:
    """The chunk of the vocabulary that a tile's columns are, and how many columns it has."""
    chunk = vocabulary.chunks_in(where_gmem.first_chunk[0]) + block.column_block
    return chunk, chunk_width(vocabulary, where_gmem, chunk)


def chunk_width(vocabulary: Vocabulary, where_gmem: VocabSlice, chunk: Array) -> Array:
    """How many columns a chunk has, read inside a kernel."""
    return vocabulary.width(chunk, None if where_gmem.columns is None else where_gmem.columns[0])


def target_place(vocabulary: Vocabulary, target_ids: Array, chunk: Array, width: Array) -> Array:
    """The place of each row's target in a chunk, negative where the target is not in it."""
    place = target_ids - vocabulary.start(chunk)
    return jnp.where(place < width, place, -1)


class ChunkTile(NamedTuple):
    """64 rows of one chunk: the chunk's number and width, the first row, what each row's logits are scaled by, and what
    `bits_of_tile` gives.

    Rows of several chunks have a number and a width each.
    """

    chunk: Array
    width: Array
    row: Array | int
    scale: Array
    bits: Callable[[], Array] | None = None


def _pick(logits: LogitsConfig, tile: ChunkTile, products: Array, target_ids_gmem: Ref) -> tuple[Array, Array | None]:
    """The y of each row's target and the derivative of its softcap, if any; both 0 where the chunk does not hold it."""
    target_ids = row_vector(target_ids_gmem, tile.row)
    target, columns = target_place(logits.head.vocabulary, target_ids, tile.chunk, tile.width), products.shape[1]
    picked = jnp.where(column_numbers(columns) == over_columns(target, columns), products, 0.0).sum(axis=1)
    value, derivative = softcapped(picked, logits.softcap)
    return value * tile.scale, None if derivative is None else jnp.where(target < 0, 0.0, derivative)


def rows_of_chunk(partials_gmem: Partials, chunk: Array, row: Array) -> Partials:
    """References to the partials of 64 rows in a chunk."""
    return jax.tree.map(lambda x_gmem: x_gmem.at[chunk, pl.ds(row, WARPGROUP_ROWS)], partials_gmem)


def store_partial(
    logits: LogitsConfig,
    tile: ChunkTile,
    products: Array,
    target_ids_gmem: Ref,
    holds: Array | None,
    out: Partials,
    kept_dtype: Any = None,
    see: Callable[[Array, Array], None] | None = None,
) -> list[Array]:
    """Store the partial softmax of a tile of products `[64, 256 or 128]` that hold their bias, into references `[64]`.

    holds says whether one of the rows has its target in the chunk; with None it is searched. Returns the strips of
    `rounded_exponentials` in kept_dtype, each in all of its parts, or none without it. A softcap takes one strip at a
    time, since the temporaries of a whole tile would spill registers. `see(products, largest)` is given the products,
    −inf where no softmax takes them, and the largest of each row.
    """

    def pick() -> tuple[Array, Array | None]:
        return _pick(logits, tile, products, target_ids_gmem)

    def no_target() -> tuple[Array, Array | None]:
        zeros = jnp.zeros_like(tile.scale)
        return zeros, None if logits.softcap is None else zeros

    picked, picked_derivative = pick() if holds is None else lax.cond(holds, pick, no_target)
    # Where exponentials are kept beside an entropy the branch stays, too: without it ptxas spills a register.
    products = masked(logits, products, tile.width, -jnp.inf, branches=kept_dtype is not None and out.gap is not None)
    products = only_allowed(products, tile.bits, 0, -jnp.inf)
    largest = products.max(axis=1)

    def store_picked() -> None:
        out.target[...] = picked
        if out.target_derivative is not None:
            out.target_derivative[...] = picked_derivative

    # What is stored early is held in no register meanwhile. With a softcap ptxas spills unless it is stored last.
    if see is not None:
        if logits.softcap is None:
            store_picked()
        see(products, largest)
    scaling = logit_scaling(logits, largest, tile.scale)

    def store_sum() -> None:
        # The barrier keeps compilers from fusing the product into the sum, which they might not do in every kernel.
        of_shift = lax.optimization_barrier(scaling.shift * tile.width.astype(jnp.float32))
        out.logit_sum[...] = functools.reduce(jnp.add, sums) + of_shift

    if logits.softcap is None:
        out.shift[...] = scaling.shift
        if see is None:
            store_picked()
    columns = products.shape[1] if logits.softcap is None else STRIP
    totals, gaps, sums, kept = [], [], [], []
    for first in range(0, products.shape[1], columns):
        y_minus_shift, derivative = logit_exponents(logits, scaling, products[:, first : first + columns])
        if derivative is not None:
            # The softcap of −∞ is finite.
            y_minus_shift = masked(logits, y_minus_shift, tile.width - first, -jnp.inf)
        if out.logit_sum is not None:
            sums.append(_sum_inside(y_minus_shift, tile.width - first))
            if logits.softcap is None:
                store_sum()
        exponentials = jnp.exp2(y_minus_shift)
        if derivative is not None:
            exponentials = only_allowed(exponentials, tile.bits, first, 0)
        totals.append(exponentials.sum(axis=1))
        if out.gap is not None:
            # The exponential of a logit of −∞ is 0, and 0·∞ must be 0.
            gaps.append((exponentials * jnp.minimum(-y_minus_shift, 1e30)).sum(axis=1))
        if kept_dtype is not None:
            rounded = rounded_exponentials(exponentials, derivative, kept_dtype)
            kept += [part[:, strip : strip + STRIP] for strip in range(0, columns, STRIP) for part in rounded]
    if logits.softcap is not None:
        out.shift[...] = scaling.shift
        store_picked()
        if out.logit_sum is not None:
            store_sum()
    out.total[...] = functools.reduce(jnp.add, totals)
    if out.gap is not None:
        out.gap[...] = functools.reduce(jnp.add, gaps)
    return kept


def row_clusters(rows: Array, cluster_rows: int) -> Array:
    """How many clusters of `cluster_rows` rows hold `rows` rows."""
    return lax.div(rows + (cluster_rows - 1), jnp.int32(cluster_rows))


def cut_for(logits: LogitsConfig, hidden: Matrix, weight: Matrix) -> tuple[LogitsConfig, Tile]:
    """The tile of hidden·Wᵀ, and the logits whose chunks are its columns."""
    tile = of_parts(statistics_tile(hidden.shape[0]), len(parts_of(hidden)), len(parts_of(weight)))
    head = replace(logits.head, vocabulary=logits.head.vocabulary.cut(tile.columns))
    return replace(logits, head=head), tile


def product_with_head(
    name: str,
    head: HeadAccess,
    tile: Tile,
    hidden: Matrix,
    weight: Matrix,
    low_rank: LowRankTerm | None,
    slice_chunks: int,
    finish: Any,
    store_dtype: Any = None,
    strip_columns: int = STRIP,
    operands_of: Callable[[Any], tuple[Ref, Ref]] = lambda refs: (refs.hidden_gmem, refs.weight_gmem),
) -> Product:
    """The product hidden·Wᵀ over one slice of chunks, for a kernel whose epilogue is `finish`.

    The product of a low-rank term goes on with its sums. The kernel's references have the field `where_gmem`, what
    `operands_of` takes hidden and weight from and, beside such a term, `low_rank_gmem`.
    """
    rows = hidden.shape[0]
    loaded_rows = min(rows, tile.rows)

    def stretch(dim: int, pair_of: Callable[[Any], tuple[Ref, Ref]]) -> Stretch:
        """K over `dim` columns of the two references, which are of rows and of the head."""

        def load_a(refs: Any, block: Block, k: Array) -> tuple[Ref, ...]:
            there = pl.ds(block.row, loaded_rows), pl.ds(k * DEPTH, DEPTH)
            return tuple(part.at[there] for part in parts_of(pair_of(refs)[0]))

        def load_b(refs: Any, block: Block, k: Array) -> tuple[Ref, ...]:
            first = head.vocabulary.chunks_in(refs.where_gmem.first_chunk[0])
            columns = pl.ds(head.row(first, block.column_block), tile.columns)
            depth = pl.ds(k * DEPTH, DEPTH)
            there = (columns, depth) if head.layout == "vd" else (depth, columns)
            return tuple(part.at[there] for part in parts_of(pair_of(refs)[1]))

        return Stretch(lambda refs, block: jnp.int32(-(-dim // DEPTH)), load_a, load_b)

    stretches = [stretch(hidden.shape[1], operands_of)]
    if low_rank is not None:
        stretches.append(stretch(low_rank.hidden.shape[1], lambda refs: refs.low_rank_gmem))

    return Product(
        name=name,
        tile=tile,
        dtype=parts_of(hidden)[0].dtype,
        a_transposed=False,
        b_transposed=head.layout == "vd",
        max_blocks=(padded(rows, tile.cluster_rows) // tile.cluster_rows, slice_chunks),
        blocks=lambda refs: (
            row_clusters(refs.where_gmem.rows[0], tile.cluster_rows),
            head.vocabulary.chunks_in(refs.where_gmem.chunks[0]),
        ),
        stretches=tuple(stretches),
        finish=finish,
        loaded_rows=loaded_rows,
        store_dtype=store_dtype,
        strip=(WARPGROUP_ROWS, strip_columns),
        parts=(len(parts_of(hidden)), len(parts_of(weight))),
    )
