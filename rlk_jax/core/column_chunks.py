"""Chunks of a head's columns, as `deterministic` walks over them: 256 at a time, none in two groups of the softmax."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlk_jax.core.fixed_order import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    DEPTH_MULTIPLE,
    ColumnGroups,
    fma_chain,
    zeros_behind,
)
from rlk_jax.core.gemm import WeightLayout

Array = jax.Array


class ColumnChunk(NamedTuple):
    """256 columns from `start` on: ids and bias `[1, 256]`, weight `[256, D]` or, with B of a low-rank term behind it,
    `[256, D + r]`, and which of them are one group's.
    """

    start: Array
    columns: Array
    valid: Array
    weight: Array
    bias: Array

    def products(self, hidden: Array) -> Array:
        """hidden·Wᵀ for a block of 64 rows, `[64, 256]`."""
        return fma_chain(hidden.T, self.weight.T, jnp.zeros((BLOCK_ROWS, BLOCK_COLUMNS), jnp.float32))


def padded_columns(*parts: Array) -> Array:
    """float32 arrays `[·, K]` side by side, each with zeros up to a multiple of 64 columns, which change no bits of a
    chain over them.
    """
    return jnp.concatenate([zeros_behind(x.astype(jnp.float32), 1, DEPTH_MULTIPLE) for x in parts], axis=1)


def column_chunk(
    weights: Sequence[Array | None],
    bias: Array | None,
    layout: WeightLayout,
    groups: ColumnGroups,
    real: Any,
    group: Array,
    chunk: Array,
) -> ColumnChunk:
    """Chunk number `chunk` of a group of a head of `real` columns; its weights that are not None stand side by side."""
    start = group * groups.width + chunk * BLOCK_COLUMNS
    columns = start + jnp.arange(BLOCK_COLUMNS, dtype=jnp.int32)
    valid = columns < jnp.minimum((group + 1) * groups.width, real)
    index = jnp.clip(columns, 0, jnp.maximum(real - 1, 0))
    given = [x[index] if layout == "vd" else x[:, index].T for x in weights if x is not None]
    own_bias = jnp.zeros(BLOCK_COLUMNS, jnp.float32) if bias is None else bias[index].astype(jnp.float32)
    return ColumnChunk(
        start,
        columns[None],
        valid[None],
        padded_columns(*(jnp.where(valid[:, None], x, 0) for x in given)),
        jnp.where(valid, own_bias, 0)[None],
    )


def chunks_in_group(groups: ColumnGroups) -> int:
    """How many chunks each group has."""
    return -(-groups.width // BLOCK_COLUMNS)


def folded_by_group[Tree](groups: ColumnGroups, step: Callable[[Array, Array, Tree], Tree], start: Tree) -> Tree:
    """`step(group, chunk, so_far)` over the ascending chunks of each group, from `start`: a result for each group."""

    def of_group(group: Array) -> Tree:
        return lax.fori_loop(0, chunks_in_group(groups), lambda chunk, so_far: step(group, chunk, so_far), start)

    return lax.map(of_group, jnp.arange(groups.count, dtype=jnp.int32))


def rows_first(x: Any) -> Any:
    """`[rows, groups]` arrays from `[groups, rows]` ones, or back."""
    return jax.tree.map(jnp.transpose, x)
