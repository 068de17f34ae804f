"""The promises of `deterministic`, as raw bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_jax import linear_logp
from rlk_jax.core.fixed_order import fma_chain
from tests.support import helpers
from tests.support.helpers import Case, assert_same_bits

CASE = Case("bits", (1000,), 40, 2049, bias=True, temperature="per token")
SOFTCAP = Case("bits, softcap", (1000,), 40, 2049, bias=True, temperature="per token", options={"logit_softcap": 4.0})


def outputs(case: Case, problem: helpers.Problem, **changes):
    return helpers.outputs(case, problem, "deterministic", **changes)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def whole(request):
    problem = helpers.make(CASE, request.param)
    return problem, *outputs(CASE, problem)


@pytest.mark.parametrize("n", [1, 65, 1000])
def test_rows_do_not_depend_on_the_batch(whole, n):
    problem, rows, _ = whole
    rng = np.random.default_rng(n)
    for index in (rng.permutation(1000)[:n], np.arange(1000 - n, 1000)):
        assert_same_bits(outputs(CASE, helpers.rows_of(problem, index))[0], [x[index] for x in rows])


def test_rows_with_softcap_do_not_depend_on_the_batch():
    problem = helpers.make(SOFTCAP, jnp.float32)
    rows, _ = outputs(SOFTCAP, problem)
    index = np.random.default_rng(0).permutation(1000)[:65]
    assert_same_bits(outputs(SOFTCAP, helpers.rows_of(problem, index))[0], [x[index] for x in rows])


def test_run_to_run(whole, compiled_anew):
    problem, rows, head = whole
    compiled_anew()
    assert_same_bits(outputs(CASE, problem), (rows, head))


def test_with_and_without_the_other_outputs(whole):
    problem, (logp, lse, entropy, _), _ = whole
    for changes in ({"return_entropy": False}, {"return_lse": False}, {"return_lse": False, "return_entropy": False}):
        assert_same_bits(jax.tree.leaves(problem.call(CASE, "deterministic", **changes))[0], logp)
    assert_same_bits(problem.call(CASE, "deterministic", return_entropy=False).lse, lse)
    assert_same_bits(problem.call(CASE, "deterministic", return_lse=False).entropy, entropy)


@pytest.mark.parametrize(
    ("case", "used", "temperature"),
    [(CASE, (0,), None), (CASE, (0, 2), 0.7), (SOFTCAP, (0,), 1.0), (SOFTCAP, (0, 2), None)],
    ids=str,
)
def test_an_unused_output_and_one_of_zero_gradient_are_the_same(case, used, temperature):
    """Zeros as arrays, and no gradient at all: two programs, one answer. Temperatures per token, and constants."""
    problem = helpers.rows_of(helpers.make(case, jnp.float32), np.arange(70))
    if temperature is not None:
        problem = problem._replace(temperature=temperature)

    def loss(operands, upstream):
        changed = problem._replace(hidden=operands[0], weight=operands[1], bias=operands[2])
        values = changed.call(case, "deterministic")
        return sum(jnp.vdot(g, x) for g, x in zip(upstream, values, strict=True) if g is not None)

    operands = (problem.hidden, problem.weight, problem.bias)
    gradient = jax.jit(jax.grad(loss))
    absent = [g if i in used else None for i, g in enumerate(problem.upstream)]
    zeros = [g if i in used else jnp.zeros(70) for i, g in enumerate(problem.upstream)]
    expected = gradient(operands, absent)
    assert_same_bits(gradient(operands, zeros), expected)
    assert_same_bits(jax.jit(lambda: jax.grad(loss)(operands, absent))(), expected)
    assert_same_bits(jax.jit(jax.grad(lambda h: loss((h, *operands[1:]), absent)))(operands[0]), expected[0])


def test_padding_rows_of_the_head_change_no_bits():
    """A head padded to 2112 rows gives what its 2049 real rows give."""
    problem = helpers.rows_of(helpers.make(CASE, jnp.float32), np.arange(70))
    padded_case = helpers.with_options(CASE, global_vocab_size=2049)
    padded = problem._replace(
        weight=jnp.pad(problem.weight, ((0, 63), (0, 0)), constant_values=jnp.nan), bias=jnp.pad(problem.bias, (0, 63))
    )
    rows, head = outputs(CASE, problem)
    padded_rows, padded_head = outputs(padded_case, padded)
    assert_same_bits(padded_rows, rows)
    assert_same_bits([x[:2049] for x in padded_head], head)


def test_transformations_do_not_change_bits(whole):
    problem, (logp, *_), _ = whole

    def f(hidden, target_ids, temperature):
        return linear_logp(
            hidden, problem.weight, target_ids, problem.bias, temperature=temperature, implementation="deterministic"
        )

    arguments = (problem.hidden, problem.target_ids, problem.temperature)
    assert_same_bits(f(*arguments), logp)
    assert_same_bits(jax.jit(f)(*arguments), logp)
    assert_same_bits(jax.vmap(f)(*arguments), logp)
    assert_same_bits(jax.vmap(f)(*(x.reshape(4, 250, *x.shape[1:]) for x in arguments)).reshape(-1), logp)
    assert_same_bits(jax.jit(jax.checkpoint(f))(*arguments), logp)
    surrounded = jax.jit(lambda h, t, s: (f(h * 1, t, s * 1), jnp.exp(f(h, t, s)) * 3 - 1))
    assert_same_bits(surrounded(*arguments)[0], logp)


def test_ignored_rows_anywhere(whole):
    """NaN rows inserted at random places change no bit of any other row, of dW, or of db."""
    problem, _, _ = whole
    kept = helpers.rows_of(problem, np.arange(200))
    rows, head = outputs(CASE, kept)
    place = np.sort(np.random.default_rng(1).permutation(317)[:200])

    def spread(x, fill):
        return jnp.full((317, *x.shape[1:]), fill, x.dtype).at[place].set(x)

    sparse = kept._replace(
        hidden=spread(kept.hidden, jnp.nan),
        target_ids=spread(kept.target_ids, -100),
        temperature=spread(kept.temperature, 1),
        upstream=tuple(spread(g, 3) for g in kept.upstream),
    )
    sparse_rows, sparse_head = outputs(CASE, sparse, ignore_index=-100)
    assert_same_bits([x[place] for x in sparse_rows], rows)
    assert_same_bits(sparse_head, head)


def test_rows_with_zero_upstream_appended_or_inserted(whole):
    problem, _, _ = whole
    kept = helpers.rows_of(problem, np.arange(100))
    _, head = outputs(CASE, kept)
    mask = jnp.arange(250) % 5 < 2
    masked = helpers.rows_of(problem, np.cumsum(np.asarray(mask)) - 1)
    masked = masked._replace(upstream=tuple(jnp.where(mask, g, 0) for g in masked.upstream))
    assert_same_bits(outputs(CASE, masked)[1], head)


def test_the_chain_is_what_it_says():
    """fma over ascending k from c: emulated in float64, where a product of two float32 numbers is exact."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=s).astype(np.float32) for s in ((37, 64), (37, 256), (64, 256)))
    expected = c
    for k in range(37):
        expected = (expected.astype(np.float64) + a[k][:, None].astype(np.float64) * b[k]).astype(np.float32)
    chain = jax.jit(fma_chain)
    assert_same_bits(chain(a, b, c), expected)
    for cut in (1, 16, 36):
        assert_same_bits(chain(a[cut:], b[cut:], chain(a[:cut], b[:cut], c)), expected)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.lists(st.integers(0, 19), min_size=1, max_size=70),
    vocab=st.sampled_from([3, 64, 700]),
    seed=st.integers(0, 100),
)
def test_any_selection_of_rows(rows, vocab, seed):
    case = Case("property", (20,), 9, vocab)
    problem = helpers.make(case, jnp.float32, seed)
    whole = problem.call(case, "deterministic")
    index = np.asarray(rows)
    selected = problem._replace(hidden=problem.hidden[index], target_ids=problem.target_ids[index])
    assert_same_bits(selected.call(case, "deterministic"), [x[index] for x in whole])
