"""The promises of `deterministic`, as raw bits.

`make test` has one case, with a softcap and in float32, and shares its programs: a row of 1, 65 or 1000 tokens is one
program wherever it is needed.
"""

import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_jax import linear_logp
from rlk_jax.core import softmax
from rlk_jax.core.fixed_order import column_groups, fma_chain
from tests.support import helpers
from tests.support.helpers import Case, assert_same_bits

CASE = Case("bits", (1000,), 40, 2049, bias=True, temperature="per token")
SOFTCAP = Case("bits, softcap", (1000,), 40, 2049, bias=True, temperature="per token", options={"logit_softcap": 4.0})


def outputs(case: Case, problem: helpers.Problem, **changes):
    """(logp, lse, entropy, dH) of every row, and (dW, db), all by the program of the gradients."""
    values, (d_hidden, *d_head) = problem.values_and_gradients(case, "deterministic", **changes)
    return (*(x for x in values if x is not None), d_hidden), tuple(d_head)


class Whole(NamedTuple):
    case: Case
    problem: helpers.Problem
    rows: tuple
    head: tuple

    def of(self, index):
        """The case's problem of these rows."""
        return helpers.rows_of(self.problem, index)


# Without a softcap and in bfloat16 `deterministic` runs the same sums, of other numbers. What depends on a batch there
# is caught in `make test` by `rlk check` (float16, no softcap, every arrangement) and torch_bridge's bits.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param((SOFTCAP, "float32"), id="softcap-float32"),
        pytest.param((CASE, "float32"), id="float32", marks=pytest.mark.full),
        pytest.param((CASE, "bfloat16"), id="bfloat16", marks=pytest.mark.full),
    ],
)
def whole(request):
    case, dtype = request.param
    problem = helpers.make(case, dtype)
    return Whole(case, problem, *outputs(case, problem))


def test_the_whole_is_accurate(whole):
    gold, dtype = helpers.gold(whole.case, whole.problem), whole.problem.hidden.dtype
    for value, expected in zip(whole.rows[:3], gold.values, strict=True):
        helpers.assert_within_contract(value, expected, "linear_logp", dtype, "forward")
    for gradient, expected in zip((whole.rows[3], *whole.head), gold.gradients, strict=True):
        helpers.assert_within_contract(gradient, expected, "linear_logp", dtype, "gradient")


@pytest.mark.parametrize("n", [1, 65, 1000])
def test_rows_do_not_depend_on_the_batch(whole, n):
    rng = np.random.default_rng(n)
    for index in (rng.permutation(1000)[:n], np.arange(1000 - n, 1000)):
        assert_same_bits(outputs(whole.case, whole.of(index))[0], [x[index] for x in whole.rows])


def test_run_to_run(whole, compiled_anew):
    compiled_anew()
    assert_same_bits(outputs(whole.case, whole.problem), (whole.rows, whole.head))


def test_with_and_without_the_other_outputs(whole):
    call, (logp, _, entropy, _) = partial(whole.problem.call, whole.case, "deterministic"), whole.rows
    alone = call(return_lse=False, return_entropy=False)
    with_entropy = call(return_lse=False, return_entropy=True)
    assert_same_bits((alone, with_entropy.logp, with_entropy.entropy), (logp, logp, entropy))


@pytest.mark.full
def test_with_lse_alone(whole):
    """In `make test`, test_with_and_without_the_other_outputs catches a logp that depends on what is returned; lse is
    computed with every logp.
    """
    found = whole.problem.call(whole.case, "deterministic", return_lse=True, return_entropy=False)
    assert_same_bits((found.logp, found.lse), whole.rows[:2])


def test_a_frozen_head_and_unused_outputs_change_no_gradient_of_hidden(whole):
    """dH of logp alone beside a frozen head is that of a program of the tests above, whose other upstreams are 0."""
    problem = whole.of(np.arange(65))
    g_logp, *others = problem.upstream
    (*_, expected), _ = outputs(whole.case, problem._replace(upstream=(g_logp, *(0 * g for g in others))))

    def loss(hidden):
        return jnp.vdot(g_logp, problem._replace(hidden=hidden).call(whole.case, "deterministic").logp)

    assert_same_bits(jax.jit(jax.grad(loss))(problem.hidden), expected)


UNUSED = [(CASE, (0,), None), (CASE, (0, 2), 0.7), (SOFTCAP, (0,), 1.0), (SOFTCAP, (0, 2), None)]


# Which of the outputs are used changes which terms the backward adds; in `make test` the test above has the case with
# the fewest, and dH has these terms by the same gradients of logits as dW and db. The others are caught by gradients
# against float64 and by `test_jitted_gradients_keep_their_bits` of the logits' ops.
@pytest.mark.full
@pytest.mark.parametrize(("case", "used", "temperature"), UNUSED, ids=str)
def test_an_unused_output_and_one_of_zero_gradient_are_the_same(case, used, temperature):
    """Zeros as arrays, and no gradient at all: two programs, one answer; and a third one whose head is frozen."""
    gradient, _, operands, absent, zeros = unused(case, used, temperature)
    expected = gradient(operands, absent)
    assert_same_bits(gradient(operands, zeros), expected)
    frozen = jax.jit(lambda h: gradient((h, *operands[1:]), absent)[0])
    assert_same_bits(frozen(operands[0]), expected[0])


@pytest.mark.full
@pytest.mark.parametrize(("case", "used", "temperature"), UNUSED, ids=str)
def test_a_program_of_constants_has_the_bits_of_one_of_arguments(case, used, temperature):
    """In `make test` the transformations below have the head as a constant."""
    gradient, loss, operands, absent, _ = unused(case, used, temperature)
    assert_same_bits(jax.jit(lambda: jax.grad(loss)(operands, absent))(), gradient(operands, absent))


def unused(case, used, temperature):
    """A gradient and its loss, the operands, and upstream gradients of which those not used are None, or zeros."""
    problem = helpers.rows_of(helpers.make(case, jnp.float32), np.arange(70))
    if temperature is not None:
        problem = problem._replace(temperature=temperature)

    def loss(operands, upstream):
        changed = problem._replace(hidden=operands[0], weight=operands[1], bias=operands[2])
        values = changed.call(case, "deterministic")
        return sum(jnp.vdot(g, x) for g, x in zip(upstream, values, strict=True) if g is not None)

    operands = (problem.hidden, problem.weight, problem.bias)
    absent = [g if i in used else None for i, g in enumerate(problem.upstream)]
    zeros = [g if i in used else jnp.zeros(70) for i, g in enumerate(problem.upstream)]
    return jax.jit(jax.grad(loss)), loss, operands, absent, zeros


def test_padding_rows_of_the_head_change_no_bits(whole):
    """A head padded to 2112 rows gives what its 2049 real rows give."""
    case, problem = whole.case, whole.of(np.arange(65))
    padded_case = helpers.with_options(case, global_vocab_size=2049)
    padded = problem._replace(
        weight=jnp.pad(problem.weight, ((0, 63), (0, 0)), constant_values=jnp.nan), bias=jnp.pad(problem.bias, (0, 63))
    )
    rows, head = outputs(case, problem)
    padded_rows, padded_head = outputs(padded_case, padded)
    assert_same_bits(padded_rows, rows)
    assert_same_bits([x[:2049] for x in padded_head], head)


TRANSFORMATIONS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "vmap of batches": lambda f: lambda *x: jax.vmap(f)(*(a.reshape(4, 250, *a.shape[1:]) for a in x)).reshape(-1),
    "remat": lambda f: jax.jit(jax.checkpoint(f)),
    "surrounded": lambda f: (
        lambda *x: jax.jit(
            lambda h, t, s: (f(h * 1, t, s * 1), jnp.exp(f(h, t, s)) * 3 - 1),
        )(*x)[0]
    ),
}


# A surrounded program is jitted too, and batches are mapped as single rows are. Programs of jit alone and of no jit are
# compared above: `whole` is jitted, and the other outputs are not.
@helpers.cover("name", [(x,) for x in TRANSFORMATIONS], lambda x: x in ("vmap of batches", "surrounded"))
def test_transformations_do_not_change_bits(whole, name):
    problem, options = whole.problem, whole.case.options

    def f(hidden, target_ids, temperature):
        head = {"temperature": temperature, "implementation": "deterministic", **options}
        return linear_logp(hidden, problem.weight, target_ids, problem.bias, **head)

    arguments = (problem.hidden, problem.target_ids, problem.temperature)
    assert_same_bits(TRANSFORMATIONS[name](f)(*arguments), whole.rows[0])


def test_ignored_rows_anywhere(whole):
    """NaN rows inserted at random places change no bit of any other row, of dW, or of db."""
    kept = whole.of(np.arange(65))
    rows, head = outputs(whole.case, kept)
    place = np.sort(np.random.default_rng(1).permutation(130)[:65])

    def spread(x, fill):
        return jnp.full((130, *x.shape[1:]), fill, x.dtype).at[place].set(x)

    sparse = kept._replace(
        hidden=spread(kept.hidden, jnp.nan),
        target_ids=spread(kept.target_ids, -100),
        temperature=spread(kept.temperature, 1),
        upstream=tuple(spread(g, 3) for g in kept.upstream),
    )
    sparse_rows, sparse_head = outputs(whole.case, sparse, ignore_index=-100)
    assert_same_bits([x[place] for x in sparse_rows], rows)
    assert_same_bits(sparse_head, head)


def test_rows_with_zero_upstream_appended_or_inserted(whole):
    _, head = outputs(whole.case, whole.of(np.arange(65)))
    mask = jnp.asarray(np.random.default_rng(2).permutation(1000) < 65)
    masked = whole.of(np.maximum(np.cumsum(np.asarray(mask)) - 1, 0))
    masked = masked._replace(upstream=tuple(jnp.where(mask, g, 0) for g in masked.upstream))
    assert_same_bits(outputs(whole.case, masked)[1], head)


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


def test_chunks_and_groups_are_folded_in_ascending_order():
    """The tree over the vocabulary, chunk by chunk: in another order all calls would agree, and differ from today's."""
    case = Case("order", (64,), 40, 2049)
    problem = helpers.make(case, jnp.float32)
    logits = jax.jit(fma_chain)(problem.hidden.T, problem.weight.T, jnp.zeros((64, 2049)))
    of_chunk = jax.jit(partial(softmax.fixed_order_partial, with_gap=True))
    fold = jax.jit(softmax.fold)
    nothing = softmax.empty_partial(64, logits, with_gap=True)
    width = column_groups(2049).width

    def partial_of(columns):
        """The softmax over at most 256 columns."""
        padded = jnp.pad(logits[:, columns], ((0, 0), (0, 256 - len(columns))), constant_values=-jnp.inf)
        ids = jnp.pad(columns, (0, 256 - len(columns)), constant_values=-1)
        return of_chunk(padded, ids == problem.target_ids[:, None])

    groups = []
    for start in range(0, 2049, width):
        columns = np.arange(start, min(start + width, 2049))
        groups.append(functools.reduce(fold, map(partial_of, np.split(columns, [256])), nothing))
    assert len(groups) == 8 and width > 256

    def lse_and_entropy(groups):
        whole = functools.reduce(fold, groups, nothing)
        log_sum = jnp.log(whole.total)
        return whole.max + log_sum, log_sum + whole.gap / whole.total

    found = problem.call(case, "deterministic")
    assert_same_bits((found.lse, found.entropy), lse_and_entropy(groups))
    assert np.any(helpers.bits(found.lse) != helpers.bits(lse_and_entropy(groups[::-1])[0]))


@pytest.mark.full  # In `make test` the rows of `whole` above are selected, and logp's of any place.
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


@pytest.mark.full
def test_multi_token_prediction_is_a_lead_dimension():
    """K hidden states of each token go through one head: rows have the bits of K calls, and dW is the sum of theirs.

    In `make test`, rows are in other batches above, and test_options_against_float64 has two lead dimensions.
    """
    depth, batch, length = 3, 2, 7
    case = Case("multi-token", (depth, batch, length), 40, 300, bias=True, options={"ignore_index": -100})
    problem = helpers.make(case, jnp.float32)
    tokens = jnp.pad(problem.target_ids[0], ((0, 0), (0, depth)), constant_values=-100)
    shifted = jnp.stack([tokens[:, k : k + length] for k in range(depth)])
    problem = problem._replace(target_ids=shifted)
    rows, (d_weight, d_bias) = outputs(case, problem)
    one = Case("one token", (batch, length), 40, 300, bias=True, options={"ignore_index": -100})
    calls = [outputs(one, helpers.rows_of(problem, k)) for k in range(depth)]
    assert_same_bits(rows, tuple(map(jnp.stack, zip(*(x for x, _ in calls), strict=True))))
    for found, parts in zip((d_weight, d_bias), zip(*(x for _, x in calls), strict=True), strict=True):
        helpers.assert_within_contract(found, sum(parts), "linear_logp", jnp.float32, "gradient")
