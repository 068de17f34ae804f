"""linear_logp by its kernels on a GPU, Mosaic's, Triton's and CUDA C++: accuracy, raw bits, memory, transformations."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton import call
from rlk_jax import linear_logp
from tests.gpu.hopper import HEAD_KERNELS
from tests.support import helpers
from tests.support.helpers import Case, assert_error, assert_same_bits, assert_within_contract

DTYPES = (jnp.bfloat16, jnp.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
SHAPES = (
    Case("one row", (1,), 64, 1000, bias=True),
    Case("no lead", (), 128, 300),
    Case("tiny vocabulary", (9,), 64, 5),
    Case("two columns", (3,), 8, 2),
    Case("hidden dim of 8", (65,), 8, 520),
    Case("ragged groups", (300,), 192, 1000, bias=True),
    Case("odd vocabulary", (130,), 64, 50257 // 16),
    Case("dv", (300,), 72, 4096, options={"weight_layout": "dv"}),
    Case("dv, ragged", (129,), 128, 1000, bias=True, options={"weight_layout": "dv"}),
    Case("dv, padded", (70,), 64, 1024, options={"weight_layout": "dv", "global_vocab_size": 1001}),
    Case("padding and short chunks", (40,), 64, 2112, options={"global_vocab_size": 2049, "memory_budget": 60000}),
    Case("large softcap", (40,), 64, 300, options={"logit_softcap": 1e4}),
    Case("many slices", (700,), 128, 6000, bias=True, options={"memory_budget": 2**20}),
    *(
        helpers.model_case(name, (70,), shrink=4)
        for name in ("gpt2", "llama2-7b", "llama3-8b", "gemma2-2b", "qwen3-8b-padded")
    ),
)
PEAKED = (
    Case("p = 0.999", (40,), 128, 3000, scale=0.02),
    Case("logits of 100", (40,), 128, 3000, scale=25.0),
    Case("p = 0.999, K = 4096", (40,), 4096, 3000, scale=0.02),
    Case("logits of 100, K = 4096", (40,), 4096, 3000, scale=25.0),
)
BITS = Case("bits", (4096,), 192, 5000, bias=True, temperature="per token")


@pytest.fixture(params=HEAD_KERNELS, scope="module")
def kernels(request):
    return request.param


@every_dtype
@pytest.mark.parametrize("case", [*helpers.OPTION_CASES, *SHAPES], ids=str)
def test_against_float64(kernels, case, dtype):
    problem = helpers.make(case, dtype)
    gold = helpers.gold(case, problem)
    for value, expected in zip(problem.call(case, kernels), gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp_wgmma", dtype, "forward")
    for gradient, expected in zip(problem.gradients(case, kernels), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_wgmma", dtype, "gradient")


def test_a_vocabulary_of_one(kernels):
    case = Case("one column", (3,), 8, 1)
    problem = helpers.make(case, jnp.bfloat16)
    gold = helpers.gold(case, problem)
    for value, expected in zip(problem.call(case, kernels), gold.values, strict=True):
        assert_error(float(np.abs(value - expected).max()), "linear_logp_wgmma", jnp.bfloat16, "forward")


@every_dtype
@pytest.mark.parametrize("case", PEAKED, ids=str)
def test_peaked_and_large_logits(kernels, case, dtype):
    problem = helpers.make(case, dtype)
    if case.name.startswith("p ="):
        weight = problem.weight.at[problem.target_ids].set(problem.hidden * jnp.asarray(13.0 / case.dim, dtype))
        problem = problem._replace(weight=weight)
    gold = helpers.gold(case, problem)
    largest = np.abs(gold.logits).max()
    classes = ("linear_logp_peaked_wgmma", *("linear_logp_peaked_wgmma_lse",) * 2)
    for value, expected, op_class in zip(problem.call(case, kernels), gold.values, classes, strict=True):
        assert_error(float(np.abs(value - expected).max() / largest), op_class, dtype, "forward")
    for gradient, expected in zip(problem.gradients(case, kernels), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_peaked_wgmma", dtype, "gradient")


@every_dtype
def test_largest_logits_between_integers(kernels, dtype):
    helpers.assert_largest_logits_between_integers(kernels, dtype)


@pytest.mark.parametrize(("operand", "lift"), [(0, 2.0**-10), (1, 2.0**10)], ids=["dH", "dW"])
def test_fp16_gradients_survive_tiny_upstream(kernels, operand, lift):
    """g·p near 1e-11; hidden and head are scaled against each other so that float16 can hold the gradient itself."""
    case = Case("tiny upstream", (16,), 64, 151936)
    problem = helpers.make(case, jnp.float16)
    problem = problem._replace(
        hidden=problem.hidden * lift,
        weight=problem.weight / lift,
        upstream=(jnp.full(16, 1e-4 / 16), jnp.zeros(16), jnp.zeros(16)),
    )
    expected = helpers.gold(case, problem).gradients[operand]
    actual = problem.gradients(case, kernels)[operand]
    assert np.abs(expected).max() > np.finfo(np.float16).tiny
    assert_within_contract(actual, expected, "linear_logp_tiny_upstream", jnp.float16, "gradient")


@every_dtype
def test_triton_takes_odd_columns(dtype):
    """TMA does not: their strides are no multiples of 16 bytes."""
    odd = Case("dv, odd", (129,), 128, 1001, bias=True, options={"weight_layout": "dv"})
    if call.why_missing():
        pytest.skip(call.why_missing())
    test_against_float64("triton", odd, dtype)


@pytest.fixture(scope="module")
def whole(kernels):
    problem = helpers.make(BITS, jnp.bfloat16)
    return problem, *helpers.outputs(BITS, problem, kernels)


def test_constants_of_a_program_give_the_bits_of_arguments(kernels, whole):
    problem, rows, _ = whole

    def loss(hidden):
        return helpers.weighted(problem._replace(hidden=hidden).call(BITS, kernels), problem.upstream)

    assert_same_bits(jax.jit(jax.grad(loss))(problem.hidden), rows[-1])


@pytest.mark.parametrize("n", [1, 7, 20, 64, 100, 128, 129, 1000, 4096])
def test_rows_do_not_depend_on_the_batch(kernels, whole, n):
    problem, rows, _ = whole
    rng = np.random.default_rng(n)
    for index in (rng.permutation(4096)[:n], np.arange(4096 - n, 4096)):
        part = helpers.outputs(BITS, helpers.rows_of(problem, index), kernels)[0]
        assert_same_bits(part, [x[index] for x in rows])


def test_fp16_rows_do_not_depend_on_the_batch_or_its_largest_gradient(kernels):
    problem = helpers.make(BITS, jnp.float16)
    scales = jnp.asarray(10.0 ** np.random.default_rng(0).uniform(-6, 2, 4096), jnp.float32)
    problem = problem._replace(upstream=tuple(g * scales for g in problem.upstream))
    rows, _ = helpers.outputs(BITS, problem, kernels)
    index = np.random.default_rng(1).permutation(4096)[:100]
    assert_same_bits(helpers.outputs(BITS, helpers.rows_of(problem, index), kernels)[0], [x[index] for x in rows])


def test_run_to_run(kernels, whole):
    problem, rows, head = whole
    for _ in range(10):
        assert_same_bits(helpers.outputs(BITS, problem, kernels), (rows, head))


@pytest.mark.parametrize("budget", [1, 2**20, 20 * 2**20, 64 * 2**20, 512 * 2**20, 4 * 2**30])
def test_memory_budgets(kernels, whole, budget):
    """One chunk a slice to all of them: chains of dH are cut at every chunk, at multiples of 64, or not at all, and
    groups are summed up one by one or at once.
    """
    problem, rows, head = whole
    assert_same_bits(helpers.outputs(BITS, problem, kernels, memory_budget=budget), (rows, head))


@pytest.mark.parametrize("vocab", [512, 5000, 50257, 131072])
def test_a_chain_cut_at_multiples_of_64(kernels, vocab):
    """Groups of 64, 632, 6288 and 16384 columns; slices of one chunk against one slice."""
    case = Case("cuts", (130,), 64, vocab)
    problem = helpers.make(case, jnp.bfloat16)
    cut, whole = (helpers.outputs(case, problem, kernels, memory_budget=b) for b in (1, 4 * 2**30))
    assert_same_bits(cut, whole)


def test_other_outputs_change_nothing(kernels, whole):
    problem, rows, _ = whole
    for options in ({"return_lse": False}, {"return_entropy": False}, {"return_lse": False, "return_entropy": False}):
        values = problem.call(BITS, kernels, **options)
        values = values if isinstance(values, tuple) else (values,)
        for name, expected in zip(("logp", "lse", "entropy"), rows[:3], strict=True):
            actual = getattr(values, name, values[0] if name == "logp" else None)
            if actual is not None:
                assert_same_bits(actual, expected)


def test_gradients_with_or_without_the_other_operands_and_remat(kernels, whole):
    problem, rows, head = whole

    def loss(h, w, b):
        return helpers.weighted(problem._replace(hidden=h, weight=w, bias=b).call(BITS, kernels), problem.upstream)

    operands = (problem.hidden, problem.weight, problem.bias)
    expected = (rows[3], *head)
    for argnums in ((0,), (1,), (2,), (0, 2), (1, 2)):
        actual = jax.jit(jax.grad(loss, argnums))(*operands)
        assert_same_bits(actual, [expected[i] for i in argnums])
    assert_same_bits(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*operands), expected)


@every_dtype
def test_ignored_and_zero_gradient_rows_change_no_gradient(kernels, dtype):
    """Rows inserted anywhere, whatever they hold: dW and db keep their bits, and so do the other rows."""
    case = Case("inserted", (600,), 128, 3000, bias=True)
    problem = helpers.make(case, dtype)
    rows, head = helpers.outputs(case, problem, kernels)
    rng = np.random.default_rng(0)
    place = np.sort(rng.permutation(1000)[:600])
    hidden = jnp.full((1000, 128), jnp.nan, dtype).at[place].set(problem.hidden)

    def spread(x: jax.Array, fill: float) -> jax.Array:
        return jnp.full(1000, fill, x.dtype).at[place].set(x)

    bigger = problem._replace(
        hidden=hidden,
        target_ids=spread(problem.target_ids, fill=-100),
        upstream=tuple(spread(g, fill=1.0) for g in problem.upstream),
    )
    ignoring = helpers.with_options(dataclasses.replace(case, lead=(1000,)), ignore_index=-100)
    new_rows, new_head = helpers.outputs(ignoring, bigger, kernels)
    assert_same_bits(new_head, head)
    assert_same_bits([x[place] for x in new_rows], rows)
    outside = np.setdiff1d(np.arange(1000), place)
    for x in new_rows:
        assert not np.asarray(x[outside]).astype(np.float32).any()

    masked = bigger._replace(
        hidden=hidden.at[outside].set(1),
        target_ids=jnp.maximum(bigger.target_ids, 0),
        upstream=tuple(spread(g, fill=0.0) for g in problem.upstream),
    )
    masked_rows, masked_head = helpers.outputs(dataclasses.replace(case, lead=(1000,)), masked, kernels)
    assert_same_bits(masked_head, head)
    assert_same_bits(masked_rows[3][place], rows[3])


def test_no_active_row_and_no_row_at_all(kernels):
    case = Case("empty", (5,), 64, 300, bias=True, options={"ignore_index": -1})
    problem = helpers.make(case, jnp.bfloat16)._replace(target_ids=jnp.full(5, -1))
    rows, head = helpers.outputs(case, problem, kernels)
    for x in (*rows, *head):
        assert not np.asarray(x).astype(np.float32).any()
    nothing = Case("nothing", (0,), 64, 300, bias=True)
    rows, head = helpers.outputs(nothing, helpers.make(nothing, jnp.bfloat16), kernels)
    assert rows[0].shape == (0,)
    for x in head:
        assert not np.asarray(x).astype(np.float32).any()


def test_a_bad_target_is_nan_and_nothing_else_is(kernels):
    case = Case("bad target", (200,), 64, 1000)
    problem = helpers.make(case, jnp.bfloat16)
    rows, _ = helpers.outputs(case, problem, kernels)
    bad = problem._replace(target_ids=problem.target_ids.at[7].set(1000))
    bad_rows, (d_weight,) = helpers.outputs(case, bad, kernels, validate=False)
    for x, good in zip(bad_rows, rows, strict=True):
        assert np.isnan(np.asarray(x[7]).astype(np.float32)).all()
        assert_same_bits(jnp.delete(x, 7, 0), jnp.delete(good, 7, 0))
    assert np.isnan(np.asarray(d_weight).astype(np.float32)).all()


def test_garbage_in_padding_rows_of_the_head(kernels):
    case = Case("padding", (200,), 64, 1024, bias=True, options={"global_vocab_size": 1001})
    problem = helpers.make(case, jnp.bfloat16)
    expected = helpers.outputs(case, problem, kernels)
    garbage = problem._replace(weight=problem.weight.at[1001:].set(jnp.nan), bias=problem.bias.at[1001:].set(jnp.nan))
    actual = helpers.outputs(case, garbage, kernels)
    assert_same_bits(actual, expected)
    for gradient in actual[1]:
        assert not np.asarray(gradient[1001:]).astype(np.float32).any()


def test_more_than_2_31_logits(kernels):
    tokens, vocab = 16384, 151936
    case = Case("large", (tokens,), 64, vocab, bias=True)
    problem = helpers.make(case, jnp.bfloat16)
    budget = 8 * 2**30
    rows, head = helpers.outputs(case, problem, kernels, memory_budget=budget)
    small, small_head = helpers.outputs(case, problem, kernels, memory_budget=2**28)
    assert_same_bits((rows, head), (small, small_head))
    keeping, without = helpers.without_entropy(case, problem)
    kept = without.gradients(keeping, kernels, memory_budget=11 * 2**30)  # all 2.5e9 exponentials
    assert_same_bits(kept, without.gradients(case, kernels, memory_budget=2**28))
    index = np.arange(tokens - 64, tokens)
    part = helpers.rows_of(problem, index)
    gold = helpers.gold(dataclasses.replace(case, lead=(64,)), part)
    for value, expected in zip(rows[:3], gold.values, strict=True):
        assert_within_contract(value[index], expected, "linear_logp_wgmma", jnp.bfloat16, "forward")
    assert_within_contract(rows[3][index], gold.gradients[0], "linear_logp_wgmma", jnp.bfloat16, "gradient")


MEMORY = """
import sys, jax, jax.numpy as jnp
from rlk_jax import linear_logp
n, d, v, budget, real = map(int, sys.argv[2:])
h, w, t = jnp.ones((n, d), jnp.bfloat16), jnp.ones((v, d), jnp.bfloat16), jnp.zeros(n, jnp.int32)
options = {"global_vocab_size": real, "memory_budget": budget, "implementation": sys.argv[1]}
f = jax.jit(jax.grad(lambda h, w: linear_logp(h, w, t, **options).sum(), (0, 1)))
compiled = f.lower(h, w).compile()
jax.block_until_ready(compiled(h, w))
stats = jax.devices()[0].memory_stats()
kept = 2 * (h.nbytes + w.nbytes) + t.nbytes
print(compiled.memory_analysis().temp_size_in_bytes, stats["peak_bytes_in_use"] - kept)
"""


@pytest.mark.parametrize("budget", [64 * 2**20, 512 * 2**20])
@pytest.mark.parametrize("padding", [0, 128])
@pytest.mark.parametrize("shape", [(4096, 2048, 131072), (16384, 2048, 32768), (8192, 8192, 131072)], ids=str)
def test_peak_memory(kernels, shape, budget, padding):
    """Beyond inputs and gradients: the budget, dH in float32, and 2 % of the float32 logits.

    Where the budget holds no group's gradients of logits beside hidden, the chain of the group that a slice ends inside
    comes on top.
    """
    command = [sys.executable, "-c", MEMORY, kernels, *map(str, (*shape, budget, shape[2] - padding))]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    n, d, v = shape
    sums = 1 if 2 * n * d + 2 * n * v / 8 <= budget else 2
    for used in map(int, out.split()):
        assert used <= budget + sums * 4 * n * d + 0.02 * 4 * n * v


def test_transformations(kernels, whole):
    problem, rows, _ = whole
    h, w, t, b = problem.hidden[:128], problem.weight, problem.target_ids[:128], problem.bias
    temperature = problem.temperature[:128]

    def logp(h, t, temperature):
        return linear_logp(h, w, t, b, temperature=temperature, implementation=kernels)

    expected = rows[0][:128]
    args = (h, t, temperature)
    assert_same_bits(logp(*args), expected)
    batched = jax.tree.map(lambda x: x.reshape(4, 32, *x.shape[1:]), args)
    assert_same_bits(jax.jit(jax.vmap(logp))(*batched).reshape(-1), expected)
    scanned = jax.jit(lambda args: jax.lax.scan(lambda c, x: (c, logp(*x)), 0, args)[1])(batched)
    assert_same_bits(scanned.reshape(-1), expected)
    d_hidden = jax.grad(lambda h: logp(h, t, temperature).sum())(h)
    mapped = jax.vmap(jax.grad(lambda h, t, temperature: logp(h, t, temperature).sum()))(*batched)
    assert_same_bits(mapped.reshape(128, -1), d_hidden)
    with jax.enable_x64(True):
        assert_same_bits(jax.jit(logp)(*args), expected)
        assert_same_bits(jax.grad(lambda h: logp(h, t, temperature).sum())(h), d_hidden)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(kernels, whole, check_vma):
    problem, *_ = whole
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    spec = jax.sharding.PartitionSpec

    def loss(h, w, t, temperature):
        return linear_logp(h, w, t, problem.bias, temperature=temperature, implementation=kernels).sum()

    def local(h, w, t, temperature):
        return jax.lax.psum(loss(h, w, t, temperature), "data")

    in_specs = (spec("data"), spec(), spec("data"), spec("data"))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=spec(), check_vma=check_vma)
    arguments = (problem.hidden, problem.weight, problem.target_ids, problem.temperature)
    actual = jax.jit(jax.grad(sharded, (0, 1)))(*arguments)
    assert_same_bits(actual, jax.jit(jax.grad(loss, (0, 1)))(*arguments))
