"""Forward of linear_logp: for each row and chunk of 256 columns, the softmax over them; then the fold over chunks.

Logits are scaled to powers of two: y = z·log2(e). A partial is (k, s, t, u) with k = round(max y) an integer,
s = Σ 2^(y − k), t = y of the target if it is among the columns, and u = Σ 2^(y − k)·(k − y), from which the entropy
follows. k is an integer so that rescaling a partial is exact. The powers 2^(y − k) may be kept, rounded to bfloat16,
for a backward that need not multiply again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import LOG2_E, Logits, Partials, Slice
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine, Tile, padded, statistics_tile
from pallas_kernels.hopper.vocabulary import Head, Vocabulary
from pallas_kernels.mosaic.main_loop import (
    COLUMN,
    STRIP,
    WARPGROUP_ROWS,
    Block,
    Product,
    column_numbers,
    multiply,
    over_columns,
    over_rows,
    row_vector,
    store_through,
)

Array = jax.Array
Ref = Any
_LARGE_SOFTCAP = 64.0
"""From here on 1 − exp(−2x/c) loses digits of small logits that matter: a series stands in for them."""


class _Arguments(NamedTuple):
    where: Slice
    hidden: Ref
    weight: Ref
    bias: Ref | None
    target_ids: Ref
    holds_target: Ref | None
    temperature: Ref
    out: Partials
    kept: Ref | None


class Powers(NamedTuple):
    """How the values of a chunk, one row's at a time, become powers of two: 2^(y − shift), of which the largest is
    between √½ and √2.
    """

    largest: Array
    scale: Array
    shift: Array
    rest: Array

    def exponents(self, values: Array) -> Array:
        """y − shift. Not values·scale − shift: once y has no digits behind the point, that is far from 0 at the maximum
        itself.
        """
        columns = values.shape[1]
        below = values - over_columns(self.largest, columns)
        return below * over_columns(self.scale, columns) + over_columns(self.rest, columns)


def powers(largest: Array, scale: Array) -> Powers:
    """Of values whose largest is `largest`, −∞ where there are none."""
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    y = largest * scale
    shift = lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN)
    rest = y - shift
    return Powers(largest, scale, shift, jnp.where(jnp.abs(rest) > 0.5, 0.0, rest))


def softcapped(values: Array, softcap: float | None) -> tuple[Array, Array | None]:
    """softcap·tanh(values / softcap) and its derivative; the values and None without a softcap.

    With e = exp(−2x/c) and q = (1 + e)^(−1/2): tanh(x/c) = (1 − e)·q², its derivative 4·e·q⁴; e is kept finite. The
    hardware's own tanh is not accurate enough.
    """
    if softcap is None:
        return values, None
    share = values * (1 / softcap)
    e = jnp.exp2(jnp.minimum(share * (-2 * LOG2_E), 60.0))
    root = lax.rsqrt(1 + e)
    inverse = root * root
    # Written so that the compiler keeps few values alive: other orders spill registers in the backward.
    capped = (1 - e) * (inverse * softcap)
    if softcap > _LARGE_SOFTCAP:
        square = share * share
        series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315)))
        capped = jnp.where(jnp.abs(share) < 0.2, values * series, capped)
    return capped, (e * inverse) * (4 * inverse)


def bounded(logits: Logits, products: Array, bias: Array | None) -> tuple[Array, Array | None]:
    """softcap(products + bias), and its derivative where there is a softcap."""
    return softcapped(products if bias is None else products + over_rows(bias), logits.softcap)


def masked(logits: Logits, values: Array, width: Array, fill: float) -> Array:
    """`fill` in the columns from `width` on, which a chunk of fewer than 256 columns does not fill.

    Beside a softcap it stays where no chunk needs it: without the branch ptxas spills registers.
    """
    if not logits.head.vocabulary.is_ragged and logits.softcap is None:
        return values
    columns = values.shape[1]
    other = jnp.asarray(fill, values.dtype)
    return lax.cond(width < columns, lambda: jnp.where(column_numbers(columns) < width, values, other), lambda: values)


def column_bias(bias: Ref | None, first: Array, columns: int) -> Array | None:
    """Bias of some columns; asked for before the product, its latency hides there."""
    if bias is None:
        return None
    return plgpu.load(bias.at[pl.ds(first, columns)], layout=COLUMN, optimized=False)


def chunk_of(vocabulary: Vocabulary, where: Slice, block: Block) -> tuple[Array, Array]:
    """A tile's chunk and its width."""
    chunk = where.first_chunk[0] + block.column_block
    return chunk, width_of(vocabulary, where, chunk)


def width_of(vocabulary: Vocabulary, where: Slice, chunk: Array) -> Array:
    """Columns of a chunk, from inside a kernel."""
    return vocabulary.width(chunk, None if where.columns is None else where.columns[0])


def place_of(vocabulary: Vocabulary, target_ids: Array, chunk: Array, width: Array) -> Array:
    """Per row the target's place in a chunk: negative where it is not there."""
    place = target_ids - vocabulary.start(chunk)
    return jnp.where(place < width, place, -1)


def row_clusters(rows: Array, cluster_rows: int) -> Array:
    return lax.div(rows + (cluster_rows - 1), jnp.int32(cluster_rows))


def product_with_head(
    name: str, head: Head, tile: Tile, hidden: Array, slice_chunks: int, finish: Any, store_dtype: Any = None
) -> Product:
    """hidden·Wᵀ over one slice of chunks. The kernel's arguments have fields `where`, `hidden` and `weight`."""
    rows, dim = hidden.shape

    def load_b(refs: Any, block: Block, k: Array) -> Ref:
        columns = pl.ds(head.row(refs.where.first_chunk[0], block.column_block), COLUMNS)
        depth = pl.ds(k * DEPTH, DEPTH)
        return refs.weight.at[columns, depth] if head.layout == "vd" else refs.weight.at[depth, columns]

    return Product(
        name=name,
        tile=tile,
        dtype=hidden.dtype,
        a_transposed=False,
        b_transposed=head.layout == "vd",
        max_blocks=(padded(rows, tile.cluster_rows) // tile.cluster_rows, slice_chunks),
        blocks=lambda refs: (row_clusters(refs.where.rows[0], tile.cluster_rows), refs.where.chunks[0]),
        steps=lambda refs: jnp.int32(-(-dim // DEPTH)),
        load_a=lambda refs, block, k: refs.hidden.at[pl.ds(block.row, tile.rows), pl.ds(k * DEPTH, DEPTH)],
        load_b=load_b,
        finish=finish,
        store_dtype=store_dtype,
    )


def partials(
    logits: Logits,
    machine: Machine,
    where: Slice,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    target_ids: Array,
    holds_target: Array | None,
    temperature: Array,
    out: Partials,
    kept: Ref | None = None,
) -> None:
    """Write the partials of one slice of chunks into the references `out`, and powers into `kept` as far as it reaches.

    hidden `[rows, D]` (whole tiles of rows), weight as `logits.head` says, bias float32 `[slice's chunks · 256]`,
    target_ids int32 and temperature float32 `[rows]`. holds_target int32 `[rows / 64, all chunks]` is not 0 where one
    of 64 rows has its target in a chunk; None looks everywhere. kept bfloat16 `[rows, first chunks · 256]`.
    """
    head = logits.head

    def finish(refs: _Arguments, block: Block, product: Any, staging: Ref) -> None:
        chunk, width = chunk_of(head.vocabulary, refs.where, block)
        there = (chunk, pl.ds(block.row, WARPGROUP_ROWS))
        # Asked for before the product and used after it: the latency of memory hides there.
        temperature = row_vector(refs.temperature, block.row)
        holds = (
            None
            if refs.holds_target is None
            else refs.holds_target[lax.div(block.row, jnp.int32(WARPGROUP_ROWS)), chunk] > 0
        )
        added = column_bias(refs.bias, block.column_block * COLUMNS, COLUMNS)
        values = bounded(logits, product(), added)[0]
        scale = LOG2_E / temperature

        def pick() -> Array:
            target = place_of(head.vocabulary, row_vector(refs.target_ids, block.row), chunk, width)
            return jnp.where(column_numbers() == over_columns(target), values, 0.0).sum(axis=1) * scale

        picked = pick() if holds is None else lax.cond(holds, pick, lambda: jnp.zeros_like(scale))
        values = masked(logits, values, width, -jnp.inf)
        to_powers = powers(values.max(axis=1), scale)
        y_minus_shift = to_powers.exponents(values)
        weights = jnp.exp2(y_minus_shift)
        refs.out.shift[there] = to_powers.shift
        refs.out.total[there] = weights.sum(axis=1)
        refs.out.target[there] = picked
        if refs.out.gap is not None:
            # A logit of −∞ has weight 0, and 0·∞ must be 0.
            refs.out.gap[there] = (weights * jnp.minimum(-y_minus_shift, 1e30)).sum(axis=1)
        if refs.kept is None:
            return
        kept = refs.kept

        def store(strip: int, smem: Ref) -> None:
            columns = pl.ds(chunk * COLUMNS + strip * STRIP, STRIP)
            plgpu.copy_smem_to_gmem(smem, kept.at[pl.ds(block.row, WARPGROUP_ROWS), columns], commit_group=False)

        def strip_of(strip: int) -> Array:
            return weights[:, strip * STRIP : (strip + 1) * STRIP].astype(kept.dtype)

        @pl.when(chunk * COLUMNS < kept.shape[1])
        def _() -> None:
            store_through(staging, block.warpgroup, machine, strip_of, store)

    tile, chunks = statistics_tile(hidden.shape[0]), out.shift.shape[0]
    store_dtype = None if kept is None else kept.dtype
    product = product_with_head("linear_logp_statistics", head, tile, hidden, chunks, finish, store_dtype)
    arguments = _Arguments(where, hidden, weight, bias, target_ids, holds_target, temperature, out, kept)
    multiply(product, machine, arguments)
