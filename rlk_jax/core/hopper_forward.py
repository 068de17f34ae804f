"""One pass over the head on Hopper, slice by slice: the partial softmax of every row and chunk, and on the way what a
backward or a ranking needs of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import LogitsConfig, Partials, SliceProducts, new_partials
from pallas_kernels.hopper.parts import Matrix
from pallas_kernels.hopper.tiles import COLUMNS, Machine
from rlk_jax.core.head import HeadConfig, Operands, head_dim
from rlk_jax.core.hopper_kernels import HeadKernels
from rlk_jax.core.hopper_plan import ChunkRange, HopperPlan, forward_plan, softmax_vocabulary
from rlk_jax.core.hopper_slices import (
    NOWHERE,
    HeadSlice,
    bits_of_rows,
    matrices,
    over_slices,
    places_in_slice,
    slice_of,
)
from rlk_jax.core.rows import Compacted, compact
from rlk_jax.core.tokens import Tokens
from rlk_jax.core.transforms import as_replicated, fusion_barrier

Array = jax.Array


@dataclass(frozen=True)
class Listener:
    """Who looks at the products of every slice: `see(slice)` is called when `products` hold those of a slice."""

    products: SliceProducts
    see: Callable[[HeadSlice], None]


def new_products(plan: HopperPlan) -> SliceProducts:
    """References to the memory for the products of a slice, of a plan of one range."""
    (chunks,) = plan.ranges
    parts = softmax_vocabulary(plan.config).chunks_in(chunks.width)
    values = lax.empty((plan.matrix_rows, chunks.width * COLUMNS), jnp.float32)
    return SliceProducts(jax.new_ref(values), jax.new_ref(lax.empty((parts, plan.rows), jnp.float32)))


def products_so_far(plan: HopperPlan, part: HeadSlice, products: SliceProducts, ids: Array, so_far: Array) -> Array:
    """The products of the tokens `[rows, k]` so far, and those of the tokens in this slice."""
    values = products.values[...]
    places = places_in_slice(plan, part, ids)
    own = jnp.take_along_axis(values, places[: len(values)], axis=1, mode="clip")
    return jnp.where(places == NOWHERE, so_far, jnp.pad(own, ((0, len(ids) - len(own)), (0, 0))))


@dataclass(frozen=True)
class ForwardPass:
    """What the slices of one pass share: the plan, and the rows as the kernels see them."""

    plan: HopperPlan
    rows: Compacted
    operands: Operands
    hidden: Matrix
    low_rank_hidden: Matrix | None
    target_ids: Array
    holds_target: Array | None
    temperature: Array
    allowed: Array | None

    def new_partials(self) -> Partials:
        """References to the partials of all chunks."""
        config = self.plan.config
        shape = softmax_vocabulary(config).chunks, self.plan.rows
        wanted = {"with_derivative": config.logit_softcap is not None, "with_sum": config.smoothing is not None}
        return new_partials(shape, with_gap=config.return_entropy, **wanted)

    def run(
        self,
        kernels: HeadKernels,
        machine: Machine,
        out: Partials,
        kept: Any = None,
        listener: Listener | None = None,
    ) -> None:
        """Write the partials of all chunks into the references `out`, and exponentials into `kept`."""

        def step(chunks: ChunkRange, index: Any) -> None:
            part = slice_of(self.plan, chunks, index, self.operands, self.rows)
            logits = LogitsConfig(part.head, self.plan.config.logit_softcap)
            head = part.where._replace(allowed=self.allowed), self.hidden, part.weight, part.bias
            per_token = self.target_ids, self.holds_target, self.temperature
            term = part.term(self.low_rank_hidden)
            products = None if listener is None else listener.products
            kernels.partials(logits, machine, *head, *per_token, out, kept, term, products)
            if listener is not None:
                listener.see(part)

        over_slices(self.plan, step)


def forward_pass(config: HeadConfig, operands: Operands, tokens: Tokens, keeping: int = 0) -> ForwardPass:
    """The pass over all tokens, which keeps the exponentials of so many chunks."""
    n, dim = operands.hidden.shape[0], head_dim(config, operands)
    operands, tokens = as_replicated((fusion_barrier(operands), tokens))
    if config.ranking is not None and config.logit_softcap is not None and operands.bias is not None:
        # A softcap makes a finite logit of a bias of −∞, which is a token's, and the same one of this.
        lowest = jnp.asarray(jnp.finfo(operands.bias.dtype).min, operands.bias.dtype)
        operands = operands._replace(bias=jnp.maximum(operands.bias, lowest))
    plan = forward_plan(config, dim, n, keeping)
    rows = compact(tokens.active, plan.rows, all_active=not config.may_ignore)
    hidden, low_rank_hidden = matrices(plan, rows, operands.hidden)
    target_ids, temperature = fusion_barrier((rows.take(tokens.target_ids), rows.take(tokens.temperature, 1)))
    holds_target, allowed = _holds_target(plan, target_ids), bits_of_rows(plan, rows, tokens)
    of_rows = hidden, low_rank_hidden, target_ids, holds_target, temperature, allowed
    return ForwardPass(plan, rows, operands, *of_rows)


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
