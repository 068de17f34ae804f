"""linear_logp by Triton on a GPU: accuracy, raw bits, memory, JAX's transformations."""

import dataclasses
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton import call
from rlk_jax import linear_logp
from tests import helpers
from tests.helpers import Case, assert_error, assert_same_bits, assert_within_contract

pytestmark = pytest.mark.skipif(bool(call.why_missing()), reason=str(call.why_missing()))

DTYPES = (jnp.bfloat16, jnp.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
SHAPES = (
    Case("one row", (1,), 64, 1000, bias=True),
    Case("no lead", (), 128, 300),
    Case("tiny vocabulary", (9,), 64, 5),
    Case("hidden dim of 8", (65,), 8, 520),
    Case("ragged groups", (300,), 192, 1000, bias=True),
    Case("odd vocabulary", (130,), 64, 50257 // 16),
    Case("dv", (300,), 72, 4096, options={"weight_layout": "dv"}),
    Case("dv, odd", (129,), 128, 1001, bias=True, options={"weight_layout": "dv"}),
    Case("dv, padded", (70,), 64, 1024, options={"weight_layout": "dv", "global_vocab_size": 1001}),
    Case("padding and slices", (40,), 64, 2112, options={"global_vocab_size": 2049, "memory_budget": 60000}),
    Case("large softcap", (40,), 64, 300, options={"logit_softcap": 1e4}),
    Case("many slices", (700,), 128, 6000, bias=True, options={"memory_budget": 2**20}),
    *(helpers.model_case(name, (70,), shrink=4) for name in ("gpt2", "llama2-7b", "gemma2-2b", "qwen3-8b-padded")),
)
PEAKED = (
    Case("p = 0.999", (40,), 128, 3000, scale=0.02),
    Case("logits of 100", (40,), 128, 3000, scale=25.0),
    Case("logits of 100, K = 4096", (40,), 4096, 3000, scale=25.0),
)
BITS = Case("bits", (4096,), 192, 5000, bias=True, temperature="per token")


@every_dtype
@pytest.mark.parametrize("case", [*helpers.OPTION_CASES, *SHAPES], ids=str)
def test_against_float64(case, dtype):
    problem = helpers.make(case, dtype)
    gold = helpers.gold(case, problem)
    for value, expected in zip(problem.call(case, "triton"), gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp_wgmma", dtype, "forward")
    for gradient, expected in zip(problem.gradients(case, "triton"), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_wgmma", dtype, "gradient")


@every_dtype
@pytest.mark.parametrize("case", PEAKED, ids=str)
def test_peaked_and_large_logits(case, dtype):
    problem = helpers.make(case, dtype)
    if case.name.startswith("p ="):
        weight = problem.weight.at[problem.target_ids].set(problem.hidden * jnp.asarray(13.0 / case.dim, dtype))
        problem = problem._replace(weight=weight)
    gold = helpers.gold(case, problem)
    largest = np.abs(gold.logits).max()
    classes = ("linear_logp_peaked_wgmma", *("linear_logp_peaked_wgmma_lse",) * 2)
    for value, expected, op_class in zip(problem.call(case, "triton"), gold.values, classes, strict=True):
        assert_error(float(np.abs(value - expected).max() / largest), op_class, dtype, "forward")
    for gradient, expected in zip(problem.gradients(case, "triton"), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_peaked_wgmma", dtype, "gradient")


@pytest.mark.parametrize(("operand", "lift"), [(0, 2.0**-10), (1, 2.0**10)], ids=["dH", "dW"])
def test_fp16_gradients_survive_tiny_upstream(operand, lift):
    case = Case("tiny upstream", (16,), 64, 151936)
    problem = helpers.make(case, jnp.float16)
    problem = problem._replace(
        hidden=problem.hidden * lift,
        weight=problem.weight / lift,
        upstream=(jnp.full(16, 1e-4 / 16), jnp.zeros(16), jnp.zeros(16)),
    )
    expected = helpers.gold(case, problem).gradients[operand]
    actual = problem.gradients(case, "triton")[operand]
    assert_within_contract(actual, expected, "linear_logp_tiny_upstream", jnp.float16, "gradient")


@pytest.fixture(scope="module")
def whole():
    problem = helpers.make(BITS, jnp.bfloat16)
    return problem, *helpers.outputs(BITS, problem, "triton")


@pytest.mark.parametrize("n", [1, 7, 64, 100, 128, 129, 1000, 4096])
def test_rows_do_not_depend_on_the_batch(whole, n):
    problem, rows_of_whole, _ = whole
    rng = np.random.default_rng(n)
    for index in (rng.permutation(4096)[:n], np.arange(4096 - n, 4096)):
        part = helpers.outputs(BITS, helpers.rows_of(problem, index), "triton")[0]
        assert_same_bits(part, [x[index] for x in rows_of_whole])


def test_run_to_run(whole):
    problem, *expected = whole
    for _ in range(10):
        assert_same_bits(helpers.outputs(BITS, problem, "triton"), tuple(expected))


@pytest.mark.parametrize("budget", [1, 2**20, 64 * 2**20, 4 * 2**30])
def test_memory_budgets(whole, budget):
    problem, *expected = whole
    assert_same_bits(helpers.outputs(BITS, problem, "triton", memory_budget=budget), tuple(expected))


@pytest.mark.parametrize("vocab", [512, 5000, 50257])
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_a_chain_cut_anywhere(vocab, layout):
    case = Case("cuts", (130,), 64, vocab, options={"weight_layout": layout})
    problem = helpers.make(case, jnp.bfloat16)
    cut, uncut = (helpers.outputs(case, problem, "triton", memory_budget=b) for b in (1, 4 * 2**30))
    assert_same_bits(cut, uncut)


def test_other_outputs_change_nothing(whole):
    problem, expected, _ = whole
    for options in ({"return_lse": False}, {"return_entropy": False}, {"return_lse": False, "return_entropy": False}):
        values = problem.call(BITS, "triton", **options)
        assert_same_bits(values.logp if isinstance(values, tuple) else values, expected[0])


def test_gradients_with_or_without_the_other_operands_and_remat(whole):
    problem, of_rows, of_head = whole

    def loss(h, w, b):
        return helpers.weighted(problem._replace(hidden=h, weight=w, bias=b).call(BITS, "triton"), problem.upstream)

    operands, expected = (problem.hidden, problem.weight, problem.bias), (of_rows[3], *of_head)
    for argnums in ((0,), (1,), (2,), (0, 2)):
        actual = jax.jit(jax.grad(loss, argnums))(*operands)
        assert_same_bits(actual, [expected[i] for i in argnums])
    assert_same_bits(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*operands), expected)


@every_dtype
def test_ignored_rows_change_no_gradient(dtype):
    """Inserted anywhere, whatever they hold: dW and db keep their bits, and so do the other rows."""
    case = Case("inserted", (600,), 128, 3000, bias=True)
    problem = helpers.make(case, dtype)
    expected, head = helpers.outputs(case, problem, "triton")
    place = np.sort(np.random.default_rng(0).permutation(1000)[:600])

    def spread(x: jax.Array, fill: float) -> jax.Array:
        return jnp.full((1000, *x.shape[1:]), fill, x.dtype).at[place].set(x)

    bigger = problem._replace(
        hidden=spread(problem.hidden, fill=math.nan),
        target_ids=spread(problem.target_ids, fill=-100),
        upstream=tuple(spread(g, fill=1.0) for g in problem.upstream),
    )
    ignoring = helpers.with_options(dataclasses.replace(case, lead=(1000,)), ignore_index=-100)
    found, found_head = helpers.outputs(ignoring, bigger, "triton")
    assert_same_bits(found_head, head)
    assert_same_bits([x[place] for x in found], expected)
    for x in found:
        assert not np.delete(np.asarray(x, np.float32), place, axis=0).any()


def test_no_active_row_and_no_row_at_all():
    case = Case("empty", (5,), 64, 300, bias=True, options={"ignore_index": -1})
    problem = helpers.make(case, jnp.bfloat16)._replace(target_ids=jnp.full(5, -1))
    for x in jax.tree.leaves(helpers.outputs(case, problem, "triton")):
        assert not np.asarray(x).astype(np.float32).any()
    nothing = Case("nothing", (0,), 64, 300, bias=True)
    for x in helpers.outputs(nothing, helpers.make(nothing, jnp.bfloat16), "triton")[1]:
        assert not np.asarray(x).astype(np.float32).any()


def test_garbage_in_padding_rows_of_the_head():
    case = Case("padding", (200,), 64, 1024, bias=True, options={"global_vocab_size": 1001})
    problem = helpers.make(case, jnp.bfloat16)
    expected = helpers.outputs(case, problem, "triton")
    garbage = problem._replace(weight=problem.weight.at[1001:].set(jnp.nan), bias=problem.bias.at[1001:].set(jnp.nan))
    assert_same_bits(helpers.outputs(case, garbage, "triton"), expected)


def test_more_than_2_31_logits():
    tokens, vocab = 16384, 151936
    case = Case("large", (tokens,), 64, vocab, bias=True)
    problem = helpers.make(case, jnp.bfloat16)
    large, small = (helpers.outputs(case, problem, "triton", memory_budget=b) for b in (8 * 2**30, 2**28))
    assert_same_bits(large, small)
    index = np.arange(tokens - 64, tokens)
    gold = helpers.gold(dataclasses.replace(case, lead=(64,)), helpers.rows_of(problem, index))
    for value, expected in zip(large[0][:3], gold.values, strict=True):
        assert_within_contract(value[index], expected, "linear_logp_wgmma", jnp.bfloat16, "forward")
    assert_within_contract(large[0][3][index], gold.gradients[0], "linear_logp_wgmma", jnp.bfloat16, "gradient")


MEMORY = """
import sys, jax, jax.numpy as jnp
from rlk_jax import linear_logp
n, d, v, budget = map(int, sys.argv[1:])
h, w, t = jnp.ones((n, d), jnp.bfloat16), jnp.ones((v, d), jnp.bfloat16), jnp.zeros(n, jnp.int32)
options = {"memory_budget": budget, "implementation": "triton"}
f = jax.jit(jax.grad(lambda h, w: linear_logp(h, w, t, **options).sum(), (0, 1)))
compiled = f.lower(h, w).compile()
jax.block_until_ready(compiled(h, w))
stats = jax.devices()[0].memory_stats()
kept = 2 * (h.nbytes + w.nbytes) + t.nbytes
print(compiled.memory_analysis().temp_size_in_bytes, stats["peak_bytes_in_use"] - kept)
"""


@pytest.mark.parametrize("budget", [64 * 2**20, 512 * 2**20])
@pytest.mark.parametrize("shape", [(4096, 2048, 131072), (16384, 2048, 32768)], ids=str)
def test_peak_memory(shape, budget):
    """Beyond inputs and gradients: the budget, dH in float32, and 2 % of the float32 logits."""
    command = [sys.executable, "-c", MEMORY, *map(str, (*shape, budget))]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    n, d, v = shape
    for used in map(int, out.split()):
        assert used <= budget + 4 * n * d + 0.02 * 4 * n * v


def test_transformations(whole):
    problem, of_rows, _ = whole
    h, w, t, b = problem.hidden[:128], problem.weight, problem.target_ids[:128], problem.bias
    args = (h, t, problem.temperature[:128])

    def logp(h, t, temperature):
        return linear_logp(h, w, t, b, temperature=temperature, implementation="triton")

    expected = of_rows[0][:128]
    assert_same_bits(logp(*args), expected)
    batched = jax.tree.map(lambda x: x.reshape(4, 32, *x.shape[1:]), args)
    assert_same_bits(jax.jit(jax.vmap(logp))(*batched).reshape(-1), expected)
    scanned = jax.jit(lambda args: jax.lax.scan(lambda c, x: (c, logp(*x)), 0, args)[1])(batched)
    assert_same_bits(scanned.reshape(-1), expected)
    d_hidden = jax.grad(lambda h: logp(h, *args[1:]).sum())(h)
    mapped = jax.vmap(jax.grad(lambda h, t, temperature: logp(h, t, temperature).sum()))(*batched)
    assert_same_bits(mapped.reshape(128, -1), d_hidden)
