"""linear_logp with a low-rank term of the head: values, bits, transformations, sharded heads, messages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rlk_jax
from rlk_jax import LowRank, linear_logp, vocab_parallel
from tests.support import helpers, low_rank
from tests.support.allowed import allowed_of, ids_of, mask_of
from tests.support.helpers import assert_same_bits, assert_within_contract
from tests.support.low_rank import Arrays, Case
from tests.support.rankings import BOTH, assert_ranks_gold

CASES = (
    Case(37, 40, 300, 5),
    Case(70, 72, 301, 16, {"weight_layout": "dv", "logit_softcap": 2.0}),
    Case(20, 64, 512, 70, {"global_vocab_size": 499}, own_inputs=True),
)
PROMISING = "deterministic"


@functools.cache
def problem(number: int, dtype: Any) -> Arrays:
    return low_rank.make(CASES[number], dtype)


# deterministic's chain is one for all dtypes. Inputs of A's own become columns beside hidden's before an implementation
# is called.
@helpers.cover(
    "number, implementation, dtype",
    [
        (i, x, dtype)
        for i in range(len(CASES))
        for x in ("reference", "xla", "deterministic")
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    ],
    lambda i, x, dtype: (
        (i, x, dtype)
        in (
            (0, "reference", jnp.float32),
            (1, "xla", jnp.bfloat16),
            (2, "xla", jnp.float16),
            (0, "deterministic", jnp.bfloat16),
        )
    ),
)
def test_against_float64(number, implementation, dtype):
    case, x = CASES[number], problem(number, dtype)
    low_rank.assert_is_definition(case, x, low_rank.outputs(case, x, implementation))


@pytest.mark.parametrize(
    ("implementation", "dtype", "upstream"), [("xla", jnp.bfloat16, 1.0), ("deterministic", jnp.float16, 1e-7)]
)
def test_b_of_zeros_gives_the_bits_of_no_term(implementation, dtype, upstream):
    """Tiny gradients round to −0 in float16."""
    case, x = CASES[1], problem(1, dtype)
    x = x._replace(b=jnp.zeros_like(x.b), upstream=x.upstream * upstream)
    logp, gradients = low_rank.outputs(case, x, implementation)

    def loss(given: Any) -> Any:
        found = linear_logp(given[0], given[1].T, x.target_ids, given[2], implementation=implementation, **case.options)
        return jnp.vdot(found, x.upstream), found

    operands = (x.hidden, x.weight, x.bias)
    (_, expected), of_operands = jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)
    assert_same_bits(logp, expected)
    assert_same_bits([gradients[name] for name in ("hidden", "weight", "bias")], list(of_operands))
    d_hidden = np.asarray(of_operands[0])
    assert np.signbit(d_hidden[d_hidden == 0]).any() == (dtype == jnp.float16)
    assert not np.asarray(gradients["a"]).any() and np.asarray(gradients["b"]).any()


@pytest.mark.full
def test_rows_have_the_same_bits_in_any_batch_and_ignored_rows_change_none():
    """In `make test`, test_ignored_rows_anywhere and test_rows_do_not_depend_on_the_batch (test_bits.py) catch what
    places and batches change: a term's columns lie beside hidden's and the head's, in the same blocks.

    Rows alone, and spread among ignored ones that hold NaN: gradients of A and B are those of the rows alone."""
    case, x = CASES[0], problem(0, jnp.bfloat16)
    places = np.sort(np.random.default_rng(1).permutation(90)[: case.tokens])

    def spread(rows: Any, fill: float) -> Any:
        return jnp.full((90, *rows.shape[1:]), fill, rows.dtype).at[places].set(rows)

    wide = x._replace(
        hidden=spread(x.hidden, np.nan), target_ids=spread(x.target_ids, -1), upstream=spread(x.upstream, 1)
    )
    alone, among = low_rank.outputs(case, x, PROMISING), low_rank.outputs(case, wide, PROMISING, ignore_index=-1)
    assert_same_bits(among[0][places], alone[0])
    rows = among[1].pop("hidden")
    assert_same_bits(rows[places], alone[1].pop("hidden"))
    assert not np.asarray(rows[np.setdiff1d(np.arange(90), places)]).any()
    assert_same_bits(among[1], alone[1])


def test_rows_without_an_upstream_gradient_may_hold_nan():
    case, x = CASES[0], problem(0, jnp.bfloat16)
    bad = x._replace(hidden=x.hidden.at[::3].set(jnp.nan), upstream=x.upstream.at[::3].set(0))
    good = x._replace(upstream=bad.upstream)
    assert_same_bits(low_rank.outputs(case, bad, PROMISING)[1], low_rank.outputs(case, good, PROMISING)[1])


def test_gradients_have_the_same_bits_outside_jit():
    """A scale that is no power of two shows whether XLA fuses a product into a sum."""
    x = problem(0, jnp.float32)

    def gradient(low_rank: Any, hidden: Any) -> Any:
        call = functools.partial(linear_logp, implementation=PROMISING)
        return jax.grad(lambda h: (call(h, x.weight, x.target_ids, low_rank=low_rank) * x.upstream).sum())(hidden)

    term = (x.a, x.b, 0.7)
    assert_same_bits(gradient(term, x.hidden), jax.jit(gradient)(term, x.hidden))


def test_a_frozen_head_has_no_gradient_in_memory():
    """Beside a frozen W the sums over tokens are [V, r], not [V, D]."""
    shapes = (4, 1024), (4096, 4), (64, 1024), (4096, 1024)

    def loss(a: Any, b: Any, h: Any, w: Any) -> Any:
        return linear_logp(h, w, jnp.zeros(64, int), low_rank=(a, b, 0.5), implementation=PROMISING).sum()

    def temporaries(wanted: tuple[int, ...]) -> int:
        arrays = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
        return jax.jit(jax.grad(loss, wanted)).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    assert temporaries((0, 1)) < 4096 * 1024 * 4 <= temporaries((0, 1, 3))


def test_frozen_operands_and_float32_factors():
    """Masters of A and B in float32 are rounded to hidden's dtype, and their gradients come back in float32."""
    x = problem(0, jnp.bfloat16)
    fine = [y.astype(jnp.float32) * (1 + 2**-12) for y in (x.a, x.b)]

    def loss(a: Any, b: Any) -> Any:
        return linear_logp(x.hidden, x.weight, x.target_ids, low_rank=(a, b, 0.5), implementation="xla").sum()

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    found, coarse = gradients(*fine), gradients(*(y.astype(jnp.bfloat16) for y in fine))
    assert all(y.dtype == jnp.float32 for y in found)
    assert_same_bits([y.astype(jnp.bfloat16) for y in found], list(coarse))
    only_b = jax.jit(jax.grad(lambda b: loss(x.a, b)))(x.b)
    assert_same_bits(only_b, gradients(x.a, x.b)[1])


def test_transformations():
    """vmap over rows is one call; a batch of adapters, scan and remat give each call's bits."""
    x = problem(0, jnp.bfloat16)
    rows, ids = x.hidden[:36].reshape(4, 9, -1), x.target_ids[:36].reshape(4, 9)

    def loss(hidden: Any, ids: Any, a: Any, b: Any) -> Any:
        return linear_logp(hidden, x.weight, ids, low_rank=(a, b, 0.5), implementation=PROMISING).sum()

    gradients = jax.grad(loss, (0, 2, 3))
    of_row = jax.jit(gradients)
    expected = jax.tree.map(lambda *y: jnp.stack(y), *(of_row(*row, x.a, x.b) for row in zip(rows, ids, strict=True)))
    assert_same_bits(jax.jit(jax.vmap(gradients, (0, 0, None, None)))(rows, ids, x.a, x.b), expected)
    adapters = [jnp.stack([y] * 4) for y in (x.a, x.b)]
    assert_same_bits(jax.jit(jax.vmap(gradients))(rows, ids, *adapters), expected)
    of_remat = jax.grad(jax.checkpoint(loss), (0, 2, 3))
    assert_same_bits(jax.jit(lambda *y: jax.lax.map(lambda r: of_remat(*r, x.a, x.b), y))(rows, ids), expected)


def sharded(mesh: Any, case: Case, x: Arrays, implementation: str, lead: Any, **options: Any) -> Any:
    op = functools.partial(vocab_parallel.linear_logp, mesh=mesh, vocab_axis="tp", token_axes=lead)
    return low_rank.outputs(case, x, implementation, op, **options)


@helpers.cover(
    "data, tp, axis_type",
    [(*degrees, kind) for degrees in ((1, 2), (2, 4), (1, 8)) for kind in (AxisType.Auto, AxisType.Explicit)],
    lambda data, tp, kind: (data, tp, kind) == (1, 8, AxisType.Auto),
)
def test_a_head_cut_along_the_vocabulary_has_the_same_bits_at_every_degree(data, tp, axis_type):
    """In `make test`, test_bare_calls_over_explicit_axes (here) has a term over Explicit axes and tokens over two
    devices, and test_bare_calls_on_sharded_heads (sharding/test_vocab_parallel.py) a head that is cut along one.
    """
    case = Case(24, 40, 512, 5)
    x = low_rank.make(case, jnp.bfloat16)
    expected = low_rank.outputs(case, x, PROMISING)
    devices = jax.devices()[: data * tp]
    mesh = jax.make_mesh((data, tp), ("data", "tp"), axis_types=(axis_type,) * 2, devices=devices)
    found = sharded(mesh, case, x, PROMISING, "data", reduction="canonical")
    names = list(found[1]) if data == 1 else ["hidden"]  # two devices add up two sums over tokens
    assert_same_bits(found[0], expected[0])
    assert_same_bits([found[1][name] for name in names], [expected[1][name] for name in names])
    low_rank.assert_is_definition(case, x, found)


@helpers.cover(
    "rows, head",
    [(P("x"), P()), (P(), P("x")), (P(), P(None, "x")), (P("x"), P(None, "y")), (P(("x", "y")), P())],
    lambda *x: x in ((P(), P("x")), (P("x"), P(None, "y"))),
)
def test_bare_calls_over_auto_axes(rows, head):
    """However arrays lie over a mesh, values are right and the head is not gathered.

    In `make test`, one case cuts the head along the vocabulary, and one cuts its columns and the rows.
    """
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    case = Case(24, 40, 512, 5)
    x = low_rank.make(case, jnp.float32)
    laid = x._replace(
        hidden=jax.device_put(x.hidden, NamedSharding(mesh, rows)),
        target_ids=jax.device_put(x.target_ids, NamedSharding(mesh, rows)),
        weight=jax.device_put(x.weight, NamedSharding(mesh, head)),
        b=jax.device_put(x.b, NamedSharding(mesh, P(*head[:1]))),
    )
    low_rank.assert_is_definition(case, x, low_rank.outputs(case, laid, "xla"))


def test_bare_calls_over_explicit_axes():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    case = Case(24, 40, 512, 5)
    x = low_rank.make(case, jnp.float32)
    lay = lambda y, *spec: jax.device_put(y, NamedSharding(mesh, P(*spec)))  # noqa: E731
    laid = x._replace(
        hidden=lay(x.hidden, "data"),
        target_ids=lay(x.target_ids, "data"),
        upstream=lay(x.upstream, "data"),
        weight=lay(x.weight, "tensor"),
        b=lay(x.b, "tensor"),
        a=lay(x.a),
        bias=lay(x.bias),
    )
    with jax.set_mesh(mesh):
        found = low_rank.outputs(case, laid, "xla")
        assert_within_contract(low_rank.call(case, laid, "xla"), found[0], "linear_logp", jnp.float32, "forward")
    low_rank.assert_is_definition(case, x, found)


def with_allowed(case: Case, x: Arrays, form: str) -> tuple[Arrays, np.ndarray]:
    """The arrays of a call whose rows may take some tokens alone, and which. No row may take some of the first ten."""
    allowed = allowed_of(case, x)
    allowed[:, np.setdiff1d(np.arange(10), x.target_ids)] = False
    given = {"allowed_ids": ids_of(allowed)} if form == "ids" else {"allowed_mask": mask_of(allowed)}
    return x._replace(**given), allowed


# Ids and a mask become the same words before an implementation is called. In make test, test_against_float64 has a term
# in deterministic, and the test of that name in test_allowed.py a mask.
@helpers.cover(
    "number, implementation, form",
    [(i, x, y) for i in range(len(CASES)) for x in helpers.IMPLEMENTATIONS for y in ("ids", "mask")],
    lambda *x: x == (1, "xla", "mask"),
)
def test_beside_allowed_tokens(number, implementation, form):
    """What B gives to tokens that no row allows has no gradient."""
    case = CASES[number]
    x, allowed = with_allowed(case, problem(number, jnp.float32), form)
    found = low_rank.outputs(case, x, implementation)
    low_rank.assert_is_definition(case, x, found, allowed)
    is_possible = allowed.any(axis=0)
    assert not is_possible.all() and not np.asarray(found[1]["b"])[~is_possible].any()


# In make test, test_beside_allowed_tokens has what a mask does to a term, and
# test_a_mask_that_allows_everything_gives_the_bits_of_no_mask (test_allowed.py) the bits of one.
@pytest.mark.full
@helpers.implementations(PROMISING, "xla")
def test_a_mask_that_allows_everything_changes_no_bit(implementation):
    case, x = CASES[1], problem(1, jnp.bfloat16)
    masked = x._replace(allowed_mask=mask_of(np.ones((case.tokens, case.vocab), bool)))
    assert_same_bits(low_rank.outputs(case, masked, implementation), low_rank.outputs(case, x, implementation))


# A mask changes logits, of which a ranking is made. In make test, test_against_float64 has a term in deterministic, and
# the test of that name in test_top_k.py a ranking.
@helpers.cover(
    "implementation, masked",
    [(x, y) for x in helpers.IMPLEMENTATIONS for y in (False, True)],
    lambda x, masked: (x, masked) == ("xla", True),
)
def test_beside_a_ranking(implementation, masked):
    """The ranking is that of logits with the term; log-probs and gradients are those of a call without one."""
    case, x, allowed = CASES[1], problem(1, jnp.float32), None
    if masked:
        x, allowed = with_allowed(case, x, "mask")
    found, gradients = low_rank.outputs(case, x, implementation, **BOTH)
    assert_ranks_gold(found, low_rank.definition(case, x, allowed).logits, x.target_ids, jnp.float32)
    expected, of_plain = low_rank.outputs(case, x, implementation)
    assert_same_bits((found.logp, gradients), (expected, of_plain))


# In make test, test_a_head_cut_along_the_vocabulary_has_the_same_bits_at_every_degree has a term; test_allowed.py and
# test_top_k.py have masks and rankings of a head that is cut.
@pytest.mark.full
@pytest.mark.parametrize("degree", [2, 8])
def test_a_mask_and_a_ranking_of_a_head_cut_along_the_vocabulary(degree):
    case = Case(24, 40, 512, 5)
    x, _ = with_allowed(case, low_rank.make(case, jnp.bfloat16), "ids")
    mesh = jax.make_mesh((degree,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:degree])
    found = sharded(mesh, case, x, PROMISING, None, reduction="canonical", **BOTH)
    assert_same_bits(found, low_rank.outputs(case, x, PROMISING, **BOTH))


def test_linear_grpo_loss_takes_it_for_the_policy_alone():
    """The frozen reference is the model without the adapter."""
    x = problem(0, jnp.float32)
    shape = (4, 9)
    hidden, ids = x.hidden[:36].reshape(*shape, -1), x.target_ids[:36].reshape(shape)
    rng = np.random.default_rng(0)
    old, mask = jnp.asarray(rng.normal(size=shape) - 6, jnp.float32), jnp.asarray(rng.random(shape) < 0.8)
    advantages, options = jnp.asarray(rng.normal(size=4), jnp.float32), rlk_jax.grpo.LossOptions(beta=0.1)
    term = LowRank(x.a, x.b, 0.5)
    call = {"implementation": "xla", "options": options, "ref_hidden": hidden, "ref_weight": x.weight}
    given = (hidden, x.weight, ids, old, None, advantages, mask)
    found = jax.jit(lambda: rlk_jax.linear_grpo_loss(*given, low_rank=term, **call))()

    @jax.jit
    def in_two_calls() -> Any:
        masked = jnp.where(mask, ids, -100)
        logp, ref = (
            linear_logp(hidden, x.weight, masked, low_rank=y, ignore_index=-100, implementation="xla")
            for y in (term, None)
        )
        return rlk_jax.grpo.policy_loss(logp, old, advantages, mask, ref_logps=ref, options=options)

    expected = in_two_calls()
    assert_within_contract(found.loss, expected.loss, "grpo_loss", jnp.float32, "forward")
    assert_within_contract(found.kl, expected.kl, "grpo_loss", jnp.float32, "forward")


H, W, IDS, A, B = jnp.ones((3, 8)), jnp.ones((16, 8)), jnp.zeros(3, jnp.int32), jnp.ones((2, 8)), jnp.ones((16, 2))


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ([A, B, 1.0], r"low_rank must be \(A, B, scale\) or a rlk_jax.LowRank, got builtins.list"),
        ((A,), "low_rank must be"),
        ((A, B, 1.0, None, 1), "low_rank must be"),
        ((A.T, B, 1.0), r"A and B must be \[r, D\] and \[V, r\] .* got shapes \(8, 2\) and \(16, 2\)"),
        ((A, B.T, 1.0), r"A and B must be .* got shapes \(2, 8\) and \(2, 16\)"),
        ((A[:0], B[:, :0], 1.0), "with r >= 1"),
        ((A[0], B, 1.0), "A and B must be"),
        (("A", B, 1.0), "low_rank's A must be a JAX or NumPy array, got builtins.str"),
        ((A, None, 1.0), "low_rank needs both A and B, got None"),
        ((None, None, 1.0), "low_rank needs both A and B, got None"),
        ((A, B, 1e39), "low_rank's scale must be finite as float32, got 1e[+]39"),
        ((A.astype(jnp.int32), B, 1.0), "low_rank_a must be bfloat16, float16 or float32, got int32"),
        ((A, B, jnp.ones(2)), r"low_rank's scale must be a number or a scalar, got shape \(2,\)"),
        ((A, B, float("nan")), "low_rank's scale must be finite as float32, got nan"),
        ((A, B, 1.0, H[:2]), r"low_rank's inputs must have hidden's shape \(3, 8\), got \(2, 8\)"),
    ],
)
def test_messages(term, message):
    with pytest.raises(ValueError, match=message):
        linear_logp(H, W, IDS, low_rank=term)


def test_no_tokens():
    found = jax.grad(lambda a: linear_logp(H[:0], W, IDS[:0], low_rank=(a, B, 1.0)).sum())(A)
    assert not np.asarray(found).any()
