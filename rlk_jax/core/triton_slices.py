"""A head as Triton's kernels take it: hidden's active rows, slices of the vocabulary, and the gradients of its operands
from those of one slice's logits at a time.

Of each slice, dlogits·W is added to dH (one float32 chain for each group of the vocabulary, folded in ascending order),
and its parts of dW and db are stored complete.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import LowRankTerm
from pallas_kernels.triton import linear_logp as kernels
from pallas_kernels.triton.gemm import ALIGNED
from pallas_kernels.triton.linear_logp import TILE_COLUMNS, ColumnRange, HeadShape, KernelOperands
from rlk_jax.core.fixed_order import zeros_behind
from rlk_jax.core.head import (
    Gradients,
    HeadConfig,
    Needs,
    Operands,
    head_dim,
    rank_axis,
    real_columns,
)
from rlk_jax.core.rows import Compacted
from rlk_jax.core.softmax import scaling
from rlk_jax.core.transforms import fusion_barrier

Array = jax.Array


@dataclass(frozen=True)
class TritonHead:
    """A head beside the compacted rows of its hidden states, and both as the kernels take them."""

    config: HeadConfig
    operands: Operands
    rows: Compacted
    shape: HeadShape
    of_kernels: KernelOperands

    def terms(self) -> list[tuple[HeadShape, KernelOperands]]:
        """The head, and its low-rank term where it has one, as a head whose gradients of logits are the same."""
        terms = [(self.shape, self.of_kernels)]
        if self.of_kernels.low_rank is not None:
            hidden, weight = self.of_kernels.low_rank
            own = self.of_kernels._replace(hidden=hidden, weight=weight)
            terms.append((replace(self.shape, dim=hidden.shape[1]), own))
        return terms

    def slice_of_group(self, columns: int, width: int, group: Array, index: Array) -> ColumnRange:
        """Slice number `index` of a group of the first `columns` columns; it is empty behind a short group's end."""
        first = jnp.asarray(group, jnp.int32) * self.config.groups.width
        end = jnp.clip(first + self.config.groups.width, first, jnp.maximum(first, columns))
        start = first + jnp.asarray(index, jnp.int32) * width
        return ColumnRange(start.reshape(1), first.reshape(1), end.reshape(1))

    def slices_in_group(self, width: int) -> int:
        """How many slices each group has. A number that only the device knows would wait for the host."""
        return -(-self.config.groups.width // width)


def triton_head(config: HeadConfig, operands: Operands, rows: Compacted, allowed: Array | None = None) -> TritonHead:
    """The head of these operands, with active rows in front, and what they are allowed."""
    dim, groups = head_dim(config, operands), config.groups
    shape = HeadShape(dim, config.vocab_size, config.weight_layout, config.logit_softcap, groups.count, groups.width)
    real = jnp.asarray(real_columns(config, operands), jnp.int32).reshape(1)
    hidden = fusion_barrier(rows.take(operands.hidden[:, :dim]))
    low_rank = None
    if operands.low_rank is not None:
        columns = zeros_behind(rows.take(operands.hidden[:, dim:]), 1, ALIGNED)
        weight = zeros_behind(operands.low_rank, rank_axis(config.weight_layout), ALIGNED)
        low_rank = fusion_barrier(LowRankTerm(columns, weight))
    if allowed is not None:
        in_bytes = lax.bitcast_convert_type(rows.take(allowed), jnp.uint8)
        allowed = fusion_barrier(lax.collapse(in_bytes, 1))
    of_kernels = KernelOperands(hidden, operands.weight, operands.bias, rows.count, real, low_rank, allowed)
    return TritonHead(config, operands, rows, shape, of_kernels)


def width_within(config: HeadConfig, room: int, bytes_of_column: int) -> int:
    """Columns of a slice of one group that so many bytes hold; slices of a group are equally wide but for rounding."""
    affordable = max(1, room // (bytes_of_column * TILE_COLUMNS))
    tiles = -(-config.groups.width // TILE_COLUMNS)
    return TILE_COLUMNS * -(-tiles // -(-tiles // affordable))


def bytes_of_rows(needs: Needs, rows: int, dim: int, dtype: Any) -> int:
    """Bytes of the copies of hidden that a backward holds beside a slice."""
    return (4 if dtype == jnp.float16 and needs.weight else 2) * rows * dim


def bytes_of_chain(needs: Needs, rows: int, dim: int) -> int:
    """Bytes of a group's chain of dH; 0 where none is needed."""
    return 4 * rows * dim if needs.hidden else 0


class _SoFar(NamedTuple):
    """What slices have given so far: dH and dW of each term, and db; None where none is needed."""

    hidden: list[Array | None]
    weights: list[Array | None]
    bias: Array | None


def gradients_by_slice(
    head: TritonHead, needs: Needs, scale: Array | None, width: int, dlogits: Callable[[ColumnRange], Array]
) -> Gradients:
    """The gradients, slice by slice of so many columns.

    `dlogits(where)` gives the gradients of a slice's products hidden·Wᵀ, `[rows, width]` in hidden's dtype: 0 in rows
    that do not count and in padding. Rows were multiplied by `scale`, as float16 needs, or by nothing.
    """
    config, operands, rows = head.config, head.operands, head.rows
    dtype, terms = operands.hidden.dtype, head.terms()
    of_weights, row_unscale, unscale = terms, jnp.ones(rows.size, jnp.float32), jnp.ones(1, jnp.float32)
    if scale is not None:
        # dW sums rows of different scales, so hidden is rescaled to the smallest one; the row that has it stays exact.
        row_unscale, to_common, unscale = scaling(rows, scale)
        of_weights = [(shape, x._replace(hidden=(x.hidden * to_common[:, None]).astype(dtype))) for shape, x in terms]
    columns = config.real_vocab_size if operands.real_columns is None else config.vocab_size
    new_weight = jnp.zeros if config.real_vocab_size < config.vocab_size else lax.empty
    d_weights = [
        new_weight(x.weight.shape, dtype) if is_needed else None
        for (_, x), is_needed in zip(terms, (needs.weight, needs.low_rank), strict=False)
    ]
    d_bias = jnp.zeros(config.vocab_size, jnp.float32) if needs.bias else None
    parts = config.hidden_gradient_parts
    sums = [jnp.zeros((parts, *x.hidden.shape), jnp.float32) if needs.hidden else None for _, x in terms]

    def of_slice(where: ColumnRange, so_far: _SoFar) -> _SoFar:
        of_logits = dlogits(where)
        d_hidden, d_weights, d_bias = so_far
        d_hidden = [
            x if x is None else kernels.add_hidden_gradient(*term, of_logits, where, x)
            for term, x in zip(terms, d_hidden, strict=True)
        ]
        d_weights = [
            x if x is None else kernels.store_weight_gradient(*term, of_logits, unscale, where, x)
            for term, x in zip(of_weights, d_weights, strict=True)
        ]
        if d_bias is not None:
            there = where.start + jnp.arange(width, dtype=jnp.int32)
            there = jnp.where(there < where.chain_end, there, config.vocab_size)
            d_bias = d_bias.at[there].set(kernels.column_sums(of_logits, row_unscale, rows.count), mode="drop")
        return _SoFar(d_hidden, d_weights, d_bias)

    def of_group(group: Array, so_far: _SoFar) -> _SoFar:
        chains = [None if x is None else jnp.zeros(x.shape[1:], jnp.float32) for x in so_far.hidden]
        found = lax.fori_loop(
            0,
            head.slices_in_group(width),
            lambda i, x: of_slice(head.slice_of_group(columns, width, group, i), x),
            so_far._replace(hidden=chains),
        )
        part = group if config.sums_by_group else 0
        pairs = zip(so_far.hidden, found.hidden, strict=True)
        return found._replace(hidden=[x if x is None else x.at[part].add(chain) for x, chain in pairs])

    sums, d_weights, d_bias = lax.fori_loop(0, config.groups.count, of_group, _SoFar(sums, d_weights, d_bias))
    of_hidden = None
    if needs.hidden:
        spread = [jax.vmap(rows.spread)(x * row_unscale[:, None]) for x in sums if x is not None]
        of_hidden = jnp.concatenate(spread, axis=-1)[..., : operands.hidden.shape[1]]
        of_hidden = of_hidden if config.is_shard else of_hidden[0]
    d_weight, d_low_rank = d_weights if config.rank else (*d_weights, None)
    return fusion_barrier(Gradients(of_hidden, d_weight, d_bias, d_low_rank).like(config, operands))
