"""TRL with the bridge in it against TRL as it is: losses and gradient norms of GRPOTrainer, calls of its fused head.

TRL computes its losses itself, from what its fused head returns. `make test` trains with one loss, and compares calls
of the head with all that they can ask for; `make test-full` trains with every loss and option.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import torch_bridge
from tests.support import helpers, tiny_trl
from tests.support.tiny_trl import torch
from torch_bridge.clients.trl import ChunkedDivergence, ChunkedLogProb

trl_utils = pytest.importorskip("trl.trainer.utils")
ORIGINAL = trl_utils._ChunkedLogProbFunction
OURS = ChunkedLogProb(ORIGINAL, {})
divergences = pytest.importorskip("trl.kernels.chunked_divergence")
DIVERGENCE = divergences.ChunkedDivergenceFunction
LOSSES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo")},
    "luspo": {"importance_sampling_level": "sequence"},
}
# The second step sees the first one's tokens again, with ratios other than 1.
STEPS = {"max_steps": 2, "num_iterations": 2, "max_completion_length": 7, "learning_rate": 2e-3, "logging_steps": 1}


class Recorder(tiny_trl.GRPOTrainer):
    """Keeps losses unrounded."""

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super()._compute_loss(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


@pytest.fixture
def assert_same_training(tmp_path):
    """Two steps of a configuration have the losses and gradient norms that they have without the bridge."""

    def run(policy: Any, config: dict[str, Any]) -> np.ndarray:
        trainer = tiny_trl.trainer(Recorder, str(tmp_path), policy, **STEPS, **config)
        trainer.train()
        norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
        assert len(norms) == len(trainer.losses) == 2 and min(norms) > 0.01
        return np.array([*trainer.losses, *norms])

    def check(config: dict[str, Any], dtype: str = "float32", policy: Any = None) -> None:
        stock = run(policy, config)
        torch_bridge.install("trl")
        before = torch_bridge.cache_info()
        error = np.abs(run(policy, config) - stock).max()
        after = torch_bridge.cache_info()
        assert after.hits + after.misses >= before.hits + before.misses + 2
        helpers.assert_error(error, "trl_training", dtype, "forward")

    yield check
    torch_bridge.uninstall("trl")


# TRL computes every loss from the same outputs of its fused head. In `make test`, the case of "grpo" catches what is
# wrong in training, and test_a_call_gives_what_trl_s_own_gives any wrong output or gradient of the head.
@pytest.mark.parametrize(
    "loss_type", ["grpo", *(pytest.param(x, marks=pytest.mark.full) for x in LOSSES if x != "grpo")]
)
def test_every_loss(assert_same_training, loss_type):
    assert_same_training({"loss_type": loss_type, **LOSSES[loss_type]})


@pytest.mark.full
def test_gradient_checkpointing(assert_same_training):
    """In `make test`, test_checkpoint (tests/torch_bridge/test_autograd.py) has calls that are computed again."""
    assert_same_training({"gradient_checkpointing": True})


@pytest.mark.full
def test_bf16_autocast(assert_same_training):
    """In `make test`, `test_under_autocast` has a call of the head."""
    assert_same_training({"bf16": True}, "bfloat16")


@pytest.mark.full
def test_a_reference_model_an_entropy_bonus_and_a_temperature(assert_same_training, tmp_path):
    """TRL loads the reference from where the policy came from. In `make test`, test_a_call_gives_what_trl_s_own_gives
    has a temperature and gradients of the entropy.
    """
    folder = str(tmp_path / "model")
    tiny_trl.model(len(tiny_trl.byte_tokenizer())).save_pretrained(folder)
    assert_same_training({"beta": 0.3, "entropy_coef": 0.2, "temperature": 0.7}, policy=folder)


STATISTICS = ("log_sum_sq_probs", "mean_logits", "is_top1")
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"logit_scale": 0.25},
    "scale and softcap": {"logit_scale": 3, "final_logit_softcapping": 2.0},
    "scale, softcap, bias and temperature": {
        "logit_scale": 0.5,
        "final_logit_softcapping": 1.5,
        "bias": True,
        "temperature": 0.7,
    },
    "head of another dtype": {"bias": True, "head_dtype": torch.bfloat16},
    "no rows": {"rows": 0, "bias": True},
}


def called(function: Any, autocast: bool = False, rows: int = 11, **call: Any) -> tuple[Any, list[Any]]:
    """Outputs, and gradients of hidden, weight and bias, of one random call."""
    generator = torch.Generator().manual_seed(0)

    def parameter(*shape: int, dtype: Any) -> Any:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    head_dtype = call.get("head_dtype", torch.float32)
    hidden = parameter(rows, 24, dtype=torch.float32)
    head = [parameter(70, 24, dtype=head_dtype)] + [parameter(70, dtype=head_dtype)] * call.get("bias", False)
    targets = torch.randint(0, 70, (rows,), generator=generator)
    options = (call.get("temperature", 1.0), 32, call.get("final_logit_softcapping"), call.get("logit_scale", 1.0))
    with torch.autocast("cpu", enabled=autocast):
        bias = head[1] if call.get("bias") else None
        found = function.apply(hidden, head[0], bias, targets, *options, ("log_probs", "entropy", *STATISTICS))
    (found[0].sum() - 2 * found[1].sum()).backward()
    return [x.detach() for x in found], [x.grad for x in (hidden, *head)]


def assert_close(actual: Any, expected: Any, kind: Any, dtype: Any = None) -> None:
    assert actual.dtype == expected.dtype
    dtype = dtype or str(actual.dtype).removeprefix("torch.")
    helpers.assert_within_contract(actual.float(), expected.float(), "trl_calls", dtype, kind)


# In `make test`, "scale, softcap, bias and temperature" catches what is wrong with its parts.
@pytest.mark.parametrize(
    "call", [pytest.param(x, marks=pytest.mark.full) if x in ("scale", "scale and softcap") else x for x in CALLS]
)
def test_a_call_gives_what_trl_s_own_gives(call):
    found, gradients = called(OURS, **CALLS[call])
    expected, expected_gradients = called(ORIGINAL, **CALLS[call])
    for actual, gold in zip(found[:-1], expected[:-1], strict=True):
        assert_close(actual, gold, "forward")
    assert torch.equal(found[-1], expected[-1])
    for actual, gold in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, gold, "gradient")


def test_under_autocast():
    """TRL and the bridge round hidden and head to bfloat16; TRL also rounds its logits."""
    found, gradients = called(OURS, autocast=True)
    expected, expected_gradients = called(ORIGINAL, autocast=True)
    exact, _ = called(OURS)
    assert not torch.equal(found[0], exact[0])
    for actual, gold in zip(found[:2], expected[:2], strict=True):
        assert_close(actual, gold, "forward", "bfloat16")
    for actual, gold in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, gold, "gradient", "bfloat16")


def test_outputs_that_are_not_asked_for_are_none():
    hidden, weight = torch.randn(3, 8), torch.randn(5, 8)
    given = (hidden, weight, None, torch.tensor([0, 1, 4]), 1.0, 32, None, 1.0)
    logp, *others = OURS.apply(*given, ("log_probs",))
    assert logp.shape == (3,) and others == [None] * 4
    _, entropy, _, mean_logits, is_top1 = OURS.apply(*given, ("log_probs", "mean_logits"))
    assert entropy is None and is_top1 is None
    assert torch.equal(mean_logits, ORIGINAL.apply(*given, ("mean_logits",))[3])


def test_options_reach_the_op_and_uninstall_restores_trl_s():
    torch_bridge.install("trl", implementation="xla", memory_budget=2**30)
    installed = trl_utils._ChunkedLogProbFunction
    assert installed.options == {"implementation": "xla", "memory_budget": 2**30}
    given = (torch.randn(3, 8), torch.randn(5, 8), None, torch.arange(3), 1.0, 32)
    with pytest.raises(ValueError, match="mosaic"):
        replace(installed, options={"implementation": "mosaic"}).apply(*given)
    torch_bridge.uninstall("trl")
    assert trl_utils._ChunkedLogProbFunction is ORIGINAL


def diverged(function: Any, beta: float) -> tuple[Any, list[Any]]:
    """Outputs of one random call of all options, and gradients of the student's hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((11, 24), (70, 24), (70,), (11, 40), (70, 40), (70,))
    arrays = [
        2 * torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if shape[0] == 70 else 1) for shape in shapes
    ]
    arrays[4].requires_grad_()  # A teacher may be a module whose weights need gradients.
    student = [x.requires_grad_() for x in arrays[:3]]
    found = function.apply(*student, *arrays[3:], beta, 0.7, 0.5, 1.5, 2.0, None)
    assert not found[1].requires_grad
    found[0].square().sum().backward()
    assert arrays[4].grad is None
    return [x.detach() for x in found], [x.grad for x in student]


# In `make test`, one end stands for both: test_linear_kl.py has the kinds that they are.
@pytest.mark.parametrize("beta", [0.3, pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_a_divergence_is_trl_s_own(beta):
    """That of DistillationTrainer, whose kinds are ends of the generalised Jensen-Shannon divergence."""
    found, gradients = diverged(ChunkedDivergence(DIVERGENCE, {}), beta)
    expected, expected_gradients = diverged(DIVERGENCE, beta)
    for actual, gold in zip(found, expected, strict=True):
        assert_close(actual, gold, "forward")
    for actual, gold in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, gold, "gradient")


def test_the_distillation_trainer_calls_the_bridge():
    trainer = pytest.importorskip("trl.trainer.distillation_trainer")
    torch_bridge.install("trl", implementation="reference")
    try:
        assert trainer.ChunkedDivergenceFunction.options["implementation"] == "reference"
    finally:
        torch_bridge.uninstall("trl")
    assert trainer.ChunkedDivergenceFunction is divergences.ChunkedDivergenceFunction is DIVERGENCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": ("log_probs", "variance")}, "TRL asks for outputs that torch_bridge does not know: variance."),
        ({"logit_scale": 0.0}, "logit_scale must be positive, got 0.0."),
    ],
)
def test_what_cannot_be_supplied_raises(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        OURS.apply(torch.randn(3, 8), torch.randn(5, 8), None, torch.tensor([0, 1, 4]), 1.0, 32, **change)
