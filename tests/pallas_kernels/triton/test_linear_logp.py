"""linear_logp's Triton kernels in Triton's interpreter, against float64 NumPy. Bits are tested on GPUs (tests/gpu)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton import gemm as gemm_module
from pallas_kernels.triton import linear_logp as kernels
from rlk_jax import linear_logp, vocab_parallel
from tests.pallas_kernels.triton import interpreted
from tests.support import helpers, low_rank, shards
from tests.support.allowed import allowed_of, ids_of, mask_of
from tests.support.helpers import Case, assert_error, assert_same_bits, assert_within_contract
from tests.support.rankings import BOTH, assert_exact, assert_ranks_gold, of_integers

PADDED = Case("padded vocabulary", (40,), 64, 320, bias=True, options={"global_vocab_size": 257})
PADDED_SOFTCAP = dataclasses.replace(
    PADDED, name="padded vocabulary, large softcap", options=PADDED.options | {"logit_softcap": 1e4}
)
CASES = (
    Case("plain", (40,), 128, 300),
    Case("one row", (1,), 64, 5),
    Case("two row tiles, bias, odd", (140,), 72, 301, bias=True),
    Case("softcap", (40,), 64, 1000, options={"logit_softcap": 2.0}, temperature="per token"),
    Case("dv", (40,), 72, 512, options={"weight_layout": "dv"}),
    Case("dv, odd", (40,), 64, 301, bias=True, options={"weight_layout": "dv"}),
    PADDED,
    PADDED_SOFTCAP,
    Case("slices", (40,), 136, 1500, options={"memory_budget": 1}),
)


@pytest.fixture(autouse=True, scope="module")
def on_this_cpu():
    with interpreted.runs("linear_logp", kernels, gemm_module):
        yield


@pytest.mark.parametrize(
    "case",
    # In make test "dv, odd", "two row tiles, bias, odd", "slices" and `PADDED_SOFTCAP` have all that these four have.
    [pytest.param(x, marks=pytest.mark.full if x in (PADDED, CASES[0], CASES[1], CASES[4]) else ()) for x in CASES],
    ids=str,
)
def test_against_float64(case):
    """Values and gradients are compared in float16, since the interpreter truncates to bfloat16 where a GPU rounds.

    Padding of the head holds NaN.
    """
    problem = helpers.make(case, jnp.float16)
    gold = helpers.gold(case, problem)
    values, gradients = helpers.with_padding(case, problem).values_and_gradients(case, "triton")
    for value, expected in zip(values, gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp", jnp.float16, "forward")
    for gradient, expected in zip(gradients, gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp", jnp.float16, "gradient")


def test_extreme_biases():
    """Biases mask columns with −∞, whole chunks of them too, and one is 100 where rows only fill a tile."""
    case = Case("biases", (40,), 64, 1500, bias=True)
    problem = helpers.make(case, jnp.float16)
    ids = jnp.minimum(problem.target_ids.at[:20].set(jnp.arange(20)), 999)
    bias = problem.bias.at[1000:].set(-jnp.inf).at[300:600].set(-60000).at[3].set(100)
    problem = problem._replace(bias=bias, target_ids=jnp.where((ids < 300) | (ids >= 600), ids, 0))
    gold = helpers.gold(case, problem)
    (*values, d_hidden), d_head = helpers.outputs(case, problem, "triton")
    for value, expected in zip(values, gold.values, strict=True):
        assert_error(np.abs(value - expected).max() / 100, "linear_logp_peaked", jnp.float16, "forward")
    for gradient, expected in zip((d_hidden, *d_head), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_peaked", jnp.float16, "gradient")


@pytest.mark.parametrize(("softcap", "temperature"), [pytest.param(1e4, 1.0, marks=pytest.mark.full), (None, 1e-9)])
def test_large_softcaps_and_low_temperatures(softcap, temperature):
    """In make test, test_against_float64 (here) has such a softcap in `PADDED_SOFTCAP`."""
    case = Case("extreme", (40,), 64, 300, options={"logit_softcap": softcap}, temperature=temperature)
    problem = helpers.make(case, jnp.float16)
    gold = helpers.gold(case, problem)
    for value, expected in zip(problem.call(case, "triton"), gold.values, strict=True):
        if expected.any():
            assert_within_contract(value, expected, "linear_logp", jnp.float16, "forward")
    if temperature == 1:
        for gradient, expected in zip(problem.gradients(case, "triton"), gold.gradients, strict=True):
            assert_within_contract(gradient, expected, "linear_logp", jnp.float16, "gradient")


@pytest.mark.full
def test_garbage_in_padding_rows():
    """More than one slice meets the padding. In make test, test_against_float64 (here) has NaN in that of one slice."""
    case = Case("padding", (40,), 64, 2112, bias=True, options={"global_vocab_size": 2049, "memory_budget": 60000})
    problem = helpers.make(case, jnp.float16)
    gold = helpers.gold(case, problem)
    garbage = helpers.with_padding(case, problem)
    for gradient, expected in zip(garbage.gradients(case, "triton"), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp", jnp.float16, "gradient")


def test_ignored_rows_hold_anything():
    case = Case("ignored", (150,), 64, 300, options={"ignore_index": -1})
    problem = helpers.make(case, jnp.float16)
    ignored = np.random.default_rng(0).permutation(150)[:100]
    problem = problem._replace(
        hidden=problem.hidden.at[ignored].set(jnp.nan), target_ids=problem.target_ids.at[ignored].set(-1)
    )
    kept = np.setdiff1d(np.arange(150), ignored)
    gold = helpers.gold(dataclasses.replace(case, lead=(50,)), helpers.rows_of(problem, kept))
    rows, (d_weight,) = helpers.outputs(case, problem, "triton")
    for x, expected in zip(rows, (*gold.values, gold.gradients[0]), strict=True):
        kind = "forward" if x.ndim == 1 else "gradient"
        assert_within_contract(x[kept], expected, "linear_logp", jnp.float16, kind)
        assert not np.asarray(x[ignored]).astype(np.float32).any()
    assert_within_contract(d_weight, gold.gradients[1], "linear_logp", jnp.float16, "gradient")


MASKED = (
    Case("masked, bias", (20,), 64, 301, bias=True, temperature="per token"),
    Case("masked, dv", (20,), 72, 320, options={"global_vocab_size": 301, "weight_layout": "dv", "logit_softcap": 2.0}),
)


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_allowed_tokens_against_float64(case):
    """Groups of 40 columns begin inside a word. Rows that allow their target alone have groups of none.

    Biases of columns that no row allows are NaN and infinite, and reach no gradient.
    """
    problem = helpers.make(case, jnp.float16)
    allowed, given = allowed_of(case, problem), helpers.with_padding(case, problem)
    if case.bias:
        bad = np.setdiff1d(np.arange(0, case.vocab, 3), np.asarray(problem.target_ids))
        allowed[:, bad] = False
        broken = jnp.resize(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf], jnp.float16), len(bad))
        given = given._replace(bias=given.bias.at[bad].set(broken))
    gold = helpers.gold(helpers.with_options(case, allowed=allowed), problem)
    values, gradients = given.values_and_gradients(case, "triton", allowed_mask=mask_of(allowed))
    for value, expected in zip(values, gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp", jnp.float16, "forward")
    for gradient, expected in zip(gradients, gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp", jnp.float16, "gradient")
    assert not any(np.asarray(x)[~allowed.any(axis=0)].any() for x in gradients[1:])


def test_a_mask_that_allows_everything_gives_the_bits_of_no_mask():
    case = Case("everything", (20,), 64, 301, bias=True, options={"logit_softcap": 2.0})
    problem = helpers.make(case, jnp.float16)
    every = jnp.full((20, 10), -1, jnp.int32)
    found, expected = (problem.values_and_gradients(case, "triton", **x) for x in ({"allowed_mask": every}, {}))
    assert_same_bits(found, expected)


SMOOTHED = (
    Case(
        *("smoothed, softcap", (40,), 64, 320),
        bias=True,
        temperature="per token",
        options={"global_vocab_size": 301, "logit_softcap": 2.0, "label_smoothing": 0.1, "memory_budget": 1},
    ),
    Case("smoothed, dv, odd", (40,), 72, 301, options={"weight_layout": "dv", "label_smoothing": 0.3}),
)


# Layouts change no part of what is smoothed. In make test, test_against_float64 (here) has heads of the other layout.
@pytest.mark.parametrize("case", [SMOOTHED[0], pytest.param(SMOOTHED[1], marks=pytest.mark.full)], ids=str)
def test_smoothed_targets_against_float64(case):
    case, problem = helpers.without_entropy(case, helpers.make(case, jnp.float16))
    gold = helpers.gold(case, problem)
    values, gradients = helpers.with_padding(case, problem).values_and_gradients(case, "triton")
    for value, expected in zip(values[:2], gold.values[:2], strict=True):
        assert_within_contract(value, expected, "linear_logp", jnp.float16, "forward")
    for gradient, expected in zip(gradients, gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp", jnp.float16, "gradient")


@pytest.mark.full
def test_smoothed_targets_of_two_shards():
    """In make test, test_shards_of_a_padded_head (here) has shards, and another test smoothed targets of one device."""
    shards.check_two("triton", 512, "vd", jnp.float16, "linear_logp", has_bits=False, label_smoothing=0.1)


RANKED = dataclasses.replace(
    MASKED[0], name="ranked", options={"logit_softcap": 2.0, "ignore_index": -1, "memory_budget": 1}
)


def test_the_most_probable_tokens_against_float64():
    """Some rows allow fewer than k tokens. Log-probs have the bits of those tokens as targets."""
    problem = helpers.make(RANKED, jnp.float16)
    ignored, allowed = np.arange(20) % 5 == 2, allowed_of(RANKED, problem)
    given = problem._replace(target_ids=jnp.where(ignored, -1, problem.target_ids))
    mask = {"allowed_mask": mask_of(allowed), "return_target_rank": True}
    found = given.call(RANKED, "triton", **mask, return_top_k=10)
    logits = helpers.gold(helpers.with_options(RANKED, allowed=allowed), problem).logits
    kept = jax.tree.map(lambda x: x[~ignored], found)
    assert_ranks_gold(kept, logits[~ignored], problem.target_ids[~ignored], jnp.float16)
    assert (np.asarray(found.top_ids)[ignored] == -1).all() and not np.asarray(found.top_logps)[ignored].any()
    best = problem._replace(target_ids=found.top_ids[:, 0])
    again = best.call(RANKED, "triton", **mask, return_top_k=10)
    assert_same_bits(again.logp, found.top_logps[:, 0])
    assert (np.asarray(again.target_rank)[~ignored] == 0).all()


def test_equal_logits_stand_in_the_order_of_their_ids():
    problem, logits = of_integers(20, 64, 150)
    problem = problem._replace(hidden=problem.hidden.astype(jnp.float16), weight=problem.weight.astype(jnp.float16))
    found = problem.call(Case("integers", (20,), 64, 150), "triton", return_top_k=100, return_target_rank=True)
    assert_exact(found, logits, problem.target_ids)


@pytest.mark.full
def test_equal_logits_of_a_head_on_two_devices():
    """In make test, test_bare_calls_over_a_mesh (tests/ops/linear_logp/test_top_k.py) merges shards by this code."""
    problem, logits = of_integers(20, 64, 512)
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    operands = (x.astype(jnp.float16) for x in (problem.hidden, problem.weight))
    how = {"mesh": mesh, "vocab_axis": "tp", "implementation": "triton"}
    assert_exact(vocab_parallel.linear_logp(*operands, problem.target_ids, **how, **BOTH), logits, problem.target_ids)


def test_ignored_rows_may_allow_nothing():
    """Rows that count are packed in front, and what they allow with them. A backward packs both by the same code."""
    case = Case("ignored, masked", (30,), 64, 70, options={"ignore_index": -1})
    problem = helpers.make(case, jnp.float16)
    ignored = np.random.default_rng(0).permutation(30)[:20]
    kept = np.setdiff1d(np.arange(30), ignored)
    allowed = allowed_of(case, problem)
    few = dataclasses.replace(case, lead=(10,), options={"allowed": allowed[kept]})
    gold = helpers.gold(few, helpers.rows_of(problem, kept))
    allowed[ignored] = False
    problem = problem._replace(target_ids=problem.target_ids.at[ignored].set(-1))
    for x, expected in zip(problem.call(case, "triton", allowed_ids=ids_of(allowed)), gold.values, strict=True):
        assert_within_contract(x[kept], expected, "linear_logp", jnp.float16, "forward")
        assert not np.asarray(x)[ignored].any()


def test_a_bad_target_is_nan_and_nothing_else_is():
    case = Case("bad target", (40,), 64, 300)
    problem = helpers.make(case, jnp.float16)
    rows, _ = helpers.outputs(case, problem, "triton", validate=False)
    bad = problem._replace(target_ids=problem.target_ids.at[7].set(300))
    bad_rows, (d_weight,) = helpers.outputs(case, bad, "triton", validate=False)
    for x, good in zip(bad_rows, rows, strict=True):
        assert np.isnan(np.asarray(x[7]).astype(np.float32)).all()
        assert_same_bits(jnp.delete(x, 7, 0), jnp.delete(good, 7, 0))
    assert np.isnan(np.asarray(d_weight).astype(np.float32)).all()


def test_no_row_at_all():
    case = Case("nothing", (0,), 64, 300, bias=True)
    rows, head = helpers.outputs(case, helpers.make(case, jnp.float16), "triton")
    assert [x.shape for x in rows] == [(0,), (0,), (0,), (0, 64)]
    assert all(not np.asarray(x).astype(np.float32).any() for x in jax.tree.leaves(head))


@pytest.mark.parametrize(("operand", "kernel"), [(0, "store_weight_gradient"), (1, "add_hidden_gradient")])
def test_frozen_sides_launch_nothing(monkeypatch, operand, kernel):
    monkeypatch.setattr(kernels, kernel, lambda *_: pytest.fail(f"{kernel} was launched"))
    p = helpers.make(Case("frozen", (10,), 64, 300 + operand), jnp.float16)
    call = lambda *x: linear_logp(*x, p.target_ids, implementation="triton").sum()  # noqa: E731
    jax.eval_shape(jax.grad(call, operand), p.hidden, p.weight)


# On group edges the kernels see another number of groups and no other code. In make test, the case off the edges runs
# that code, and test_against_float64 (here) has both layouts.
@pytest.mark.parametrize(
    ("columns", "layout"),
    [
        pytest.param(512, "vd", id="on group edges-vd", marks=pytest.mark.full),
        pytest.param(640, "dv", id="off them-dv"),
        pytest.param(512, "dv", id="on group edges-dv", marks=pytest.mark.full),
        pytest.param(640, "vd", id="off them-vd", marks=pytest.mark.full),
    ],
)
def test_shards_of_a_padded_head(columns, layout):
    shards.check_two("triton", columns, layout, jnp.float16, "linear_logp", has_bits=False)


LOW_RANK = (
    low_rank.Case(40, 72, 301, 5, {"memory_budget": 1}),
    low_rank.Case(40, 64, 520, 72, {"weight_layout": "dv", "global_vocab_size": 499}, own_inputs=True),
)


@pytest.mark.parametrize("case", LOW_RANK, ids=str)
def test_a_low_rank_term_against_float64(case):
    """Padding of the head and of B holds NaN."""
    x = low_rank.make(case, jnp.float16)
    padding = slice(case.options.get("global_vocab_size", case.vocab), None)
    bad = x._replace(weight=x.weight.at[padding].set(jnp.nan), b=x.b.at[padding].set(jnp.nan))
    low_rank.assert_is_definition(case, x, low_rank.outputs(case, bad, "triton"))


def test_a_low_rank_term_of_a_head_on_two_devices():
    case = low_rank.Case(24, 40, 512, 5)
    x = low_rank.make(case, jnp.float16)
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    op = functools.partial(vocab_parallel.linear_logp, mesh=mesh, vocab_axis="tp", reduction="canonical")
    low_rank.assert_is_definition(case, x, low_rank.outputs(case, x, "triton", op))


def test_a_low_rank_term_with_b_of_zeros_gives_the_bits_of_no_term():
    case = low_rank.Case(10, 64, 130, 8)
    x = low_rank.make(case, jnp.float16)
    logp, gradients = low_rank.outputs(case, x._replace(b=jnp.zeros_like(x.b)), "triton")

    def loss(hidden, weight, bias):
        found = linear_logp(hidden, weight, x.target_ids, bias, implementation="triton")
        return jnp.vdot(found, x.upstream), found

    (_, expected), of_operands = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x.hidden, x.weight, x.bias)
    assert_same_bits(logp, expected)
    assert_same_bits([gradients[name] for name in ("hidden", "weight", "bias")], list(of_operands))
    assert not np.asarray(gradients["a"]).any() and np.asarray(gradients["b"]).any()


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize(("m", "k", "n", "has_start"), [(1, 1, 1, True), (70, 150, 130, False), (65, 64, 5, True)])
def test_products_of_any_layout(a_transposed, b_transposed, m, k, n, has_start):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=shape), jnp.float16) for shape in ((m, k), (k, n)))
    start = jnp.asarray(rng.normal(size=(m, n)), jnp.float32) if has_start else None
    given = (a.T if a_transposed else a, b.T if b_transposed else b, start)
    found = gemm_module.gemm(*given, a_transposed=a_transposed, b_transposed=b_transposed, out_dtype=jnp.float32)
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    gold = expected + (0 if start is None else start)
    assert_within_contract(found, gold, "det_gemm_float32", jnp.float16, "forward")
