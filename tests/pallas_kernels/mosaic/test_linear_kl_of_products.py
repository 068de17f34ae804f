"""linear_kl by kernels that know one head, in Pallas' interpreter: here Mosaic's stand for those in CUDA C++."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rlk_jax import dispatch
from rlk_jax.core.fixed_order import column_groups
from rlk_jax.core.head import Needs
from rlk_jax.ops.linear_kl import hopper
from rlk_jax.ops.linear_kl.hopper_plan import backward_plans_of_products, forward_plans_of_products
from rlk_jax.ops.linear_kl.options import KlConfig, OneHeadConfig
from tests.ops.linear_kl.test_bits import rows_of
from tests.ops.linear_kl.test_shards import CASE
from tests.ops.linear_kl.test_values import of_kind, with_anything_where_nothing_counts
from tests.pallas_kernels.mosaic.test_linear_kl import BF16, EVERYTHING, F16, PLAIN
from tests.support import divergences
from tests.support.divergences import KINDS, Case, assert_found
from tests.support.helpers import assert_same_bits, cover
from tests.support.interpreter import MACHINE
from tests.support.kl_shards import one_rank_after_another


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Make `cuda` run by Mosaic's kernels in the interpreter. New memory holds NaN, as it may on a GPU."""
    functions = hopper.by_kernels_of_a_head(hopper._kernels, MACHINE)
    row = dispatch.Implementation("cuda", functions, promises_bits=True)
    others = (x for x in dispatch.TABLE["linear_kl"] if x.name != "cuda")
    monkeypatch.setitem(dispatch.TABLE, "linear_kl", (row, *others))
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    jax.clear_caches()


@cover(
    "case, kind, dtype",
    [(case, kind, dtype) for case in (PLAIN, EVERYTHING) for kind in KINDS for dtype in (BF16, F16)],
    lambda case, kind, dtype: case is EVERYTHING and (kind, dtype) in (("reverse", F16), ("jsd", BF16)),
)
def test_against_float64(case, kind, dtype):
    """In make test with all options."""
    case = of_kind(case, kind)
    problem = divergences.make(case, dtype)
    actual = divergences.found(case, with_anything_where_nothing_counts(problem, case), "cuda")
    assert_found(actual, divergences.gold(case, problem), dtype)
    if problem.completion_mask is not None:
        assert not actual.values[~problem.completion_mask].any() and not actual.hidden[~problem.completion_mask].any()
    assert not actual.weight[case.real :].any()


@cover("kind", [(kind,) for kind in KINDS], lambda kind: kind == "forward")
def test_identical_student_and_teacher(kind):
    """The divergence and every gradient are exactly 0."""
    case = of_kind(Case("same", (9,), 64, 64, 300, 300, bias=True, noise=0.0), kind)
    for x in jax.tree.leaves(divergences.found(case, divergences.make(case, BF16), "cuda")):
        assert not x.any()


@cover("kind", [(kind,) for kind in KINDS], lambda kind: kind == "reverse")
def test_bits(kind):
    """Slices of one chunk, with masked rows between the others, and heads of two layouts."""
    options = {"global_vocab_size": 512, "weight_layout": "dv"}
    case = of_kind(Case("bits", (20,), 64, 60, 576, 512, options=options), kind)
    problem = divergences.make(case, BF16)._replace(completion_mask=jnp.ones(20, bool), temperature=jnp.ones(20))
    expected = divergences.found(case, problem, "cuda")
    index = np.insert(np.arange(20), [0, 1, 7], -1)
    actual = divergences.found(case, rows_of(problem, index, np.nan), "cuda", memory_budget=1)
    real = index >= 0
    assert_same_bits(actual._replace(values=actual.values[real], hidden=actual.hidden[real]), expected)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "count"), [("reverse", 2), ("jsd", 2), ("forward", 8)])
def test_shards_have_the_bits_of_whole_heads(kind, count):
    """In make test, test_same_bits_at_every_degree (tests/ops/linear_kl/test_shards.py) has what all implementations
    share.
    """
    case = of_kind(dataclasses.replace(CASE, dim=64, teacher_dim=64), kind)
    problem = divergences.make(case, BF16)
    spoilt = with_anything_where_nothing_counts(problem, case)
    actual = one_rank_after_another(case, spoilt, "cuda", count)
    assert_same_bits(actual, divergences.found(case, problem, "cuda"))


def test_budgets_hold_the_products_of_a_slice():
    """float32 products of both heads in both passes, and the gradients of logits in the backward."""
    head, needs = OneHeadConfig(131072, 131072, None, False, False, "vd"), Needs(True, True, False)
    for budget in (2**20, 2**28, 2**29, 2**31):
        config = KlConfig("forward", 0.5, head, head, budget, column_groups(131072), 131072)
        forward = forward_plans_of_products(config, (4096, 2048), 4096)
        backward = backward_plans_of_products(config, (4096, 2048), 4096, needs, BF16)
        for plan, bytes_of_pair in ((forward, 8), (backward, 10)):
            (chunks,) = plan.student.ranges
            assert (chunks.first, chunks.end) == (0, 512) and plan.teacher_range(chunks).width == chunks.width
            assert chunks.width == 1 or chunks.width * 256 * 4096 * bytes_of_pair < budget
            assert (chunks.width == 1) == (budget == 2**20)
