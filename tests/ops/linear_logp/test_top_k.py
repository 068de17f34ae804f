"""The most probable tokens and the target's rank: values, ties, bits, shards, transformations, messages."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import rlk_jax
from rlk_jax import LinearLogp, RankedLogp, linear_grpo_loss, linear_logp, vocab_parallel
from tests.support import helpers
from tests.support.allowed import EVERYTHING, allowed_of, mask_of
from tests.support.helpers import Case, Problem, assert_same_bits, assert_within_contract
from tests.support.rankings import BOTH, assert_exact, assert_ranks_gold, of_integers, ranking_of

every_implementation = pytest.mark.parametrize("implementation", helpers.IMPLEMENTATIONS)


@helpers.cover(
    "implementation, dtype",
    itertools.product(helpers.IMPLEMENTATIONS, helpers.DTYPES),
    # Logits are float32 whatever the operands are.
    lambda x, y: y == jnp.float32 or (x, y) == ("xla", jnp.bfloat16),
)
def test_against_float64(implementation, dtype):
    """Rows may allow fewer than k tokens; ignored ones hold NaN."""
    problem = helpers.make(EVERYTHING, dtype)
    allowed, ignored = allowed_of(EVERYTHING, problem), np.arange(70) % 5 == 2
    given = problem._replace(
        target_ids=jnp.where(ignored, -1, problem.target_ids),
        hidden=jnp.where(ignored[:, None], jnp.nan, problem.hidden),
    )
    found, _ = given.values_and_gradients(EVERYTHING, implementation, allowed_mask=mask_of(allowed), **BOTH)
    for x, nothing in zip(ranking_of(found), (-1, 0, -1), strict=True):
        assert (np.asarray(x)[ignored] == nothing).all()
    logits = helpers.gold(helpers.with_options(EVERYTHING, allowed=allowed), problem).logits
    kept = jax.tree.map(lambda x: x[~ignored], found)
    assert_ranks_gold(kept, logits[~ignored], problem.target_ids[~ignored], dtype)


PLAIN = Case("plain", (37,), 24, 120)


# The float64 test has k = 20 in each implementation, and the reference sorts all columns for any k.
@helpers.cover(
    "implementation, top_k",
    itertools.product(helpers.IMPLEMENTATIONS, (1, 120)),
    lambda implementation, top_k: (implementation, top_k) in (("xla", 1), ("xla", 120), ("deterministic", 120)),
)
def test_one_and_all(implementation, top_k):
    problem = helpers.make(PLAIN, jnp.float32)
    found = problem.call(PLAIN, implementation, return_top_k=top_k, return_target_rank=True)
    assert_ranks_gold(found, helpers.gold(PLAIN, problem).logits, problem.target_ids, jnp.float32)
    if top_k == 120:
        rows = np.arange(37)
        np.testing.assert_array_equal(np.asarray(found.top_ids)[rows, found.target_rank], problem.target_ids)


@every_implementation
def test_equal_logits_stand_in_the_order_of_their_ids(implementation):
    """Chunks of 256 columns and groups of 88 end between equal logits."""
    problem, logits = of_integers(70, 8, 700)
    case = Case("integers", (70,), 8, 700)
    assert_exact(problem.call(case, implementation, **{**BOTH, "return_top_k": 100}), logits, problem.target_ids)


@every_implementation
def test_zeros_of_both_signs_are_equal(implementation):
    """−1e-45 at temperature 2 is −0."""
    hidden, bias = jnp.zeros((1, 8)), jnp.asarray([-1e-45, 0.0, -1e-45, 1.0, 0.0])
    options: Any = {"temperature": 2.0, "return_top_k": 5, "return_target_rank": True}
    found = linear_logp(hidden, jnp.ones((5, 8)), jnp.asarray([2]), bias, implementation=implementation, **options)
    np.testing.assert_array_equal(found.top_ids, [[3, 0, 1, 2, 4]])
    assert found.target_rank[0] == 3


@every_implementation
def test_rows_of_nan_and_infinite_logits(implementation):
    """Rows of NaN, of an infinite logit, and of a logit of −inf, which is no token's."""
    problem, logits = of_integers(4, 8, 40)
    hidden = problem.hidden.at[1, 3].set(jnp.nan).at[2].set(jnp.inf)
    bias = jnp.zeros(40).at[int(logits[0].argmax())].set(-jnp.inf)
    options: Any = {"implementation": implementation, "return_top_k": 40, "return_target_rank": True}
    found = linear_logp(hidden, problem.weight, problem.target_ids, bias, **options)
    for row in (1, 2):
        assert (found.top_ids[row] == -1).all() and np.isnan(found.top_logps[row]).all()
        assert found.target_rank[row] == -1
    for row in (0, 3):
        expected = np.argsort(-(logits[row] + np.asarray(bias)), kind="stable")
        np.testing.assert_array_equal(found.top_ids[row], [*expected[:-1], -1])
        assert found.top_logps[row, -1] == -np.inf and np.isfinite(found.top_logps[row, :-1]).all()


# A mask changes logits, of which a ranking is made.
@helpers.cover("masked, dtype", [(True, jnp.float32), (False, jnp.bfloat16)], lambda masked, dtype: masked)
def test_logps_are_the_bits_of_the_same_tokens_as_targets(masked, dtype):
    problem = helpers.make(EVERYTHING, dtype)
    mask = {"allowed_mask": mask_of(allowed_of(EVERYTHING, problem))} if masked else {}
    found, _ = problem.values_and_gradients(EVERYTHING, "deterministic", **mask, **BOTH)
    for place in (0, 3, 19):
        ids = found.top_ids[..., place]
        call = problem._replace(target_ids=jnp.where(ids < 0, problem.target_ids, ids))
        values, _ = call.values_and_gradients(EVERYTHING, "deterministic", **mask, **BOTH)
        assert_same_bits(values.logp[ids >= 0], found.top_logps[..., place][ids >= 0])
        np.testing.assert_array_equal(values.target_rank[ids >= 0], place)


@every_implementation
def test_what_stands_beside_keeps_its_bits(implementation):
    """Values and gradients are those of a call without a ranking."""
    problem = helpers.make(EVERYTHING, jnp.float32)
    mask = {"allowed_mask": mask_of(allowed_of(EVERYTHING, problem))}
    found, gradients = problem.values_and_gradients(EVERYTHING, implementation, **mask, **BOTH)
    values, expected = problem.values_and_gradients(EVERYTHING, implementation, **mask)
    assert isinstance(found, RankedLogp) and isinstance(values, LinearLogp)
    assert_same_bits((found[:3], gradients), (values, expected))


# What is returned of a ranking is stopped in autodiff, for all implementations.
@helpers.implementations("xla")
def test_a_ranking_has_no_gradient(implementation):
    problem = helpers.make(EVERYTHING, jnp.float32)

    def of_ranking(hidden: Any) -> Any:
        return problem._replace(hidden=hidden).call(EVERYTHING, implementation, **BOTH).top_logps.sum()

    assert not np.asarray(jax.jit(jax.grad(of_ranking))(problem.hidden)).any()


def test_rows_keep_their_ranking_in_any_batch():
    problem, few = helpers.make(EVERYTHING, jnp.float32), np.asarray([31, 13, 59])
    mask = mask_of(allowed_of(EVERYTHING, problem))
    whole, _ = problem.values_and_gradients(EVERYTHING, "deterministic", allowed_mask=mask, **BOTH)
    alone = helpers.rows_of(problem, few).call(EVERYTHING, "deterministic", allowed_mask=mask[few], **BOTH)
    for x, y in zip(ranking_of(alone), ranking_of(whole), strict=True):
        np.testing.assert_array_equal(x, y[few])


def test_logits_stay_within_the_budget():
    """All logits of 2048 rows would take 160 MB."""
    arrays = [jax.ShapeDtypeStruct(x, y) for x, y in (((2048, 8), "f"), ((20000, 8), "f"), ((2048,), "i"))]
    call = functools.partial(linear_logp, return_top_k=128, return_target_rank=True, memory_budget=2**23)
    found = jax.jit(call).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    assert found < 3 * 2**23


def test_only_what_was_asked_for():
    problem = helpers.make(PLAIN, jnp.float32)
    arrays = problem.hidden, problem.weight, problem.target_ids
    asked_for = {"return_entropy": True, **BOTH}, {"return_top_k": 20}, {"return_target_rank": True}
    both, top, rank = jax.jit(lambda: [linear_logp(*arrays, **x) for x in asked_for])()
    assert (top.lse, top.entropy, top.target_rank, rank.top_ids, rank.top_logps, both.lse) == (None,) * 6
    np.testing.assert_array_equal(top.top_ids, both.top_ids)
    np.testing.assert_array_equal(rank.target_rank, both.target_rank)
    none = linear_logp(problem.hidden[:0], problem.weight, problem.target_ids[:0], **BOTH)
    assert (none.top_ids.shape, none.top_logps.shape, none.target_rank.shape) == ((0, 20), (0, 20), (0,))
    shapes = jax.eval_shape(
        functools.partial(linear_logp, **BOTH), jnp.ones((2, 3, 24)), arrays[1], jnp.ones((2, 3), int)
    )
    assert [(x.shape, x.dtype.name) for x in ranking_of(shapes)] == [
        ((2, 3, 20), "int32"),
        ((2, 3, 20), "float32"),
        ((2, 3), "int32"),
    ]


def test_under_jit_vmap_and_remat():
    """A batch of heads too, whose elements run one after the other. Each element has two lead dimensions."""
    problem, _ = of_integers(12, 8, 60)
    call = functools.partial(linear_logp, **BOTH)
    folded = problem.hidden.reshape(3, 2, 2, 8), problem.target_ids.reshape(3, 2, 2)

    def of_rows(hidden: Any, ids: Any) -> Any:
        return call(hidden, problem.weight, ids)

    def gradient(f: Any, *arrays: Any) -> Any:
        def loss(hidden: Any) -> Any:
            found = f(hidden, *arrays[1:])
            return found.logp.sum(), found

        return jax.jit(jax.grad(loss, has_aux=True))(arrays[0])

    heads = jnp.stack([problem.weight] * 3)
    d_hidden, expected = gradient(of_rows, problem.hidden, problem.target_ids)
    d_folded, of_vmap = gradient(jax.checkpoint(jax.vmap(of_rows)), *folded)
    of_heads = jax.jit(jax.vmap(call))(folded[0], heads, folded[1])
    for x in (of_vmap, of_heads):
        np.testing.assert_array_equal(x.top_ids.reshape(12, 20), expected.top_ids)
        np.testing.assert_array_equal(x.target_rank.reshape(12), expected.target_rank)
        assert_within_contract(x.top_logps.reshape(12, 20), expected.top_logps, "linear_logp", jnp.float32, "forward")
    assert_within_contract(d_folded.reshape(12, 8), d_hidden, "linear_logp", jnp.float32, "gradient")


def over_a_mesh(case: Case, problem: Problem, mesh: Mesh, implementation: str, **given: Any) -> RankedLogp:
    """vocab_parallel.linear_logp on a padded head."""
    n = mesh.shape["tp"]
    return vocab_parallel.linear_logp(
        problem.hidden,
        vocab_parallel.pad_lm_head(problem.weight, n),
        problem.target_ids,
        None if problem.bias is None else vocab_parallel.pad_lm_head(problem.bias, n),
        mesh=mesh,
        vocab_axis="tp",
        token_axes="data" if "data" in mesh.shape else None,
        implementation=implementation,
        **{"global_vocab_size": case.vocab, "temperature": problem.temperature, **case.options, **given},
    )


# One shard is a whole head, and two and four are cut as eight are, with more columns.
@helpers.cover("shards", [(x,) for x in (1, 2, 4, 8)], lambda n: n == 8)
def test_shards_keep_all_bits(shards):
    """The last of eight shards of 16 columns are padding, and none has k columns."""
    case = Case("few columns", (9,), 16, 70, bias=True, temperature="per token", options={"logit_softcap": 3.0})
    problem = helpers.make(case, jnp.float32)
    mesh = jax.make_mesh((shards,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    mask = {"allowed_mask": mask_of(allowed_of(case, problem))}
    options: Any = {"return_lse": True, "return_entropy": True, **BOTH}
    found = jax.jit(lambda: over_a_mesh(case, problem, mesh, "deterministic", **mask, **options))()
    expected = problem.call(case, "deterministic", **mask, **options)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32))


# In `make test`, test_shards_keep_all_bits has an Auto axis.
@helpers.cover("kind", [(AxisType.Auto,), (AxisType.Explicit,)], lambda kind: kind == AxisType.Explicit)
def test_shards_of_vocabulary_and_tokens(kind):
    """Equal logits of several shards stand in the order of their ids; gradients pass beside the ranking."""
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:8])
    problem, logits = of_integers(24, 8, 700)
    case = Case("integers", (24,), 8, 700)

    def loss(hidden: Any) -> Any:
        found = over_a_mesh(case, problem._replace(hidden=hidden), mesh, "xla", **BOTH)
        return found.logp.sum(), found

    gradient, found = jax.jit(jax.grad(loss, has_aux=True))(problem.hidden)
    assert_exact(found, logits, problem.target_ids)
    plain = jax.jit(jax.grad(lambda h: linear_logp(h, problem.weight, problem.target_ids).sum()))(problem.hidden)
    assert_within_contract(gradient, plain, "linear_logp", jnp.float32, "gradient")


# In `make test`, test_shards_keep_all_bits has types of varying axes.
@helpers.cover("check_vma", [(False,), (True,)], lambda check_vma: not check_vma)
def test_shards_in_another_order(check_vma):
    """Rank r holds the columns of shard 3 − r; ranks that were given different ids give NaN."""
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    problem, logits = of_integers(10, 8, 256)

    def on_rank(hidden: Any, weight: Any, ids: Any, difference: Any) -> Any:
        rank = jax.lax.axis_index("tp")
        ids = ids if check_vma else ids + rank * difference
        return linear_logp(hidden, weight, ids, axis_name="tp", vocab_start_index=64 * (3 - rank), **BOTH)

    specs = {"in_specs": (P(), P("tp"), P(), P()), "out_specs": P(), "check_vma": check_vma}
    backwards = problem.weight.reshape(4, 64, 8)[::-1].reshape(256, 8)
    call = jax.jit(jax.shard_map(on_rank, mesh=mesh, **specs))
    nothing = jnp.zeros(10, jnp.int32)
    assert_exact(call(problem.hidden, backwards, problem.target_ids, nothing), logits, problem.target_ids)
    if not check_vma:
        spoilt = call(problem.hidden, backwards, problem.target_ids % 200, nothing.at[3].set(1))
        assert np.isnan(spoilt.logp[3]) == np.isnan(spoilt.top_logps[3]).all() == (spoilt.target_rank[3] == -1)
        assert not np.isnan(np.delete(spoilt.top_logps, 3, axis=0)).any()


# HeadLayout cuts a head with and without a ranking: in `make test`, test_allowed.py has the other ways to lie.
@helpers.cover("head", [(P("x"),), (P(None, "x"),), (P(),)], lambda head: head == P("x"))
def test_bare_calls_over_a_mesh(head):
    """XLA cuts the call along tokens and columns."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    problem, logits = of_integers(24, 8, 700)
    lay = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    arrays = lay(problem.hidden, P("y")), lay(problem.weight, head), lay(problem.target_ids, P("y"))
    mask = lay(mask_of(np.ones((24, 700), bool)), P("y"))
    found = jax.jit(functools.partial(linear_logp, **BOTH))(*arrays, allowed_mask=mask)
    assert_exact(found, logits, problem.target_ids)


def test_bare_calls_over_explicit_axes():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    problem, logits = of_integers(24, 8, 700)
    lay = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    with jax.set_mesh(mesh):
        arrays = lay(problem.hidden, "data"), lay(problem.weight, "tensor"), lay(problem.target_ids, "data")
        assert_exact(linear_logp(*arrays, **BOTH), logits, problem.target_ids)


H, W, IDS = jnp.ones((3, 8)), jnp.ones((40, 8)), jnp.asarray([0, 1, 39])


@pytest.mark.parametrize("given", [{"return_top_k": 3}, {"return_target_rank": True}], ids=str)
def test_no_implementation_refuses_a_ranking(given):
    decision, plain = (rlk_jax.explain("linear_logp", H, W, IDS, **options) for options in (given, {}))
    assert decision.choice == "xla" and decision.reasons == plain.reasons


NO_COUNT = "return_top_k must be an integer from 1 to 128 or None, got "
BAD = {
    "none": ({"return_top_k": 0}, NO_COUNT + "0."),
    "less than none": ({"return_top_k": -1}, NO_COUNT + "-1."),
    "too many": ({"return_top_k": 129}, NO_COUNT + "129."),
    "half": ({"return_top_k": 2.5}, NO_COUNT + "2.5."),
    "yes": ({"return_top_k": True}, NO_COUNT + "True."),
    "more than there are": ({"return_top_k": 41}, "return_top_k must be at most the vocabulary size 40, got 41."),
    "more than are no padding": (
        {"return_top_k": 20, "global_vocab_size": 19, "target_ids": IDS % 19},
        "return_top_k must be at most the vocabulary size 19, got 20.",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_messages(what):
    given, message = BAD[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_logp(H, W, **{"target_ids": IDS, **given})


def test_losses_have_no_ranking():
    hidden, ids, ones = H[None], IDS[None], jnp.ones((1, 3))
    for name, value in {**BOTH, "return_lse": True}.items():
        with pytest.raises(ValueError, match=f"linear_grpo_loss has no option {name}: it returns no log-probs."):
            linear_grpo_loss(hidden, W, ids, ones, None, ones[:, 0], ones, **{name: value})
