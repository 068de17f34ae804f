"""The gradient of linear_logp's hidden from the gradients of one slice's logits: dH = dlogits·W.

Each group of the vocabulary is one float32 chain over its columns, and the groups are folded in ascending order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import GroupRange, HiddenGradient, VocabSlice
from pallas_kernels.hopper.parts import Matrix, parts_of
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine, hidden_gradient_tile, of_parts
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.mosaic.launch import all_threads
from pallas_kernels.mosaic.main_loop import (
    STRIP,
    WARPGROUP_ROWS,
    Block,
    Product,
    Stretch,
    multiply,
    over_columns,
    row_vector,
)
from pallas_kernels.mosaic.statistics import row_clusters
from pallas_kernels.products import padded

Array = jax.Array
Ref = Any


class _HiddenGradientArguments(NamedTuple):
    """The references that the kernel of `add_hidden_gradient` is given."""

    where_gmem: VocabSlice
    groups_gmem: GroupRange
    dlogits_gmem: Any
    weight_gmem: Any
    unscale_gmem: Ref | None
    out_gmem: HiddenGradient


class _Piece(NamedTuple):
    """The chunks first … end − 1 of a slice that belong to one group, and whether they begin and end the group."""

    group: Array
    first: Array
    end: Array
    begins: Array
    ends: Array


def folds_groups(machine: Machine) -> bool:
    """Whether `add_hidden_gradient` folds several groups to a total in one call. The interpreter has no semaphores."""
    return machine.interpret is None


def _most_groups(vocabulary: Vocabulary, chunks: int) -> int:
    """How many groups a slice of so many chunks can have chunks of."""
    return min(vocabulary.groups, (chunks - 2) // vocabulary.group_chunks + 2)


def add_hidden_gradient(
    head: HeadAccess,
    machine: Machine,
    where: VocabSlice,
    dlogits: Matrix,
    weight: Matrix,
    unscale: Array | None,
    groups: GroupRange,
    out: HiddenGradient,
) -> None:
    """Add dlogits·W over the columns of one slice that belong to `groups` to `out`, in place.

    The weight is the head's, or that of a low-rank term, for which the sums are the gradient of its columns of hidden.

    A group's float32 chain starts from 0 where the slice has the group's first chunk, whatever `out` holds, and goes on
    from `out.chains` elsewhere. Where `out.total` is None, it is stored to the group's chain, which the caller folds.
    Else a chain that is not complete is stored, and a complete one is added to the total of the groups before it. With
    the vocabulary's last group each row of the total is multiplied by unscale, float32 `[rows]` or None, and written to
    `out.rounded` in that dtype, or to `out.total` where `rounded` is None. Unless `folds_groups(machine)`, a call adds
    one group to a total.
    """
    vocabulary = head.vocabulary
    n, dim = dlogits.shape[0], weight.shape[1 if head.layout == "vd" else 0]
    waits = out.total is not None and folds_groups(machine)
    groups_at_once = _most_groups(vocabulary, dlogits.shape[1] // COLUMNS) if out.total is None or waits else 1
    of_operands = len(parts_of(dlogits)), len(parts_of(weight))
    tile = of_parts(hidden_gradient_tile(n, dim, groups_at_once), *of_operands)
    row_blocks, column_blocks = padded(n, tile.cluster_rows) // tile.cluster_rows, -(-dim // tile.columns)
    loaded_rows = min(n, tile.rows)

    def piece_of(refs: _HiddenGradientArguments, block: Block) -> _Piece:
        group = refs.groups_gmem.first[0] + block.layer
        start, stop = group * vocabulary.group_chunks, (group + 1) * vocabulary.group_chunks
        slice_first = refs.where_gmem.first_chunk[0]
        slice_end = slice_first + refs.where_gmem.chunks[0]
        first, end = jnp.maximum(start, slice_first), jnp.minimum(stop, slice_end)
        return _Piece(group, first, end, first == start, end == stop)

    def column_of(block: Block) -> Array:
        return block.column_block * tile.columns

    def steps(refs: _HiddenGradientArguments, block: Block) -> Array:
        piece = piece_of(refs, block)
        return vocabulary.steps_before(piece.end) - vocabulary.steps_before(piece.first)

    def load_a(refs: _HiddenGradientArguments, block: Block, k: Array) -> tuple[Ref, ...]:
        chunk = piece_of(refs, block).first - refs.where_gmem.first_chunk[0]
        there = pl.ds(block.row, loaded_rows), pl.ds(chunk * COLUMNS + k * DEPTH, DEPTH)
        return tuple(part.at[there] for part in parts_of(refs.dlogits_gmem))

    def load_b(refs: _HiddenGradientArguments, block: Block, k: Array) -> tuple[Ref, ...]:
        slice_first = refs.where_gmem.first_chunk[0]
        first = head.row(slice_first, piece_of(refs, block).first - slice_first)
        depth, wide = pl.ds(first + k * DEPTH, DEPTH), pl.ds(column_of(block), tile.columns)
        there = (depth, wide) if head.layout == "vd" else (wide, depth)
        return tuple(part.at[there] for part in parts_of(refs.weight_gmem))

    def folded_of(block: Block) -> Ref:
        """The semaphore that counts the groups of this call whose chains a warpgroup's part of the total has taken.

        A tile waits for the same tile of the group before, whose layer was begun before its own.
        """
        parts = row_blocks * tile.cluster_rows // WARPGROUP_ROWS, column_blocks
        place = lax.div(block.row, jnp.int32(WARPGROUP_ROWS)), block.column_block
        return pl.get_global(plgpu.SemaphoreType.REGULAR(parts)).at[place]

    def finish(refs: _HiddenGradientArguments, block: Block, product: Any, staging_smem: Ref) -> None:
        chains_gmem, total_gmem, _ = refs.out_gmem
        piece, column = piece_of(refs, block), column_of(block)
        there = pl.ds(block.row, WARPGROUP_ROWS), pl.ds(column, tile.columns)
        if chains_gmem is None:
            values = product()
        else:
            chain = piece.group if total_gmem is None else 0
            # The sums are loaded even where they start from 0: a branch around the load would make ptxas serialise the
            # wgmmas.
            so_far = plgpu.load(chains_gmem.at[chain, *there], layout=plgpu.Layout.WGMMA, optimized=False)
            values = product(jnp.where(jnp.broadcast_to(piece.begins, so_far.shape), 0.0, so_far))
        folded = folded_of(block) if waits else None
        if folded is not None:
            plgpu.semaphore_wait(folded, block.layer, decrement=False, memory_scope="gpu")
        if chains_gmem is not None:

            @pl.when(jnp.logical_not(piece.ends) if total_gmem is not None else True)
            def store_chain() -> None:
                chains_gmem[chain, *there] = values

        if total_gmem is not None:

            @pl.when(piece.ends)
            def fold_chain() -> None:
                for strip in range(0, tile.columns, STRIP):
                    fold(refs, piece, block.row, column + strip, values[:, strip : strip + STRIP])

        if folded is not None:
            all_threads()
            plgpu.semaphore_signal(folded, memory_scope="gpu")

    def fold(refs: _HiddenGradientArguments, piece: _Piece, row: Array, column: Array, values: Array) -> None:
        """Add a strip of a complete chain's columns to the total. Strips keep few registers in use."""
        _, total_gmem, rounded_gmem = refs.out_gmem
        there = pl.ds(row, WARPGROUP_ROWS), pl.ds(column, STRIP)
        before = plgpu.load(total_gmem.at[there], layout=plgpu.Layout.WGMMA, optimized=False)
        folded = jnp.where(jnp.broadcast_to(piece.group == 0, values.shape), values, before + values)
        is_last = piece.group == vocabulary.groups - 1

        @pl.when(jnp.logical_not(is_last))
        def store_total() -> None:
            total_gmem[there] = folded

        @pl.when(is_last)
        def store_complete() -> None:
            unscale_gmem = refs.unscale_gmem
            done = folded if unscale_gmem is None else folded * over_columns(row_vector(unscale_gmem, row), STRIP)
            complete_gmem = total_gmem if rounded_gmem is None else rounded_gmem
            complete_gmem[there] = done.astype(complete_gmem.dtype)

    product = Product(
        name="linear_logp_d_hidden",
        tile=tile,
        dtype=parts_of(dlogits)[0].dtype,
        a_transposed=False,
        b_transposed=head.layout == "dv",
        max_blocks=(row_blocks, column_blocks * groups_at_once),
        blocks=lambda refs: (row_clusters(refs.where_gmem.rows[0], tile.cluster_rows), column_blocks),
        layers=lambda refs: refs.groups_gmem.count[0],
        stretches=(Stretch(steps, load_a, load_b),),
        finish=finish,
        loaded_rows=loaded_rows,
        parts=of_operands,
    )
    multiply(product, machine, _HiddenGradientArguments(where, groups, dlogits, weight, unscale, out))
