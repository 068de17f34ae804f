"""Compiles shipped kernel configurations for an H200 without one: python -m tests.pallas_kernels.mosaic.sm90 [--all].

With --all it compiles all of them; without, as few as have every kernel and every pair of options that any of them has.
It prints a line per configuration; the exit status is 1 where one fails to compile, spills registers, or has its wgmma
serialised (ptxas has several warnings for that, C7510 and C7515 among them). Then it compiles whole programs: ops in a
scan, and bare calls over one and two H200s; without --all, only gradients in a scan and one bare call. It needs ptxas,
and jax's CUDA plugins of its version in the folder of $RLK_SM90_PLUGINS. With --all it takes a process per core, and
without it one process, because `make test` keeps the other cores busy.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
sys.path.insert(0, os.environ["RLK_SM90_PLUGINS"])

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies

from pallas_kernels.hopper.arrays import (
    Coefficients,
    GradientRows,
    HiddenGradient,
    KeptExponentials,
    KeptRowMap,
    LogitsConfig,
    Partials,
    VocabSlice,
)
from pallas_kernels.hopper.tiles import COLUMNS, Machine, gemm_plan
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.logits import RowCoefficients, RowConfig
from pallas_kernels.mosaic import gradients, logits, statistics
from pallas_kernels.mosaic.dlogits import coefficients, dlogits, dlogits_from_kept_exponentials
from pallas_kernels.mosaic.fold import fold_chunks, fold_groups
from pallas_kernels.mosaic.gemm import gemm
from rlk_jax import det_gemm, linear_logp
from rlk_jax.core import dispatch
from rlk_jax.core.fixed_order import column_groups
from tests.support import verdicts
from tests.support.verdicts import HEAD_LAYOUTS, HeadLayout, Verdict

MACHINE = Machine()


class Configuration(NamedTuple):
    """A program of one kernel with its options, and the operands to compile it with."""

    options: dict[str, Any]
    """Among them the kernel's name."""
    run: Callable[..., Any]
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.options.items() if value not in (None, False))


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
    shard: bool = False
    """Whether the head is one of eight shards. Only the device knows its true width, and its dH stays float32."""

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
    def weight(self) -> jax.ShapeDtypeStruct:
        columns = column_groups(self.vocab).width if self.shard else self.vocab
        rows = self.slice_chunks * COLUMNS if self.copied else columns
        return jax.ShapeDtypeStruct((rows, self.dim) if self.layout == "vd" else (self.dim, rows), self.dtype)

    def vector(self, wanted: bool = True, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct((self.vector_rows,), dtype) if wanted else None

    def common(self) -> dict[str, Any]:
        scalar = jax.ShapeDtypeStruct((1,), jnp.int32)
        bias = jax.ShapeDtypeStruct((self.slice_chunks * COLUMNS,), jnp.float32) if self.bias else None
        return {
            "where": VocabSlice(scalar, scalar, scalar, scalar if self.shard else None),
            "hidden": jax.ShapeDtypeStruct((self.rows, self.dim), self.dtype),
            "weight": self.weight,
            "bias": bias,
        }

    def coefficients(self) -> Coefficients:
        ids, row = self.vector(dtype=jnp.int32), self.vector()
        return Coefficients(ids, row, row, row, row if self.entropy else None, row)

    def dlogits_array(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.slice_chunks * COLUMNS), self.dtype)


def forward(p: Problem) -> Configuration:
    def run(where, hidden, weight, bias, target_ids, holds_target, temperature):
        shape = (p.head.vocabulary.chunks, p.vector_rows)
        new = [jax.new_ref(lax.empty(shape, jnp.float32)) if i < 3 or p.entropy else None for i in range(4)]
        out = Partials(*new)
        kept = jax.new_ref(lax.empty((p.rows, p.slice_chunks * COLUMNS), p.dtype)) if p.keeps else None
        logits, per_token = LogitsConfig(p.head, p.softcap), (target_ids, holds_target, temperature)
        statistics.partials(logits, MACHINE, where, hidden, weight, bias, *per_token, out, kept)
        return jax.tree.map(jax.freeze, out)

    holds = jax.ShapeDtypeStruct((p.vector_rows // 64, p.head.vocabulary.chunks), jnp.int32) if p.rows > 128 else None
    vectors = {"target_ids": p.vector(dtype=jnp.int32), "holds_target": holds, "temperature": p.vector()}
    return Configuration(p.options("forward"), run, {**p.common(), **vectors})


def folds(p: Problem) -> Configuration:
    """Both folds. They depend on the numbers of chunks and groups and on an entropy, not on what made the partials."""

    def run(partials, active):
        groups = fold_chunks(partials, p.head.vocabulary.groups, active, MACHINE)
        return fold_groups(groups, active, MACHINE)

    row = jax.ShapeDtypeStruct((p.head.vocabulary.chunks, p.vector_rows), jnp.float32)
    partials = Partials(row, row, row, row if p.entropy else None)
    active = jax.ShapeDtypeStruct((1,), jnp.int32)
    return Configuration(p.options("folds"), run, {"partials": partials, "active": active})


def logit_gradients(p: Problem) -> Configuration:
    def run(where, hidden, weight, bias, rows):
        out = jax.new_ref(lax.empty((p.rows, p.slice_chunks * COLUMNS), p.dtype))
        dlogits(LogitsConfig(p.head, p.softcap), MACHINE, where, hidden, weight, bias, rows, out)
        return jax.freeze(out)

    return Configuration(p.options("dlogits"), run, {**p.common(), "rows": p.coefficients()})


def row_coefficients(p: Problem) -> Configuration:
    def run(rows):
        return coefficients(rows, MACHINE)

    wanted = {"gap": p.entropy, "g_lse": p.lse, "g_entropy": p.entropy, "scale": p.dtype == jnp.float16}
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
            out, kept = jax.new_ref(kept.exponentials), kept._replace(exponentials=None)
        else:
            out = jax.new_ref(lax.empty((p.rows, p.slice_chunks * COLUMNS), p.dtype))
        dlogits_from_kept_exponentials(p.head.vocabulary, MACHINE, where, kept, source, rows, out)
        return jax.freeze(out)

    where = p.common()["where"]
    shift = jax.ShapeDtypeStruct((p.slice_chunks, p.vector_rows), jnp.float32)
    arguments = {"where": where, "kept": KeptExponentials(p.dlogits_array(), shift)}
    arguments |= {"source": KeptRowMap(p.vector(dtype=jnp.int32), where.rows), "rows": p.coefficients()}
    options = p.options("dlogits from kept exponentials") | {"in_place": in_place}
    return Configuration(options, run, arguments)


def hidden_gradient(p: Problem) -> Configuration:
    def run(where, slice_dlogits, weight, unscale):
        shape = (p.vector_rows, -(-p.dim // COLUMNS) * COLUMNS)
        rounded = None if p.shard else jax.new_ref(lax.empty(shape, p.dtype))
        out = HiddenGradient(jax.new_ref(lax.empty(shape, jnp.float32)), rounded)
        chain = range(p.head.vocabulary.chunks)
        gradients.add_hidden_gradient(p.head, MACHINE, where, slice_dlogits, weight, unscale, chain, out)
        return jax.tree.map(jax.freeze, out)

    arguments = {"where": p.common()["where"], "slice_dlogits": p.dlogits_array(), "weight": p.weight}
    return Configuration(p.options("d_hidden"), run, {**arguments, "unscale": p.vector(p.dtype == jnp.float16)})


def weight_gradient(p: Problem) -> Configuration:
    def run(where, slice_dlogits, hidden, unscale):
        out = jax.new_ref(lax.empty(p.weight.shape, p.dtype))
        gradients.store_weight_gradient(p.head, MACHINE, where, slice_dlogits, hidden, unscale, out)
        return jax.freeze(out)

    unscale = jax.ShapeDtypeStruct((1,), jnp.float32) if p.dtype == jnp.float16 else None
    common = p.common()
    arguments = {"where": common["where"], "slice_dlogits": p.dlogits_array(), "hidden": common["hidden"]}
    return Configuration(p.options("d_weight"), run, {**arguments, "unscale": unscale})


def bias_gradient(p: Problem) -> Configuration:
    def run(where, slice_dlogits, row_unscale):
        return gradients.column_sums(where, slice_dlogits, row_unscale, MACHINE)

    row_unscale = p.vector(p.dtype == jnp.float16)
    arguments = {"where": p.common()["where"], "slice_dlogits": p.dlogits_array(), "row_unscale": row_unscale}
    return Configuration(p.options("d_bias"), run, arguments)


def logits_kernels(size: int, dtype: Any, softcap: float | None, entropy: bool) -> Iterator[Configuration]:
    """The kernels of statistics and gradients over materialised logits of `size` columns."""
    config, count = RowConfig(size, softcap, entropy), 64

    def vector(dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count,), dtype)

    ids, row = vector(jnp.int32), vector()
    options = {"size": size, "dtype": jnp.dtype(dtype).name, "softcap": softcap, "entropy": entropy}
    common = {"logits": jax.ShapeDtypeStruct((count, size), dtype), "target_ids": ids, "active": ids}
    statistics = functools.partial(logits.statistics, config, machine=MACHINE)
    arguments = {**common, "temperature": row}
    yield Configuration({"kernel": "logits statistics", **options}, lambda **x: statistics(**x), arguments)
    rows = RowCoefficients(row, row, row, row, row if entropy else None, row)
    for in_place in (False, True):
        gradients = functools.partial(logits.gradients, config, in_place=in_place, machine=MACHINE)
        changed = {"kernel": "logits gradients", **options, "in_place": in_place}
        yield Configuration(changed, lambda gradients=gradients, **x: gradients(**x), {**common, "rows": rows})


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One configuration of det_gemm's kernel, whose sizes pick the tile."""

    m: int
    n: int
    k: int
    a_transposed: bool = False
    b_transposed: bool = False
    accumulates: bool = False
    out_dtype: Any = jnp.bfloat16
    dtype: Any = jnp.bfloat16

    @property
    def plan(self) -> Any:
        options = {"a_transposed": self.a_transposed, "accumulates": self.accumulates}
        return gemm_plan(self.m, self.n, MACHINE.sm_count, **options)

    def configuration(self) -> Configuration:
        def run(a, b, start):
            options = {"a_transposed": self.a_transposed, "b_transposed": self.b_transposed}
            return gemm(a, b, start, **options, out_dtype=self.out_dtype, machine=MACHINE)

        a, b = (self.m, self.k), (self.k, self.n)
        shape = jax.ShapeDtypeStruct
        arguments = {
            "a": shape(a[::-1] if self.a_transposed else a, self.dtype),
            "b": shape(b[::-1] if self.b_transposed else b, self.dtype),
            "start": shape((self.m, self.n), jnp.float32) if self.accumulates else None,
        }
        # The sizes of C matter to the kernel by the tile alone.
        options = {name: value for name, value in dataclasses.asdict(self).items() if name not in ("m", "n")}
        dtypes = {name: jnp.dtype(options[name]).name for name in ("dtype", "out_dtype")}
        tile = self.plan.tile
        sizes = {"tile_rows": tile.rows, "tile_columns": tile.columns, "stages": tile.stages, "cluster": tile.cluster}
        plan = {**sizes, "swapped": self.plan.swapped}
        return Configuration({"kernel": "gemm", **plan, **options, **dtypes}, run, arguments)


def gemms() -> Iterator[Gemm]:
    """Every tile that is ever chosen, in every layout, with sums from 0 and from C, for each result dtype.

    K is long in some and short enough to be unrolled in others.
    """
    both, seen = (False, True), set()
    sizes = itertools.product((1, 12, 24, 64, 128, 1024), (4096, 14336))
    for (m, n), layout, accumulates, out_dtype in itertools.product(
        sizes, itertools.product(both, both), both, (jnp.bfloat16, jnp.float32)
    ):
        g = Gemm(m, n, 512, *layout, accumulates, out_dtype)
        key = (g.plan, layout, accumulates, out_dtype)
        if key not in seen:
            seen.add(key)
            yield g
    for (m, n), b_transposed in itertools.product(((1, 4096), (128, 14336), (4096, 4096)), both):
        for dtype in (jnp.bfloat16, jnp.float16):
            yield Gemm(m, n, 4096, b_transposed=b_transposed, out_dtype=dtype, dtype=dtype)
    yield Gemm(3, 5, 7)


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
            if softcap is None and rows > 64:
                yield forward(Problem(keeps=True, **head, **options))
        for vocab, dtype in itertools.product((131072, 151936), (jnp.bfloat16, jnp.float16)):
            yield logit_gradients(Problem(vocab=vocab, dtype=dtype, **options))
    for head, dtype in itertools.product(heads, (jnp.bfloat16, jnp.float16)):
        yield forward(Problem(dtype=dtype, **head))
        yield logit_gradients(Problem(dtype=dtype, **head))
        for rows in (64, 512):
            yield hidden_gradient(Problem(rows=rows, dtype=dtype, **head))
            yield weight_gradient(Problem(rows=rows, dtype=dtype, **head))
    yield weight_gradient(Problem(dim=64, layout="dv"))
    for head in heads:
        yield forward(Problem(keeps=True, **head))
        yield logit_gradients_from_kept_exponentials(Problem(**head), in_place=True)
        yield logit_gradients_from_kept_exponentials(Problem(**head), in_place=False)
    for entropy, head in itertools.product(both, ({}, {"vocab": 151936}, {"vocab": 131584}, {"vocab": 50257})):
        yield folds(Problem(entropy=entropy, **head))
        yield folds(Problem(entropy=entropy, shard=True, **head))
    for dtype, lse, entropy in itertools.product((jnp.bfloat16, jnp.float16), both, both):
        yield row_coefficients(Problem(dtype=dtype, lse=lse, entropy=entropy))
    for dtype in (jnp.bfloat16, jnp.float16):
        yield bias_gradient(Problem(dtype=dtype))
    yield from (g.configuration() for g in gemms())
    for dtype, size, softcap, entropy in itertools.product(
        (jnp.bfloat16, jnp.float16, jnp.float32), (131072, 151936, 50257, 50258), (None, 30.0), both
    ):
        if dtype == jnp.bfloat16 or size in (131072, 50257):
            yield from logits_kernels(size, dtype, softcap, entropy)
    yield from logits_kernels(1000, jnp.bfloat16, None, True)
    yield from logits_kernels(5, jnp.bfloat16, None, True)


@contextlib.contextmanager
def _captured_output(into: list[str]) -> Iterator[None]:
    """Capture what C++ prints on file descriptors 1 and 2, where ptxas writes."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            for descriptor, old in zip((1, 2), saved, strict=True):
                os.dup2(old, descriptor)
                os.close(old)
            file.seek(0)
            into.append(file.read().decode(errors="replace"))


def verdict(run: Callable[..., Any], arguments: dict[str, Any], sharding: Any) -> tuple[bool, str]:
    """Whether a program compiles without spills and serialised wgmma, and what ptxas says of it."""
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    log: list[str] = []
    try:
        with _captured_output(log):
            jax.jit(run).lower(**specs).compile()
    except Exception as problem:
        return False, f"{type(problem).__name__}: {str(problem)[:400]}"
    spills = [int(x) for x in re.findall(r"(\d+) bytes spill stores", log[0])]
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", log[0])]
    serialised = "wgmma.mma_async instructions are serialized" in log[0]
    if not registers:
        return False, "ptxas printed no report"
    text = f"registers {registers} spills {spills}" + (" serialised wgmma" if serialised else "")
    return not any(spills) and not serialised, text


@functools.cache
def _mesh(devices: int) -> jax.sharding.Mesh:
    target = (pathlib.Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{devices}")
    return topologies.make_mesh(topo=topology, mesh_shape=(devices,), axis_names=("x",))


def h200(devices: int = 1, *spec: str | None) -> jax.sharding.Sharding:
    """The sharding of an array that lies on H200s as `spec` says, over the axis "x"."""
    return jax.sharding.NamedSharding(_mesh(devices), jax.sharding.PartitionSpec(*spec))


def compile_one(index: int) -> tuple[bool, str]:
    """The verdict on configuration number `index`.

    Processes are given numbers because a configuration holds a function, which cannot be sent to another process.
    """
    configuration = next(itertools.islice(configurations(), index, None))
    ok, text = verdict(configuration.run, configuration.arguments, h200())
    return ok, f"{'ok  ' if ok else 'FAIL'} {configuration}: {text}"


def trace_for_h200() -> None:
    """Make dispatch take all arguments from now on for arrays on an H200, whatever JAX's device is."""
    dispatch.device_of = lambda arrays: dispatch.Device("gpu", "H200", "9.0")


def scanned(every: bool) -> Iterator[Verdict]:
    """Whether ops under lax.map write slices of stacked results in place, and linear_logp's gradients alone take kept
    exponentials. Unless every op is asked for, only gradients are compiled, which have the kernels of the values too.
    """
    trace_for_h200()
    # There are more than 64 tokens, so that exponentials are kept.
    a, b, c = ((4, 96, 512), jnp.bfloat16), ((4, 512, 4096), jnp.bfloat16), ((4, 96, 4096), jnp.bfloat16)
    ids = ((4, 96), jnp.int32)

    def gemm_gradients(x: Any) -> Any:
        return jax.vjp(functools.partial(det_gemm, implementation="mosaic"), *x[:2])[1](x[2])

    def logp(x: Any) -> Any:
        return linear_logp(*x, weight_layout="dv", implementation="mosaic")

    def logp_gradients(x: Any) -> Any:
        return jax.grad(lambda hidden, weight: logp((hidden, weight, x[2])).sum(), (0, 1))(*x[:2])

    programs: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
        "det_gemm": (lambda x: det_gemm(*x, implementation="mosaic"), (a, b)),
        "det_gemm's gradients": (gemm_gradients, (a, b, c)),
        "linear_logp": (logp, (a, b, ids)),
        "linear_logp's gradients": (logp_gradients, (a, b, ids)),
    }
    for name, (op, stacked) in programs.items():
        if not every and not name.endswith("gradients"):
            continue
        arguments = tuple(jax.ShapeDtypeStruct(*x, sharding=h200()) for x in stacked)
        traced = jax.jit(functools.partial(lax.map, op)).trace(arguments)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
        keeps = "linear_logp_dlogits_from_kept_exponentials" in text
        # In such a fusion XLA forgets that the kernel writes in place, and all results are lost.
        is_ok = "dynamic-slice-fusion" not in text and keeps == (op is logp_gradients)
        yield verdicts.named(f"{name} in a scan", is_ok)


def bare(layouts: Sequence[HeadLayout]) -> Iterator[Verdict]:
    """Whether bare calls' gradients keep exponentials on one H200, and never gather a head that is spread over two."""
    trace_for_h200()
    shape = jax.ShapeDtypeStruct
    loss = jax.grad(lambda *x: linear_logp(*x, implementation="mosaic").sum(), (0, 1))
    for devices, spec in layouts:
        whole = h200(devices)
        operands = (
            shape((256, 512), jnp.bfloat16, sharding=whole),
            shape((32768, 512), jnp.bfloat16, sharding=h200(devices, *spec)),
            shape((256,), jnp.int32, sharding=whole),
        )
        jax.clear_caches()
        text = jax.jit(loss).trace(*operands).lower(lowering_platforms=("cuda",)).compile().as_text()
        gathers = [x for x in text.splitlines() if " all-gather(" in x or " all-gather-start(" in x]
        holds_head = any("[32768," in x.split(" all-gather")[0] for x in gathers)
        is_ok = not holds_head and (("linear_logp_dlogits_from_kept_exponentials" in text) == (devices == 1))
        yield verdicts.named(f"a bare call over {devices}, the head {spec}", is_ok)


def exported() -> Iterator[Verdict]:
    """Whether jax.export takes a program with Mosaic's kernels."""
    trace_for_h200()
    loss = jax.grad(lambda *x: linear_logp(*x, implementation="mosaic").sum(), (0, 1))
    shapes = ((256, 512), jnp.bfloat16), ((4096, 512), jnp.bfloat16), ((256,), jnp.int32)
    yield verdicts.exported(loss, [jax.ShapeDtypeStruct(*x) for x in shapes])


def main() -> int:
    options, every = [configuration.options for configuration in configurations()], "--all" in sys.argv
    numbers, compiled = verdicts.of_configurations(options, compile_one, every=every)
    # Without --all, one H200 is left to `scanned`, whose gradients are on one too, and the last layout to Triton's aot.
    layouts = HEAD_LAYOUTS if every else HEAD_LAYOUTS[1:2]
    failed = verdicts.count_failed(itertools.chain(compiled, scanned(every), bare(layouts), exported()))
    count = f"{len(numbers)} of {len(options)} configurations"
    print(f"{count}: {f'{failed} failed' if failed else 'no spills, no serialised wgmma'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
