"""det_gemm's Mosaic kernel in Pallas' interpreter, with race detection: every kind of tile, layout and result.

Bits are compared on small integers, whose sums are exact, so that the comparison shows which terms an element gets. The
order of sums on the tensor cores is tested in tests/gpu.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import GemmPlan, Machine, Tile
from pallas_kernels.mosaic import gemm as kernel
from rlk_jax import det_gemm
from rlk_jax.core import dispatch
from rlk_jax.ops.det_gemm import hopper
from tests.support import gemm
from tests.support.gemm import Case
from tests.support.helpers import assert_same_bits

MACHINE = Machine(4, plgpu.InterpretGPUParams(detect_races=True))
CASES = (
    Case("one row", 1, 64, 70),
    Case("few rows, long", 16, 72, 600, transpose_b=True),
    Case("narrow tiles", 7, 130, 100, transpose_b=True),
    Case("40 rows", 40, 64, 300, out_dtype=jnp.float32),
    Case("odd", 70, 130, 301, transpose_b=True),
    Case("several blocks", 260, 72, 300, out_dtype=jnp.float32),
    Case("from C", 130, 72, 260, accumulates=True),
    Case("few rows from C", 5, 72, 260, lead=(2,), accumulates=True, out_dtype=jnp.bfloat16),
    Case("more stages than steps", 70, 8, 8),
    Case("more steps than stages", 40, 1200, 40),
)
TILES = (
    Tile(64, 64, 2, 1),
    Tile(64, 128, 3, 2),
    Tile(128, 64, 2, 2),
    Tile(128, 256, 4, 2, 1),
)
LAYOUTS = ((False, False), (False, True), (True, False), (True, True))
"""Whether A and B are transposed."""
STARTS = (False, True, True, False)
"""Whether sums start from C, in float32, or from 0, in bfloat16."""
PAIRS = [
    pytest.param(tile, layout, accumulates, marks=() if is_first and accumulates == start else pytest.mark.full)
    for is_first in (True, False)
    for tile, layout, start in zip(TILES, LAYOUTS if is_first else LAYOUTS[::-1], STARTS, strict=True)
    for accumulates in (False, True)
]
"""In make test each tile and each layout occurs once, with one start; the script sm90 compiles tiles with several."""
BITS = Case("bits", 150, 72, 130, integers=True)
SUM = Case("sum", 140, 140, 40, integers=True)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Make `mosaic` run in the interpreter on four multiprocessors, and new memory hold NaN."""
    jax.clear_caches()
    entry = dispatch.Implementation("mosaic", hopper.mosaic(MACHINE), promises_bits=True)
    monkeypatch.setitem(dispatch.TABLE, "det_gemm", (entry, *dispatch.TABLE["det_gemm"][1:]))
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((x, jnp.bfloat16) for x in CASES if x.name in ("several blocks", "from C")),
        *((x, jnp.float16) for x in CASES if x.name == "few rows, long"),
        *(
            pytest.param(x, jnp.bfloat16, marks=pytest.mark.full)
            for x in CASES
            if x.name not in ("several blocks", "from C")
        ),
        # float16 changes no path of the kernel: run where it is cheap.
        *(pytest.param(x, jnp.float16, marks=pytest.mark.full) for x in CASES if x.name == "narrow tiles"),
    ],
    ids=lambda x: str(x) if isinstance(x, Case) else np.dtype(x).name,
)
def test_against_float64(case, dtype):
    """In make test are several blocks, sums from C, and swapped operands. `test_every_tile_and_every_layout` and
    `test_swapped_operands` have the tiles and edges of the other cases there, without gradients.
    """
    case = replace(case, out_dtype=dtype) if case.out_dtype == jnp.bfloat16 else case
    gemm.check_against_gold(case, dtype, "mosaic", "det_gemm_float32")


def with_plan(monkeypatch, plan):
    monkeypatch.setattr(kernel, "gemm_plan", lambda *sizes, **layout: plan)


@pytest.mark.parametrize(("tile", "layout", "accumulates"), PAIRS, ids=str)
def test_every_tile_and_every_layout(tile, layout, accumulates, monkeypatch):
    """Every tile gives the same bits in every layout, at sizes that are no multiples of anything."""
    p = gemm.make(replace(BITS, accumulates=True), jnp.bfloat16)
    a, b = p.a.T if layout[0] else p.a, p.b.T if layout[1] else p.b
    options = {"a_transposed": layout[0], "b_transposed": layout[1], "machine": MACHINE}
    expected = np.asarray(p.a, np.float32) @ np.asarray(p.b, np.float32)
    with_plan(monkeypatch, GemmPlan(tile))
    start, dtype = (p.start, jnp.float32) if accumulates else (None, jnp.bfloat16)
    actual = jax.jit(functools.partial(kernel.gemm, out_dtype=dtype, **options))(a, b, start)
    assert_same_bits(actual, jnp.asarray(expected + (np.asarray(start) if accumulates else 0), dtype))


SWAPPED = [
    (size, kind)
    for kind in ((64, False, jnp.float16, 128), (128, True, jnp.float32, 64))
    for size in ((1, 8), (8, 8), (13, 8), (13, 16), (40, 32), (64, 64), (100, 64))
]
"""C's rows and the tile's columns; the tile's rows, whether B is transposed, C's dtype, and the tile's depth."""
SWAPPED_IN_MAKE_TEST = (SWAPPED[0], SWAPPED[6], SWAPPED[10], SWAPPED[11])
"""Every number of columns and both kinds, with one row, a tile that is not full, and more than one tile of rows."""


@pytest.mark.parametrize(
    ("size", "kind"),
    [pytest.param(*x, marks=() if x in SWAPPED_IN_MAKE_TEST else pytest.mark.full) for x in SWAPPED],
    ids=str,
)
def test_swapped_operands(size, kind, monkeypatch):
    """`make test` has each kind and each number of columns with one case; `SWAPPED_IN_MAKE_TEST` says which."""
    (m, columns), (rows, transpose_b, dtype, depth) = size, kind
    case = Case("swapped", m, 328, 200, transpose_b, integers=True)
    p = gemm.make(case, jnp.float16)
    with_plan(monkeypatch, GemmPlan(Tile(rows, columns, 2, 1, depth=depth), swapped=True))
    actual = jax.jit(lambda p: gemm.call(case, p, "mosaic", out_dtype=dtype))(p)
    assert_same_bits(actual, jnp.asarray(gemm.gold(case, p).c, dtype))


# 65 rows take the tiles of the whole, while 7 rows take others, with swapped operands.
@pytest.mark.full
@pytest.mark.parametrize(("transpose_b", "size"), [(False, 7), (True, 65)])
def test_rows_do_not_depend_on_the_batch(transpose_b, size):
    """In make test, test_every_tile_and_every_layout and test_swapped_operands (here) catch a row with other terms: the
    sums are exact, and each tile, swapped or not, has to give their bits.
    """
    gemm.check_rows(replace(BITS, transpose_b=transpose_b), jnp.bfloat16, "mosaic", (size,))


@pytest.mark.full
@pytest.mark.parametrize("transpose_b", [False, True])
def test_sums_in_parts(transpose_b):
    """In make test, test_every_tile_and_every_layout (here) compares exact sums that start from C with their bits, and
    test_against_float64 (here) accumulates into C through the op.
    """
    gemm.check_cuts(replace(SUM, transpose_b=transpose_b), jnp.bfloat16, "mosaic", (64,))


@pytest.mark.full
def test_zero_rows_appended_leave_the_gradient_of_b():
    """In make test, test_against_float64 (here) has sums over numbers of rows that fill no tile."""
    gemm.check_appended_zero_rows(Case("appended", 70, 40, 50, integers=True), jnp.bfloat16, "mosaic", (1, 100))


def test_nothing_to_multiply():
    gemm.check_empty(jnp.bfloat16, "mosaic")


@pytest.mark.full
def test_vmap_is_one_product():
    """In make test tests/ops/det_gemm has vmap, whose rule all implementations share."""
    p = gemm.make(BITS, jnp.bfloat16)
    batched = p.a.reshape(3, 50, -1)
    actual = jax.vmap(lambda a: det_gemm(a, p.b, implementation="mosaic"))(batched)
    assert_same_bits(actual.reshape(150, -1), det_gemm(p.a, p.b, implementation="mosaic"))


@pytest.mark.parametrize(
    ("m", "check_vma"),
    [(2, False), (600, True), *(pytest.param(*x, marks=pytest.mark.full) for x in ((2, True), (600, False)))],
)
def test_lowers_inside_shard_map(m, check_vma, monkeypatch):
    """Gradients lower for an H200, in 64-bit mode too; the types of what kernels write have to agree.

    In make test each number of rows, which picks the kernel, and each way to check occurs once.
    """
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "H200", "9.0"))
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    rows = jax.P("data")

    def loss(a, b, c):
        f = jax.shard_map(
            lambda a, b, c: det_gemm(a, b, accumulate_into=c),
            mesh=mesh,
            in_specs=(rows, jax.P(), rows),
            out_specs=rows,
            check_vma=check_vma,
        )
        return f(a, b, c).sum()

    shapes = (((m, 1024), jnp.bfloat16), ((1024, 4096), jnp.bfloat16), ((m, 4096), jnp.float32))
    for x64 in (False, True):
        with jax.enable_x64(x64):
            gradients = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*(jax.ShapeDtypeStruct(*x) for x in shapes))
            assert "mosaic_gpu" in gradients.lower(lowering_platforms=("cuda",)).as_text()
