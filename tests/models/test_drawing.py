"""How a token is drawn: which ones can be, how often they are, and what is recorded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rlk_jax import linear_logp
from rlk_jax.core.allowed import packed_words
from rlk_jax.models import Sampling
from tests.support.allowed import mask_of
from tests.support.helpers import assert_same_bits, assert_within_contract


def gold(logits, sampling):
    """Which tokens of one row can be drawn, in float64, and how near a token is to being drawn or not."""
    scaled, margins = np.asarray(logits, np.float64) / sampling.temperature, [1.0]
    kept = np.full(len(scaled), True)
    if sampling.top_k is not None:
        kept = np.isin(np.arange(len(scaled)), np.argsort(-scaled, stable=True)[: sampling.top_k])
    if sampling.top_p is not None:
        shares = np.where(kept, np.exp(scaled - scaled.max()), 0)
        shares /= shares.sum()
        ordered = np.sort(shares)[::-1]
        sums = np.cumsum(ordered)
        count = next((i for i, total in enumerate(sums, 1) if total >= sampling.top_p), len(sums))
        margins += list(abs(sums - sampling.top_p))
        kept &= shares >= ordered[count - 1]
    if sampling.min_p is not None:
        relative = np.exp(scaled - scaled.max())
        margins += list(abs(relative - sampling.min_p))
        kept &= relative >= sampling.min_p
    return kept, min(margins)


def kept_of(logits, sampling):
    """Which tokens of one row are left, whose logits keep their differences."""
    given = jnp.asarray(logits, jnp.float32)[None]
    left, ids = (None if x is None else np.asarray(x)[0] for x in sampling.kept(given))
    ids = np.arange(len(logits)) if ids is None else ids
    expected = (np.asarray(logits) - np.max(logits)) / sampling.temperature
    is_left = np.isfinite(left)
    assert_within_contract(left[is_left], expected[ids[is_left]], "models", jnp.float32, "forward")
    kept = np.isin(np.arange(len(logits)), ids[is_left])
    assert kept.sum() == is_left.sum()
    return kept


SIZE = 9
some_logits = st.lists(st.integers(-6, 6), min_size=SIZE, max_size=SIZE)
"""Small integers, so that many are equal."""
shares = st.floats(0.01, 1.0)


@given(
    some_logits,
    st.sampled_from((0.3, 1.0, 2.5)),
    st.sampled_from((None, 1, 2, 5, SIZE, 2 * SIZE)),
    st.one_of(st.none(), shares),
    st.one_of(st.none(), shares),
)
@example([5, 5, 5, 5, 0, 0, 0, 0, 0], 1.0, 2, 0.5, 1.0)
@example([1, 0, 0, 0, 0, 0, 0, 0, 0], 1.0, 1, None, 1.0)
def test_the_tokens_that_can_be_drawn_are_those_of_the_definition(logits, temperature, k, p, m):
    sampling = Sampling(temperature, k, p, m)
    expected, margin = gold(logits, sampling)
    assume(margin > 1e-5 or p == 1 or m == 1 or p == 0.5)
    found = kept_of(logits, sampling)
    np.testing.assert_array_equal(found, expected)
    assert found[np.argmax(logits)]


@given(st.permutations(range(SIZE)), shares)
def test_top_p_keeps_the_smallest_prefix_that_reaches_p(order, p):
    """Without ties: the kept tokens are the most probable ones, they reach p, and without the last one they do not."""
    logits = np.array(order) * 0.7
    probabilities = np.exp(logits) / np.exp(logits).sum()
    kept = kept_of(logits, Sampling(top_p=p))
    assert probabilities[kept].min() > probabilities[~kept].max(initial=0)
    total, rounding = probabilities[kept].sum(), 1e-6
    assert total >= p - rounding and total - probabilities[kept].min() < p + rounding


@pytest.mark.parametrize("sampling", [Sampling(top_k=SIZE), Sampling(top_k=2**40), Sampling(top_p=1.0), Sampling(0.5)])
def test_what_truncates_nothing_keeps_all(sampling):
    """The least probable tokens have a share below what float32 adds to 1."""
    assert kept_of(np.arange(SIZE) * -9.0, sampling).all()


def test_what_may_truncate_says_so():
    whole = Sampling(), Sampling(0.3), Sampling(top_p=1.0), Sampling(top_k=9), Sampling(0, top_k=3, top_p=0.5)
    assert not any(x.truncates(9) for x in whole)
    assert all(x.truncates(9) for x in (Sampling(top_k=8), Sampling(top_p=0.9), Sampling(min_p=0.1)))


def test_equal_tokens_at_the_end_of_top_k():
    """They are cut to exactly k, of the lowest ids; what follows keeps equal tokens, within the k."""
    logits = [0, 5, 1, 5, 1, 1, 1, 0, 1]
    for k, expected in ((1, [1]), (4, [1, 2, 3, 4]), (8, [0, 1, 2, 3, 4, 5, 6, 8])):
        np.testing.assert_array_equal(np.flatnonzero(kept_of(logits, Sampling(top_k=k))), expected)
    within = kept_of(logits, Sampling(top_k=4, top_p=0.99, min_p=0.01))
    np.testing.assert_array_equal(np.flatnonzero(within), [1, 2, 3, 4])
    everywhere = kept_of(logits, Sampling(top_p=0.99))
    np.testing.assert_array_equal(np.flatnonzero(everywhere), [1, 2, 3, 4, 5, 6, 8])


def test_top_p_is_a_share_of_what_top_k_leaves():
    """In this order: of the whole vocabulary, the first token would have 0.4."""
    logits = np.log([0.4, 0.15, 0.15, 0.15, 0.15])
    np.testing.assert_array_equal(kept_of(logits, Sampling(top_k=2, top_p=0.7)), [True, False, False, False, False])
    np.testing.assert_array_equal(kept_of(logits, Sampling(top_p=0.5)), [True] * 5)


@pytest.mark.parametrize("p", [1e-37, 1e-3])
def test_the_most_probable_token_is_kept_by_any_p_and_at_any_temperature(p):
    for sampling in (Sampling(top_p=p), Sampling(min_p=1.0), Sampling(top_k=1), Sampling(1e-37, top_p=p, min_p=p)):
        kept = kept_of([3.0, 80.0, -80.0, 79.0], sampling)
        np.testing.assert_array_equal(kept, [False, True, False, False])


# How often they are drawn, and what is recorded of it.


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.3, top_k=20), Sampling(0.8, 5, 0.7), Sampling(top_p=0.6), Sampling(min_p=0.1), Sampling(top_k=40)],
    ids=str,
)
def test_a_draw_records_what_it_was_drawn_among(sampling):
    """Ids from the most probable one on, padded to k, with a top_k; else packed bits, which count from bit 0 of the
    first word; and nothing where nothing is taken away. Some logits are equal.
    """
    logits = np.random.default_rng(2).integers(-3, 4, (6, 40)).astype(np.float32)
    kept = np.array([gold(row, sampling)[0] for row in logits])
    tokens, allowed = jax.jit(sampling.draw)(jax.random.split(jax.random.key(0), 6), logits)
    assert kept[np.arange(6), tokens].all() and tokens.dtype == np.int32
    if sampling.top_k == 40:
        assert not allowed.restricts and kept.all()
    elif sampling.top_k is not None:
        assert allowed.allowed_mask is None and allowed.allowed_ids.dtype == np.int32
        order = np.argsort(-logits, stable=True)
        expected = [[x for x in own if row[x]] for own, row in zip(order, kept, strict=True)]
        padded = [own + [-1] * (sampling.top_k - len(own)) for own in expected]
        np.testing.assert_array_equal(allowed.allowed_ids, padded)
    else:
        assert allowed.allowed_ids is None
        assert_same_bits(allowed.allowed_mask, mask_of(kept))


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7, top_k=20, top_p=0.9), Sampling(0.8, top_p=0.9, min_p=1e-3)], ids=str
)
def test_a_draw_does_not_depend_on_other_rows(sampling):
    """Nor does what is recorded of it."""
    logits = np.random.default_rng(2).normal(size=(6, 40)).astype(np.float32)
    keys, draw = jax.random.split(jax.random.key(0), 6), jax.jit(sampling.draw)
    token, allowed = draw(keys[3:4], logits[3:4])
    tokens, among = draw(keys, logits)
    assert token[0] == tokens[3] and allowed.restricts
    assert_same_bits(allowed, jax.tree.map(lambda x: x[3:4], among))


@pytest.mark.parametrize("size", [1, 32, 33])
def test_words_end_where_the_vocabulary_does(size):
    is_allowed = np.random.default_rng(size).random((2, 3, size)) < 0.5
    assert_same_bits(packed_words(jnp.asarray(is_allowed)), mask_of(is_allowed))


@pytest.mark.parametrize("sampling", [Sampling(top_k=3), Sampling(top_p=0.5)], ids=str)
def test_a_row_that_is_nan_allows_nothing(sampling):
    """What is computed of its token is NaN then, and other rows are as they were."""
    logits = jnp.array([[1.0, jnp.nan, 3.0, 0.0, 0.0], [1.0, 2.0, 3.0, 0.0, 0.0]])
    _, allowed = sampling.draw(jax.random.split(jax.random.key(0), 2), logits)
    given = linear_logp(logits.at[0].set(1), jnp.eye(5), jnp.array([2, 2]), validate=False, **allowed._asdict())
    assert jnp.isnan(given[0]) and jnp.isfinite(given[1])


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.6), Sampling(1.7, top_k=6), Sampling(1.2, top_p=0.8), Sampling(min_p=0.1)]
)
def test_draws_follow_the_distribution(sampling):
    logits, count = np.random.default_rng(1).normal(size=12) * 1.5, 20_000
    keys = jax.random.split(jax.random.key(7), count)
    tokens, _ = sampling.draw(keys, jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, 12)))
    found = np.bincount(tokens, minlength=12)
    kept, _ = gold(logits, sampling)
    weights = np.where(kept, np.exp(logits / sampling.temperature), 0)
    expected = count * weights / weights.sum()
    assert kept.sum() == 12 - (found == 0).sum() and not found[~kept].any()
    squares = ((found - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert squares < freedom + 4 * (2 * freedom) ** 0.5


def test_temperature_0_takes_the_largest_logit():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(50, 20)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 50)
    for sampling in (Sampling(0), Sampling(0, top_k=3, top_p=0.5, min_p=0.5)):
        tokens, allowed = sampling.draw(keys, logits)
        np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))
        assert not allowed.restricts


# Mistakes.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or a positive finite number, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or a positive finite number, got nan"),
        ({"temperature": float("inf")}, "temperature must be 0 or a positive finite number, got inf"),
        ({"top_k": 0}, "top_k must be a positive integer, got 0"),
        ({"top_k": 2.0}, "top_k must be a positive integer, got 2.0"),
        ({"top_p": 0.0}, "top_p must be greater than 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be greater than 0 and at most 1, got 1.1"),
        ({"top_p": float("nan")}, "top_p must be greater than 0 and at most 1, got nan"),
        ({"min_p": -1}, "min_p must be greater than 0 and at most 1, got -1"),
        ({"min_p": float("nan")}, "min_p must be greater than 0 and at most 1, got nan"),
    ],
)
def test_numbers_out_of_their_range(fields, message):
    with pytest.raises(ValueError) as error:
        Sampling(**fields)
    assert str(error.value) == f"{message}."
