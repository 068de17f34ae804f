"""linear_logp's kernels."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.allowed import BIT_COLUMNS
from pallas_kernels.hopper.arrays import (
    LIST,
    Coefficients,
    GradientRows,
    GroupRange,
    HiddenGradient,
    KeptExponentials,
    KeptRowMap,
    LargestProducts,
    LogitsConfig,
    Partials,
    SliceProducts,
    VocabSlice,
    new_partials,
)
from pallas_kernels.hopper.parts import Parts, new_matrix
from pallas_kernels.hopper.tiles import COLUMNS
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.mosaic import head_kernels
from pallas_kernels.mosaic.dlogits import coefficients, dlogits
from pallas_kernels.mosaic.fold import fold_chunks, fold_groups
from pallas_kernels.mosaic.hidden_gradient import add_hidden_gradient
from pallas_kernels.mosaic.kept_exponentials import dlogits_from_kept_exponentials
from pallas_kernels.mosaic.largest import add_largest
from pallas_kernels.mosaic.weight_gradient import add_weight_gradient, column_sums, store_weight_gradient
from pallas_kernels.products import LowRankTerm, padded
from rlk_jax.core.fixed_order import column_groups
from tests.pallas_kernels.mosaic.configurations import MACHINE, Configuration


@dataclasses.dataclass(frozen=True)
class Problem:
    """One configuration of linear_logp's kernels.

    The number of rows picks the tile, and the size of the vocabulary decides whether chunks are ragged. A copied head
    is always "vd".
    """

    rows: int = 512
    dim: int = 512
    vocab: int = 131072
    layout: Any = "vd"
    copied: bool = False
    dtype: Any = jnp.bfloat16
    softcap: float | None = None
    bias: bool = False
    lse: bool = False
    entropy: bool = False
    slice_chunks: int = 16
    keeps: bool = False
    """Whether the forward keeps exponentials of its first chunks, which the backward reads."""
    lists: bool = False
    """Whether the forward brings the products to memory, for a ranking."""
    rank: int = 0
    """The rank of a low-rank term; 0 for none."""
    shard: bool = False
    """Whether the head is one of eight shards. Only the device knows its true width, and its dH stays float32."""
    allowed: bool = False
    """Whether each row is allowed some columns only."""
    smoothing: bool = False
    """Whether targets are smoothed."""
    parts: tuple[int, int] = (1, 1)
    """In how many parts hidden and the weight are. A weight in two parts is always copied."""

    def options(self, kernel: str) -> dict[str, Any]:
        """All fields, and the kernel's name."""
        return {"kernel": kernel, **dataclasses.asdict(self), "dtype": jnp.dtype(self.dtype).name}

    @property
    def vector_rows(self) -> int:
        return max(self.rows, 128)

    @property
    def head(self) -> HeadAccess:
        whole = column_groups(self.vocab)
        groups = 1 if self.shard else whole.count
        vocabulary = Vocabulary(whole.width - 1 if self.shard else self.vocab, groups, whole.width)
        return HeadAccess(vocabulary, self.layout, self.copied)

    @property
    def softmax_vocabulary(self) -> Vocabulary:
        return self.head.vocabulary.cut(COLUMNS // max(self.parts))

    def matrix(self, shape: tuple[int, ...], parts: int) -> Any:
        one = jax.ShapeDtypeStruct(shape, self.dtype)
        return one if parts == 1 else Parts(one, one)

    def gradient_dtype(self, parts: int) -> Any:
        """The dtype of the gradient of an operand in so many parts."""
        return self.dtype if parts == 1 else jnp.float32

    @property
    def weight(self) -> Any:
        return self.weight_of(self.dim)

    def weight_of(self, dim: int) -> Any:
        columns = column_groups(self.vocab).width if self.shard else self.vocab
        rows = self.slice_chunks * COLUMNS if self.copied else columns
        return self.matrix((rows, dim) if self.layout == "vd" else (dim, rows), self.parts[1])

    def vector(self, wanted: bool = True, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct((self.vector_rows,), dtype) if wanted else None

    def common(self) -> dict[str, Any]:
        scalar = jax.ShapeDtypeStruct((1,), jnp.int32)
        bias = jax.ShapeDtypeStruct((self.slice_chunks * COLUMNS,), jnp.float32) if self.bias else None
        words = jax.ShapeDtypeStruct((self.vector_rows, self.softmax_vocabulary.chunks * BIT_COLUMNS), jnp.int32)
        allowed = words if self.allowed else None
        return {
            "where": VocabSlice(scalar, scalar, scalar, scalar if self.shard else None, allowed),
            "hidden": self.matrix((self.rows, self.dim), self.parts[0]),
            "weight": self.weight,
            "bias": bias,
            "low_rank": self.low_rank,
        }

    @property
    def low_rank(self) -> LowRankTerm | None:
        if not self.rank:
            return None
        return LowRankTerm(jax.ShapeDtypeStruct((self.rows, self.rank), self.dtype), self.weight_of(self.rank))

    def coefficients(self) -> Coefficients:
        ids, row = self.vector(dtype=jnp.int32), self.vector()
        return Coefficients(ids, row, row, row, self.vector(self.entropy), row, self.vector(self.smoothing))

    def dlogits_matrix(self, parts: int) -> Any:
        """Gradients of logits for a result in so many parts."""
        return self.matrix((self.rows, self.slice_chunks * COLUMNS), parts)

    def new_dlogits(self) -> Any:
        """Memory for gradients of logits, or exponentials, as references."""
        memory = new_matrix((self.rows, self.slice_chunks * COLUMNS), self.gradient_dtype(max(self.parts)))
        return jax.tree.map(jax.new_ref, memory)

    def new_products(self) -> SliceProducts:
        """Memory for the products of a slice, as references."""
        values = lax.empty((self.rows, self.slice_chunks * COLUMNS), jnp.float32)
        chunks = self.softmax_vocabulary.chunks_in(self.slice_chunks)
        return SliceProducts(jax.new_ref(values), jax.new_ref(lax.empty((chunks, self.vector_rows), jnp.float32)))


def forward(p: Problem) -> Configuration:
    def run(where, hidden, weight, bias, low_rank, target_ids, holds_target, temperature):
        shape = (p.softmax_vocabulary.chunks, p.vector_rows)
        out = new_partials(shape, with_gap=p.entropy, with_derivative=p.softcap is not None, with_sum=p.smoothing)
        kept = p.new_dlogits() if p.keeps else None
        products = p.new_products() if p.lists else None
        logits, per_token = LogitsConfig(p.head, p.softcap), (target_ids, holds_target, temperature)
        head_kernels.partials(logits, MACHINE, where, hidden, weight, bias, *per_token, out, kept, low_rank, products)
        return jax.tree.map(jax.freeze, (out, products))

    of_chunks = p.vector_rows // 64, p.softmax_vocabulary.chunks
    holds = jax.ShapeDtypeStruct(of_chunks, jnp.int32) if p.rows > 128 else None
    vectors = {"target_ids": p.vector(dtype=jnp.int32), "holds_target": holds, "temperature": p.vector()}
    return Configuration(p.options("forward"), run, {**p.common(), **vectors})


def largest_products(p: Problem, count: int) -> Configuration:
    """The `count` largest products of each row, those of one more slice added."""

    def run(where, products, best):
        refs = jax.tree.map(jax.new_ref, best)
        add_largest(p.softmax_vocabulary, MACHINE, where, jax.tree.map(jax.new_ref, products), count, refs)
        return jax.tree.map(jax.freeze, refs)

    shape = jax.ShapeDtypeStruct
    values = shape((p.rows, p.slice_chunks * COLUMNS), jnp.float32)
    chunks = p.softmax_vocabulary.chunks_in(p.slice_chunks)
    best = LargestProducts(shape((p.vector_rows, LIST), jnp.float32), shape((p.vector_rows, LIST), jnp.int32))
    products = SliceProducts(values, shape((chunks, p.vector_rows), jnp.float32))
    arguments = {"where": p.common()["where"]._replace(allowed=None), "products": products, "best": best}
    return Configuration(p.options("largest") | {"count": count}, run, arguments)


def folds(p: Problem) -> Configuration:
    """Both folds. They depend on the numbers of chunks and groups, on an entropy, on a softcap and on smoothed targets,
    not on what made the partials.
    """

    def run(partials, active):
        groups = fold_chunks(partials, p.head.vocabulary.groups, active, MACHINE)
        return fold_groups(groups, active, MACHINE)

    row = jax.ShapeDtypeStruct((p.softmax_vocabulary.chunks, p.vector_rows), jnp.float32)
    wanted = (True, True, True, p.entropy, p.softcap is not None, p.smoothing)
    partials = Partials(*(row if x else None for x in wanted))
    active = jax.ShapeDtypeStruct((1,), jnp.int32)
    return Configuration(p.options("folds"), run, {"partials": partials, "active": active})


def logit_gradients(p: Problem) -> Configuration:
    def run(where, hidden, weight, bias, low_rank, rows):
        out = p.new_dlogits()
        dlogits(LogitsConfig(p.head, p.softcap), MACHINE, where, hidden, weight, bias, rows, out, low_rank)
        return jax.tree.map(jax.freeze, out)

    return Configuration(p.options("dlogits"), run, {**p.common(), "rows": p.coefficients()})


def row_coefficients(p: Problem) -> Configuration:
    def run(rows):
        return coefficients(rows, MACHINE)

    wanted = {"gap": p.entropy, "g_lse": p.lse, "g_entropy": p.entropy, "scale": p.dtype == jnp.float16}
    wanted |= {"target_derivative": p.softcap is not None, "g_uniform": p.smoothing, "g_spread": p.smoothing}
    rows = GradientRows(
        *(
            p.vector(wanted.get(name, True), jnp.int32 if name == "target_ids" else jnp.float32)
            for name in GradientRows._fields
        )
    )
    return Configuration(p.options("coefficients"), run, {"rows": rows})


def logit_gradients_from_kept_exponentials(p: Problem, *, in_place: bool) -> Configuration:
    def run(where, kept, source, rows):
        if in_place:
            out, kept = jax.tree.map(jax.new_ref, kept.exponentials), kept._replace(exponentials=None)
        else:
            out = p.new_dlogits()
        dlogits_from_kept_exponentials(p.head.vocabulary, MACHINE, where, kept, source, rows, out)
        return jax.tree.map(jax.freeze, out)

    where = p.common()["where"]
    parts = max(p.parts)
    shift = jax.ShapeDtypeStruct((parts * p.slice_chunks, p.vector_rows), jnp.float32)
    arguments = {"where": where, "kept": KeptExponentials(p.dlogits_matrix(parts), shift)}
    arguments |= {"source": KeptRowMap(p.vector(dtype=jnp.int32), where.rows), "rows": p.coefficients()}
    options = p.options("dlogits from kept exponentials") | {"in_place": in_place}
    return Configuration(options, run, arguments)


def hidden_gradient(p: Problem, sums: str) -> Configuration:
    """sums: whether groups are summed up "at once" or "whole" ones one by one, or slices "cut" them."""

    def run(where, groups, slice_dlogits, weight, unscale):
        shape = (p.vector_rows, -(-p.dim // COLUMNS) * COLUMNS)

        def new(wanted: bool, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
            return jax.new_ref(lax.empty(shape, dtype)) if wanted else None

        at_once = sums == "at once"
        chains = new(sums != "whole", (p.head.vocabulary.groups if at_once else 1, *shape))
        rounded = new(not at_once and not p.shard and p.parts[0] == 1, shape, p.dtype)
        out = HiddenGradient(chains, new(not at_once, shape), rounded)
        add_hidden_gradient(p.head, MACHINE, where, slice_dlogits, weight, unscale, groups, out)
        return jax.tree.map(jax.freeze, out)

    where = p.common()["where"]
    arguments = {"where": where, "groups": GroupRange(where.rows, where.rows)}
    arguments |= {"slice_dlogits": p.dlogits_matrix(p.parts[0])}
    arguments |= {"weight": p.weight, "unscale": p.vector(p.dtype == jnp.float16)}
    return Configuration(p.options("d_hidden") | {"sums": sums}, run, arguments)


def weight_gradient(p: Problem) -> Configuration:
    def run(where, slice_dlogits, hidden, unscale):
        out = jax.new_ref(lax.empty(p.weight.shape, p.gradient_dtype(p.parts[1])))
        store_weight_gradient(p.head, MACHINE, where, slice_dlogits, hidden, unscale, out)
        return jax.freeze(out)

    unscale = jax.ShapeDtypeStruct((1,), jnp.float32) if p.dtype == jnp.float16 else None
    common = p.common()
    slice_dlogits = p.dlogits_matrix(p.parts[1])
    arguments = {"where": common["where"], "slice_dlogits": slice_dlogits, "hidden": common["hidden"]}
    return Configuration(p.options("d_weight"), run, {**arguments, "unscale": unscale})


def weight_gradient_sums(p: Problem) -> Configuration:
    def run(where, slice_dlogits, hidden, sums):
        out = jax.new_ref(sums)
        add_weight_gradient(MACHINE, where, slice_dlogits, hidden, out)
        return jax.freeze(out)

    common = p.common()
    shape = p.head.vocabulary.chunks * COLUMNS, padded(p.dim, COLUMNS)
    arguments = {"where": common["where"], "slice_dlogits": p.dlogits_matrix(1), "hidden": common["hidden"]}
    return Configuration(
        p.options("d_weight sums"), run, {**arguments, "sums": jax.ShapeDtypeStruct(shape, jnp.float32)}
    )


def bias_gradient(p: Problem, *, goes_on: bool = False) -> Configuration:
    def run(where, slice_dlogits, row_unscale, so_far):
        return column_sums(where, slice_dlogits, row_unscale, MACHINE, so_far)

    row_unscale = p.vector(p.dtype == jnp.float16)
    so_far = jax.ShapeDtypeStruct((p.slice_chunks * COLUMNS,), jnp.float32) if goes_on else None
    slice_dlogits = p.dlogits_matrix(max(p.parts))
    arguments = {"where": p.common()["where"], "slice_dlogits": slice_dlogits, "row_unscale": row_unscale}
    return Configuration(p.options("d_bias") | {"goes_on": goes_on}, run, {**arguments, "so_far": so_far})


def configurations() -> Iterator[Configuration]:
    """Every tile with every set of options that reaches a kernel, with whole and ragged chunks, all layouts and copies.

    Softcaps above 64 are left out. They take one more branch, and with an entropy and without a bias their dlogits
    spill 20 to 32 bytes.
    """
    heads = (
        {},
        {"vocab": 151936},
        {"layout": "dv"},
        {"copied": True, "vocab": 50257},
        {"shard": True},
        {"shard": True, "layout": "dv"},
        {"shard": True, "copied": True, "vocab": 50257},
    )
    both = (False, True)
    for rows, bias, softcap, entropy in itertools.product((64, 128, 512), both, (None, 30.0), both):
        options = {"rows": rows, "bias": bias, "softcap": softcap, "entropy": entropy}
        for head in ({}, {"vocab": 151936}, {"vocab": 131584, "layout": "dv"}, {"shard": True}):
            yield forward(Problem(**head, **options))
            for dtype in (jnp.bfloat16, jnp.float16):
                yield forward(Problem(keeps=True, dtype=dtype, **head, **options))
        for vocab, dtype in itertools.product((131072, 151936), (jnp.bfloat16, jnp.float16)):
            yield logit_gradients(Problem(vocab=vocab, dtype=dtype, **options))
    for head, dtype in itertools.product(heads, (jnp.bfloat16, jnp.float16)):
        yield forward(Problem(dtype=dtype, **head))
        yield logit_gradients(Problem(dtype=dtype, **head))
        for rows in (64, 512):
            for sums in ("at once", "whole", "cut"):
                yield hidden_gradient(Problem(rows=rows, dtype=dtype, **head), sums)
            yield weight_gradient(Problem(rows=rows, dtype=dtype, **head))
    for rank, head in itertools.product((64, 128), ({}, {"layout": "dv"}, {"copied": True, "vocab": 50257})):
        for rows in (64, 512):
            # Products with A of a low-rank term are those with a head of so many dimensions.
            for sums in ("at once", "whole", "cut"):
                yield hidden_gradient(Problem(rows=rows, dim=rank, **head), sums)
            yield weight_gradient(Problem(rows=rows, dim=rank, **head))
    for head in ({}, {"layout": "dv"}):
        # Tiles of dH and, but for "dv", of dW are narrower here than for a multiple of 256.
        for sums in ("at once", "whole", "cut"):
            yield hidden_gradient(Problem(dim=896, **head), sums)
        yield weight_gradient(Problem(dim=896, **head))
    for head, keeps in itertools.product(({"entropy": True}, {"layout": "dv"}, {"dtype": jnp.float16}), both):
        yield logit_gradients(Problem(rank=64, **head))
        yield forward(Problem(rank=64, keeps=keeps, **head))
    for rows in (64, 128):
        yield logit_gradients(Problem(rows=rows, rank=64, bias=True, softcap=30.0))
        yield forward(Problem(rows=rows, rank=64, bias=True, softcap=30.0, keeps=True))
    for head, dtype in itertools.product(heads, (jnp.bfloat16, jnp.float16)):
        yield forward(Problem(keeps=True, dtype=dtype, **head))
        yield forward(Problem(keeps=True, dtype=dtype, softcap=30.0, entropy=True, **head))
        for in_place in both:
            yield logit_gradients_from_kept_exponentials(Problem(dtype=dtype, **head), in_place=in_place)
    for entropy, softcap, head in itertools.product(
        both, (None, 30.0), ({}, {"vocab": 151936}, {"vocab": 131584}, {"vocab": 50257})
    ):
        yield folds(Problem(entropy=entropy, softcap=softcap, **head))
        yield folds(Problem(entropy=entropy, softcap=softcap, shard=True, **head))
    for dtype, lse, entropy, softcap in itertools.product((jnp.bfloat16, jnp.float16), both, both, (None, 30.0)):
        yield row_coefficients(Problem(dtype=dtype, lse=lse, entropy=entropy, softcap=softcap))
    for dtype in (jnp.bfloat16, jnp.float16):
        yield bias_gradient(Problem(dtype=dtype))
    yield bias_gradient(Problem(), goes_on=True)
    for dim in (512, 64, 896):
        yield weight_gradient_sums(Problem(dim=dim))
    yield from _of_rankings()
    yield from _of_allowed_columns()
    yield from _of_smoothed_targets()
    yield from _in_parts()


def _of_rankings() -> Iterator[Configuration]:
    """Forwards that bring their products to memory, and the search for the largest of them.

    With a softcap, a bias and rows that are allowed some columns only ptxas spills up to sixteen registers, and two
    where a tile has 64 rows, a bias and an entropy.
    """
    both = (False, True)
    for rows, bias, softcap, entropy in itertools.product((64, 128, 512), both, (None, 30.0), both):
        listing = forward(Problem(rows=rows, bias=bias, softcap=softcap, entropy=entropy, lists=True))
        yield listing._replace(most_spills=8) if rows == 64 and bias and entropy and softcap is None else listing
    for head in (
        {"vocab": 151936},
        {"layout": "dv", "dtype": jnp.float16},
        {"copied": True, "vocab": 50257},
        {"shard": True},
        {"rank": 64},
        {"parts": (2, 2), "copied": True, "vocab": 50257},
        {"parts": (1, 2), "copied": True, "vocab": 50257},
        {"parts": (2, 1), "layout": "dv"},
    ):
        for allowed in both:
            yield forward(Problem(allowed=allowed, lists=True, **head))
        most_masked = forward(Problem(allowed=True, softcap=30.0, bias=True, lists=True, **head))
        yield most_masked._replace(most_spills=64)
    for head in ({}, {"vocab": 50257, "slice_chunks": 300}, {"parts": (2, 2)}, {"shard": True}):
        yield largest_products(Problem(**head), 20)


def _of_allowed_columns() -> Iterator[Configuration]:
    """Rows that are allowed some columns only, in every epilogue with a product.

    With a softcap and kept exponentials ptxas spills up to four registers of two of these configurations.
    """
    both = (False, True)
    for rows, bias, softcap, entropy in itertools.product((64, 128, 512), both, (None, 30.0), both):
        p = Problem(rows=rows, bias=bias, softcap=softcap, entropy=entropy, vocab=151936, allowed=True)
        yield forward(p)
        kept = forward(dataclasses.replace(p, keeps=True))
        yield kept if softcap is None else kept._replace(most_spills=16)
        yield logit_gradients(p)
    for head in ({"dtype": jnp.float16}, {"layout": "dv"}, {"copied": True, "vocab": 50257}, {"rank": 64}):
        p = Problem(allowed=True, **head)
        yield forward(dataclasses.replace(p, keeps=True))
        yield logit_gradients(p)
    p = Problem(allowed=True, parts=(2, 2), copied=True, vocab=50257)
    yield forward(dataclasses.replace(p, keeps=True))
    yield logit_gradients(p)


def _of_smoothed_targets() -> Iterator[Configuration]:
    """Smoothed targets in every epilogue that sums logits up or adds to their gradients. No entropy is beside them."""
    both = (False, True)
    for rows, bias, softcap, dtype in itertools.product(
        (64, 128, 512), both, (None, 30.0), (jnp.bfloat16, jnp.float16)
    ):
        for vocab in (131072, 151936):
            p = Problem(rows=rows, bias=bias, softcap=softcap, dtype=dtype, vocab=vocab, smoothing=True)
            yield forward(p)
            if softcap is None:
                yield forward(dataclasses.replace(p, keeps=True))
            yield logit_gradients(p)
    for head in ({"layout": "dv"}, {"copied": True, "vocab": 50257}, {"rank": 64}, {"shard": True}):
        p = Problem(smoothing=True, **head)
        yield forward(dataclasses.replace(p, keeps=True))
        yield logit_gradients(p)
    for in_place in both:
        yield logit_gradients_from_kept_exponentials(Problem(smoothing=True), in_place=in_place)
    for softcap in (None, 30.0):
        yield folds(Problem(softcap=softcap, smoothing=True, vocab=151936))
        yield row_coefficients(Problem(softcap=softcap, smoothing=True, lse=True))
        p = Problem(softcap=softcap, smoothing=True, parts=(2, 2), copied=True, vocab=50257)
        yield forward(dataclasses.replace(p, keeps=softcap is None))
        yield logit_gradients(p)
    p = Problem(smoothing=True, parts=(2, 2), copied=True, vocab=50257)
    yield logit_gradients_from_kept_exponentials(p, in_place=False)


def _in_parts() -> Iterator[Configuration]:
    """Operands in two parts. Every tile, ragged chunks and both layouts meet all numbers of parts; the options of
    epilogues meet float32 operands alone, since tiles are the same for others.
    """
    both = (False, True)
    for parts in ((2, 2), (1, 2), (2, 1)):
        read: dict[str, Any] = {"parts": parts, "copied": parts[1] == 2}
        head = {"vocab": 50257} if read["copied"] else {"layout": "dv"}
        for rows in (64, 128, 512):
            p = Problem(rows=rows, dim=4096, **head, **read)
            yield forward(dataclasses.replace(p, keeps=rows == 512))
            yield logit_gradients(p)
            for sums in ("at once", "whole", "cut"):
                yield hidden_gradient(p, sums)
            yield weight_gradient(p)
        for dim in (64, 512):
            yield hidden_gradient(Problem(dim=dim, **read), "whole")
            yield weight_gradient(Problem(dim=dim, **read))
        yield logit_gradients_from_kept_exponentials(Problem(**head, **read), in_place=not read["copied"])
    yield weight_gradient(Problem(dim=64, layout="dv", parts=(1, 2)))
    read = {"parts": (2, 2), "copied": True}
    for bias, softcap, entropy, keeps in itertools.product(both, (None, 30.0), both, both):
        p = Problem(bias=bias, softcap=softcap, entropy=entropy, vocab=50257, **read)
        yield forward(dataclasses.replace(p, keeps=keeps))
        if not keeps:
            yield logit_gradients(p)
    yield forward(Problem(keeps=True, shard=True, **read))
    yield folds(Problem(vocab=50257, **read))
    yield bias_gradient(Problem(**read))
