"""linear_grpo_loss's promise on a GPU: the bits of linear_logp followed by policy_loss."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax.grpo import LossOptions
from tests.gpu.hopper import every_implementation
from tests.support import policy_losses
from tests.support.helpers import assert_same_bits
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
