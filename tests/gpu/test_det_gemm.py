"""det_gemm on a Hopper GPU, by Mosaic and CUDA C++: accuracy, bits at the target shapes, every tile, sums in parts."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cuda import kernels as cuda_kernels
from pallas_kernels.hopper.tiles import GemmPlan, Tile
from pallas_kernels.mosaic import gemm as mosaic_gemm
from rlk_jax import det_gemm, explain
from tests.gpu import golden
from tests.gpu.hopper import needs_cuda
from tests.support import gemm
from tests.support.gemm import Case
from tests.support.helpers import assert_same_bits

every_dtype = pytest.mark.parametrize("dtype", gemm.DTYPES, ids=lambda d: np.dtype(d).name)
TARGETS = {
    "qkv": (4096, 12288),
    "o_proj": (4096, 4096),
    "mlp_up": (4096, 14336),
    "mlp_down": (14336, 4096),
    "lm_head": (4096, 32000),
}
"""K and N."""
ROWS = (1, 2, 7, 16, 63, 64, 65, 100, 128, 512, 1000, 4096, 8192)
CASES = (
    Case("one of each", 1, 1, 1, integers=True),
    Case("one row", 1, 64, 70),
    Case("odd", 7, 3, 5, transpose_b=True, out_dtype=jnp.float32),
    Case("few rows, long", 16, 72, 20000),
    Case("few rows, long, transposed", 16, 4096, 20000, transpose_b=True),
    Case("narrow tiles", 7, 130, 100, transpose_b=True),
    Case("40 rows", 40, 4096, 300, out_dtype=jnp.float32),
    Case("64 rows, fp32", 64, 256, 17000, out_dtype=jnp.float32),
    Case("odd, several blocks", 301, 1001, 777, transpose_b=True),
    Case("lead", 65, 520, 4096, lead=(3, 2)),
    Case("from C", 300, 4096, 1000, accumulates=True),
    Case("few rows from C, rounded", 5, 4096, 260, lead=(2,), accumulates=True, out_dtype=jnp.bfloat16),
    Case("long K", 128, 14336, 512, out_dtype=jnp.float32),
)
PLANS = (
    *(GemmPlan(Tile(r, c, 4, x)) for r, c in ((128, 256), (128, 128), (64, 256), (64, 128), (64, 64)) for x in (1, 2)),
    GemmPlan(Tile(band=1)),
    GemmPlan(Tile(64, 64, 8, 1)),
    *(
        GemmPlan(Tile(rows, columns, 4, 1, depth=depth), swapped=True)
        for rows, depth in ((64, 64), (128, 64), (64, 128))
        for columns in (8, 16, 32, 64)
    ),
)


@pytest.fixture(params=["mosaic", pytest.param("cuda", marks=needs_cuda)])
def kernels(request):
    return request.param


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(kernels, case, dtype):
    case = replace(case, out_dtype=dtype) if case.out_dtype == jnp.bfloat16 else case
    gemm.check_against_gold(case, dtype, kernels, "det_gemm_float32_wgmma")


@pytest.mark.parametrize("transpose_b", [False, True], ids=["KN", "NK"])
@pytest.mark.parametrize("name", TARGETS)
def test_rows_do_not_depend_on_the_batch(kernels, name, transpose_b):
    """C and dA, for every M, at random places and at the end."""
    k, n = TARGETS[name]
    gemm.check_rows(Case(name, max(ROWS), k, n, transpose_b), jnp.bfloat16, kernels, ROWS)


@every_dtype
@pytest.mark.parametrize("transpose_b", [False, True], ids=["KN", "NK"])
def test_rows_of_odd_sizes(kernels, dtype, transpose_b):
    gemm.check_rows(Case("odd", 1000, 1001, 777, transpose_b), dtype, kernels, (1, 7, 65, 100))


@pytest.mark.parametrize("name", TARGETS)
def test_run_to_run(kernels, name):
    case = Case(name, 1024, *TARGETS[name])
    p = gemm.make(case, jnp.bfloat16)
    expected = gemm.outputs(case, p, kernels)
    for _ in range(10):
        assert_same_bits(gemm.outputs(case, p, kernels), expected)


@every_dtype
@pytest.mark.parametrize("transpose_b", [False, True], ids=["KN", "NK"])
@pytest.mark.parametrize(
    "cuts", [(64,), (2048,), (4032,), (64, 1984, 3008), tuple(range(576, 4032, 576))], ids=lambda cuts: f"{len(cuts)}"
)
def test_sums_in_parts(kernels, cuts, transpose_b, dtype):
    """K is cut for C and rows are cut for dB; both are 4096 + 30 long."""
    gemm.check_cuts(Case("sum", 4126, 4126, 520, transpose_b), dtype, kernels, cuts)


def test_sums_in_parts_from_a_given_c(kernels):
    case = Case("sum from C", 300, 4096, 1000, accumulates=True, out_dtype=jnp.bfloat16)
    gemm.check_cuts(case, jnp.bfloat16, kernels, (64, 256))


@every_dtype
def test_zero_rows_appended_leave_the_gradient_of_b(kernels, dtype):
    gemm.check_appended_zero_rows(Case("appended", 1000, 512, 1024), dtype, kernels, (1, 24, 1000, 7192))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_tile(kernels, plan, monkeypatch):
    """Tiles, stages, clusters, raster and swapped operands change no bit, from 0 in 16 and in 32 bits."""
    case = Case("tiles", 200, 4096, 1000, transpose_b=True)
    p = gemm.make(case, jnp.bfloat16)

    def results():
        jax.clear_caches()
        return [gemm.call(case, p, kernels, out_dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32)]

    expected = results()
    module = {"mosaic": mosaic_gemm, "cuda": cuda_kernels}[kernels]
    monkeypatch.setattr(module, "gemm_plan", lambda *sizes, **layout: plan)
    assert_same_bits(results(), expected)
    jax.clear_caches()


def test_golden_hashes(kernels):
    def found():
        for dtype in gemm.DTYPES:
            for case in (Case("large", 1000, 1024, 1000), Case("small", 16, 4096, 4096, transpose_b=True)):
                for name, x in zip(
                    ("C", "dA", "dB"), gemm.outputs(case, gemm.make(case, dtype), kernels), strict=False
                ):
                    yield f"{case.name} {np.dtype(dtype).name} {name}", x

    golden.check("det_gemm", lambda: dict(found()))


@every_dtype
def test_nothing_to_multiply(kernels, dtype):
    gemm.check_empty(dtype, kernels)


def test_transformations(kernels):
    case = Case("transformed", 32, 512, 4096, lead=(4,))
    p = gemm.make(case, jnp.bfloat16)
    expected = gemm.outputs(case, p, kernels)

    def f(a, b):
        return det_gemm(a, b, implementation=kernels)

    for function in (f, jax.checkpoint(f), jax.vmap(f, (0, None)), lambda a, b: jax.lax.map(lambda x: f(x, b), a)):
        assert_same_bits(jax.jit(function)(p.a, p.b), expected.c)
        assert_same_bits(jax.jit(lambda a, b, f=function: jax.vjp(f, a, b)[1](p.g)[0])(p.a, p.b), expected.d_a)
    with jax.enable_x64(True):
        assert_same_bits(gemm.outputs(case, p, kernels), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(kernels, check_vma):
    case = Case("sharded", 128, 512, 4096)
    p = gemm.make(case, jnp.bfloat16)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    f = jax.shard_map(
        functools.partial(det_gemm, implementation=kernels),
        mesh=mesh,
        in_specs=(jax.P("data"), jax.P()),
        out_specs=jax.P("data"),
        check_vma=check_vma,
    )
    c, pull_back = jax.vjp(jax.jit(f), p.a, p.b)
    expected = gemm.outputs(case, p, kernels)
    assert_same_bits((c, *pull_back(p.g)), expected[:3])


def test_weights_of_whole_tiles_are_never_copied(kernels):
    spec = jax.ShapeDtypeStruct
    for transpose_b, m in ((False, 16), (True, 16), (False, 4096), (True, 4096)):
        weight = (32000, 4096) if transpose_b else (4096, 32000)
        f = jax.jit(lambda a, b, t=transpose_b: det_gemm(a, b, transpose_b=t, implementation=kernels))
        compiled = f.lower(spec((m, 4096), jnp.bfloat16), spec(weight, jnp.bfloat16)).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_mosaic_is_the_choice():
    assert explain("det_gemm", jnp.ones((3, 8), jnp.bfloat16), jnp.ones((8, 5), jnp.bfloat16)).choice == "mosaic"
