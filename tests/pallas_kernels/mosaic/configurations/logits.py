"""The kernels over materialised logits."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.allowed import BIT_COLUMNS
from pallas_kernels.hopper.arrays import LogitsConfig, Partials, VocabSlice, new_partials
from pallas_kernels.hopper.tiles import COLUMNS, THREADS
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.logits import RowCoefficients, RowConfig
from pallas_kernels.mosaic import logits
from pallas_kernels.mosaic.partials_of_logits import partials_of_logits
from rlk_jax.core.fixed_order import column_groups
from tests.pallas_kernels.mosaic.configurations import MACHINE, Configuration


def logits_kernels(
    size: int, dtype: Any, softcap: float | None, entropy: bool, mask: bool = False
) -> Iterator[Configuration]:
    """The kernels of statistics and gradients over materialised logits of `size` columns."""
    config, count = RowConfig(size, softcap, entropy), 64

    def vector(dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count,), dtype)

    ids, row = vector(jnp.int32), vector()
    options = {"size": size, "dtype": jnp.dtype(dtype).name, "softcap": softcap, "entropy": entropy}
    options["mask"] = mask
    words = jax.ShapeDtypeStruct((count, -(-size // 32)), jnp.uint32) if mask else None
    common = {"logits": jax.ShapeDtypeStruct((count, size), dtype), "target_ids": ids, "active": ids, "allowed": words}
    statistics = functools.partial(logits.statistics, config, machine=MACHINE)
    arguments = {**common, "temperature": row}
    yield Configuration({"kernel": "logits statistics", **options}, lambda **x: statistics(**x), arguments)
    rows = RowCoefficients(row, row, row, row, row if entropy else None, row)
    for in_place in (False, True):
        gradients = functools.partial(logits.gradients, config, in_place=in_place, machine=MACHINE)
        changed = {"kernel": "logits gradients", **options, "in_place": in_place}
        yield Configuration(changed, lambda gradients=gradients, **x: gradients(**x), {**common, "rows": rows})


def partials(
    count: int, size: int, softcap: float | None, entropy: bool, has_bias: bool, mask: bool = False
) -> Configuration:
    """The kernel of linear_logp's partials from `count` rows of logits of `size` columns."""
    groups = column_groups(size)
    how = LogitsConfig(HeadAccess(Vocabulary(size, groups.count, groups.width), "vd", copied=False), softcap)
    options = {"kernel": "partials of logits", "rows": count, "size": size, "softcap": softcap, "entropy": entropy}
    options |= {"bias": has_bias, "mask": mask}
    vocabulary = how.head.vocabulary

    def run(where: VocabSlice, products: Any, bias: Any, target_ids: Any, temperature: Any) -> Partials:
        shape = (vocabulary.chunks, THREADS)
        out = new_partials(shape, with_gap=entropy, with_derivative=softcap is not None)
        partials_of_logits(how, MACHINE, where, products, bias, target_ids, temperature, out)
        return jax.tree.map(jax.freeze, out)

    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    rows = {"target_ids": jnp.int32, "temperature": jnp.float32}
    allowed = jax.ShapeDtypeStruct((THREADS, vocabulary.chunks * BIT_COLUMNS), jnp.int32) if mask else None
    arguments = {
        "where": VocabSlice(one, one, one, allowed=allowed),
        "products": jax.ShapeDtypeStruct((count, size), jnp.float32),
        "bias": jax.ShapeDtypeStruct((vocabulary.chunks * COLUMNS,), jnp.float32) if has_bias else None,
        **{name: jax.ShapeDtypeStruct((THREADS,), dtype) for name, dtype in rows.items()},
    }
    return Configuration(options, run, arguments)


def configurations() -> Iterator[Configuration]:
    """Every dtype with whole, ragged and unaligned rows, with and without a softcap and an entropy."""
    for dtype, size, softcap, entropy in itertools.product(
        (jnp.bfloat16, jnp.float16, jnp.float32), (131072, 151936, 50257, 50258), (None, 30.0), (False, True)
    ):
        if dtype == jnp.bfloat16 or size in (131072, 50257):
            yield from logits_kernels(size, dtype, softcap, entropy)
    # Rows of other dtypes have pieces of as many words.
    for size, dtype, softcap in itertools.product((131072, 50257, 50258), (jnp.bfloat16, jnp.float32), (None, 30.0)):
        yield from logits_kernels(size, dtype, softcap, entropy=True, mask=True)
    yield from logits_kernels(131072, jnp.bfloat16, None, entropy=False, mask=True)
    yield from logits_kernels(1000, jnp.bfloat16, None, True)
    yield from logits_kernels(5, jnp.bfloat16, None, True)
    for size, softcap, entropy in itertools.product((151936, 50257), (None, 30.0, 100.0), (False, True)):
        for count in (9, 17):
            yield partials(count, size, softcap, entropy, has_bias=count == 17 and size == 151936)
        yield partials(17, size, softcap, entropy, has_bias=False, mask=True)
