"""linear_kl's kernels."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import LogitsConfig
from pallas_kernels.hopper.divergence import (
    DivergencePartials,
    GradientFactors,
    HeadRows,
    MixtureSums,
    RowNormalizer,
    TwoSlices,
)
from pallas_kernels.mosaic import divergence
from pallas_kernels.mosaic.divergence_gradients import divergence_gradients
from tests.pallas_kernels.mosaic.configurations import MACHINE, Configuration
from tests.pallas_kernels.mosaic.configurations.head import Problem

_COPIED = "copied"
_SHARES = 0.5, 0.3, 0.1
"""Those of a teacher in a mixture, which kernels are made for: equal, other large and small ones."""


@dataclasses.dataclass(frozen=True)
class TwoHeads:
    """One configuration of the kernels over two heads, for a slice of 16 chunks.

    The number of rows picks the tile, and the size of the vocabulary decides whether chunks are ragged. A layout is how
    a head is stored, or "copied".
    """

    rows: int = 512
    vocab: int = 131072
    softcap: float | None = None
    bias: bool = False
    layouts: tuple[str, str] = ("vd", "vd")
    dtypes: tuple[Any, Any] = (jnp.bfloat16, jnp.bfloat16)
    shard: bool = False
    """Whether the heads are one of eight shards."""

    def options(self, kernel: str, **others: Any) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("rows", "vocab", "softcap", "bias", "shard")}
        layouts = {f"layout {i}": x for i, x in enumerate(self.layouts)}
        dtypes = {f"dtype {i}": jnp.dtype(x).name for i, x in enumerate(self.dtypes)}
        return {"kernel": kernel, **others, **own, **layouts, **dtypes}

    @property
    def heads(self) -> tuple[Problem, Problem]:
        """Both heads, of two widths."""

        def head(dim: int, layout: Any, dtype: Any) -> Problem:
            is_copied = layout == _COPIED
            own: dict[str, Any] = {"layout": "vd" if is_copied else layout, "copied": is_copied, "dtype": dtype}
            return Problem(rows=self.rows, dim=dim, vocab=self.vocab, bias=self.bias, shard=self.shard, **own)

        first, second = map(head, (512, 1024), self.layouts, self.dtypes)
        return first, second

    def slices(self, where: Any, heads: Any) -> TwoSlices:
        """What a kernel is given, of these arguments."""
        first, second = (LogitsConfig(head.head, self.softcap) for head in self.heads)
        return TwoSlices((first, second), heads, where, MACHINE)

    def arguments(self) -> dict[str, Any]:
        """What all kernels take."""
        common = [head.common() for head in self.heads]
        row = self.heads[0].vector()
        heads = tuple(HeadRows(x["hidden"], x["weight"], x["bias"], row) for x in common)
        return {"where": common[0]["where"], "heads": heads}

    def normalizers(self) -> tuple[RowNormalizer, RowNormalizer]:
        row = self.heads[0].vector()
        return RowNormalizer(row, row), RowNormalizer(row, row)

    def new_sums(self, sums: Any) -> Any:
        """References to sums of this type over all chunks."""
        shape = self.heads[0].softmax_vocabulary.chunks, self.heads[0].vector_rows
        return sums(*(jax.new_ref(lax.empty(shape, jnp.float32)) for _ in sums._fields))


def partials(two: TwoHeads) -> Configuration:
    """The kernel of the partials of a divergence."""

    def run(where: Any, heads: Any) -> DivergencePartials:
        out = two.new_sums(DivergencePartials)
        divergence.divergence_partials(two.slices(where, heads), out)
        return jax.tree.map(jax.freeze, out)

    return Configuration(two.options("partials of a divergence"), run, two.arguments())


def mixture(share: float) -> Callable[[TwoHeads], Configuration]:
    """The kernel of a mixture's sums."""

    def of_heads(two: TwoHeads) -> Configuration:
        def run(where: Any, heads: Any, normalizers: Any) -> MixtureSums:
            out = two.new_sums(MixtureSums)
            divergence.mixture_sums(two.slices(where, heads), share, normalizers, out)
            return jax.tree.map(jax.freeze, out)

        arguments = {**two.arguments(), "normalizers": two.normalizers()}
        return Configuration(two.options("sums of a mixture", share=share), run, arguments)

    return of_heads


def gradients(kind: Any, share: float = 0.5) -> Callable[[TwoHeads], Configuration]:
    """The kernel of the gradients of a slice's logits. Beside a softcap ptxas spills one register for "reverse", where
    there is a bias, and up to four for "jsd" with shares that are not equal.
    """

    def of_heads(two: TwoHeads) -> Configuration:
        head = two.heads[0]

        def run(where: Any, heads: Any, normalizers: Any, factors: GradientFactors) -> Any:
            out = head.new_dlogits()
            divergence_gradients(two.slices(where, heads), kind, share, normalizers, factors, out)
            return jax.freeze(out)

        factors = GradientFactors(head.vector(), head.vector())
        arguments = {**two.arguments(), "normalizers": two.normalizers(), "factors": factors}
        of_reverse = 4 if kind == "reverse" and two.bias else 0
        spills = 0 if two.softcap is None else 16 if kind == "jsd" and share != 0.5 else of_reverse
        return Configuration(two.options("gradients of a divergence", kind=kind, share=share), run, arguments, spills)

    return of_heads


def _fold(name: str, fold: Callable[..., Any], sums: Any) -> Configuration:
    """The fold of sums of this type."""
    row = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    arguments = {"sums": sums(*(row for _ in sums._fields)), "active": jax.ShapeDtypeStruct((1,), jnp.int32)}
    return Configuration({"kernel": name}, lambda sums, active: fold(sums, 8, active, MACHINE), arguments)


def configurations() -> Iterator[Configuration]:
    """Every way to make logits with whole and ragged chunks and on shards, and every tile with every way to read both
    heads.
    """
    b, h = jnp.bfloat16, jnp.float16
    options = itertools.product((512,), (131072, 151936), (None, 30.0, 100.0), (False, True))
    problems = (
        *itertools.starmap(TwoHeads, options),
        TwoHeads(rows=64, layouts=("dv", _COPIED), dtypes=(b, h)),
        TwoHeads(rows=128, layouts=(_COPIED, "vd"), dtypes=(h, b)),
        TwoHeads(layouts=("vd", "dv"), dtypes=(h, h)),
        TwoHeads(shard=True),
        TwoHeads(shard=True, softcap=30.0, bias=True, layouts=("vd", _COPIED)),
    )
    mixtures = (*map(mixture, _SHARES), *(gradients("jsd", share) for share in _SHARES))
    kernels = (partials, gradients("forward"), gradients("reverse"), *mixtures)
    for kernel, two in itertools.product(kernels, problems):
        yield kernel(two)
    for rows, *layouts in itertools.product((64, 128, 512), ("vd", "dv", _COPIED), ("vd", "dv", _COPIED)):
        yield partials(TwoHeads(rows=rows, layouts=(layouts[0], layouts[1])))
    yield _fold("fold of a divergence", divergence.fold_divergence, DivergencePartials)
    yield _fold("fold of a mixture", divergence.fold_mixture, MixtureSums)
