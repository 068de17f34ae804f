"""What the CUDA C++ kernels alone promise on a Hopper GPU: Mosaic's bits, no other kernels, tiles, threads, graphs."""

import concurrent.futures
import dataclasses
import gc
import os
import pathlib
import re
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cuda import kernels
from pallas_kernels.hopper.arrays import Coefficients, KeptExponentials, KeptRowMap, VocabSlice
from pallas_kernels.hopper.tiles import THREADS, Machine, Tile
from pallas_kernels.hopper.vocabulary import Vocabulary
from pallas_kernels.products import padded
from rlk_jax import det_gemm, explain, linear_cross_entropy, linear_logp
from tests.gpu.hopper import needs_cuda
from tests.gpu.test_allowed import SHAPES as MASKED
from tests.gpu.test_head_kernels import BITS, SHAPES, every_dtype
from tests.gpu.test_label_smoothing import SHAPES as SMOOTHED
from tests.gpu.test_label_smoothing import SMOOTHING
from tests.gpu.test_top_k import SHAPES as RANKED
from tests.support import helpers
from tests.support.allowed import allowed_of, mask_of
from tests.support.helpers import Case, assert_same_bits, assert_within_contract
from tests.support.rankings import ranking_of

pytestmark = needs_cuda
LEAST_LEAK = 4096
"""Bytes of a call: less than one graph or one buffer's record would take."""
SMALL = Case("small", (300,), 192, 5000, bias=True)


@every_dtype
@pytest.mark.parametrize("case", [*helpers.OPTION_CASES, *SHAPES, BITS], ids=str)
def test_the_bits_of_mosaic(case, dtype):
    """All bits but those of the entropy: in its sums the compiler of Mosaic's kernels chooses what to fuse."""
    problem = helpers.make(case, dtype)
    ours, theirs = (problem.call(case, name) for name in ("cuda", "mosaic"))
    assert_same_bits((ours.logp, ours.lse), (theirs.logp, theirs.lse))
    if ours.entropy is not None:
        assert_within_contract(ours.entropy, theirs.entropy, "linear_logp_wgmma", dtype, "forward")
    without, problem = helpers.without_entropy(case, problem)
    assert_same_bits(problem.gradients(without, "cuda"), problem.gradients(without, "mosaic"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", MASKED, ids=str)
def test_the_bits_of_mosaic_over_allowed_tokens(case, dtype):
    """Kept exponentials, and gradients of logits that are computed again."""
    case, problem = helpers.without_entropy(case, helpers.make(case, dtype))
    assert_bits_of_mosaic(case, problem, allowed_mask=mask_of(allowed_of(case, problem)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", SMOOTHED, ids=str)
def test_the_bits_of_mosaic_for_smoothed_targets(case, dtype):
    """Kept exponentials, and gradients of logits that are computed again; beside an lse, and of a loss without one."""
    case, problem = helpers.without_entropy(helpers.with_options(case, **SMOOTHING), helpers.make(case, dtype))
    assert_bits_of_mosaic(case, problem)

    def gradients(implementation):
        def loss(hidden, weight):
            options = {"logit_softcap": case.options.get("logit_softcap"), "implementation": implementation}
            return linear_cross_entropy(hidden, weight, problem.target_ids, problem.bias, **SMOOTHING, **options)

        return jax.value_and_grad(loss, (0, 1))(problem.hidden, problem.weight)

    assert_same_bits(gradients("cuda"), gradients("mosaic"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", RANKED, ids=str)
def test_the_ranking_of_mosaic(case, masked, dtype):
    """Its ids, its ranks and the bits of its log-probs, from one slice of the head and from several."""
    problem = helpers.make(case, dtype)
    mask = {"allowed_mask": mask_of(allowed_of(case, problem))} if masked else {}
    for budget, top_k in ((None, 20), (2**21, 128)):
        options = {"return_top_k": top_k, "return_target_rank": True, "memory_budget": budget, **mask}
        ours, theirs = (problem.call(case, name, **options) for name in ("cuda", "mosaic"))
        assert_same_bits((ours.logp, ours.lse), (theirs.logp, theirs.lse))
        for x, y in zip(ranking_of(ours), ranking_of(theirs), strict=True):
            np.testing.assert_array_equal(x, y)


def assert_bits_of_mosaic(case, problem, **options):
    """In two memory budgets."""
    for budget in (None, 2**21):
        both = (helpers.outputs(case, problem, name, memory_budget=budget, **options) for name in ("cuda", "mosaic"))
        assert_same_bits(*both)


@pytest.mark.parametrize(
    "tile",
    [
        Tile(rows=64, stages=5, cluster=1),
        Tile(rows=64, stages=3, cluster=2),
        Tile(cluster=1),
        Tile(stages=3),
        Tile(band=1),
    ],
    ids=str,
)
def test_every_tile(tile, monkeypatch):
    problem = helpers.make(BITS, jnp.bfloat16)
    expected = helpers.outputs(BITS, problem, "cuda")
    for name in ("statistics_tile", "gemm_tile"):
        monkeypatch.setattr(kernels, name, lambda rows: tile)
    jax.clear_caches()
    assert_same_bits(helpers.outputs(BITS, problem, "cuda"), expected)
    jax.clear_caches()


@pytest.mark.parametrize("count", [3, 17, 24])
def test_kept_exponentials_in_a_matrix_of_fewer_rows_than_a_tile(count):
    """Its gradients have the bits of those in a whole tile, whether or not kept rows moved. No plan keeps so few."""
    vocabulary, rows = Vocabulary(1000, 8, 128), padded(2 * count, 8)
    columns = vocabulary.chunks * 256
    rng = np.random.default_rng(count)
    exponentials = jnp.asarray(rng.uniform(0, 1, (64, columns)), jnp.bfloat16)
    shift = jnp.asarray(rng.integers(-3, 3, (vocabulary.chunks, THREADS)), jnp.float32)
    of_rows = [jnp.asarray(rng.uniform(1, 2, THREADS), jnp.float32) for _ in range(4)]
    target_ids = jnp.asarray(rng.integers(0, 1000, THREADS), jnp.int32)
    coefficients = Coefficients(target_ids, *of_rows[:3], None, of_rows[3])
    where = VocabSlice(*(jnp.full(1, x, jnp.int32) for x in (count, 0, vocabulary.chunks)))
    own = jnp.arange(THREADS, dtype=jnp.int32)

    def gradients(matrix_rows, first_kept):
        row_map = KeptRowMap(own + first_kept * (own < count), jnp.full(1, first_kept, jnp.int32))
        buffer = jax.new_ref(exponentials[:matrix_rows])
        kernels.dlogits_from_kept_exponentials(
            vocabulary, Machine(), where, KeptExponentials(None, shift), row_map, coefficients, buffer
        )
        return jax.freeze(buffer)

    for first_kept in (0, rows - count):
        few, whole = (jax.jit(gradients, static_argnums=(0, 1))(x, first_kept) for x in (rows, 64))
        assert_same_bits(few, whole[:rows])


def test_no_other_kernels_run():
    def head(h, w, t, b, upstream):
        def op(h, w, b):
            return linear_logp(h, w, t, b, implementation="cuda", return_entropy=True)

        values, vjp = jax.vjp(op, h, w, b)
        return values, vjp(jax.tree.map(lambda _: upstream, values))

    spec = jax.ShapeDtypeStruct
    bf16, ids, row = jnp.bfloat16, spec((512,), jnp.int32), spec((512,), jnp.float32)
    operands = spec((512, 256), bf16), spec((8192, 256), bf16), ids, spec((8192,), jnp.float32), row
    product = jax.jit(lambda a, b: det_gemm(a, b, implementation="cuda"))
    lowered = jax.jit(head).lower(*operands), product.lower(spec((512, 256), bf16), spec((256, 1001), bf16))
    for text in (x.compile().as_text() for x in lowered):
        called = set(re.findall(r'custom_call_target="([^"]+)"', text))
        assert {x for x in called if x.startswith("rlk_")}
        assert not [
            x for x in called if re.search("mosaic|triton|cublas|gemm_fusion", x, re.IGNORECASE) and "rlk_" not in x
        ]
        # XLA may count rows in a Triton kernel of its own making; a product that it fuses still has its dot.
        assert " dot(" not in text


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_nan_stays_nan(softcap):
    """NaN in a row of hidden reaches that row, NaN in a row of the head reaches all; other bits are as without it."""
    case = helpers.with_options(SMALL, logit_softcap=softcap, return_entropy=False)
    problem = helpers.make(case, jnp.bfloat16)
    clean = problem.call(case, "cuda").logp
    row = problem._replace(hidden=problem.hidden.at[3].set(jnp.nan))
    found, d_hidden = row.call(case, "cuda").logp, row.gradients(case, "cuda")[0]
    others = jnp.arange(len(clean)) != 3
    assert jnp.isnan(found[3]) and jnp.isnan(d_hidden[3]).all() and not jnp.isnan(d_hidden[others]).any()
    assert_same_bits(found[others], clean[others])
    column = problem._replace(weight=problem.weight.at[7].set(jnp.nan))
    assert jnp.isnan(column.call(case, "cuda").logp).all()
    assert jnp.isnan(column.gradients(case, "cuda")[0]).all()


def test_a_failing_launch_is_an_error_and_does_no_harm(monkeypatch):
    problem = helpers.make(SMALL, jnp.bfloat16)
    expected = problem.call(SMALL, "cuda")
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "statistics_tile", lambda rows: Tile(stages=16))
        jax.clear_caches()
        with pytest.raises(jax.errors.JaxRuntimeError, match="rlk_statistics: invalid argument"):
            jax.block_until_ready(problem.call(SMALL, "cuda"))
    jax.clear_caches()
    assert_same_bits(problem.call(SMALL, "cuda"), expected)


def test_a_thousand_runs_have_the_same_bits_and_leak_nothing():
    """Under jit, where XLA captures the calls in CUDA graphs (tests/pallas_kernels/cuda/test_programs.py).

    What the driver holds beside JAX's own memory is looked at where no other test runs beside this one.
    """
    problem = helpers.make(SMALL, jnp.bfloat16)

    @jax.jit
    def step(h, w, b):
        def loss(h, w, b):
            return linear_logp(h, w, problem.target_ids, b, implementation="cuda").sum()

        return jax.value_and_grad(loss, (0, 1, 2))(h, w, b)

    @jax.jit
    def same(so_far, found, expected):
        equal = jax.tree.map(lambda x, y: jnp.array_equal(bits_of(x), bits_of(y)), found, expected)
        return jnp.stack([so_far, *jax.tree.leaves(equal)]).all()

    def bits_of(x):
        return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32)

    alone = "PYTEST_XDIST_WORKER" not in os.environ
    operands = problem.hidden, problem.weight, problem.bias
    expected = step(*operands)

    def of_gpu():
        """Bytes, as the driver counts them."""
        if not alone:
            return 0
        free, total = pytest.importorskip("torch").cuda.mem_get_info()
        return total - free

    def held_after(runs):
        """Bytes in use by JAX, of this process, and of the GPU, once all runs had the same bits."""
        all_same = jnp.array(True)
        for _ in range(runs):
            all_same = same(all_same, step(*operands), expected)
        assert all_same
        del all_same
        gc.collect()
        resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        return jax.devices()[0].memory_stats()["bytes_in_use"], resident, of_gpu()

    held_after(100)
    on_device, resident, of_driver = held_after(100)
    on_device_after, resident_after, of_driver_after = held_after(1000)
    assert on_device_after == on_device
    assert resident_after - resident < 1000 * LEAST_LEAK
    assert of_driver_after - of_driver < 1000 * LEAST_LEAK
    if alone:
        print(f"1000 calls: {of_driver_after - of_driver} bytes more by the driver, {resident_after - resident} here")


def test_threads():
    """Few and many tokens take other tiles of the same kernels, and other amounts of shared memory."""
    problems = [helpers.make(dataclasses.replace(SMALL, lead=(n,)), jnp.bfloat16) for n in (5, 300, 100, 20)]

    @jax.jit
    def outputs(problem):
        return problem.call(SMALL, "cuda"), problem.gradients(SMALL, "cuda")

    expected = [jax.block_until_ready(outputs(p)) for p in problems]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert_same_bits(list(pool.map(outputs, problems)), expected)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_another_device_than_the_first():
    problem = helpers.make(SMALL, jnp.bfloat16)
    there = jax.device_put(problem, jax.devices()[1])
    here_and_there = [helpers.outputs(SMALL, p, "cuda") for p in (problem, there)]
    assert_same_bits(*jax.tree.map(np.asarray, here_and_there))


def test_by_name_only():
    operands = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((80, 64), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    decision = explain("linear_logp", *operands)
    assert decision.choice == "mosaic" and "cuda" in decision.by_name
    assert explain("linear_logp", *operands, implementation="cuda").choice == "cuda"
