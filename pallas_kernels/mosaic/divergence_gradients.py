"""The gradients of the student's logits by linear_kl, in the epilogue of the products with both heads.

With l = log2 of the probabilities p of the student and q of the teacher, and s the slope of a column:
  forward p − q,   reverse p·(ln(p / q) − Σ s),   jsd p·((β − 1)·ln(m / p) − Σ s), where m = β·q + (1 − β)·p.
Every gradient is computed by itself in float32, times the row's weight and the softcap's derivative, and rounded once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.divergence import GradientFactors, Kind, RowNormalizer, TwoSlices
from pallas_kernels.hopper.tiles import COLUMNS
from pallas_kernels.logits import LN_2, LOG2_E
from pallas_kernels.mosaic.divergence import NEAR, SERIES, log_mixture, log_probability, polynomial
from pallas_kernels.mosaic.main_loop import ROW, STRIPS_IN_FLIGHT, WARPGROUP_ROWS, Block, over_columns, row_vector
from pallas_kernels.mosaic.softcap import softcapped
from pallas_kernels.mosaic.statistics import chunk_and_width, masked
from pallas_kernels.mosaic.stores import store_rows, store_strip, wait_for_place
from pallas_kernels.mosaic.two_heads import FEW_COLUMNS, Step, Strip, TwoHeadsArguments, over_two_heads

Array = jax.Array
Ref = Any


def divergence_gradients(
    two: TwoSlices,
    kind: Kind,
    share: float,
    normalizers: tuple[RowNormalizer, RowNormalizer],
    factors: GradientFactors,
    out: Any,
) -> None:
    """Write the gradients of one slice's products with the student's head into the reference `out [rows, slice's chunks
    · 256]`, which is 16-bit and has hidden's rows. Places that hold no column, and rows that do not count, become 0.

    Student comes first, teacher second. `share` is the teacher's in the mixture.
    """
    vocabulary = two.logits[0].head.vocabulary

    def finish(refs: TwoHeadsArguments, block: Block, over_strips: Callable[[Step], Any], staging_smem: Ref) -> None:
        row, (known_gmem, factors_gmem) = block.row, refs.rows_gmem
        width = chunk_and_width(vocabulary, refs.where_gmem, block)[1]
        scales = [LOG2_E / row_vector(head.temperature, row) for head in refs.heads_gmem]
        known = [jax.tree.map(lambda ref: row_vector(ref, row), own) for own in known_gmem]
        slope = row_vector(factors_gmem.slope, row)
        counts = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW) + row < refs.where_gmem.rows[0]

        def gradient(first: Any, products: list[Array]) -> Array:
            log_p, log_q = (
                log_probability(*of_head) for of_head in zip(two.logits, products, scales, known, strict=True)
            )
            found = _gradient(kind, share, log_p, log_q, over_columns(slope, FEW_COLUMNS))
            # The weight is loaded here rather than before the products: with a softcap, registers would spill.
            found = found * over_columns(row_vector(factors_gmem.weight, row), FEW_COLUMNS)
            derivative = softcapped(products[0], two.logits[0].softcap)[1]
            found = found if derivative is None else found * derivative
            found = jnp.where(over_columns(counts, FEW_COLUMNS), found, 0.0).astype(out.dtype)
            return masked(two.logits[0], found, width - first, 0)

        def step(strip: Strip, _: Any) -> tuple[()]:
            def store(strip_smem: Ref) -> None:
                columns = pl.ds(block.column_block * COLUMNS + strip.first, FEW_COLUMNS)
                store_rows(strip_smem, refs.out_gmem, row, columns)

            values = gradient(strip.first, strip.products)
            wait_for_place(two.machine)
            store_strip(staging_smem.at[block.warpgroup, strip.number % STRIPS_IN_FLIGHT], values, store)
            return ()

        over_strips(step)

    rows, slice_chunks = (normalizers, factors), out.shape[1] // COLUMNS
    over_two_heads("linear_kl_gradients", two, rows, out, slice_chunks, finish, out.dtype)


def _gradient(kind: Kind, share: float, log_p: Array, log_q: Array, total: Array) -> Array:
    """The gradient of the divergence by the student's logits, before the row's weight. total is the slopes' sum."""
    larger = jnp.maximum(log_p, log_q)
    # Both may be −∞, whose difference is NaN.
    difference = jnp.where(larger == -jnp.inf, 0.0, (log_p - log_q) * LN_2)
    if kind == "forward":
        apart = jnp.abs(difference)
        # 1 − e⁻ˣ of the larger probability is left, by a series where it is small.
        near, far = apart * polynomial(-apart, (1.0, *SERIES)), 1 - jnp.exp2(-LOG2_E * apart)
        left = jnp.exp2(larger) * jnp.where(apart < NEAR, near, far)
        return jnp.where(difference < 0, -left, left)
    p = jnp.exp2(log_p)
    slope = jnp.where(p == 0, 0.0, difference) if kind == "reverse" else (share - 1) * log_mixture(share, difference)
    return p * (slope - total)
