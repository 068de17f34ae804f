"""linear_kl by Mosaic's kernels, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from rlk_jax import dispatch
from rlk_jax.ops.linear_kl import hopper
from tests.ops.linear_kl.test_values import of_kind, with_anything_where_nothing_counts
from tests.support import divergences
from tests.support.divergences import Case, assert_found
from tests.support.interpreter import MACHINE

BF16, F16 = jnp.bfloat16, jnp.float16
_REAL = {"global_vocab_size": 700, "teacher_global_vocab_size": 700}
PLAIN = Case("plain", (40,), 64, 128, 512, 512)
EVERYTHING = Case(
    "everything",
    (7, 10),
    72,
    40,
    712,
    704,
    bias=True,
    mask=True,
    temperature="per token",
    teacher_temperature=1.3,
    options={"logit_softcap": 3.0, "teacher_logit_softcap": 4.0, "teacher_weight_layout": "dv", **_REAL},
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Make `mosaic` run in the interpreter. New memory holds NaN, as it may on a GPU."""
    row = dispatch.Implementation("mosaic", hopper.mosaic(MACHINE), promises_bits=True)
    monkeypatch.setitem(dispatch.TABLE, "linear_kl", (row, *dispatch.TABLE["linear_kl"][1:]))
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    jax.clear_caches()


@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize("case", [PLAIN, EVERYTHING], ids=str)
def test_against_float64(case, kind):
    dtype = BF16 if case is PLAIN else F16
    case = of_kind(case, kind)
    problem = divergences.make(case, dtype)
    expected = divergences.gold(case, problem)
    problem = with_anything_where_nothing_counts(problem, case)
    actual = divergences.found(case, problem, "mosaic")
    assert_found(actual, expected, dtype)
