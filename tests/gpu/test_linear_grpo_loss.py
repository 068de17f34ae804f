"""linear_grpo_loss's promise on a GPU: the bits of linear_logp followed by policy_loss, by all tokens at once and by
blocks of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlk_jax
from rlk_jax import linear_grpo_loss
from rlk_jax.grpo import LossOptions
from tests.gpu.hopper import every_implementation
from tests.support import policy_losses
from tests.support.helpers import assert_same_bits, assert_within_contract
from tests.support.policy_losses import BUDGETS, DIM, TOKENS, VOCAB, Batch, gradients_of_batch

LOSSES = {
    "dapo": LossOptions(beta=0.07, clip_eps_high=0.3),
    "gspo": LossOptions(loss_type="gspo", beta=0.07, kl_estimator="k2"),
    "cispo": LossOptions(loss_type="cispo", cispo_ratio_cap=1.1),
}


@pytest.mark.parametrize("loss", LOSSES)
@every_implementation
def test_the_bits_of_two_calls_whatever_is_kept(implementation, loss):
    b = policy_losses.batch((4, TOKENS // 4), DIM, VOCAB, jnp.bfloat16)
    temperature = jnp.linspace(0.5, 2, TOKENS).reshape(4, -1)
    given = {"options": LOSSES[loss], "temperature": temperature, "implementation": implementation}
    expected = gradients_of_batch(Batch.in_two_calls, b, memory_budget=BUDGETS[0], **given)
    for budget in BUDGETS:
        assert_same_bits(gradients_of_batch(Batch.loss, b, memory_budget=budget, **given), expected)
    assert np.asarray(expected[1][0], np.float32).any()


@every_implementation
def test_options_of_the_head_and_an_entropy_beside_the_loss(implementation):
    """Which keeps nothing for itself: it is only reported."""
    b = policy_losses.batch((4, TOKENS // 4), DIM, VOCAB, jnp.bfloat16)
    b = b._replace(bias=jnp.linspace(-1, 1, VOCAB, dtype=jnp.bfloat16))
    given = {"return_entropy": True, "logit_softcap": 5.0, "implementation": implementation}
    one, two = (gradients_of_batch(calls, b, **given) for calls in (Batch.loss, Batch.in_two_calls))
    assert_same_bits(one, two)
    assert one[0][1].entropy > 0


BLOCKS = {"implementation": "mosaic", "memory_budget": 5 * 2**24}
"""With it, gradients of the batch below take blocks of tokens, of whole sequences too."""


def batch_of_blocks(**options: Any) -> Batch:
    """Bias, masked tokens that hold NaN, and more active tokens than a block has."""
    b = policy_losses.batch((4, 1024), 256, 16384, jnp.bfloat16)
    hidden = jnp.where(b.mask[..., None], b.hidden, jnp.nan)
    b = b._replace(hidden=hidden, bias=jnp.linspace(-1, 1, 16384, dtype=jnp.bfloat16))
    plan = rlk_jax.explain("linear_grpo_loss", *b, **options, **BLOCKS).plan
    assert plan is not None and "blocks of" in plan
    return b


@pytest.mark.parametrize(
    "options",
    [
        LossOptions(clip_eps=1e3),
        LossOptions(loss_type="cispo", beta=0.07),
        LossOptions(loss_type="gspo", clip_eps=1e3),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_the_bits_of_two_calls_by_blocks_of_tokens(options, layout):
    """Every active token has a gradient, so that blocks end where sums of all tokens pass a multiple of 64 rows."""
    b = batch_of_blocks(options=options)
    b = b._replace(weight=b.weight.T) if layout == "dv" else b
    temperature = jnp.linspace(0.5, 2, 4096).reshape(4, -1)
    given = {**BLOCKS, "options": options, "temperature": temperature, "weight_layout": layout}
    found, expected = (gradients_of_batch(calls, b, **given) for calls in (Batch.loss, Batch.in_two_calls))
    assert_same_bits(found, expected)
    assert np.asarray(expected[1][0], np.float32)[np.asarray(b.mask)].any()


def test_tokens_without_a_gradient_by_blocks_of_tokens():
    """They are left out of a block's sums, so that dW and db keep the contract, and all else the bits."""
    b = batch_of_blocks()
    found, expected = (gradients_of_batch(calls, b, **BLOCKS) for calls in (Batch.loss, Batch.in_two_calls))
    assert expected[0][1].clip_fraction > 0.1
    assert_same_bits((found[0], found[1][0]), (expected[0], expected[1][0]))
    for gradient, of_two_calls in zip(found[1][1:], expected[1][1:], strict=True):
        assert_within_contract(gradient, of_two_calls, "linear_logp_wgmma", jnp.bfloat16, "gradient")


@pytest.mark.parametrize("shape", [(32768, 4096, 151936), (65536, 2048, 131072)], ids=str)
def test_memory_by_blocks_of_tokens(shape):
    """No more than the budget, dW and dH in float32, and 2 %."""
    (tokens, dim, vocab), lead, budget = shape, (8, shape[0] // 8), 2**30

    def of(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    per_token = of(lead, jnp.float32)
    rest = of(lead, jnp.int32), per_token, per_token, of(lead[:1], jnp.float32), of(lead, jnp.bool_)

    def loss(hidden, weight, *rest):
        return linear_grpo_loss(hidden, weight, *rest, implementation="mosaic", memory_budget=budget).loss

    operands = of((*lead, dim), jnp.bfloat16), of((vocab, dim), jnp.bfloat16)
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*operands, *rest).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    assert held <= 1.02 * (budget + 4 * vocab * dim + 4 * tokens * dim)
