"""The most probable tokens on Hopper: the forward brings the products of a slice of the head to memory, and a kernel
adds the largest of them to those of earlier slices.

Columns are compared by their products and bias, before softcap and temperature, which keep their order. The log-probs
of the best come from the kernels of the forward, and so have its bits. A target's product, which may be that of another
shard, is known once the forward is done: a second pass over the head counts what stands before it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import (
    LIST,
    LargestProducts,
    LogitsConfig,
    Partials,
    Softmax,
    VocabSlice,
    new_partials,
)
from pallas_kernels.hopper.tiles import COLUMNS, THREADS, Machine
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.products import padded
from rlk_jax.core.devices import default_machine
from rlk_jax.core.head import HeadConfig, Operands, RankingConfig, kernel_memory_budget
from rlk_jax.core.hopper_forward import ForwardPass, Listener, forward_pass, new_products, products_so_far
from rlk_jax.core.hopper_kernels import HeadKernels
from rlk_jax.core.hopper_plan import softmax_vocabulary
from rlk_jax.core.hopper_slices import HeadSlice
from rlk_jax.core.rows import Compacted
from rlk_jax.core.tokens import Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier, varying_like
from rlk_jax.ops.linear_logp.options import RankingFunctions
from rlk_jax.ops.linear_logp.ranking import NO_TOKEN, BestColumns, Target, add_columns

Array = jax.Array
_BYTES_OF_ROW = 192
"""Bytes that the log-prob of one token takes: its product, padded to the 32 columns of a copy, and its partials."""


class FoundProducts(NamedTuple):
    """What a forward found for a ranking: the largest products and their columns `[N, k]`, or None where none are
    wanted, and the product of each target `[N]`, 0 where it is not among the columns, or None.
    """

    products: Array | None
    columns: Array | None
    target: Array | None


@dataclass(frozen=True)
class Search:
    """What looks for the largest products and the targets' while a forward runs."""

    listener: Listener
    wanted: RankingConfig
    best: LargestProducts | None
    target: Any

    def found(self, rows: Compacted) -> FoundProducts:
        """What was found, for every token."""

        def first(ref: Any) -> Array:
            return rows.spread(jax.freeze(ref))[:, : self.wanted.top_k]

        products, columns = (None, None) if self.best is None else map(first, self.best)
        return FoundProducts(
            products, columns, None if self.target is None else rows.spread(jax.freeze(self.target))[:, 0]
        )


def ranking_functions(kernels: Callable[[], HeadKernels], machine: Machine | None) -> RankingFunctions:
    """What finds the most probable tokens on one machine; None for the GPU that JAX sees."""
    return RankingFunctions(
        functools.partial(_best, kernels, machine),
        functools.partial(_logps_of_products, kernels, machine),
        own_targets=lambda state: state.found.target,
    )


def new_search(kernels: HeadKernels, machine: Machine, forward: ForwardPass) -> Search:
    """The search that a forward with a ranking runs."""
    plan, products = forward.plan, new_products(forward.plan)
    wanted = plan.config.ranking
    assert wanted is not None
    best = target = None
    if wanted.top_k is not None:
        shape = plan.rows, LIST
        nothing = LargestProducts(jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_TOKEN, jnp.int32))
        best = jax.tree.map(jax.new_ref, nothing)
    if wanted.has_target_rank:
        target = jax.new_ref(jnp.zeros((plan.rows, 1), jnp.float32))

    def see(part: HeadSlice) -> None:
        if best is not None:
            vocabulary = softmax_vocabulary(plan.config)
            kernels.add_largest(vocabulary, machine, part.where, products, wanted.top_k or 0, best)
        if target is not None:
            target[...] = products_so_far(plan, part, products, forward.target_ids[:, None], target[...])

    return Search(Listener(products, see), wanted, best, target)


def _best(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    operands: Operands,
    tokens: Tokens,
    state: Any,
    softmax: Softmax,
    targets: Array | None,
) -> BestColumns:
    """Where a rank is wanted, a second pass counts: the targets' products are known then."""
    found: FoundProducts = state.found
    products, before = found.products, None
    if products is not None:
        # Zeros of both signs are equal.
        products = jnp.where(products == 0, 0, products)
    if targets is not None:
        before = _count_before(kernels(), machine or default_machine(), config, operands, tokens, targets)
    return BestColumns(products, found.columns, before)


def _count_before(
    kernels: HeadKernels, machine: Machine, config: HeadConfig, operands: Operands, tokens: Tokens, target: Array
) -> Array:
    """How many columns stand before each target, whose product is given."""
    forward = forward_pass(config, operands, tokens)
    target = forward.rows.take(as_replicated(fusion_barrier(target)))
    products, rows = new_products(forward.plan), forward.plan.matrix_rows
    before = jax.new_ref(jnp.zeros(forward.plan.rows, jnp.int32))

    def see(part: HeadSlice) -> None:
        so_far = BestColumns(None, None, before[:rows])
        of_rows = Target(target[:rows], forward.target_ids[:rows])
        # The memory of the last slice may be larger than the slice.
        place = jnp.arange(len(part.columns), dtype=jnp.int32)
        own = jnp.where(place < part.where.chunks * COLUMNS, products.values[...], -jnp.inf)
        added = add_columns(so_far, own, part.columns[None], of_rows).before
        assert added is not None
        before[:rows] = added

    forward.run(kernels, machine, forward.new_partials(), listener=Listener(products, see))
    return varying_like(forward.rows.spread(jax.freeze(before)), operands.hidden)


def _logps_of_products(
    kernels: Callable[[], HeadKernels],
    machine: Machine | None,
    config: HeadConfig,
    tokens: Tokens,
    softmax: Softmax,
    products: Array,
) -> Array:
    """The log-probs of tokens of these products `[N, k]`, as the forward's kernels make them of a target's product.

    Each product is a row's only column. As many are taken at a time as the budget holds.
    """
    (n, k), typed = products.shape, products
    budget = kernel_memory_budget(config, 1, n)
    at_once = max(1, min(k, budget // (_BYTES_OF_ROW * n)))
    tokens, softmax, products = as_replicated(fusion_barrier((tokens, softmax, products)))
    of_some = functools.partial(_logps_of_some, kernels(), machine or default_machine(), config, tokens, softmax)
    places = jnp.pad(products.T, ((0, -k % at_once), (0, 0))).reshape(-1, at_once, n)
    logps = of_some(places[0]) if len(places) == 1 else lax.map(of_some, places)
    logps = logps.reshape(-1, n)[:k].T
    # The softcap of −∞ is finite.
    return varying_like(jnp.where(products == -jnp.inf, -jnp.inf, logps), typed)


def _logps_of_some(
    kernels: HeadKernels, machine: Machine, config: HeadConfig, tokens: Tokens, softmax: Softmax, products: Array
) -> Array:
    """The log-probs of products `[places, N]`."""
    count, n = products.shape
    rows = padded(count * n, THREADS)

    def of_rows(x: Array) -> Array:
        return jnp.pad(jnp.tile(x, count), (0, rows - count * n), constant_values=1)

    temperature = of_rows(jnp.where(tokens.active, tokens.temperature, 1))
    vocabulary, one = Vocabulary(1, 1, 1), jnp.ones(1, jnp.int32)
    logits = LogitsConfig(HeadAccess(vocabulary, "vd", copied=False), config.logit_softcap)
    where = VocabSlice(count * n * one, 0 * one, one)
    out = new_partials((1, rows), with_gap=False, with_derivative=config.logit_softcap is not None)
    targets = jnp.zeros(rows, jnp.int32)
    kernels.partials_of_logits(logits, machine, where, products.reshape(-1, 1), None, targets, temperature, out)
    scaled = fusion_barrier(jax.tree.map(jax.freeze, out)).target
    groups = fusion_barrier(Partials(of_rows(softmax.shift)[None], of_rows(softmax.total)[None], scaled, None, None))
    logp = kernels.fold_groups(groups, rows * one, machine).logp
    return fusion_barrier(logp)[: count * n].reshape(count, n)
