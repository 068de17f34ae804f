"""linear_logp with a float32 hidden or head on Hopper's tensor cores: accuracy of long sums, raw bits, memory, and
numbers that are not finite.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlk_jax
from rlk_jax import linear_logp
from tests.support import helpers
from tests.support.helpers import Case, assert_error, assert_same_bits, assert_within_contract
from tests.support.mixed_dtypes import assert_close_to_float64, make

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
DTYPES = [(F32, F32), (BF16, F32), (F32, BF16)]
every_pair = pytest.mark.parametrize(("hidden", "weight"), DTYPES, ids=["fp32", "fp32 head", "fp32 hidden"])
BITS = Case("bits", (1500,), 192, 5000, bias=True, temperature="per token")
SHAPES = (
    Case("one row", (1,), 64, 1000, bias=True),
    Case("tiny vocabulary", (9,), 64, 5, scale=0.2),
    Case("hidden dim of 8", (65,), 8, 520, scale=0.2),
    Case("ragged groups", (300,), 192, 1000, bias=True),
    Case("odd vocabulary", (130,), 64, 50257 // 16),
    Case("dv", (300,), 128, 4096, options={"weight_layout": "dv"}),
    Case("dv, ragged", (129,), 128, 1000, bias=True, options={"weight_layout": "dv"}),
    Case("padded", (200,), 128, 1024, options={"global_vocab_size": 1001}),
    Case("many slices", (700,), 128, 6000, bias=True, options={"memory_budget": 2**21}),
    Case("softcap", (300,), 128, 5000, options={"logit_softcap": 30.0}, temperature=0.7),
    Case("softcap, dv", (300,), 128, 4096, options={"logit_softcap": 2.0, "weight_layout": "dv"}),
    *(helpers.model_case(name, (70,), shrink=4) for name in ("gpt2", "gemma2-2b", "qwen3-8b-padded")),
)


@pytest.mark.parametrize(("hidden", "weight"), [*DTYPES, (F16, F32)], ids=["fp32", "fp32 head", "fp32 hidden", "fp16"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_against_float64(case, hidden, weight):
    assert_close_to_float64(case, make(case, hidden, weight))


@every_pair
def test_peaked_logits(hidden, weight):
    case = Case("logits of 100, K = 4096", (40,), 4096, 3000, scale=25.0)
    problem = make(case, hidden, weight)
    gold = helpers.gold(case, problem)
    largest = np.abs(gold.logits).max()
    for value, expected in zip(problem.call(case, "mosaic"), gold.values, strict=True):
        assert_error(float(np.abs(value - expected).max() / largest), "linear_logp_peaked_wgmma", F32, "forward")
    for gradient, expected in zip(problem.gradients(case, "mosaic"), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_peaked_wgmma", gradient.dtype, "gradient")


def test_largest_logits_between_integers():
    helpers.assert_largest_logits_between_integers("mosaic", F32)


class _Gold(NamedTuple):
    logp: np.ndarray
    lse: np.ndarray
    d_hidden: np.ndarray
    d_weight: np.ndarray


def _gold(hidden: Any, weight: Any, ids: Any, upstream: Any) -> _Gold:
    """The values of logp and lse and the gradients of lse, in float64 on the host."""
    h, w = (np.asarray(x, np.float64) for x in (hidden, weight))
    z, rows = h @ w.T, np.arange(len(h))
    largest = z.max(axis=1, keepdims=True)
    lse = largest[:, 0] + np.log(np.exp(z - largest).sum(axis=1))
    d_logits = np.exp(z - lse[:, None]) * np.asarray(upstream, np.float64)[:, None]
    return _Gold(z[rows, ids] - lse, lse, d_logits @ w, d_logits.T @ h)


@every_pair
@pytest.mark.parametrize(
    ("tokens", "dim", "vocab"), [(256, 4096, 8192), (64, 256, 151936), (8192, 128, 2048)], ids=["K", "V", "N"]
)
def test_long_sums_of_one_sign(tokens, dim, vocab, hidden, weight):
    """Tensor cores' own sums would be off by 4e-6 over K = 4096, and by 1e-4 over V = 151936.

    Gradients are those of lse: that of logp has a term of the other sign, for the target.
    """
    rng = np.random.default_rng(0)
    h = jnp.asarray(np.abs(rng.normal(size=(tokens, dim))), hidden)
    w = jnp.asarray(np.abs(rng.normal(size=(vocab, dim))) / dim**0.5, weight)
    ids, g = jnp.asarray(rng.integers(0, vocab, tokens)), jnp.asarray(rng.uniform(0.5, 1, tokens), F32)

    def loss(h: Any, w: Any) -> Any:
        out = linear_logp(h, w, ids, return_lse=True, implementation="mosaic")
        return jnp.vdot(out.lse, g), out

    (d_hidden, d_weight), out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(h, w)
    gold = _gold(h, w, ids, g)
    assert_within_contract(out.logp, gold.logp, "linear_logp_wgmma", F32, "forward")
    assert_within_contract(out.lse, gold.lse, "linear_logp_wgmma", F32, "forward")
    assert_within_contract(d_hidden, gold.d_hidden, "linear_logp_wgmma", hidden, "gradient")
    assert_within_contract(d_weight, gold.d_weight, "linear_logp_wgmma", weight, "gradient")


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "fp32 head", "fp32 hidden"])
def whole(request):
    """A problem of `BITS` with the results of its rows, and those of its head."""
    problem = make(BITS, *request.param)
    return problem, *helpers.outputs(BITS, problem, "mosaic")


@pytest.mark.parametrize("n", [1, 7, 64, 65, 128, 129, 700])
def test_rows_in_another_batch(whole, n):
    problem, rows, _ = whole
    index = np.random.default_rng(n).permutation(1500)[:n]
    found, _ = helpers.outputs(BITS, helpers.rows_of(problem, index), "mosaic")
    assert_same_bits(found, [x[index] for x in rows])


@pytest.mark.parametrize("budget", [2**21, 2**23, 2**25, 2**28])
def test_any_budget(whole, budget):
    problem, rows, head = whole
    assert_same_bits(helpers.outputs(BITS, problem, "mosaic", memory_budget=budget), (rows, head))


@pytest.mark.parametrize("options", [{}, {"logit_softcap": 2.0}], ids=["plain", "softcap"])
@every_pair
def test_kept_and_recomputed_exponentials(hidden, weight, options):
    """All exponentials are kept, some, and none. Other rows move where only the backward leaves rows out."""
    case = Case("kept", (600,), 128, 5000, bias=True, options=options | {"ignore_index": -1})
    case, problem = helpers.without_entropy(case, make(case, hidden, weight))
    some_zero = problem._replace(upstream=tuple(g.at[::3].set(0) for g in problem.upstream))
    for p in (problem, some_zero):
        everything, some, none = (p.gradients(case, "mosaic", memory_budget=x) for x in (2**30, 2**24, 2**20))
        assert_same_bits(some, everything)
        assert_same_bits(none, everything)


def test_ignored_rows(whole):
    """Rows that are left out change no bit of the others, wherever they are."""
    problem, *_ = whole
    case = helpers.with_options(BITS, ignore_index=-1)
    ignored = np.random.default_rng(0).permutation(1500)[:400]
    counts = np.setdiff1d(np.arange(1500), ignored)
    hidden = problem.hidden.at[ignored].set(jnp.nan)
    with_ignored = problem._replace(hidden=hidden, target_ids=problem.target_ids.at[ignored].set(-1))
    rows, head = helpers.outputs(case, with_ignored, "mosaic")
    alone, head_alone = helpers.outputs(case, helpers.rows_of(with_ignored, counts), "mosaic")
    assert_same_bits(([x[counts] for x in rows], head), (list(alone), head_alone))
    assert not any(np.asarray(x[ignored], np.float32).any() for x in rows)


@pytest.mark.parametrize("hidden", [F32, BF16])
def test_values_that_are_not_finite(hidden):
    """As tests/pallas_kernels/mosaic/test_float32.py has it, by wgmma."""
    case = Case("not finite", (12,), 64, 300, options={"return_entropy": False})
    problem = make(case, F32, F32)
    weight = problem.weight.at[7, 3].set(-jnp.inf).at[100, 5].set(3.4e38)
    of_hidden = problem.hidden.at[:, 3].set(jnp.abs(problem.hidden[:, 3]) + 0.1).at[:, 5].set(0)
    of_hidden = of_hidden.at[1, 8].set(jnp.nan).at[2, 9].set(jnp.inf).at[3, 3].set(-1.0).at[4, 5].set(-1e-36)
    ids = problem.target_ids.at[0].set(7).at[5].set(100)
    problem = problem._replace(hidden=of_hidden.astype(hidden), weight=weight, target_ids=ids)
    found, expected = (problem.call(case, name) for name in ("mosaic", "reference"))
    assert found.logp[0] == -jnp.inf and np.isfinite(found.logp[4:]).all() and not np.isfinite(found.logp[1:4]).any()
    finite = np.isfinite(expected.logp)
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert_within_contract(x[finite], y[finite], "linear_logp_wgmma", F32, "forward")


@pytest.mark.parametrize("layout", ["vd", "dv"])
@every_pair
def test_memory(hidden, weight, layout):
    """A gradient holds its budget, dH and the partials; never a head in parts, which would take 256 MiB here."""
    n, dim, vocab, budget = 2048, 1024, 65536, 2**27

    def loss(h: Any, w: Any, t: Any) -> Any:
        options: dict[str, Any] = {"weight_layout": layout, "memory_budget": budget, "implementation": "mosaic"}
        return linear_logp(h, w, t, **options).sum()

    shapes = ((n, dim), hidden), ((vocab, dim) if layout == "vd" else (dim, vocab), weight), ((n,), jnp.int32)
    program = jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*x) for x in shapes)).compile()
    partials, sums = 4 * 3 * n * vocab // 128, 4 * n * dim
    assert program.memory_analysis().temp_size_in_bytes <= budget + partials + 3 * sums + 2**23


def test_the_choice():
    spec = jax.ShapeDtypeStruct
    for pair in DTYPES:
        operands = spec((4, 64), pair[0]), spec((1000, 64), pair[1]), spec((4,), jnp.int32)
        assert rlk_jax.explain("linear_logp", *operands).choice == "mosaic"
        low_rank = spec((8, 64), F32), spec((1000, 8), F32), 1.0
        decision = rlk_jax.explain("linear_logp", *operands, low_rank=low_rank)
        assert decision.choice == "xla"
        assert decision.reasons["mosaic"] == ["takes a low_rank term beside bfloat16 or float16 operands only"]


def test_a_float32_copy_of_16_bit_operands_is_as_accurate():
    """bfloat16 operands that are upcast have a low part of 0, and the three terms are one."""
    case = dataclasses.replace(BITS, lead=(100,))
    problem = make(case, BF16, BF16)
    upcast = problem._replace(hidden=problem.hidden.astype(F32), weight=problem.weight.astype(F32))
    gold = helpers.gold(case, problem)
    for value, expected in zip(upcast.call(case, "mosaic"), gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp_wgmma", F32, "forward")
