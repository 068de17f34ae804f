"""linear_logp's gradients on Hopper, block by block of tokens: dW and db go on in one float32 sum over all blocks.

A block has few enough tokens for the memory budget to hold its exponentials over the whole vocabulary. The pass then
takes three products, where all tokens at once would recompute what the budget does not hold. Blocks end at multiples of
64 rows, so that dW and db have the bits of sums that are not cut.
"""

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.arrays import Softmax
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine, statistics_tile
from pallas_kernels.products import padded
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands, kernel_memory_budget
from rlk_jax.core.hopper_gradients import HeadGradients, new_head_gradients, store_bias_gradient
from rlk_jax.core.hopper_kernels import BlockKernels
from rlk_jax.core.hopper_plan import (
    ChunkRange,
    HopperPlan,
    chunks_in_place,
    kept_bytes,
    kept_chunks,
    vocabulary_of,
)
from rlk_jax.core.hopper_slices import HeadSlice
from rlk_jax.core.rows import Compacted
from rlk_jax.core.softmax import Scaling
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import fusion_barrier
from rlk_jax.ops.linear_logp.hopper_backward import KeptForBackward, gradients
from rlk_jax.ops.linear_logp.options import BlockFunctions, TokenBlocks

Array = jax.Array
_LEAST_ROWS = 1024
"""Rows below which reading and writing the sums of dW for every block takes longer than the product that is saved."""
_ROWS = statistics_tile(_LEAST_ROWS).cluster_rows
"""Rows of a block are a multiple of this: whole tiles."""


def block_functions(kernels: Callable[[], BlockKernels], machine: Machine | None) -> BlockFunctions:
    """What works on blocks of tokens by these kernels."""
    return BlockFunctions(
        _plan_of_tokens, _config_of_block, _no_sums, functools.partial(_add, kernels, machine), _complete
    )


def _plan_of_tokens(config: HeadConfig, dim: int, tokens: int, length: int, dtype: Any) -> TokenBlocks | str:
    """Blocks where they save more than they cost: where the budget lacks more bytes of exponentials than the float32
    sums of dW have. Blocks of whole sequences may be filled by half, and are therefore twice as large.
    """
    if config.logit_parts > 1:
        return "products of float32 matrices take all tokens at once"
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name} scales gradients by what all tokens need"
    if not chunks_in_place(config, dim):
        return "a head that cannot be read in place is copied for every block"
    chunks, budget = vocabulary_of(config).chunks, kernel_memory_budget(config, dim, tokens)
    missing, sums = chunks * kept_bytes(config, tokens) - budget, 4 * math.prod(_shape_of_sums(config, dim))
    if missing <= sums:
        return (
            f"the budget of {_mib(budget)} holds all exponentials but {_mib(max(missing, 0))}, no more than the "
            f"{_mib(sums)} of the weight gradient's float32 sums"
        )
    sizes = range(_ROWS, tokens, _ROWS)
    rows = _ROWS * bisect.bisect_left(sizes, True, key=lambda x: not _keeps_all(config, dim, tokens, x))
    least = _LEAST_ROWS if length == 1 else 2 * _LEAST_ROWS
    if rows < least:
        return f"the budget of {_mib(budget)} keeps no {least} tokens' exponentials over the whole vocabulary"
    if length == 1:
        count = -(-tokens // rows)
        return TokenBlocks(max(_LEAST_ROWS, padded(-(-tokens // count), _ROWS)), count)
    sequences = (rows - DEPTH + 1) // length
    if not sequences:
        return f"a block of the {rows} tokens that {_mib(budget)} keep has no room for a sequence of {length}"
    return TokenBlocks(rows, -(-tokens // (sequences * length)), length, DEPTH)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _keeps_all(config: HeadConfig, dim: int, tokens: int, rows: int) -> bool:
    """Whether every exponential of a block of so many rows is kept, but for those of columns beside padding, which are
    always computed again.
    """
    return chunks_in_place(config, dim) <= kept_chunks(_config_of_block(config, dim, tokens), dim, rows, jnp.bfloat16)


def _config_of_block(config: HeadConfig, dim: int, tokens: int) -> HeadConfig:
    """The config of one block's forward and gradients, whose dH stays float32 as a shard's does."""
    return replace(config, memory_budget=kernel_memory_budget(config, dim, tokens), is_shard=True, keeps=True)


class _SumsOverBlocks(NamedTuple):
    """The float32 sums of dW `[chunks · 256, D padded to 256]` and of db `[V]`; None where none is needed."""

    weight: Any
    bias: Any


def _shape_of_sums(config: HeadConfig, dim: int) -> tuple[int, int]:
    """The shape of dW's sums: whole chunks of columns, and D up to a multiple of 256."""
    return vocabulary_of(config).chunks * COLUMNS, padded(dim, COLUMNS)


def _no_sums(config: HeadConfig, needs: Needs, operands: Operands) -> _SumsOverBlocks:
    """The sums over no tokens."""
    shape = _shape_of_sums(config, operands.hidden.shape[1])
    weight = jnp.zeros(shape, jnp.float32) if needs.weight else None
    return _SumsOverBlocks(weight, jnp.zeros(config.vocab_size, jnp.float32) if needs.bias else None)


@dataclass(frozen=True)
class _GradientsOfBlock:
    """The gradients of one block: those of its rows of hidden, complete, and references to the sums over blocks."""

    of_hidden: HeadGradients
    sums: _SumsOverBlocks

    def add(self, use: BlockKernels, machine: Machine, chunks: ChunkRange, part: HeadSlice, dlogits: Array) -> None:
        """Add one slice's part to dH, and this block's rows to the sums of the slice's dW and db."""
        self.of_hidden.add(use, machine, chunks, part, dlogits)
        hidden = self.of_hidden.products[0].hidden
        if self.sums.weight is not None and hidden is not None:
            use.add_weight_gradient(machine, part.where, dlogits, hidden, self.sums.weight)
        if self.sums.bias is not None:
            so_far = self.sums.bias[...].at[part.columns].get(mode="fill", fill_value=0)
            so_far = jnp.pad(so_far, (0, dlogits.shape[1] - part.columns.size))
            store_bias_gradient(self.sums.bias, part, use.column_sums(part.where, dlogits, None, machine, so_far))

    def complete(self, operands: Operands, rows: Compacted) -> Gradients:
        """The gradient of hidden."""
        return self.of_hidden.complete(operands, rows)


def _add(
    kernels: Callable[[], BlockKernels],
    machine: Machine | None,
    config: HeadConfig,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    softmax: Softmax,
    kept: KeptForBackward | None,
    upstream: LinearLogp,
    sums: _SumsOverBlocks,
) -> tuple[Array | None, _SumsOverBlocks]:
    """One block's dH, and the sums with the block added."""
    refs = jax.tree.map(jax.new_ref, fusion_barrier(sums))

    def new_gradients(
        plan: HopperPlan, needs: Needs, operands: Operands, hidden: tuple[Array | None, ...], scaling: Scaling | None
    ) -> _GradientsOfBlock:
        of_hidden = new_head_gradients(plan, Needs(needs.hidden, False, False), operands, hidden, scaling)
        return _GradientsOfBlock(of_hidden, refs)

    of_call = (config, needs, operands, tokens, softmax, kept, upstream)
    found = gradients(kernels, machine, *of_call, new_gradients)
    d_hidden = None if found.hidden is None else found.hidden[0]
    return d_hidden, fusion_barrier(jax.tree.map(jax.freeze, refs))


def _complete(config: HeadConfig, operands: Operands, sums: _SumsOverBlocks) -> Gradients:
    """The float32 gradients of weight and bias."""
    if sums.weight is None:
        return Gradients(None, None, sums.bias)
    groups, dim = config.groups, operands.hidden.shape[1]
    of_groups = sums.weight.reshape(groups.count, -1, sums.weight.shape[1])[:, : groups.width, :dim]
    columns = of_groups.reshape(-1, dim)
    size = min(len(columns), config.vocab_size)
    d_weight = jnp.pad(columns[:size], ((0, config.vocab_size - size), (0, 0)))
    return Gradients(None, d_weight if config.weight_layout == "vd" else d_weight.T, sums.bias)
