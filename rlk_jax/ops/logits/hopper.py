"""The ops over logits on Hopper, by Pallas Mosaic GPU kernels, which are imported when one of them is traced."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.allowed import allowed_bits
from pallas_kernels.hopper.arrays import LogitsConfig, VocabSlice, new_partials
from pallas_kernels.hopper.tiles import THREADS, Machine
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from rlk_jax.core.devices import default_machine
from rlk_jax.core.fixed_order import column_groups, zeros_behind
from rlk_jax.core.softmax import SoftmaxConfig
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier
from rlk_jax.ops.logits.options import LogitsFunctions
from rlk_jax.ops.logits.row_kernels import RowKernels, by_kernels

Array = jax.Array


def _kernels(machine: Machine | None) -> RowKernels:
    from pallas_kernels.mosaic import logits

    here = machine or default_machine()
    return RowKernels(
        functools.partial(logits.statistics, machine=here), functools.partial(logits.gradients, machine=here)
    )


def mosaic(machine: Machine | None = None) -> LogitsFunctions:
    """The implementation for one machine; None for the GPU that JAX sees."""
    functions = by_kernels(functools.partial(_kernels, machine))
    return replace(functions, as_linear_logp=functools.partial(_by_head_kernels, machine))


def _by_head_kernels(
    machine: Machine | None, config: SoftmaxConfig, logits: Array, tokens: Tokens
) -> tuple[LinearLogp, None]:
    """The values by the kernels of linear_logp, of which the first reads products instead of making them."""
    from pallas_kernels.mosaic.fold import fold_chunks, fold_groups
    from pallas_kernels.mosaic.partials_of_logits import partials_of_logits

    machine, groups = machine or default_machine(), column_groups(config.real_vocab_size)
    vocabulary = Vocabulary(config.real_vocab_size, groups.count, groups.width)
    how = LogitsConfig(HeadAccess(vocabulary, "vd", copied=False), config.logit_softcap)
    logits, tokens = fusion_barrier(as_replicated((logits, tokens)))
    count = jnp.full(1, logits.shape[0], jnp.int32)
    ids, temperature = (zeros_behind(x, 0, THREADS) for x in (tokens.target_ids, tokens.temperature))
    where = VocabSlice(count, jnp.zeros(1, jnp.int32), jnp.full(1, vocabulary.chunks, jnp.int32))
    if tokens.allowed is not None:
        bits = allowed_bits(vocabulary, zeros_behind(tokens.allowed, 0, THREADS))
        where = where._replace(allowed=fusion_barrier(bits))
    has_softcap = config.logit_softcap is not None
    out = new_partials((vocabulary.chunks, ids.size), with_gap=config.return_entropy, with_derivative=has_softcap)
    partials_of_logits(how, machine, where, logits, None, ids, temperature, out)
    of_chunks = jax.tree.map(jax.freeze, out)
    softmax = fold_groups(fold_chunks(of_chunks, groups.count, count, machine), count, machine)
    softmax = jax.tree.map(lambda x: x[: logits.shape[0]], fusion_barrier(softmax))
    return LinearLogp(softmax.logp, softmax.lse if config.return_lse else None, softmax.entropy), None
