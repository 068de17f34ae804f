"""The gradients of the student's logits by linear_kl, from products with both heads that are in memory.

With l = log2 of the probabilities p of the student and q of the teacher, and s the slope of a column:
  forward p − q,   reverse p·(ln(p / q) − Σ s),   jsd p·((β − 1)·ln(m / p) − Σ s), where m = β·q + (1 − β)·p.
Every gradient is computed by itself in float32, times the row's weight and the softcap's derivative, and rounded once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.arrays import VocabSlice
from pallas_kernels.hopper.divergence import GradientFactors, HeadProducts, Kind, RowNormalizer, TwoLogits
from pallas_kernels.hopper.tiles import COLUMNS, Machine, statistics_tile
from pallas_kernels.logits import LN_2, LOG2_E
from pallas_kernels.mosaic.divergence import (
    FEW_COLUMNS,
    NEAR,
    SERIES,
    log_mixtures,
    log_probability,
    polynomial,
    strip_of_products,
)
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.main_loop import ROW, WARPGROUP_ROWS, over_columns, row_vector
from pallas_kernels.mosaic.softcap import softcapped
from pallas_kernels.mosaic.statistics import chunk_width, masked, row_clusters, with_bias
from pallas_kernels.products import padded

Array = jax.Array
Ref = Any


def divergence_gradients(
    logits: TwoLogits,
    kind: Kind,
    share: float,
    machine: Machine,
    where: VocabSlice,
    products: tuple[HeadProducts, HeadProducts],
    normalizers: tuple[RowNormalizer, RowNormalizer],
    factors: GradientFactors,
    out: Any,
) -> None:
    """Write the gradients of one slice's products with the student's head into the reference `out [rows, slice's chunks
    · 256]`, which is 16-bit. Places that hold no column, and rows that do not count, become 0.

    Student comes first, teacher second. `share` is the teacher's in the mixture.
    """
    vocabulary = logits.a.head.vocabulary
    row_count, columns = out.shape
    cluster_rows = statistics_tile(row_count).cluster_rows

    def body(
        where_gmem: VocabSlice,
        products_gmem: tuple[HeadProducts, HeadProducts],
        normalizers_gmem: tuple[RowNormalizer, RowNormalizer],
        factors_gmem: GradientFactors,
        out_gmem: Ref,
        _outputs: tuple[()],
    ) -> None:
        row, inside = lax.axis_index("blocks") * WARPGROUP_ROWS, lax.axis_index("groups")
        count = where_gmem.rows[0]

        @pl.when((row < row_clusters(count, cluster_rows) * cluster_rows) & (inside < where_gmem.chunks[0]))
        def _() -> None:
            width = chunk_width(vocabulary, where_gmem, where_gmem.first_chunk[0] + inside)
            scales = [LOG2_E / row_vector(head.temperature, row) for head in products_gmem]
            known = [jax.tree.map(lambda ref: row_vector(ref, row), own) for own in normalizers_gmem]
            slope, weight = (row_vector(ref, row) for ref in factors_gmem)
            counts = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW) + row < count

            def step(i: Array, _: None) -> None:
                place = inside * COLUMNS + i * FEW_COLUMNS
                own, other = (with_bias(*strip_of_products(x, row, place)) for x in products_gmem)
                log_p, log_q = (
                    log_probability(config, values, scale, normalizer, width - i * FEW_COLUMNS)
                    for config, values, scale, normalizer in zip(
                        (logits.a, logits.b), (own, other), scales, known, strict=True
                    )
                )
                found = _gradient(kind, share, log_p, log_q, over_columns(slope, FEW_COLUMNS))
                found = found * over_columns(weight, FEW_COLUMNS)
                derivative = softcapped(own, logits.a.softcap)[1]
                found = found if derivative is None else found * derivative
                found = jnp.where(over_columns(counts, FEW_COLUMNS), found, 0.0)
                found = masked(logits.a, found, width - i * FEW_COLUMNS, 0)
                there = pl.ds(row, WARPGROUP_ROWS), pl.ds(place, FEW_COLUMNS)
                out_gmem[there] = found.astype(out_gmem.dtype)

            lax.fori_loop(0, COLUMNS // FEW_COLUMNS, step, None)

    grid = (padded(row_count, WARPGROUP_ROWS) // WARPGROUP_ROWS, columns // COLUMNS)
    arguments = (where, products, normalizers, factors, out)
    launch(body, "linear_kl_gradients", machine, (), grid, *arguments, approx_math=True)


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
    if kind == "reverse":
        slope = jnp.where(p == 0, 0.0, difference)
    else:
        slope = (share - 1) * log_mixtures(share, difference)[1]
    return p * (slope - total)
