"""linear_kl's kernels."""

import itertools
from collections.abc import Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import LogitsConfig, VocabSlice
from pallas_kernels.hopper.divergence import (
    DivergencePartials,
    GradientFactors,
    HeadProducts,
    Kind,
    MixtureSums,
    RowNormalizer,
    TwoLogits,
)
from pallas_kernels.hopper.tiles import COLUMNS
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.mosaic import divergence
from pallas_kernels.mosaic.divergence_gradients import divergence_gradients
from pallas_kernels.mosaic.head_products import head_products
from rlk_jax.core.fixed_order import column_groups
from tests.pallas_kernels.mosaic.configurations import MACHINE, Configuration
from tests.pallas_kernels.mosaic.configurations.head import Problem

_CHUNKS = 16
_ROWS = 512
_INT = jax.ShapeDtypeStruct((1,), jnp.int32)


def products(p: Problem) -> Configuration:
    def run(where, hidden, weight):
        out = jax.new_ref(lax.empty((max(p.rows, 64), p.slice_chunks * COLUMNS), jnp.float32))
        head_products(p.head, MACHINE, where, hidden, weight, out)
        return jax.freeze(out)

    common = p.common()
    return Configuration(p.options("products"), run, {name: common[name] for name in ("where", "hidden", "weight")})


def _logits(size: int, softcap: float | None) -> LogitsConfig:
    groups = column_groups(size)
    return LogitsConfig(HeadAccess(Vocabulary(size, groups.count, groups.width), "vd", copied=False), softcap)


def _products(bias: bool) -> HeadProducts:
    shape = jax.ShapeDtypeStruct
    columns = _CHUNKS * COLUMNS
    own = shape((columns,), jnp.float32) if bias else None
    return HeadProducts(shape((_ROWS, columns), jnp.float32), own, shape((_ROWS,), jnp.float32))


def partials(size: int, softcap: float | None, bias: bool) -> Configuration:
    """The kernel of the partials of a divergence over one slice of 16 chunks."""
    logits = _logits(size, softcap)
    shape = logits.head.vocabulary.chunks, _ROWS

    def run(where: VocabSlice, a: HeadProducts, b: HeadProducts) -> DivergencePartials:
        out = DivergencePartials(*(jax.new_ref(lax.empty(shape, jnp.float32)) for _ in DivergencePartials._fields))
        divergence.divergence_partials(TwoLogits(logits, logits), MACHINE, where, a, b, out)
        return jax.tree.map(jax.freeze, out)

    arguments: dict[str, Any] = {"where": VocabSlice(_INT, _INT, _INT), "a": _products(bias), "b": _products(bias)}
    return Configuration(
        {"kernel": "partials of a divergence", "size": size, "softcap": softcap, "bias": bias}, run, arguments
    )


def mixture(size: int, softcap: float | None, bias: bool) -> Configuration:
    """The kernel of a mixture's sums over one slice of 16 chunks."""
    logits = _logits(size, softcap)
    shape = logits.head.vocabulary.chunks, _ROWS

    def run(where: VocabSlice, products: Any, normalizers: Any) -> MixtureSums:
        out = MixtureSums(*(jax.new_ref(lax.empty(shape, jnp.float32)) for _ in MixtureSums._fields))
        divergence.mixture_sums(TwoLogits(logits, logits), 0.5, MACHINE, where, products, normalizers, out)
        return jax.tree.map(jax.freeze, out)

    row = jax.ShapeDtypeStruct((_ROWS,), jnp.float32)
    arguments = {
        "where": VocabSlice(_INT, _INT, _INT),
        "products": (_products(bias), _products(bias)),
        "normalizers": (RowNormalizer(row, row), RowNormalizer(row, row)),
    }
    options = {"kernel": "sums of a mixture", "size": size, "softcap": softcap, "bias": bias}
    return Configuration(options, run, arguments)


def fold_of_mixture() -> Configuration:
    """The fold of a mixture's sums."""
    row = jax.ShapeDtypeStruct((512, _ROWS), jnp.float32)

    def run(sums: MixtureSums, active: Any) -> MixtureSums:
        return divergence.fold_mixture(sums, 8, active, MACHINE)

    return Configuration({"kernel": "fold of a mixture"}, run, {"sums": MixtureSums(row, row), "active": _INT})


def fold() -> Configuration:
    """The fold of a divergence's partials."""
    row = jax.ShapeDtypeStruct((512, _ROWS), jnp.float32)

    def run(partials: DivergencePartials, active: Any) -> DivergencePartials:
        return divergence.fold_divergence(partials, 8, active, MACHINE)

    arguments = {"partials": DivergencePartials(row, row, row, row, row, row), "active": _INT}
    return Configuration({"kernel": "fold of a divergence"}, run, arguments)


def gradients(kind: Any, size: int, softcap: float | None, bias: bool, dtype: Any) -> Configuration:
    """The kernel of the gradients of one slice's logits, of 16 chunks."""
    logits = _logits(size, softcap)

    def run(where: VocabSlice, products: Any, normalizers: Any, factors: GradientFactors) -> Any:
        out = jax.new_ref(lax.empty((_ROWS, _CHUNKS * COLUMNS), dtype))
        two = TwoLogits(logits, logits)
        divergence_gradients(two, kind, 0.5, MACHINE, where, products, normalizers, factors, out)
        return jax.freeze(out)

    row = jax.ShapeDtypeStruct((_ROWS,), jnp.float32)
    arguments = {
        "where": VocabSlice(_INT, _INT, _INT),
        "products": (_products(bias), _products(bias)),
        "normalizers": (RowNormalizer(row, row), RowNormalizer(row, row)),
        "factors": GradientFactors(row, row),
    }
    options = {"kernel": "gradients of a divergence", "kind": kind, "size": size, "softcap": softcap, "bias": bias}
    return Configuration({**options, "dtype": jnp.dtype(dtype).name}, run, arguments)


def configurations() -> Iterator[Configuration]:
    """Every tile of the products with every way to read the head; sums with whole and ragged chunks."""
    heads = ({}, {"layout": "dv"}, {"copied": True, "vocab": 50257})
    for rows, dtype, head in itertools.product((64, 128, 512), (jnp.bfloat16, jnp.float16), heads):
        yield products(Problem(rows=rows, dtype=dtype, **head))
    for size, softcap, bias in itertools.product((131072, 151936), (None, 30.0, 100.0), (False, True)):
        yield partials(size, softcap, bias)
        yield mixture(size, softcap, bias)
        for kind in get_args(Kind):
            yield gradients(kind, size, softcap, bias, jnp.bfloat16)
    yield gradients("forward", 151936, None, False, jnp.float16)
    yield fold()
    yield fold_of_mixture()
