"""linear_kl by Mosaic's kernels, in Pallas' interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.mosaic.divergence import _mixture_terms
from pallas_kernels.mosaic.divergence_gradients import _gradient
from rlk_jax import dispatch, linear_kl
from rlk_jax.core.fixed_order import column_groups
from rlk_jax.core.head import Needs
from rlk_jax.ops.linear_kl import hopper
from rlk_jax.ops.linear_kl.hopper_plan import backward_plans, forward_plans
from rlk_jax.ops.linear_kl.options import KlConfig, KlOptions, OneHeadConfig
from tests.ops.linear_kl import test_list_shards
from tests.ops.linear_kl import test_top_k as listed
from tests.ops.linear_kl.test_bits import rows_of
from tests.ops.linear_kl.test_shards import CASE
from tests.ops.linear_kl.test_values import of_kind, with_anything_where_nothing_counts
from tests.support import divergences
from tests.support.divergences import KINDS, Case, assert_found
from tests.support.helpers import assert_same_bits, assert_within_contract, cover
from tests.support.interpreter import MACHINE
from tests.support.kl_shards import list_one_rank_after_another, one_rank_after_another

BF16, F16 = jnp.bfloat16, jnp.float16
_REAL = {"global_vocab_size": 300, "teacher_global_vocab_size": 300}
PLAIN = Case("plain", (40,), 64, 128, 512, 512)
EVERYTHING = Case(
    "everything",
    (3, 7),
    72,
    40,
    312,
    304,
    bias=True,
    mask=True,
    temperature="per token",
    teacher_temperature=1.3,
    options={"logit_softcap": 3.0, "teacher_logit_softcap": 4.0, "teacher_weight_layout": "dv", **_REAL},
)


def interpret(monkeypatch, name, functions):
    """Make the implementation of this name run by `functions` in the interpreter. New memory holds NaN, as it may on a
    GPU.
    """
    row = dispatch.Implementation(name, functions, promises_bits=True)
    others = (x for x in dispatch.TABLE["linear_kl"] if x.name != name)
    monkeypatch.setitem(dispatch.TABLE, "linear_kl", (row, *others))
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    jax.clear_caches()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    interpret(monkeypatch, "mosaic", hopper.mosaic(MACHINE))


def check_against_float64(case, kind, dtype, implementation):
    case = of_kind(case, kind)
    problem = divergences.make(case, dtype)
    expected = divergences.gold(case, problem)
    actual = divergences.found(case, with_anything_where_nothing_counts(problem, case), implementation)
    assert_found(actual, expected, dtype)
    if problem.completion_mask is not None:
        assert not actual.values[~problem.completion_mask].any() and not actual.hidden[~problem.completion_mask].any()
    assert not actual.weight[case.real :].any()


def check_identical_heads(kind, implementation):
    """The divergence and every gradient are exactly 0."""
    case = of_kind(Case("same", (9,), 64, 64, 300, 300, bias=True, noise=0.0), kind)
    for x in jax.tree.leaves(divergences.found(case, divergences.make(case, BF16), implementation)):
        assert not x.any()


def check_bits(kind, implementation):
    """Slices of one chunk, with masked rows between the others. The forward has slices because the teacher's head is
    copied, and kernels see heads of two layouts.
    """
    options = {"global_vocab_size": 512, "weight_layout": "dv"}
    case = of_kind(Case("bits", (20,), 64, 60, 576, 512, options=options), kind)
    problem = divergences.make(case, BF16)._replace(completion_mask=jnp.ones(20, bool), temperature=jnp.ones(20))
    expected = divergences.found(case, problem, implementation)
    index = np.insert(np.arange(20), [0, 1, 7], -1)
    actual = divergences.found(case, rows_of(problem, index, np.nan), implementation, memory_budget=1)
    real = index >= 0
    assert_same_bits(actual._replace(values=actual.values[real], hidden=actual.hidden[real]), expected)


def check_shards(kind, count, implementation):
    """They have the bits of whole heads, with NaN in padding and masked rows."""
    case = of_kind(dataclasses.replace(CASE, dim=64, teacher_dim=64), kind)
    problem = divergences.make(case, BF16)
    expected = divergences.found(case, problem, implementation)
    spoilt = with_anything_where_nothing_counts(problem, case)
    assert_same_bits(one_rank_after_another(case, spoilt, implementation, count), expected)


@cover(
    "case, kind, dtype",
    [(case, kind, dtype) for case in (PLAIN, EVERYTHING) for kind in KINDS for dtype in (BF16, F16)],
    lambda case, kind, dtype: case is EVERYTHING and (kind, dtype) in (("reverse", F16), ("jsd", BF16)),
)
def test_against_float64(case, kind, dtype):
    """In make test with all options; the forward divergence is that of exchanged heads."""
    check_against_float64(case, kind, dtype, "mosaic")


@cover(
    "case, kind, dtype",
    [(case, kind, dtype) for case in listed.CASES for kind in KINDS for dtype in (BF16, F16)],
    lambda case, kind, dtype: (
        (case is listed.EVERYTHING and kind == "jsd")
        or (case.name == "all tokens" and (kind, dtype) == ("reverse", BF16))
    ),
)
def test_lists_against_float64(case, kind, dtype):
    """In make test, a list beside all options in both dtypes, and one of all tokens."""
    problem = listed.make(case, dtype)
    actual, expected = listed.found(case, problem, kind, "mosaic"), listed.gold(case, problem, kind)
    op_class = f"{case.op_class}_wgmma"
    assert_within_contract(actual.values, expected.values, op_class, dtype, "forward")
    for name in ("hidden", "weight", "bias"):
        if getattr(expected, name) is not None:
            assert_within_contract(getattr(actual, name), getattr(expected, name), op_class, dtype, "gradient")
    left_out = ~np.asarray(problem.mask)
    assert not actual.values[left_out].any() and not actual.hidden[left_out].any()


def test_a_bad_temperature_beside_a_list_and_a_rest_that_is_impossible():
    """The first poisons its row alone; without a rest the gradient is that of what is listed, as by `xla`."""
    case = listed.Case("bad", count=4)
    problem = listed.make(case, BF16)
    row = int(np.flatnonzero(problem.mask)[5])
    options = {"teacher_ids": problem.ids, "teacher_logps": problem.logps, "completion_mask": problem.mask}
    temperature = jnp.ones(case.tokens).at[row].set(-1)
    # The rest of this row is impossible for the student; other rows list some of its tokens, or none.
    impossible = jnp.full(case.vocab, -jnp.inf, BF16).at[problem.ids[row]].set(0)

    def gradient(implementation, hidden, own, **changes):
        given = options | changes | {"implementation": implementation, "kind": "reverse", "validate": False}
        return jax.value_and_grad(lambda h: linear_kl(h, problem.weight, **given)[own].sum())(hidden)

    value, found = gradient("mosaic", problem.hidden, slice(None), temperature=temperature)
    is_nan = np.isnan(np.asarray(found, np.float32))
    assert np.isnan(value) and is_nan[row].all() and not np.delete(is_nan, row, axis=0).any()
    ours, xlas = (gradient(x, problem.hidden, row, bias=impossible) for x in ("mosaic", "xla"))
    assert_within_contract(ours[0], xlas[0], "linear_kl_wgmma", BF16, "forward")
    assert np.isfinite(xlas[0]) and np.abs(np.asarray(xlas[1], np.float32)).max() > 0
    assert_within_contract(ours[1][row], xlas[1][row], "linear_kl_wgmma", BF16, "gradient")


def test_a_row_of_a_list_has_its_bits_alone():
    """Whichever budget it has: `listed.EVERYTHING` has one chunk at a time."""
    case, row = dataclasses.replace(listed.EVERYTHING, name="cut"), 10
    problem = listed.make(case, BF16)
    whole = dataclasses.replace(case, name="whole", options=case.options | {"memory_budget": None})
    assert problem.mask[row]
    names = set(problem._fields) - {"weight", "bias"}
    alone = problem._replace(**{x: getattr(problem, x)[row : row + 1] for x in names})
    expected = listed.found(whole, problem, "jsd", "mosaic")
    actual = listed.found(case, alone, "jsd", "mosaic")
    assert_same_bits(actual[:2], (expected.values[row : row + 1], expected.hidden[row : row + 1]))


@cover("kind", [(kind,) for kind in KINDS], lambda kind: kind == "forward")
def test_identical_student_and_teacher(kind):
    """Sums of both heads go by the same code for every kind."""
    check_identical_heads(kind, "mosaic")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_near_the_student(kind):
    """Differences of probabilities keep their digits. In make test, test_gradients_of_near_logits has the formulas."""
    case = of_kind(Case("near", (16,), 64, 64, 512, 512, noise=1e-3), kind)
    problem = divergences.make(case, F16)
    problem = problem._replace(
        teacher_hidden=problem.teacher_hidden.astype(F16),
        teacher_weight=problem.teacher_weight.astype(F16),
        upstream=problem.upstream * 2.0**12,
    )
    actual = divergences.found(case, problem, "mosaic")
    assert_found(actual, divergences.gold(case, problem), F16, "linear_kl_near")


@cover("kind", [(kind,) for kind in KINDS], lambda kind: kind == "reverse")
def test_bits(kind):
    """All kinds go over the same slices."""
    check_bits(kind, "mosaic")


@pytest.mark.full
@pytest.mark.parametrize(("kind", "count"), [("reverse", 2), ("jsd", 2), ("forward", 8)])
def test_shards_have_the_bits_of_whole_heads(kind, count):
    """In make test, test_linear_kl_lowers (test_shard_map.py) has the types, and test_same_bits_at_every_degree
    (tests/ops/linear_kl/test_shards.py) what shards of all implementations share.
    """
    check_shards(kind, count, "mosaic")


@pytest.mark.full
@pytest.mark.parametrize(("kind", "dtype", "count"), [("jsd", BF16, 8), ("reverse", F16, 2)])
def test_shards_beside_a_list_have_the_bits_of_whole_heads(kind, dtype, count):
    """In make test, test_linear_kl_of_a_list_lowers (test_shard_map.py) has the types, and
    test_same_bits_at_every_degree (tests/ops/linear_kl/test_list_shards.py) what all implementations share.
    """
    case = test_list_shards.CASE
    problem = listed.make(case, dtype)
    options = KlOptions(kind=kind, beta=listed.BETA, **case.options)
    actual = list_one_rank_after_another(options, problem, "mosaic", count)
    assert_same_bits(actual, listed.found(case, problem, kind, "mosaic"))


@cover(
    "kind, who",
    [("forward", "bias"), ("reverse", "teacher_bias")],
    lambda kind, who: kind == "forward",
)
def test_impossible_tokens(kind, who):
    """A token that the first distribution can take and the second cannot; none is not a number. The reverse divergence
    is that of exchanged heads.
    """
    case = of_kind(Case("impossible", (8,), 64, 64, 300, 300, bias=True), kind)
    problem = divergences.make(case, BF16)
    problem = problem._replace(**{who: getattr(problem, who).at[:200].set(-jnp.inf)})
    assert (problem.call(case, "mosaic") == np.inf).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_near_logits(kind):
    """The formulas of the kernel, outside of it: differences of probabilities keep their digits."""
    rng, share = np.random.default_rng(0), 0.3
    student = rng.normal(size=(64, 500)) * 3
    logits = student, student + 1e-3 * rng.normal(size=student.shape)
    log2s = [np.float32((x - np.log(np.exp(x).sum(axis=1, keepdims=True))) / np.log(2)) for x in logits]
    log_p, log_q = (np.float64(x) * np.log(2) for x in log2s)
    p, q = np.exp(log_p), np.exp(log_q)
    mixture = np.log(share * q + (1 - share) * p)
    slope = {"forward": p - q, "reverse": p * (log_p - log_q), "jsd": (1 - share) * p * (log_p - mixture)}[kind]
    total = np.zeros_like(p) if kind == "forward" else np.broadcast_to(slope.sum(axis=1, keepdims=True), p.shape)
    found = _gradient(kind, share, *map(jnp.asarray, log2s), jnp.asarray(total, jnp.float32))
    assert_within_contract(found, slope - p * total, "linear_kl", jnp.float32, "gradient")


@pytest.mark.parametrize("share", [0.5, 0.3, 0.1, 0.01, 0.99])
@pytest.mark.parametrize("noise", [1e-3, 0.1, 0.5, 2.0])
def test_terms_of_a_mixture(share, noise):
    """The formulas of the kernel, outside of it: near and far terms keep their digits, whatever the share."""
    rng = np.random.default_rng(0)
    log_a = np.float32(-np.abs(rng.normal(size=20000)) - 20)
    log_b = np.append(np.float32(log_a + noise * rng.normal(size=log_a.shape))[:-1], log_a[-1])
    log_a[0] = log_b[1] = -np.inf
    log_p, log_q = (np.float64(x)[2:] * np.log(2) for x in (log_a, log_b))
    p, difference = np.exp(log_p), log_q - log_p
    # Exact where p and q are near: m / p = 1 + share·(q / p − 1), and m / q likewise.
    from_p = np.log1p(share * np.expm1(difference))
    from_q = np.log1p((1 - share) * np.expm1(-difference))
    excess = share * np.exp(difference) * (np.expm1(from_q) - from_q) + (1 - share) * (np.expm1(from_p) - from_p)
    value, slope = jax.jit(_mixture_terms, static_argnums=0)(share, log_a, log_b)
    # A token that is impossible for one of both adds what the other has, times the logarithm of its share.
    first = np.exp2(np.float64([log_b[0], log_a[1]])) * -np.log([share, 1 - share]) * [share, 1 - share]
    assert_within_contract(value, np.append(first, p * excess), "linear_kl_wgmma", BF16, "forward")
    assert_within_contract(slope[2:], p * from_p, "linear_kl_peaked", jnp.float32, "gradient")
    assert np.isfinite(slope).all()
    assert value[-1] == 0 and slope[-1] == 0 and (value >= 0).all()


@cover("share", [(0.01,), (0.3,), (0.99,)], lambda share: share == 0.01)
def test_mixtures_of_any_share(share):
    """The problem has 64 tokens: of nine, exact gradients miss the contract once they are rounded as in the kernel."""
    divergences.assert_mixtures_of_any_share(share, "mosaic", 64, "linear_kl_wgmma")


def test_budgets_are_kept_and_every_chunk_is_in_one_slice():
    """The plan of a pass, for budgets that hold one chunk and more. A forward that copies no head has one slice."""
    head, needs = OneHeadConfig(131072, 131072, None, False, False, "vd"), Needs(True, True, False)
    for budget in (2**20, 2**28, 2**29, 2**31):
        config = KlConfig("forward", 0.5, head, head, budget, column_groups(131072), 131072)
        forward = forward_plans(config, (4096, 2048), 4096)
        copies = forward_plans(config, (4096, 2056), 4096)
        backward = backward_plans(config, (4096, 2048), 4096, needs, BF16)
        for plan, bytes_of_chunk in ((forward, 0), (copies, 4 * 256 * 2112), (backward, 2 * 256 * 4096)):
            (chunks,) = plan.student.ranges
            assert (chunks.first, chunks.end) == (0, 512) and plan.teacher_range(chunks).width == chunks.width
            assert chunks.width == 1 or chunks.width * bytes_of_chunk < budget
            assert plan.teacher_range(chunks).copied == (plan is copies)
        assert forward.student.slices == 1 and (copies.student.slices > 1) == (budget < 2**31)
        assert (backward.student.ranges[0].width == 1) == (budget == 2**20)
