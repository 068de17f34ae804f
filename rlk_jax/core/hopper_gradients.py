"""The gradients of a head's operands on Hopper, from those of one slice's logits at a time."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import GroupRange, HiddenGradient, VocabSlice
from pallas_kernels.hopper.parts import Matrix, leading_parts
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, Machine
from pallas_kernels.products import padded
from rlk_jax.core.fixed_order import ascending_sum, zeros_behind
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands, rank_axis
from rlk_jax.core.hopper_kernels import HeadKernels, Ref
from rlk_jax.core.hopper_plan import ChunkRange, HopperPlan, vocabulary_of
from rlk_jax.core.hopper_slices import HeadSlice
from rlk_jax.core.rows import Compacted
from rlk_jax.core.softmax import Scaling
from rlk_jax.core.transforms import fusion_barrier

Array = jax.Array


class _ProductGradients(NamedTuple):
    """What the slices give of one product, hidden·Wᵀ or that of a low-rank term."""

    columns: int
    """Columns of its rows of hidden."""
    hidden: Matrix | None
    """The rows that the gradient of its weight sums up."""
    d_hidden: HiddenGradient | None
    """The sums over the vocabulary, or None where nothing needs them."""
    d_weight: Ref | None


@dataclass(frozen=True)
class HeadGradients:
    """The gradients of one backward as references, which its slices write one after the other."""

    plan: HopperPlan
    scaling: Scaling | None
    products: tuple[_ProductGradients, ...]
    """The head's product, and that of its low-rank term where it has one."""
    d_bias: Ref | None

    def add(self, use: HeadKernels, machine: Machine, chunks: ChunkRange, part: HeadSlice, dlogits: Matrix) -> None:
        """Add one slice's part to dH and to the gradient of a low-rank term's columns, and store its part of the
        other gradients.

        The gradient of an operand in one part is made of one part of the logits' gradients, as all 16-bit ones are.
        """
        scaling, config = self.scaling, self.plan.config
        row_unscale, unscale = (None, None) if scaling is None else (scaling.row_unscale, scaling.unscale)
        of_hidden, of_weight = (leading_parts(dlogits, x) for x in (config.hidden_parts, config.weight_parts))
        for product, weight in zip(self.products, (part.weight, part.low_rank), strict=False):
            if product.d_hidden is not None and weight is not None:
                of_slice = (part.head, machine, part.where, of_hidden)
                add = functools.partial(use.add_hidden_gradient, *of_slice, weight, row_unscale)
                at_once = self.plan.groups_at_once or use.folds_groups(machine)
                self._over_groups(chunks, part.where, at_once, functools.partial(add, out=product.d_hidden))
        for product in self.products:
            if product.d_weight is None or product.hidden is None:
                continue
            out, rows = product.d_weight, product.hidden
            of_slice = (part.stored, machine, part.where, of_weight)
            store = functools.partial(use.store_weight_gradient, *of_slice, rows, unscale)
            if part.stored.copied:
                rows_of_slice = jax.new_ref(lax.empty((part.columns.size, rows.shape[1]), out.dtype))
                store(rows_of_slice)
                out[...] = _stored(out[...], jax.freeze(rows_of_slice), part.columns, config)
            else:
                store(out)
        if self.d_bias is not None:
            store_bias_gradient(self.d_bias, part, use.column_sums(part.where, dlogits, row_unscale, machine))

    def _over_groups(
        self, chunks: ChunkRange, where: VocabSlice, at_once: bool, add: Callable[[GroupRange], None]
    ) -> None:
        """Call `add` with the groups of one slice: with all of them at once, or with one after the other.

        A slice of fewer groups than others of its range has empty calls: with a number of calls that only the device
        knows, each would wait for the host.
        """
        each = vocabulary_of(self.plan.config).group_chunks
        first = where.first_chunk // each
        count = (where.first_chunk + where.chunks - 1) // each - first + 1
        if at_once:
            add(GroupRange(first, count))
        else:
            most = chunks.most_groups(each)
            lax.fori_loop(0, most, lambda i, _: add(GroupRange(first + i, (i < count).astype(jnp.int32))), None)

    def _hidden_sums(self, sums: HiddenGradient) -> list[Array]:
        """The complete sums of rows of one product's gradient: one, or one for each group that a shard gives."""
        if sums.total is not None:
            return [sums.total if sums.rounded is None else sums.rounded]
        chains = list(sums.chains) if self.plan.config.sums_by_group else [ascending_sum(sums.chains)]
        return chains if self.scaling is None else [x * self.scaling.row_unscale[:, None] for x in chains]

    def complete(self, operands: Operands, rows: Compacted) -> Gradients:
        """The gradients of the operands, once every slice was added."""
        config = self.plan.config
        sums = [product.d_hidden for product in self.products]
        weights = [product.d_weight for product in self.products]
        # The barrier has dW, which needs hidden, complete before dH's rows are spread: hidden is not held beside them.
        sums, weights, d_bias = fusion_barrier(jax.tree.map(jax.freeze, (sums, weights, self.d_bias)))
        of_products = [self._hidden_sums(x) for x in sums if x is not None]
        of_parts = [
            jnp.concatenate([rows.spread(x[:, : f.columns]) for x, f in zip(part, self.products, strict=True)], axis=1)
            for part in zip(*of_products, strict=True)
        ]
        d_hidden = None
        if of_parts:
            d_hidden = jnp.stack(of_parts) if config.is_shard else of_parts[0]
        d_weight, d_low_rank = (*weights, None)[:2]
        return fusion_barrier(Gradients(d_hidden, d_weight, d_bias, d_low_rank).like(config, operands))


def new_head_gradients(
    plan: HopperPlan, needs: Needs, operands: Operands, hidden: tuple[Matrix | None, ...], scaling: Scaling | None
) -> HeadGradients:
    """Memory for the gradients that are needed. `hidden` are the kernels' rows of hidden, by product."""
    config = plan.config
    # Columns of padding are written by no slice.
    new_gradient = jnp.zeros if config.real_vocab_size < config.vocab_size else lax.empty

    def of_product(columns: int, of_rows: Matrix | None, weight: Any, is_needed: bool) -> _ProductGradients:
        if isinstance(of_rows, Array) and scaling is not None:
            of_rows = (of_rows * scaling.to_common[: of_rows.shape[0], None]).astype(of_rows.dtype)
        d_hidden = _new_sums(plan, columns, operands.hidden.dtype) if needs.hidden else None
        d_weight = jax.new_ref(new_gradient(weight.shape, weight.dtype)) if is_needed else None
        return _ProductGradients(columns, of_rows, d_hidden, d_weight)

    products = [of_product(plan.dim, hidden[0], operands.weight, needs.weight)]
    if operands.low_rank is not None:
        b = operands.low_rank
        whole = jax.eval_shape(lambda x: zeros_behind(x, rank_axis(config.weight_layout), DEPTH), b)
        products.append(of_product(config.rank, hidden[1], whole, needs.low_rank))
    d_bias = jax.new_ref(jnp.zeros(config.vocab_size, jnp.float32)) if needs.bias else None
    return HeadGradients(plan, scaling, tuple(products), d_bias)


def _new_sums(plan: HopperPlan, columns: int, dtype: Any) -> HiddenGradient:
    """Memory for the sums over the vocabulary that give the gradient of some columns of hidden."""
    shape = (plan.rows, padded(columns, COLUMNS))

    def new(*leading: int, dtype: Any = jnp.float32) -> Ref:
        return jax.new_ref(lax.empty((*leading, *shape), dtype))

    if plan.groups_at_once:
        return HiddenGradient(new(plan.config.groups.count), None, None)
    return HiddenGradient(
        chains=new(1) if plan.cuts_groups else None,
        total=new(),
        rounded=None if plan.config.is_shard or dtype == jnp.float32 else new(dtype=dtype),
    )


def store_bias_gradient(d_bias: Ref, part: HeadSlice, sums: Array) -> None:
    """Store db of one slice, whose places are the first of `sums`, where its columns are."""
    d_bias[...] = d_bias[...].at[part.columns].set(sums[: part.columns.size], mode="drop")


def _stored(d_weight: Array, rows_of_slice: Array, columns: Array, config: HeadConfig) -> Array:
    """`d_weight` with the rows of one slice `[places, at least D]` where their columns are."""
    rows_of_slice = rows_of_slice[:, : d_weight.shape[1 if config.weight_layout == "vd" else 0]]
    if config.weight_layout == "vd":
        return d_weight.at[columns].set(rows_of_slice, mode="drop")
    return d_weight.at[:, columns].set(rows_of_slice.T, mode="drop")
