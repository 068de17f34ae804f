"""linear_logp on Hopper, by Mosaic's or CUDA's kernels: its forward and its backward, slice by slice.

The forward is one pass over the head that keeps a partial softmax per row and chunk of 256 columns. The backward cuts
the vocabulary into slices whose gradients of logits fit the memory budget; for each slice it recomputes the logits,
writes their gradients in 16 bits, adds dlogits·W to dH (one float32 chain for each group of the vocabulary, folded in
ascending order) and stores dW and db complete.

A forward whose backward will run keeps the exponentials of the first chunks in 16 bits, as many as the budget holds
(`kept_chunks`). The backward makes their gradients in their place, and recomputes the rest in the same memory. That
takes three products and a share of the fourth, and gives the same bits, since recomputed exponentials are rounded
alike.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.arrays import (
    KeptExponentials,
    LogitsConfig,
    Partials,
    Softmax,
    new_partials,
)
from pallas_kernels.hopper.parts import new_matrix
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from rlk_jax.core.devices import default_machine
from rlk_jax.core.gemm import by_kernel
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_logp.hopper_backward import KeptForBackward, gradients
from rlk_jax.ops.linear_logp.hopper_blocks import block_functions
from rlk_jax.ops.linear_logp.hopper_kernels import BlockKernels, HeadKernels, RankingKernels
from rlk_jax.ops.linear_logp.hopper_plan import (
    ChunkRange,
    HopperPlan,
    forward_plan,
    kept_chunks,
    logits_dtype,
    softmax_vocabulary,
)
from rlk_jax.ops.linear_logp.hopper_ranking import ranking_functions
from rlk_jax.ops.linear_logp.hopper_slices import bits_of_rows, matrices, over_slices, slice_of
from rlk_jax.ops.linear_logp.options import (
    HeadConfig,
    LinearLogpFunctions,
    Operands,
    head_dim,
)

Array = jax.Array


def _mosaic_kernels() -> BlockKernels:
    from pallas_kernels.mosaic import head_kernels

    return head_kernels


def _ranking_kernels() -> RankingKernels:
    from pallas_kernels.mosaic import head_kernels

    return head_kernels


def _cuda_kernels() -> HeadKernels:
    from pallas_kernels.cuda import kernels

    return kernels


def mosaic(machine: Machine | None = None) -> LinearLogpFunctions:
    """The implementation by Pallas Mosaic GPU kernels, for one machine; None for the GPU that JAX sees.

    The kernels are imported when one of them is traced.
    """
    of_blocks = block_functions(_mosaic_kernels, machine)
    of_ranking = ranking_functions(_ranking_kernels, machine)
    return replace(_functions(_mosaic_kernels, machine), of_blocks=of_blocks, of_ranking=of_ranking)


def cuda(machine: Machine | None = None) -> LinearLogpFunctions:
    """The implementation by CUDA C++ kernels, for one machine; None for the GPU that JAX sees."""
    return _functions(_cuda_kernels, machine)


def _functions(kernels: Callable[[], HeadKernels], machine: Machine | None) -> LinearLogpFunctions:
    return LinearLogpFunctions(
        functools.partial(_partials, kernels, machine),
        functools.partial(_merge, kernels, machine),
        functools.partial(gradients, kernels, machine),
        functools.partial(by_kernel, lambda: kernels().gemm, machine),
    )


def _holds_target(plan: HopperPlan, target_ids: Array) -> Array | None:
    """Which blocks of 64 rows have a target in which chunk, `[rows / 64, chunks]`; None for few rows, where knowing it
    costs more than it saves.
    """
    if plan.tokens <= 128:
        return None
    vocabulary = softmax_vocabulary(plan.config)
    block = jnp.arange(plan.rows, dtype=jnp.int32) // 64
    # Most targets of a shard's tokens lie in other shards.
    is_here = (target_ids >= 0) & (target_ids < plan.config.vocab_size)
    chunk = jnp.where(is_here, vocabulary.chunk_of(target_ids), vocabulary.chunks)
    return jnp.zeros((plan.rows // 64, vocabulary.chunks), jnp.int32).at[block, chunk].set(1, mode="drop")


def _partials(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    operands: Operands,
    tokens: Tokens,
) -> tuple[Partials, tuple[Compacted, KeptForBackward | None]]:
    """The partials of every group by row of the kernels; which token is in which row, and what is kept."""
    use, machine = kernels(), machine or default_machine()
    n, dim = operands.hidden.shape[0], head_dim(config, operands)
    typed = operands.hidden
    operands, tokens = as_replicated((fusion_barrier(operands), tokens))
    dtype = logits_dtype(config, operands.hidden.dtype)
    keeping = kept_chunks(config, dim, n, dtype)
    plan, vocabulary = forward_plan(config, dim, n, keeping), softmax_vocabulary(config)
    rows = compact(tokens.active, plan.rows, all_active=not config.may_ignore)
    hidden, low_rank_hidden = matrices(plan, rows, operands.hidden)
    target_ids, temperature = fusion_barrier((rows.take(tokens.target_ids), rows.take(tokens.temperature, 1)))

    holds_target, allowed = _holds_target(plan, target_ids), bits_of_rows(plan, rows, tokens)
    has_softcap = config.logit_softcap is not None
    wanted = {"with_derivative": has_softcap, "with_sum": config.smoothing is not None}
    out = new_partials((vocabulary.chunks, plan.rows), with_gap=config.return_entropy, **wanted)
    exponentials = None
    if keeping:
        exponentials = jax.tree.map(jax.new_ref, new_matrix((plan.matrix_rows, keeping * COLUMNS), dtype))

    def step(chunks: ChunkRange, index: Any) -> None:
        part = slice_of(plan, chunks, index, operands, rows)
        logits = LogitsConfig(part.head, config.logit_softcap)
        per_token = (target_ids, holds_target, temperature)
        head = (part.where._replace(allowed=allowed), hidden, part.weight, part.bias)
        use.partials(logits, machine, *head, *per_token, out, exponentials, part.term(low_rank_hidden))

    over_slices(plan, step)
    of_chunks = jax.tree.map(jax.freeze, out)
    groups = use.fold_chunks(of_chunks, config.groups.count, rows.count, machine)
    kept = None
    if exponentials is not None:
        place = jnp.arange(n, dtype=jnp.int32) if rows.place is None else rows.place
        shift = of_chunks.shift[: vocabulary.chunks_in(keeping)]
        kept = KeptForBackward(KeptExponentials(jax.tree.map(jax.freeze, exponentials), shift), place)
    return varying_like((groups, (rows, kept)), typed)


def _merge(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    groups: Partials,
    state: tuple[Compacted, KeptForBackward | None],
) -> tuple[LinearLogp, Softmax, KeptForBackward | None]:
    """The values and the softmax of every token, from the groups of the whole vocabulary."""
    groups, (rows, kept) = as_replicated((groups, state))
    softmax = jax.tree.map(rows.spread, kernels().fold_groups(groups, rows.count, machine or default_machine()))
    softmax, kept = fusion_barrier((softmax, kept))
    logp = softmax.logp
    if config.smoothing is not None:
        logp = config.smoothing.logp(logp, softmax.lse, softmax.logit_sum)
        softmax = softmax._replace(logit_sum=None)
    return LinearLogp(logp, softmax.lse if config.return_lse else None, softmax.entropy), softmax, kept
