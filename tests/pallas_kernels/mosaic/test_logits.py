"""The Mosaic kernels of the ops over logits in Pallas' interpreter, with race detection, at tiny odd shapes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

import rlk_jax
from pallas_kernels.hopper.tiles import Machine
from rlk_jax import dispatch, logp
from rlk_jax.ops.det_gemm import hopper as gemm_hopper
from rlk_jax.ops.linear_logp import hopper as head_hopper
from rlk_jax.ops.logits import hopper
from tests.ops.logits import test_grpo_loss, test_logp, test_ratio_kl
from tests.support import logits as ops
from tests.support import rollouts
from tests.support.allowed import mask_of
from tests.support.helpers import assert_same_bits, assert_within_contract, with_options
from tests.support.logits import Case

MACHINE = Machine(4, plgpu.InterpretGPUParams(detect_races=True))
CASES = (
    Case("tiny", (3,), 5, temperature="per token"),
    Case("one thread's columns each", (3,), 128),
    Case("two pieces", (4,), 300, {"logit_softcap": 2.0}),
    Case("padded", (2, 2), 1030, {"global_vocab_size": 700}, "per token"),
    Case("impossible tokens", (3,), 2500, impossible=2400),
    Case("steps and a rest", (2,), 9000),
    Case("lines of eight rows", (8,), 1101, {"logit_softcap": 3.0, "global_vocab_size": 1100}, "per token"),
    Case("no whole lines", (6,), 1101),
    Case("steps by shared memory", (8,), 3 * 4096 + 45, {"logit_softcap": 3.0}, "per token"),
    Case("lines of two rows", (4,), 1084),
)
IN_MAKE_TEST = (CASES[0], *CASES[3:7], CASES[8])
"""Few columns, one piece of them and several steps, in rows that fill whole lines and in rows that do not."""


def full_unless(in_make_test, *values):
    """A case of `make test`, or one of `make test-full` alone."""
    return pytest.param(*values, marks=() if in_make_test else pytest.mark.full)


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    """Make `mosaic` run in the interpreter, and new memory hold NaN. Tests of one case share its programs."""
    functions = dict.fromkeys(("logp", "ratio_kl", "grpo_loss"), hopper.mosaic(MACHINE))
    functions |= {"linear_logp": head_hopper.mosaic(MACHINE), "det_gemm": gemm_hopper.mosaic(MACHINE)}
    with pytest.MonkeyPatch.context() as patch:
        for op, of_op in functions.items():
            entry = dispatch.Implementation("mosaic", of_op, promises_bits=True)
            patch.setitem(dispatch.TABLE, op, (entry, *dispatch.TABLE[op][1:]))
        patch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
        yield


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(full_unless(case in IN_MAKE_TEST, case, jnp.bfloat16) for case in CASES),
        # In float32 lines have other lengths. float16 differs from bfloat16 in nothing that the kernel sees.
        *(full_unless(x is CASES[9], x, jnp.float32) for x in CASES if "line" in x.name or x.name == "tiny"),
        pytest.param(CASES[2], jnp.float16, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_against_float64(case, dtype):
    """The other cases repeat the paths of those in make test with other options."""
    ops.check_against_gold(case, dtype, "mosaic")


# In `make test`, one case has whole lines and one has none; the others have lines of other numbers of rows.
@pytest.mark.parametrize(
    "case",
    [CASES[3], CASES[6], *(pytest.param(x, marks=pytest.mark.full) for x in CASES[7:])],
    ids=str,
)
def test_in_place_has_the_same_bits(case):
    p = ops.make(case, jnp.bfloat16)
    assert_same_bits(p.gradient(case, "mosaic", donate_logits=True), p.gradient(case, "mosaic"))


# In `make test`, the case of 1101 columns catches a masked row that leaks; lines of 700 columns have other rows.
@pytest.mark.parametrize("vocab", [pytest.param(700, marks=pytest.mark.full), 1101])
def test_masked_rows_leak_nothing_and_get_zeros(vocab):
    case = Case("masked", (8,), vocab, {"ignore_index": -100})
    p = ops.make(case, jnp.bfloat16)
    ignored = np.arange(8) % 3 == 1
    p = p._replace(token_ids=jnp.where(ignored, -100, p.token_ids))
    poisoned = p._replace(logits=jnp.where(ignored[:, None], jnp.nan, p.logits))
    expected = p.outputs(case, "mosaic")
    assert_same_bits(poisoned.outputs(case, "mosaic"), expected)
    assert not any(np.any(np.asarray(x)[ignored]) for x in expected)


ALLOWED = (
    Case("allowed, one piece and a rest", (2,), 300, {"logit_softcap": 2.0}, "per token"),
    Case("allowed, padded", (2, 2), 1030, {"global_vocab_size": 700}, "per token"),
    Case("allowed, lines of eight rows", (8,), 1101, {"logit_softcap": 3.0, "global_vocab_size": 1100}, "per token"),
    Case("allowed, no whole lines", (6,), 1101),
    Case("allowed, steps and a rest", (2,), 9000),
    Case("allowed, several groups of pieces", (8,), 2 * 4096 + 45, {"logit_softcap": 3.0}, "per token"),
    Case("allowed, lines of two rows", (4,), 1084),
)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(full_unless(x is ALLOWED[2], x, jnp.bfloat16) for x in ALLOWED),
        *(full_unless(x is ALLOWED[4], x, jnp.float32) for x in ALLOWED[2:]),
    ],
    ids=str,
)
def test_allowed_tokens_against_float64(case, dtype):
    """In make test are a line of eight rows with every option, and several steps with a rest of a row."""
    ops.check_allowed(case, dtype, "mosaic")


@pytest.mark.parametrize("case", [full_unless(x is ALLOWED[0], x) for x in ALLOWED], ids=str)
def test_a_mask_that_allows_everything_gives_the_bits_of_no_mask(case):
    """In make test with a softcap. Longer rows have the same way to add pieces."""
    ops.check_everything_allowed(case, jnp.bfloat16, "mosaic")


@pytest.mark.full
@pytest.mark.parametrize("case", ALLOWED[1:], ids=str)
def test_allowed_tokens_in_place_have_the_same_bits(case):
    """In make test, rows are overwritten without a mask, which is no matter of where gradients are written."""
    p = ops.make(case, jnp.bfloat16)
    mask = mask_of(ops.allowed_of(case, p))
    in_place = p.gradient(case, "mosaic", allowed_mask=mask, donate_logits=True)
    assert_same_bits(in_place, p.gradient(case, "mosaic", allowed_mask=mask))


def test_bad_rows_are_nan():
    case = Case("unchecked", (4,), 300)
    p = ops.make(case, jnp.bfloat16)._replace(token_ids=jnp.array([1, 300, -1, 2]))
    for value in p.outputs(case, "mosaic", validate=False):
        is_nan = np.isnan(np.asarray(value, np.float32).reshape(4, -1)).any(axis=1)
        np.testing.assert_array_equal(is_nan, [False, True, True, False])


# In make test, float32 (here) has the lowest number of all; the kernel computes in float32 whatever the dtype.
@pytest.mark.parametrize(
    "dtype", [full_unless(x == jnp.float32, x) for x in ops.DTYPES], ids=lambda d: np.dtype(d).name
)
def test_rows_of_the_lowest_number(dtype):
    ops.check_lowest(dtype, "mosaic")


@pytest.mark.parametrize("case", [full_unless(i in (1, 2), x) for i, x in enumerate(rollouts.CASES)], ids=str)
def test_recorded_log_probs_have_the_bits_of_linear_logp(case):
    """In make test are the ends of small vocabularies, and allowed tokens in the next test; the other cases have more
    chunks of the same kinds.
    """
    rollouts.check(case, "mosaic", of_integers=True)


def test_recorded_log_probs_of_allowed_tokens():
    """By the kernels of linear_logp, which have the same epilogue; the groups of 40 columns begin inside words."""
    case = Case("recorded", (5,), 300, {"as_linear_logp": True}, "per token")
    p = ops.make(case, jnp.float32)
    allowed = ops.allowed_of(case, p)
    found = p.call(case, "mosaic", allowed_mask=mask_of(allowed))
    for value, expected in zip(found, ops.gold(with_options(case, allowed=allowed), p).values, strict=True):
        assert_within_contract(value, expected, "logp", jnp.float32, "forward")


@pytest.mark.parametrize("op", ["logp", "ratio_kl", "grpo_loss"])
def test_bad_inputs_raise_as_everywhere(op):
    tables = {
        "logp": ((x, {**test_logp.GOOD, **changes}) for changes, x in test_logp.BAD_INPUTS.values()),
        "ratio_kl": ((x, {**test_ratio_kl.GOOD, **changes}) for changes, x in test_ratio_kl.BAD_INPUTS.values()),
        "grpo_loss": ((x, test_grpo_loss.arguments(**changes)) for changes, x in test_grpo_loss.BAD_INPUTS.values()),
    }
    for message, arguments in tables[op]:
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(rlk_jax, op)(**arguments, implementation="mosaic")


def test_two_policies():
    p = ops.make_policies(jnp.bfloat16, (2, 4), 300)
    zeros = jnp.zeros((2, 4))
    gold = ops.ratio_kl_gold(p, (zeros + 1, zeros + 2))
    for value, expected in zip(p.ratio_kl("mosaic"), gold, strict=False):
        assert_within_contract(value, expected, "ratio_kl", jnp.bfloat16, "forward")
    gradient = jax.grad(lambda x: (q := p._replace(policy_logits=x).ratio_kl("mosaic")).ratio.sum() + 2 * q.kl.sum())(
        p.policy_logits
    )
    assert_within_contract(gradient, gold.gradient, "ratio_kl", jnp.bfloat16, "gradient")
    found = p.grpo_loss(jnp.arange(2.0), "mosaic", samples_per_prompt=2, beta=0.1)
    expected = p.grpo_loss(jnp.arange(2.0), "reference", samples_per_prompt=2, beta=0.1)
    assert_within_contract(np.array(found), np.array(expected), "grpo_loss", jnp.bfloat16, "forward")


def test_an_impossible_row_is_nan_alone():
    p = ops.make(Case("impossible", (3,), 300), jnp.float32)
    logits = p.logits.at[1].set(-jnp.inf)
    np.testing.assert_array_equal(np.isnan(logp(logits, p.token_ids, implementation="mosaic")), [False, True, False])
