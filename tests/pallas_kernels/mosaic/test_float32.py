"""linear_logp's Mosaic kernels on float32 operands, in two bfloat16 parts each, in Pallas' interpreter.

What tensor cores cut off is seen on a GPU alone: tests/gpu/test_float32.py has the accuracy of long sums.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.parts import split
from rlk_jax import linear_logp
from rlk_jax.ops.linear_logp import hopper
from tests.support import helpers, shards
from tests.support.helpers import Case, assert_same_bits, assert_within_contract
from tests.support.mixed_dtypes import assert_close_to_float64, make

pytestmark = pytest.mark.usefixtures("interpreted")

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
SOME_KEPT = {F32: 600_000, BF16: 300_000}
"""A budget, by the dtype of a weight, that holds some exponentials of 40 tokens × 64 × 600."""
PLAIN = Case("plain, odd, bias", (70,), 72, 301, bias=True)
FEWER = dataclasses.replace(PLAIN, name="fewer rows, odd, bias", lead=(40,))
SOFTCAP = Case("two row tiles, softcap, dv", (140,), 72, 512, options={"logit_softcap": 2.0, "weight_layout": "dv"})


@helpers.cover(
    "case, hidden, weight",
    [
        (PLAIN, F32, F32),
        (PLAIN, BF16, F32),
        (PLAIN, F32, BF16),
        (FEWER, BF16, F32),
        (PLAIN, F16, F32),
        (dataclasses.replace(SOFTCAP, temperature="per token"), F32, F32),
        (SOFTCAP, BF16, F32),
        (SOFTCAP, F32, BF16),
        (Case("padded", (40,), 64, 320, bias=True, options={"global_vocab_size": 257}), F32, F32),
        (Case("slices", (40,), 64, 3000, options={"memory_budget": 2**19}), F32, F32),
        (Case("one row", (1,), 64, 5, scale=0.2), F32, F32),
        (Case("one row, a head that is read in place", (1,), 64, 304), F32, BF16),
    ],
    lambda case, hidden, weight: case is FEWER or (case is PLAIN and hidden == weight),
)
def test_against_float64(case, hidden, weight):
    """In make test a float32 head beside both dtypes of hidden has ragged chunks and a bias; softcaps, layouts and
    padding meet the same epilogues in test_interpreter.py.
    """
    assert_close_to_float64(case, make(case, hidden, weight))


# In make test both operands are float32, which takes every term of the others.
mixed = helpers.cover("hidden, weight", [(F32, F32), (BF16, F32), (F32, BF16)], lambda hidden, weight: hidden == weight)


TILES = [
    (*dtypes, dim, layout)
    for dtypes in ((F32, F32), (BF16, F32), (F32, BF16), (F16, F32))
    for dim in (8, 64, 72)
    for layout in ("vd", "dv")
]
TILES_IN_MAKE_TEST = (
    (F32, F32, 8, "vd"),
    (F32, F32, 64, "dv"),
    (BF16, F32, 64, "vd"),
    (BF16, F32, 72, "dv"),
    (F32, BF16, 72, "vd"),
    (F32, BF16, 8, "dv"),
)


@helpers.cover("hidden, weight, dim, layout", TILES, lambda *tile: tile in TILES_IN_MAKE_TEST)
def test_small_tiles_fit_shared_memory(hidden, weight, dim, layout):
    """Tracing finds a tile that does not; which of both factors of dW is in two parts depends on the layout.

    In make test every pair of dtypes meets both layouts, and every number of dimensions occurs twice. float16 has the
    tiles of bfloat16.
    """
    shape = (512, dim) if layout == "vd" else (dim, 512)
    ids, rows = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16, dim), hidden)

    def loss(h: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
        return linear_logp(h, w, t, weight_layout=layout, implementation="mosaic").sum()

    found = jax.eval_shape(jax.grad(loss, (0, 1)), rows, jax.ShapeDtypeStruct(shape, weight), ids)
    assert [x.dtype for x in found] == [hidden, weight]


@pytest.mark.full
@mixed
def test_slices_change_no_bit(seen, monkeypatch, hidden, weight):
    """Slices end inside groups, or there is one. Nothing is kept, so that all logits are recomputed.

    In make test, test_against_float64 (test_interpreter.py) has slices that end inside groups, of 16 bits.
    """
    monkeypatch.setattr(hopper, "kept_chunks", lambda *_: 0)
    case = Case("slices or not", (40,), 64, 600, bias=True)
    case, problem = helpers.without_entropy(case, make(case, hidden, weight))
    one, several = (problem.values_and_gradients(case, "mosaic", memory_budget=x) for x in (2**30, 100_000))
    assert set(seen) == {"dlogits"}
    assert_same_bits(several, one)


@pytest.mark.full
@mixed
def test_kept_exponentials(seen, hidden, weight):
    """Exponentials are kept of all chunks, or of some. In make test, test_kept_exponentials (test_interpreter.py) keeps
    those of 16 bits, and test_against_float64 (here) the parts that a logit has.

    Raw bits are compared on a GPU: here a CPU's compiler fuses products into sums in one kernel, and not in another.
    """
    case = Case("kept", (40,), 64, 600, bias=True)
    case, problem = helpers.without_entropy(case, make(case, hidden, weight))
    gold = helpers.gold(case, problem)
    for budget, kernels in ((None, set()), (SOME_KEPT[weight], {"dlogits"})):
        seen.clear()
        gradients = problem.gradients(case, "mosaic", memory_budget=budget)
        assert set(seen) == {"dlogits_from_kept_exponentials"} | kernels
        for gradient, expected in zip(gradients, gold.gradients, strict=True):
            assert_within_contract(gradient, expected, "linear_logp_wgmma", gradient.dtype, "gradient")


@pytest.mark.full
def test_ignored_rows_and_other_rows_change_no_bit(seen):
    """Kept exponentials are read where they moved: only the backward leaves rows out whose gradients are 0.

    In make test, test_kept_exponentials (test_interpreter.py) has them in one part, which lie where those in two do.
    """
    case = Case("rows", (24,), 64, 300, options={"ignore_index": -1})
    case, problem = helpers.without_entropy(case, make(case))
    ignored = problem._replace(
        hidden=problem.hidden.at[::7].set(jnp.nan),
        target_ids=problem.target_ids.at[::7].set(-1),
        upstream=tuple(g.at[::3].set(0) for g in problem.upstream),
    )
    counts = np.arange(24) % 7 != 0
    (values, (d_hidden, d_weight)) = ignored.values_and_gradients(case, "mosaic")
    part = helpers.rows_of(ignored, counts)
    alone, gradients = part.values_and_gradients(case, "mosaic")
    assert set(seen) == {"dlogits_from_kept_exponentials"}
    assert_same_bits((values.logp[counts], d_hidden[counts], d_weight), (alone.logp, *gradients))
    assert not np.asarray(d_hidden[~counts]).any()


@pytest.mark.full
@pytest.mark.parametrize(("columns", "layout"), [(512, "vd"), (640, "dv")])
def test_shards_of_a_padded_head(columns, layout):
    """Shards on the edges of groups, and off them. In make test, the same test in test_interpreter.py has shards in
    bfloat16.
    """
    shards.check_two("mosaic", columns, layout, F32, "linear_logp_wgmma", has_bits=False)


def test_parts():
    """Parts add up to the value, beyond the range of bfloat16's rounding too. Infinities and NaN are low parts, but for
    gradients, whose high part may stand alone.
    """
    finite = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    largest = np.finfo(np.float32).max
    for in_kernel in (False, True):
        high, low = jax.jit(lambda x: tuple(split(x, in_kernel=in_kernel)))(jnp.append(finite, largest))  # noqa: B023
        total = np.asarray(high, np.float64) + np.asarray(low, np.float64)
        assert (np.abs(total - np.append(finite, largest)) <= 2.0**-17 * np.abs(total)).all() and low.any()
        high, low = split(jnp.asarray([jnp.inf, -jnp.inf, jnp.nan]), in_kernel=in_kernel)
        if in_kernel:
            assert np.isnan(np.asarray(high, np.float32)).all()
        else:
            np.testing.assert_array_equal(np.asarray(high[:2], np.float32), [1, -1])
            np.testing.assert_array_equal(np.asarray(low, np.float32), [np.inf, -np.inf, np.nan])


@mixed
def test_an_infinite_upstream_gradient_reaches_both_gradients(hidden, weight):
    """A loss scale that overflows is seen in every gradient, as in float32. In make test both operands are float32."""
    case = Case("overflow", (12,), 64, 300, options={"return_entropy": False})
    problem = make(case, hidden, weight)
    upstream = jnp.ones(12).at[3].set(jnp.inf)

    def gradients(name):
        call = lambda h, w: linear_logp(h, w, problem.target_ids, implementation=name)  # noqa: E731
        return jax.vjp(call, problem.hidden, problem.weight)[1](upstream)

    for found, expected in zip(gradients("mosaic"), gradients("reference"), strict=True):
        found, expected = (np.isfinite(np.asarray(x, np.float32)) for x in (found, expected))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("hidden", [F32, BF16])
def test_values_that_are_not_finite(hidden):
    """A weight of −∞ makes its token impossible where hidden is positive, as in float32; NaN and ∞ spread as there."""
    case = Case("not finite", (12,), 64, 300, options={"return_entropy": False})
    problem = make(case)
    weight = problem.weight.at[7, 3].set(-jnp.inf).at[100, 5].set(3.4e38)
    of_hidden = problem.hidden.at[:, 3].set(jnp.abs(problem.hidden[:, 3]) + 0.1).at[:, 5].set(0)
    of_hidden = of_hidden.at[1, 8].set(jnp.nan).at[2, 9].set(jnp.inf).at[3, 3].set(-1.0).at[4, 5].set(-1e-36)
    of_hidden = of_hidden.astype(hidden)
    ids = problem.target_ids.at[0].set(7).at[5].set(100)
    problem = problem._replace(hidden=of_hidden, weight=weight, target_ids=ids)
    found, expected = (problem.call(case, name) for name in ("mosaic", "reference"))
    assert found.logp[0] == -jnp.inf and np.isfinite(found.logp[4:]).all() and not np.isfinite(found.logp[1:4]).any()
    finite = np.isfinite(expected.logp)
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert_within_contract(x[finite], y[finite], "linear_logp_wgmma", F32, "forward")
