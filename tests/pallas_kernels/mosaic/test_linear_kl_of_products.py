"""linear_kl by kernels that know one head, in Pallas' interpreter: here Mosaic's stand for those in CUDA C++."""

import pytest

from rlk_jax.core.fixed_order import column_groups
from rlk_jax.core.head import Needs
from rlk_jax.ops.linear_kl import hopper
from rlk_jax.ops.linear_kl.hopper_plan import backward_plans_of_products, forward_plans_of_products
from rlk_jax.ops.linear_kl.options import KlConfig, OneHeadConfig
from tests.pallas_kernels.mosaic import test_linear_kl as by_two_heads
from tests.pallas_kernels.mosaic.test_linear_kl import BF16, EVERYTHING, F16, PLAIN
from tests.support.divergences import KINDS
from tests.support.helpers import cover
from tests.support.interpreter import MACHINE


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    by_two_heads.interpret(monkeypatch, "cuda", hopper.by_kernels_of_a_head(hopper._kernels, MACHINE))


@cover(
    "case, kind, dtype",
    [(case, kind, dtype) for case in (PLAIN, EVERYTHING) for kind in KINDS for dtype in (BF16, F16)],
    lambda case, kind, dtype: case is EVERYTHING and (kind, dtype) in (("reverse", F16), ("jsd", BF16)),
)
def test_against_float64(case, kind, dtype):
    """In make test with all options."""
    by_two_heads.check_against_float64(case, kind, dtype, "cuda")


@cover("kind", [(kind,) for kind in KINDS], lambda kind: kind == "forward")
def test_identical_student_and_teacher(kind):
    """The softmaxes and products of both heads go by the same code for every kind."""
    by_two_heads.check_identical_heads(kind, "cuda")


@cover("kind", [(kind,) for kind in KINDS], lambda kind: kind == "reverse")
def test_bits(kind):
    """All kinds go over the same slices."""
    by_two_heads.check_bits(kind, "cuda")


@pytest.mark.full
@pytest.mark.parametrize(("kind", "count"), [("reverse", 2), ("jsd", 2), ("forward", 8)])
def test_shards_have_the_bits_of_whole_heads(kind, count):
    """In make test, test_same_bits_at_every_degree (tests/ops/linear_kl/test_shards.py) has what all implementations
    share.
    """
    by_two_heads.check_shards(kind, count, "cuda")


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
