"""linear_logp's Mosaic kernels over the columns that each row is allowed, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.allowed import BIT_COLUMNS, allowed_bits, bits_of_pieces
from pallas_kernels.hopper.vocabulary import Vocabulary
from tests.support import helpers
from tests.support.allowed import allowed_of, mask_of
from tests.support.helpers import Case, assert_same_bits, assert_within_contract

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
RAGGED = Case("ragged, bias", (70,), 64, 1000, bias=True, temperature="per token")
"""Groups of 125 columns begin inside words."""
SOFTCAP = Case("two row tiles, softcap, dv", (140,), 72, 512, options={"logit_softcap": 2.0, "weight_layout": "dv"})
PADDED = Case("padded", (40,), 64, 320, bias=True, options={"global_vocab_size": 257})
FEW = Case("few rows", (3,), 64, 1000, scale=0.2)
"""The norm of three rows is no norm over many: float32 operands in two parts leave 4e-6 of a logit of standard size."""


pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("columns", [256, 128])
@pytest.mark.parametrize(("size", "groups", "width"), [(1000, 8, 125), (151936, 8, 18992), (50, 1, 50), (300, 8, 40)])
def test_bits_of_every_chunk(size, groups, width, columns):
    """A chunk may begin at any bit of a word."""
    vocabulary = Vocabulary(size, groups, width, columns)
    allowed = np.random.default_rng(0).random((2, size)) < 0.5
    bits = np.asarray(jax.jit(allowed_bits, static_argnums=0)(vocabulary, mask_of(allowed))).view(np.uint32)
    bits = bits.reshape(2, vocabulary.chunks, BIT_COLUMNS)
    for chunk in range(0, vocabulary.chunks, max(1, vocabulary.chunks // 40)):
        start, count = int(vocabulary.start(jnp.int32(chunk))), int(vocabulary.width(jnp.int32(chunk)))
        place = np.arange(count)
        found = bits[:, chunk, place % BIT_COLUMNS] >> (place // BIT_COLUMNS).astype(np.uint32) & 1
        np.testing.assert_array_equal(found, allowed[:, start : start + count])


# Longer pieces have more words alike.
@helpers.cover("piece", [(128,), (1024,)], lambda piece: piece == 128)
def test_bits_of_every_piece(piece):
    """Pieces may begin at any bit of a word, stand apart, and reach behind the last word."""
    rng = np.random.default_rng(0)
    allowed = rng.random((3, 9000)) < 0.5
    everywhere = np.pad(allowed, ((0, 0), (0, 2 * piece)))
    anywhere = rng.integers(0, 9000, 34).tolist()
    for starts in ([*range(0, 33 * 128, 128), 8990], [*range(5, 9000, piece), 7000], anywhere):
        words = jax.jit(functools.partial(bits_of_pieces, starts=starts, piece=piece))(mask_of(allowed))
        words = np.asarray(words).view(np.uint32).reshape(3, -1, piece)
        for number, start in enumerate(starts):
            found = words[:, number // 32] >> np.uint32(number % 32) & 1
            np.testing.assert_array_equal(found, everywhere[:, start : start + piece])


@helpers.cover(
    "case, dtype",
    [(case, dtype) for case in (RAGGED, SOFTCAP, PADDED, FEW) for dtype in (BF16, F16, F32)],
    lambda case, dtype: (case, dtype) in ((RAGGED, BF16), (SOFTCAP, F16)),
)
def test_against_float64(case, dtype):
    """Columns that no row is allowed hold NaN and infinities. In make test one case has ragged chunks and a bias, and
    one a softcap and float16; other layouts and dtypes meet the same two epilogues.
    """
    problem = helpers.make(case, dtype)
    allowed = allowed_of(case, problem)
    bad = np.setdiff1d(np.arange(0, case.vocab, 3), np.asarray(problem.target_ids))
    allowed[:, bad] = False
    gold = helpers.gold(helpers.with_options(case, allowed=allowed), problem)
    garbage = jnp.asarray(np.resize([np.nan, np.inf, -np.inf], (len(bad), 1)), dtype)
    broken = problem._replace(weight=problem.weight.at[bad].set(garbage))
    values, (d_hidden, d_weight, *d_bias) = broken.values_and_gradients(case, "mosaic", allowed_mask=mask_of(allowed))
    for value, expected in zip(values, gold.values, strict=True):
        assert_within_contract(value, expected, "linear_logp_wgmma", dtype, "forward")
    assert not np.asarray(d_weight, np.float32)[bad].any()
    for gradient, expected in zip((d_weight, *d_bias), gold.gradients[1:], strict=True):
        assert_within_contract(gradient, expected, "linear_logp_wgmma", dtype, "gradient")
    # dH multiplies by the whole head, where 0·NaN is NaN.
    d_hidden = problem.gradients(case, "mosaic", allowed_mask=mask_of(allowed))[0]
    assert_within_contract(d_hidden, gold.gradients[0], "linear_logp_wgmma", dtype, "gradient")


def test_a_mask_that_allows_everything_gives_the_bits_of_no_mask():
    """With a softcap it does so on a GPU (tests/gpu/test_allowed.py), and not in the interpreter: on a CPU, XLA adds up
    a row in another order where it fuses the sum with another mask.
    """
    problem = helpers.make(RAGGED, BF16)
    every = jnp.full((*RAGGED.lead, -(-RAGGED.vocab // 32)), -1, jnp.int32)
    found = problem.values_and_gradients(RAGGED, "mosaic", allowed_mask=every)
    assert_same_bits(found, problem.values_and_gradients(RAGGED, "mosaic"))


@pytest.mark.full
@pytest.mark.parametrize("case", [RAGGED, SOFTCAP], ids=str)
def test_kept_and_recomputed_gradients_have_the_same_bits(seen, case):
    """The gradients whose sums do not begin anew with each slice in the interpreter, as dH's do. In make test, the test
    of this name in test_interpreter.py has both ways without a mask, and test_against_float64 (here) the masked values.
    """
    case, problem = helpers.without_entropy(case, helpers.make(case, BF16))
    mask = mask_of(allowed_of(case, problem))
    kept, recomputed = (
        problem.gradients(case, "mosaic", allowed_mask=mask, memory_budget=budget) for budget in (None, 100_000)
    )
    assert_same_bits(kept[1:], recomputed[1:])
    assert set(seen) == {"dlogits_from_kept_exponentials", "dlogits"}
