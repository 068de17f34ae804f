"""The partial softmaxes of one slice: by one kernel or, for few rows, by that of det_gemm and one that follows it."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.arrays import LogitsConfig, Partials, VocabSlice
from pallas_kernels.hopper.parts import Matrix, Parts
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.mosaic import statistics
from pallas_kernels.mosaic.gemm import gemm
from pallas_kernels.mosaic.partials_of_logits import partials_of_logits
from pallas_kernels.products import LowRankTerm

Array = jax.Array
_FEW_ROWS = 16
"""Rows up to which det_gemm's narrow tiles stream the head faster than tiles of a whole chunk, of which the last round
leaves multiprocessors idle. Products in float32 are then small beside the head."""


def partials(
    logits: LogitsConfig,
    machine: Machine,
    where: VocabSlice,
    hidden: Matrix,
    weight: Matrix,
    bias: Array | None,
    target_ids: Array,
    holds_target: Array | None,
    temperature: Array,
    out: Partials,
    kept: Any = None,
    low_rank: LowRankTerm | None = None,
) -> None:
    """`statistics.partials`, by way of products in float32 where rows are few. Both ways give the same bits."""
    head = logits.head
    is_readable = not (head.copied or isinstance(hidden, Parts)) and weight.shape[0] % 8 == 0
    if hidden.shape[0] > _FEW_ROWS or not is_readable or kept is not None or low_rank is not None:
        per_row = target_ids, holds_target, temperature
        statistics.partials(logits, machine, where, hidden, weight, bias, *per_row, out, kept, low_rank)
        return
    layout = {"a_transposed": False, "b_transposed": head.layout == "vd"}
    products = gemm(hidden, weight, None, **layout, out_dtype=jnp.float32, machine=machine)
    partials_of_logits(logits, machine, where, products, bias, target_ids, temperature, out)
