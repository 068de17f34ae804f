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
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.arrays import KeptExponentials, Partials, Softmax
from pallas_kernels.hopper.parts import new_matrix
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from rlk_jax.core.devices import default_machine
from rlk_jax.core.gemm import by_kernel
from rlk_jax.core.head import HeadConfig, Operands, head_dim
from rlk_jax.core.hopper_forward import forward_pass
from rlk_jax.core.hopper_kernels import BlockKernels, HeadKernels, cuda_kernels
from rlk_jax.core.hopper_plan import kept_chunks, logits_dtype, softmax_vocabulary
from rlk_jax.core.rows import Compacted
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_logp.hopper_backward import KeptForBackward, gradients
from rlk_jax.ops.linear_logp.hopper_blocks import block_functions
from rlk_jax.ops.linear_logp.hopper_ranking import FoundProducts, new_search, ranking_functions
from rlk_jax.ops.linear_logp.options import LinearLogpFunctions

Array = jax.Array


def _mosaic_kernels() -> BlockKernels:
    from pallas_kernels.mosaic import head_kernels

    return head_kernels


def mosaic(machine: Machine | None = None) -> LinearLogpFunctions:
    """The implementation by Pallas Mosaic GPU kernels, for one machine; None for the GPU that JAX sees.

    The kernels are imported when one of them is traced.
    """
    return replace(_functions(_mosaic_kernels, machine), of_blocks=block_functions(_mosaic_kernels, machine))


def cuda(machine: Machine | None = None) -> LinearLogpFunctions:
    """The implementation by CUDA C++ kernels, for one machine; None for the GPU that JAX sees."""
    return _functions(cuda_kernels, machine)


def _functions(kernels: Callable[[], HeadKernels], machine: Machine | None) -> LinearLogpFunctions:
    return LinearLogpFunctions(
        functools.partial(_partials, kernels, machine),
        functools.partial(_merge, kernels, machine),
        functools.partial(gradients, kernels, machine),
        functools.partial(by_kernel, lambda: kernels().gemm, machine),
        of_ranking=ranking_functions(kernels, machine),
    )


class _State(NamedTuple):
    """What a forward hands on: which token is in which row, what is kept for a backward, and what it found for a
    ranking.
    """

    rows: Compacted
    kept: KeptForBackward | None
    found: FoundProducts | None


def _partials(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    operands: Operands,
    tokens: Tokens,
) -> tuple[Partials, _State]:
    """The partials of every group by row of the kernels, and what is known of the rows beside them."""
    use, machine = kernels(), machine or default_machine()
    n, dim, typed = operands.hidden.shape[0], head_dim(config, operands), operands.hidden
    dtype = logits_dtype(config, typed.dtype)
    keeping = kept_chunks(config, dim, n, dtype)
    forward = forward_pass(config, operands, tokens, keeping)
    plan, rows, vocabulary = forward.plan, forward.rows, softmax_vocabulary(config)
    out, exponentials, search = forward.new_partials(), None, None
    if keeping:
        exponentials = jax.tree.map(jax.new_ref, new_matrix((plan.matrix_rows, keeping * COLUMNS), dtype))
    if config.ranking is not None:
        search = new_search(use, machine, forward)
    forward.run(use, machine, out, exponentials, None if search is None else search.listener)
    of_chunks = jax.tree.map(jax.freeze, out)
    groups = use.fold_chunks(of_chunks, config.groups.count, rows.count, machine)
    kept = None
    if exponentials is not None:
        place = jnp.arange(n, dtype=jnp.int32) if rows.place is None else rows.place
        shift = of_chunks.shift[: vocabulary.chunks_in(keeping)]
        kept = KeptForBackward(KeptExponentials(jax.tree.map(jax.freeze, exponentials), shift), place)
    found = None if search is None else search.found(rows)
    return varying_like((groups, _State(rows, kept, found)), typed)


def _merge(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    groups: Partials,
    state: _State,
) -> tuple[LinearLogp, Softmax, KeptForBackward | None]:
    """The values and the softmax of every token, from the groups of the whole vocabulary."""
    groups, (rows, kept, _) = as_replicated((groups, state))
    softmax = jax.tree.map(rows.spread, kernels().fold_groups(groups, rows.count, machine or default_machine()))
    softmax, kept = fusion_barrier((softmax, kept))
    logp = softmax.logp
    if config.smoothing is not None:
        logp = config.smoothing.logp(logp, softmax.lse, softmax.logit_sum)
        softmax = softmax._replace(logit_sum=None)
    return LinearLogp(logp, softmax.lse if config.return_lse else None, softmax.entropy), softmax, kept
