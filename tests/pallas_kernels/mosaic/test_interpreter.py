"""linear_logp's Mosaic kernels in Pallas' interpreter, with race detection, at tiny odd shapes, against float64."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.mosaic import head_kernels, hidden_gradient, partials
from pallas_kernels.mosaic.gemm import gemm
from rlk_jax import dispatch, linear_logp
from rlk_jax.ops.linear_logp import hopper
from tests.support import helpers, low_rank, policy_losses, shards
from tests.support.helpers import Case, assert_error, assert_same_bits, assert_within_contract
from tests.support.interpreter import MACHINE
from tests.support.policy_losses import Batch

SOFTCAP, DV, SMOOTHING = {"logit_softcap": 2.0}, {"weight_layout": "dv"}, {"label_smoothing": 0.1}
TWO_ROW_TILES = Case("two row tiles, softcap, dv", (140,), 72, 512, options=SOFTCAP | DV, temperature="per token")
"""A cluster of two blocks, chunks without padding."""
PADDED = Case("padded vocabulary", (40,), 64, 320, bias=True, options={"global_vocab_size": 257})
"""One chunk is short and one is empty."""
PADDED_SLICES = dataclasses.replace(
    PADDED,
    name="padded, slices, softcap, smoothed",
    options=PADDED.options | {"memory_budget": 100_000, "logit_softcap": 1e4} | SMOOTHING,
)
"""Softcaps above 64 take a branch of their own."""
CASES = (
    Case("plain", (40,), 128, 300),
    Case("one row", (1,), 64, 5),
    Case("two blocks, bias, odd", (70,), 144, 301, bias=True),
    Case("two row tiles, softcap", (140,), 64, 1000, options=SOFTCAP, temperature="per token"),
    Case("dv", (40,), 72, 512, options=DV),
    Case("dv, odd", (40,), 64, 300, bias=True, options=DV),
    PADDED,
    Case("slices", (40,), 64, 3000, options={"memory_budget": 2**17}),
    Case("more stages than steps", (70,), 512, 100, bias=True),
    # The norm of db needs many rows: each of its large elements is the gradient of one target, rounded twice.
    Case("smoothed, softcap", (120,), 64, 300, bias=True, options=SOFTCAP | SMOOTHING, temperature="per token"),
    dataclasses.replace(PADDED, name="smoothed", options=PADDED.options | SMOOTHING),
)


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    """Make `mosaic` run in the interpreter, on `MACHINE`."""
    functions = hopper.mosaic(MACHINE)
    before = dispatch.TABLE["linear_logp"]
    dispatch.TABLE["linear_logp"] = (dispatch.Implementation("mosaic", functions), *before[1:])
    with pytest.MonkeyPatch.context() as patch:
        # On a GPU new memory may hold anything, while the interpreter's would hold zeros: here it holds NaN.
        patch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
        yield
    dispatch.TABLE["linear_logp"] = before


def test_a_missing_wait_is_seen(monkeypatch, capsys):
    """The wait is missing in the store that every kernel with a product shares, in one that has little else."""
    wait = plgpu.wait_smem_to_gmem
    at_the_end = lambda n, wait_read_only=False: None if wait_read_only else wait(n)  # noqa: E731
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", at_the_end)
    options = {"a_transposed": False, "b_transposed": False, "out_dtype": jnp.float32, "machine": MACHINE}
    product = jax.jit(functools.partial(gemm, start=None, **options))
    raised = ""
    try:
        jax.block_until_ready(product(jnp.ones((70, 64), jnp.bfloat16), jnp.ones((64, 256), jnp.bfloat16)))
    except jax.errors.JaxRuntimeError as error:
        raised = str(error)  # jax 0.12 raises what 0.11 prints
    assert "RACE DETECTED" in raised + capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (TWO_ROW_TILES, jnp.bfloat16),
        # float16 differs in the scaling of gradients alone: run where there is also a bias.
        (PADDED_SLICES, jnp.float16),
        *(pytest.param(case, jnp.bfloat16, marks=pytest.mark.full) for case in CASES),
        pytest.param(PADDED, jnp.float16, marks=pytest.mark.full),
    ],
    ids=lambda x: str(x) if isinstance(x, Case) else np.dtype(x).name,
)
def test_against_float64(case, dtype):
    """The cases in make test have the kernels and options of all; `CASES` have them one by one and at other edges.

    Padding of the head holds NaN.
    """
    problem = helpers.make(case, dtype)
    gold = helpers.gold(case, problem)
    values, gradients = helpers.with_padding(case, problem).values_and_gradients(case, "mosaic")
    for value, expected in zip(values, gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp_wgmma", dtype, "forward")
    for gradient, expected in zip(gradients, gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_wgmma", dtype, "gradient")


@pytest.mark.parametrize(
    "case",
    [
        Case("few rows", (3,), 128, 1000),
        pytest.param(Case("few rows, smoothed", (3,), 128, 1000, options=SMOOTHING), marks=pytest.mark.full),
        pytest.param(Case("few rows, bias", (3,), 128, 1000, bias=True, options=SOFTCAP), marks=pytest.mark.full),
        pytest.param(Case("few rows, dv", (12,), 72, 512, options=DV), marks=pytest.mark.full),
        pytest.param(dataclasses.replace(PADDED, lead=(9,)), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_values_of_few_rows_by_way_of_products(case, monkeypatch):
    """A forward alone forms the products of few rows before their softmax. Padding of the head holds NaN.

    The case in make test has chunks of several widths; others have a bias and a softcap, another layout, or padding.
    """
    monkeypatch.setattr(partials, "multiply", lambda *_: pytest.fail("a tile of a whole chunk is too wide"))
    problem = helpers.make(case, jnp.bfloat16)
    values = helpers.with_padding(case, problem).call(case, "mosaic")
    for value, expected in zip(values, helpers.gold(case, problem).values, strict=True):
        assert_within_contract(value, expected, "linear_logp_wgmma", jnp.bfloat16, "forward")


@pytest.mark.full
def test_extreme_biases():
    """One bias masks a whole chunk with −1e30, one is 100 where rows only fill a tile, and one makes a target −∞.

    In make test the padded vocabulary of `test_against_float64` has a bias, and tests/ops/linear_logp extreme ones.
    """
    case = Case("biases", (40,), 64, 2304, bias=True)
    problem = helpers.make(case, jnp.bfloat16)
    ids = problem.target_ids.at[:20].set(jnp.arange(20))
    bias = problem.bias.at[1500:].set(-1e30).at[3].set(100).at[ids[5]].set(-jnp.inf)
    problem = problem._replace(bias=bias, target_ids=jnp.minimum(ids, 1499))
    gold = helpers.gold(case, problem)
    values, gradients = problem.values_and_gradients(case, "mosaic")
    for actual, expected in zip((*values, *gradients), (*gold.values, *gold.gradients), strict=True):
        finite = np.isfinite(np.asarray(expected, np.float32))
        assert (np.isfinite(np.asarray(actual, np.float32)) == finite).all()
        is_value = actual.dtype == jnp.float32
        actual, expected = (np.where(finite, np.asarray(x, np.float32), 0) for x in (actual, expected))
        if is_value:
            assert_error(np.abs(actual - expected).max() / 100, "linear_logp_peaked_wgmma", jnp.bfloat16, "forward")
        else:
            assert_within_contract(actual, expected, "linear_logp_peaked_wgmma", jnp.bfloat16, "gradient")


@pytest.mark.full
@pytest.mark.parametrize("budget", [None, 60000])
def test_garbage_in_padding_rows(budget):
    """The last chunk is empty and the one before it is short, so that more than one slice meets the padding.

    In make test, test_against_float64 (here) has a head whose padding holds NaN.
    """
    case = Case("padding", (40,), 64, 2112, options={"global_vocab_size": 2049, "memory_budget": budget})
    problem = helpers.make(case, jnp.bfloat16)
    gold = helpers.gold(case, problem)
    garbage = helpers.with_padding(case, problem)
    for gradient, expected in zip(garbage.gradients(case, "mosaic"), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_wgmma", jnp.bfloat16, "gradient")


@pytest.mark.full
@pytest.mark.parametrize(("softcap", "temperature"), [(1e4, 1.0), (None, 1e-9)])
def test_large_softcaps_and_low_temperatures(softcap, temperature):
    """In make test `PADDED_SLICES` has such a softcap, and `TWO_ROW_TILES` has temperatures, though not so low."""
    case = Case("extreme", (40,), 64, 300, options={"logit_softcap": softcap}, temperature=temperature)
    problem = helpers.make(case, jnp.bfloat16)
    gold = helpers.gold(case, problem)
    for value, expected in zip(problem.call(case, "mosaic"), gold.values, strict=True):
        if expected.any():
            assert_within_contract(value, expected, "linear_logp_wgmma", jnp.bfloat16, "forward")
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in problem.gradients(case, "mosaic"))


@pytest.mark.parametrize(("operand", "kernel"), [(0, "store_weight_gradient"), (1, "add_hidden_gradient")])
def test_frozen_sides_launch_nothing(monkeypatch, operand, kernel):
    monkeypatch.setattr(head_kernels, kernel, lambda *_: pytest.fail(f"{kernel} was launched"))
    case = Case("frozen", (10,), 64, 300 + operand)
    p = helpers.make(case, jnp.bfloat16)
    call = lambda *x: linear_logp(*x, p.target_ids, implementation="mosaic").sum()  # noqa: E731
    jax.eval_shape(jax.grad(call, operand), p.hidden, p.weight)
    monkeypatch.undo()
    jax.eval_shape(jax.grad(call, 1 - operand), p.hidden, p.weight)


@pytest.mark.parametrize("budget", [400_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_how_groups_are_summed_changes_no_bit(budget):
    """Sums of dH of all groups at once, and of one after the other. Slices that end inside groups run in full alone.

    In make test the slices of `PADDED_SLICES` end inside groups.
    """
    case = Case("groups", (70,), 64, 2100)
    case, problem = helpers.without_entropy(case, helpers.make(case, jnp.bfloat16))
    at_once, one_by_one = (problem.gradients(case, "mosaic", memory_budget=b)[0] for b in (None, budget))
    assert_same_bits(one_by_one, at_once)


class Semaphores:
    """Stands for an array of semaphores, and for each of them."""

    @property
    def at(self):
        return self

    def __getitem__(self, place):
        return self


def test_groups_in_one_launch(monkeypatch):
    """On a GPU one launch adds all groups of a slice to the total of dH, and tiles wait for each other by semaphores.

    The interpreter has none, and runs clusters one after the other in the order in which a GPU begins them. So nothing
    waits here: bits would differ if a tile came before the one that it has to wait for. Slices end inside groups.
    """
    case = Case("groups in one launch", (70,), 64, 2100, options={"memory_budget": 100_000})
    case, problem = helpers.without_entropy(case, helpers.make(case, jnp.bfloat16))
    one_by_one, waits = problem.gradients(case, "mosaic")[0], []
    machine = Machine(2, plgpu.InterpretGPUParams(detect_races=False))
    functions = dispatch.Implementation("mosaic", hopper.mosaic(machine))
    monkeypatch.setitem(dispatch.TABLE, "linear_logp", (functions, *dispatch.TABLE["linear_logp"][1:]))
    for module in (head_kernels, hidden_gradient):
        monkeypatch.setattr(module, "folds_groups", lambda machine: True)
    monkeypatch.setattr(pl, "get_global", lambda _: Semaphores())
    monkeypatch.setattr(plgpu, "semaphore_wait", lambda *x, **options: waits.append(x))
    monkeypatch.setattr(plgpu, "semaphore_signal", lambda *x, **options: None)
    jax.clear_caches()
    at_once = problem.gradients(case, "mosaic")[0]
    jax.clear_caches()
    assert_same_bits(at_once, one_by_one)
    assert waits


@pytest.mark.full
def test_ignored_rows_hold_anything():
    """In make test `test_kept_exponentials` has ignored rows that hold NaN, and checks their gradients."""
    case = Case("ignored", (150,), 64, 300, options={"ignore_index": -1})
    problem = helpers.make(case, jnp.bfloat16)
    ignored = np.random.default_rng(0).permutation(150)[:100]
    problem = problem._replace(
        hidden=problem.hidden.at[ignored].set(jnp.nan), target_ids=problem.target_ids.at[ignored].set(-1)
    )
    kept = np.setdiff1d(np.arange(150), ignored)
    part = helpers.rows_of(problem, kept)
    gold = helpers.gold(dataclasses.replace(case, lead=(50,)), part)
    values, (d_hidden, d_weight) = problem.values_and_gradients(case, "mosaic")
    for x, expected in zip((*values, d_hidden), (*gold.values, gold.gradients[0]), strict=True):
        kind = "forward" if x.ndim == 1 else "gradient"
        assert_within_contract(x[kept], expected, "linear_logp_wgmma", jnp.bfloat16, kind)
        assert not np.asarray(x[ignored]).astype(np.float32).any()
    assert_within_contract(d_weight, gold.gradients[1], "linear_logp_wgmma", jnp.bfloat16, "gradient")


@pytest.mark.parametrize(
    ("vocab_size", "budget", "kernels"),
    [
        pytest.param(600, None, {"dlogits_from_kept_exponentials"}, marks=pytest.mark.full, id="all are kept"),
        (600, 400_000, {"dlogits_from_kept_exponentials", "dlogits"}),
        pytest.param(601, 600_000, {"dlogits_from_kept_exponentials", "dlogits"}, marks=pytest.mark.full),
    ],
)
def test_kept_exponentials(seen, vocab_size, budget, kernels):
    """Gradients of smoothed targets from kept exponentials are right where rows are ignored and others take their
    places, where only the backward leaves rows out, where gradients take the exponentials' memory, and where the head
    is copied.

    A budget that keeps all of them takes no kernel that one of the others does not take. In make test,
    test_against_float64 (here) has copies of the head; that gradients from kept exponentials go to memory of their own
    where the head is copied runs in full alone, and the script sm90 compiles that kernel.
    """
    options = {"ignore_index": -1, "memory_budget": budget, **SMOOTHING}
    case = Case("kept", (80,), 64, vocab_size, bias=True, options=options)
    case, problem = helpers.without_entropy(case, helpers.make(case, jnp.bfloat16))
    problem = problem._replace(
        hidden=problem.hidden.at[::7].set(jnp.nan),
        target_ids=problem.target_ids.at[::7].set(-1),
        upstream=tuple(g.at[::3].set(0) for g in problem.upstream),
    )
    counts = np.arange(80) % 7 != 0
    gold = helpers.gold(dataclasses.replace(case, lead=(counts.sum(),)), helpers.rows_of(problem, counts))
    d_hidden, *d_head = jax.block_until_ready(problem.gradients(case, "mosaic"))
    assert set(seen) == kernels
    assert not np.asarray(d_hidden[~counts]).astype(np.float32).any()
    for gradient, expected in zip((d_hidden[counts], *d_head), gold.gradients, strict=True):
        assert_within_contract(gradient, expected, "linear_logp_wgmma", jnp.bfloat16, "gradient")


@helpers.cover(
    "dtype, softcap, smoothing, sizes",
    [
        (jnp.float16, 2.0, 0.0, (1.0, 0.02)),
        (jnp.bfloat16, 2.0, 0.0, (1.0, 0.02)),
        (jnp.float16, 0.1, 0.0, (8.0,)),
        (jnp.bfloat16, 0.1, 0.0, (8.0,)),
        (jnp.bfloat16, 1e4, 0.0, (1.0,)),
        (jnp.bfloat16, None, 0.0, (1.0,)),
        (jnp.float16, None, 0.0, (8.0, 0.02)),
        (jnp.bfloat16, None, 0.1, (1.0,)),
    ],
    lambda dtype, softcap, smoothing, sizes: dtype == jnp.float16 and softcap == 2.0,
)
def test_kept_and_recomputed_gradients_have_the_same_bits(seen, dtype, softcap, smoothing, sizes):
    """Logits of some sizes are flat, and of others many times the softcap.

    The sums of dH begin anew with each slice in the interpreter, so that the bits of the other gradients are compared,
    which depend on every gradient of a logit too. In make test one case has both float16's scale and a softcap's
    product.
    """
    options = {"logit_softcap": softcap, "label_smoothing": smoothing}
    case = Case("kept or not", (80,), 64, 600, bias=True, options=options)
    case, drawn = helpers.without_entropy(case, helpers.make(case, dtype))
    for size in sizes:
        problem = drawn._replace(hidden=drawn.hidden * size, bias=drawn.bias * size)
        kept, recomputed = (problem.gradients(case, "mosaic", memory_budget=budget) for budget in (None, 80_000))
        assert_same_bits(kept[1:], recomputed[1:])
        for gradient, expected in zip(kept, helpers.gold(case, problem).gradients, strict=True):
            assert_within_contract(gradient, expected, "linear_logp_wgmma", dtype, "gradient")
    assert set(seen) == {"dlogits_from_kept_exponentials", "dlogits"}


def test_kernels_are_traced_under_x64_too(seen):
    case = Case("x64", (80,), 64, 600, bias=True, options={"memory_budget": 402_000})
    case, problem = helpers.without_entropy(case, helpers.make(case, jnp.bfloat16))

    def loss(hidden, weight):
        return helpers.weighted(problem._replace(hidden=hidden, weight=weight).call(case, "mosaic"), problem.upstream)

    with jax.enable_x64(True):
        jax.jit(jax.grad(loss, (0, 1))).trace(problem.hidden, problem.weight)
    assert set(seen) == {"dlogits_from_kept_exponentials", "dlogits"}


@pytest.mark.full
def test_a_loss_in_one_call_keeps_exponentials(seen):
    """One call keeps what its budget holds, also where an entropy is only reported, and has the bits of two calls.

    In make test `test_kept_exponentials` compares gradients with float64 where some exponentials are kept.
    """
    b = policy_losses.batch((2, 40), 64, 600, jnp.bfloat16)

    def lowered(loss, **options):
        """The lowered program, and the names of the kernels that compute gradients of logits in it."""
        seen.clear()
        return policy_losses.lowered(loss, b, implementation="mosaic", **options), set(seen)

    one, kernels = lowered(Batch.loss)
    assert kernels == {"dlogits_from_kept_exponentials"}
    two, kernels = lowered(Batch.in_two_calls, memory_budget=400_000)
    # The budget is another one because jax would not trace the same call again, and nothing would be seen.
    assert kernels == lowered(Batch.loss, memory_budget=401_000)[1] == {"dlogits_from_kept_exponentials", "dlogits"}
    assert lowered(Batch.loss, return_entropy=True)[1] == {"dlogits_from_kept_exponentials"}
    found, expected = (program.compile()(*operands) for program, operands in (one, two))
    assert_same_bits(found, expected)
    assert np.asarray(found[1][0], np.float32).any()


@pytest.mark.full
def test_what_is_kept_serves_more_than_one_backward():
    """Two backwards of one forward agree, although gradients take the memory of what the forward kept.

    No test in make test does this: it is JAX that copies what is overwritten and still needed.
    """
    case = Case("kept", (70,), 64, 296)
    case, problem = helpers.without_entropy(case, helpers.make(case, jnp.bfloat16))
    _, pull_back = jax.vjp(lambda h: problem._replace(hidden=h).call(case, "mosaic").logp.sum(), problem.hidden)
    first, second = pull_back(1.0), pull_back(1.0)
    assert_same_bits(first, second)
    assert np.asarray(first[0]).astype(np.float32).any()


def test_a_forward_without_a_backward_keeps_nothing(monkeypatch):
    keeps, write = [], head_kernels.partials

    def noted(*arguments: Any) -> None:
        keeps.append(inspect.signature(write).bind(*arguments).arguments["kept"] is not None)
        write(*arguments)

    monkeypatch.setattr(head_kernels, "partials", noted)
    case = Case("forward alone", (72,), 64, 300)
    p = helpers.make(case, jnp.bfloat16)
    call = lambda h: linear_logp(h, p.weight, p.target_ids, implementation="mosaic").sum()  # noqa: E731
    jax.eval_shape(call, p.hidden)
    assert keeps and not any(keeps)
    jax.eval_shape(jax.grad(call), p.hidden)
    assert any(keeps)


def test_gradients_of_an_entropy_recompute(seen):
    case = Case("recomputed", (70,), 64, 300)
    problem = helpers.make(case, jnp.bfloat16)
    jax.eval_shape(lambda: problem.gradients(case, "mosaic"))
    assert set(seen) == {"dlogits"}


@pytest.mark.full
def test_batches_under_vmap():
    """A batch of forwards, and a batch of upstream gradients of one forward, have the right gradients.

    In make test tests/ops/linear_logp/test_transforms.py has vmap, whose rule all implementations share.
    """
    case = Case("vmap", (2, 70), 64, 300)
    p = helpers.make(case, jnp.bfloat16)

    def call(hidden, target_ids):
        return linear_logp(hidden, p.weight, target_ids, implementation="mosaic")

    gradient = jax.grad(lambda h, t, g: jnp.vdot(call(h, t), g))
    batched = jax.jit(jax.vmap(gradient))(p.hidden, p.target_ids, p.upstream[0])
    pull = jax.vjp(lambda h: call(h, p.target_ids[0]), p.hidden[0])[1]
    many = jax.vmap(pull)(jnp.stack([p.upstream[0][0], 2 * p.upstream[0][0]]))[0]
    alone = [np.asarray(gradient(p.hidden[i], p.target_ids[i], p.upstream[0][i]), np.float64) for i in range(2)]
    pairs = zip((*batched, *many), (*alone, alone[0], 2 * alone[0]), strict=True)
    for found, expected in pairs:
        assert_within_contract(found, expected, "linear_logp_wgmma", jnp.bfloat16, "gradient")


def test_no_row_at_all():
    case = Case("nothing", (0,), 64, 300, bias=True)
    rows, head = helpers.outputs(case, helpers.make(case, jnp.bfloat16), "mosaic")
    assert [x.shape for x in rows] == [(0,), (0,), (0,), (0, 64)]
    assert all(not np.asarray(x).astype(np.float32).any() for x in jax.tree.leaves(head))


@pytest.mark.parametrize(
    ("columns", "layout", "has_bits"),
    [
        pytest.param(512, "vd", False, id="on group edges"),
        pytest.param(512, "vd", True, marks=pytest.mark.full, id="on group edges, with the bits of the whole"),
        pytest.param(640, "dv", True, marks=pytest.mark.full, id="off them"),
    ],
)
def test_shards_of_a_padded_head(columns, layout, has_bits):
    """Off group edges a shard has its own groups.

    In make test, test_same_bits_at_every_degree (tests/ops/linear_logp/sharding/test_vocab_parallel.py) has the bits of
    the whole, without these kernels, and test_shards_of_a_padded_head (triton/test_linear_logp.py) has shards off the
    edges.
    """
    shards.check_two("mosaic", columns, layout, jnp.bfloat16, "linear_logp_wgmma", has_bits=has_bits)


@helpers.cover(
    "case, dtype",
    [
        (low_rank.Case(140, 72, 512, 16, DV), jnp.bfloat16),
        (low_rank.Case(70, 80, 301, 70), jnp.float16),
        (low_rank.Case(100, 64, 600, 5, {"global_vocab_size": 599, "memory_budget": 400_000}), jnp.bfloat16),
        (low_rank.Case(40, 64, 500, 5, {"global_vocab_size": 499, "memory_budget": 80_000}), jnp.bfloat16),
    ],
    lambda case, dtype: case.vocab == 500,
)
def test_a_low_rank_term(case, dtype):
    """The term's products go on with those of the head. In `make test`, one case has both kernels that compute logits
    and all products of the term; layouts, copied heads and kept exponentials, whose kernel multiplies nothing, differ
    from it as they do without the term.
    """
    x = low_rank.make(case, dtype)
    low_rank.assert_is_definition(case, x, low_rank.outputs(case, x, "mosaic"))
