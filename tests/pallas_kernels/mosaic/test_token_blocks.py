"""linear_grpo_loss by blocks of tokens in Pallas' interpreter: raw bits of log-probs, dH, dW and db are those of
`linear_logp` and `policy_loss` in two calls, by all tokens at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rlk_jax import dispatch
from rlk_jax.grpo import LossOptions
from rlk_jax.ops.linear_logp import hopper
from rlk_jax.ops.linear_logp.options import TokenBlocks
from tests.support import helpers, policy_losses
from tests.support.allowed import allowed_beside, mask_of
from tests.support.helpers import assert_same_bits, assert_within_contract
from tests.support.interpreter import MACHINE
from tests.support.policy_losses import Batch, gradients_of_batch

ROWS = 128
NOTHING_CUT = LossOptions(clip_eps=1e3)
"""With it every active token has a gradient, so that no sum leaves rows out that another one has."""


def _plan(config: Any, dim: int, tokens: int, length: int, dtype: Any) -> TokenBlocks:
    return TokenBlocks(ROWS if length == 1 else ROWS + 32, 2, length, 1 if length == 1 else 64)


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Make `mosaic` run in the interpreter, in blocks of `ROWS` tokens. New memory holds NaN, as it may on a GPU."""
    functions = hopper.mosaic(MACHINE)
    assert functions.of_blocks is not None
    of_blocks = dataclasses.replace(functions.of_blocks, plan=_plan)
    row = dispatch.Implementation("mosaic", dataclasses.replace(functions, of_blocks=of_blocks))
    monkeypatch.setitem(dispatch.TABLE, "linear_logp", (row, *dispatch.TABLE["linear_logp"][1:]))
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    jax.clear_caches()


def compared(b: Batch, **options: Any) -> tuple[Any, Any]:
    """Loss, metrics and gradients by blocks and by two calls."""
    given = {"implementation": "mosaic", **options}
    return gradients_of_batch(Batch.loss, b, **given), gradients_of_batch(Batch.in_two_calls, b, **given)


@helpers.cover(
    "dim, vocab, bias, options",
    [
        (64, 304, True, {}),
        (72, 304, False, {"return_entropy": True}),
        # Ends of the vocabulary's groups and a chunk that is copied, whose exponentials are computed again.
        (64, 320, True, {"global_vocab_size": 257}),
        (64, 448, False, {"weight_layout": "dv"}),
    ],
    # In `make test`, a vocabulary with a bias has every kernel of a block.
    lambda dim, vocab, bias, _: bias and vocab == 304,
)
def test_the_bits_of_two_calls(dim, vocab, bias, options):
    """Two blocks, and masked tokens, which hold NaN, before and between active ones.

    The second block has no more than 64 rows, one step of dW's sum: the interpreter adds what a sum starts from after
    its steps, and not before them.
    """
    b = policy_losses.batch((2, 125), dim, vocab, jnp.bfloat16)
    b = b._replace(hidden=jnp.where(b.mask[..., None], b.hidden, jnp.nan))
    b = b._replace(target_ids=b.target_ids % options.get("global_vocab_size", vocab))
    if bias:
        b = b._replace(bias=jnp.linspace(-1, 1, vocab))
    if options.get("weight_layout") == "dv":
        b = b._replace(weight=b.weight.T)
    assert ROWS < b.mask.sum() <= ROWS + 64
    found, expected = compared(b, options=NOTHING_CUT, temperature=jnp.linspace(0.5, 2, 250).reshape(2, 125), **options)
    assert np.asarray(expected[1][0], np.float32)[np.asarray(b.mask)].any()
    assert_same_bits(found, expected)


@pytest.mark.full
def test_the_bits_of_two_calls_over_allowed_tokens():
    """In `make test`, tests/ops/test_linear_grpo_loss.py has them, and blocks have the kernels of other calls."""
    b = policy_losses.batch((2, 125), 64, 304, jnp.bfloat16)
    found, expected = compared(b, options=NOTHING_CUT, allowed_mask=mask_of(allowed_beside(b.target_ids, 304)))
    assert_same_bits(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("loss", ["gspo", "vespo"])
def test_the_bits_of_two_calls_with_losses_of_sequences(loss):
    """The first block ends with the second sequence, and hands 18 of its 146 tokens on to the next one, which has no
    more than 64. In `make test`, tests/ops/linear_logp/test_block_loss.py has blocks of whole sequences.
    """
    b = policy_losses.batch((4, 97), 64, 304, jnp.bfloat16)
    lengths = jnp.array([[73], [0], [73], [40]])
    b = b._replace(mask=jnp.arange(97) < lengths, bias=jnp.linspace(-1, 1, 304))
    b = b._replace(hidden=jnp.where(b.mask[..., None], b.hidden, jnp.nan))
    clips = {"clip_eps": 1e3} if loss == "gspo" else {}
    found, expected = compared(b, options=LossOptions(loss_type=loss, **clips))
    gradients = np.asarray(expected[1][0], np.float32)[np.asarray(b.mask)]
    assert gradients.any(axis=1).all()
    assert_same_bits(found, expected)


@pytest.mark.full
def test_tokens_that_are_cut():
    """Tokens without a gradient are left out of a block's sums: the next block's go on at other rows than in two calls,
    which may change a bit of dW and db, and of nothing else. In `make test`, tests/ops/linear_logp/test_block_loss.py
    has tokens that are cut.
    """
    b = policy_losses.batch((2, 125), 64, 300, jnp.bfloat16)
    found, expected = compared(b)
    assert found[0][1].clip_fraction > 0.1
    assert_same_bits((found[0], found[1][0]), (expected[0], expected[1][0]))
    assert_within_contract(found[1][1], expected[1][1], "linear_logp_wgmma", jnp.bfloat16, "gradient")
