"""The losses and advantages against TRL's own code, run here on CPU without a download."""

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax.grpo import LossOptions, PolicyLoss, entropy_threshold, group_advantages, loss_denominator, policy_loss
from tests.support import helpers, tiny_trl
from tests.support.tiny_trl import GRPOTrainer, torch

LENGTH, CAP = 7, 1.2


def make_tokens(seed: int = 0) -> dict[str, np.ndarray]:
    """Log-probs whose ratios fall on both sides of every clip; every sequence has an active token, as TRL's have."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(6, LENGTH))
    arrays = {name: old + rng.normal(scale=0.5, size=old.shape) for name in ("logp", "ref", "rollout")}
    arrays |= {"old": old, "entropy": rng.exponential(size=old.shape), "advantages": rng.normal(size=6)}
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (6, 1))
    return {name: x.astype(np.float32) for name, x in arrays.items()} | {"mask": mask}


class TrlLoss(NamedTuple):
    """What TRL's own method gives for a batch."""

    loss: float
    gradient: np.ndarray
    metrics: dict[str, float]
    entropy_gradient: np.ndarray | None


def trl_loss(tokens: dict[str, np.ndarray], config: dict[str, Any]) -> TrlLoss:
    """Loss, its gradient and the logged metrics of GRPOTrainer's own method, called on a stand-in for the trainer."""
    x = {name: torch.from_numpy(array) for name, array in tokens.items()}
    logp, entropy = (x[name].clone().requires_grad_() for name in ("logp", "entropy"))
    mask = x["mask"].int()
    ids = torch.zeros_like(mask)
    args = SimpleNamespace(
        delta=config.get("delta"),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        use_bias_correction_kl=config.get("use_bias_correction_kl", False),
        steps_per_generation=1,
    )
    metrics: dict[str, list[float]] = defaultdict(list)
    trainer = SimpleNamespace(
        args=args,
        loss_type=config["loss_type"],
        importance_sampling_level=config.get("importance_sampling_level", "token"),
        epsilon_low=0.2,
        epsilon_high=config.get("epsilon_high", 0.3),
        beta=config.get("beta", 0.0),
        use_vllm=config.get("truncated", False),
        vllm_importance_sampling_correction=True,
        max_completion_length=16,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=config.get("top_entropy_quantile", 1.0),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        get_high_entropy_mask=lambda *given: GRPOTrainer.get_high_entropy_mask(trainer, *given),
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled="entropy_coef" in config,
        entropy_coef=config.get("entropy_coef", 0.0),
        use_adaptive_entropy=False,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=False,
            reduce=lambda value, reduction: value,
            gather=lambda value: value,
            pad_across_processes=lambda value, **_: value,
        ),
        _metrics={"train": metrics},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
    )
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": x["advantages"],
        "old_per_token_logps": x["old"],
        "ref_per_token_logps": x["ref"],
        "num_items_in_batch": mask.sum(),
    }
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = torch.clamp(torch.exp((x["old"] - x["rollout"]) * mask), max=CAP)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    logged = {name: values[0] for name, values in metrics.items()}
    return TrlLoss(loss.item(), logp.grad.numpy(), logged, None if entropy.grad is None else entropy.grad.numpy())


@jax.jit(static_argnames="options")
def ours(tokens: dict[str, Any], options: LossOptions) -> tuple[PolicyLoss, jax.Array]:
    def loss(logp: jax.Array) -> tuple[jax.Array, PolicyLoss]:
        value = policy_loss(
            logp,
            tokens["old"],
            tokens["advantages"],
            tokens["mask"],
            ref_logps=tokens["ref"],
            rollout_logps=None if options.importance_cap is None else tokens["rollout"],
            entropy=tokens["entropy"],
            options=options,
        )
        return value.loss, value

    (_, value), gradient = jax.value_and_grad(loss, has_aux=True)(tokens["logp"])
    return value, gradient


CLIPPED = {"clip_eps": 0.2, "clip_eps_high": 0.3}
CASES = {
    **{name: ({"loss_type": name}, {"loss_type": name, **CLIPPED}) for name in ("grpo", "bnpo", "dapo")},
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss_type": "dr_grpo", "max_completion_length": 16, **CLIPPED}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.25},
        {"loss_type": "gspo", "clip_eps": 0.2, "clip_eps_high": 0.25},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"loss_type": "cispo", "cispo_ratio_cap": 1.3}),
    "sapo": ({"loss_type": "sapo"}, {"loss_type": "sapo"}),
    "vespo": ({"loss_type": "vespo"}, {"loss_type": "vespo"}),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "luspo", **CLIPPED},
    ),
    "two-sided": ({"loss_type": "dapo", "delta": 1.6}, {"loss_type": "dapo", "dual_clip": 1.6, **CLIPPED}),
    "two-sided gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.4},
        {"loss_type": "gspo", "dual_clip": 1.4, **CLIPPED},
    ),
}
EXTRAS = {
    "plain": ({}, {}),
    "kl and truncated importance sampling": ({"beta": 0.3, "truncated": True}, {"beta": 0.3, "importance_cap": CAP}),
    "kl under a ratio": ({"beta": 0.3, "use_bias_correction_kl": True}, {"beta": 0.3, "kl_estimator": "ratio_k3"}),
}
IN_MAKE_TEST = {
    *(("bnpo", "plain"), ("gspo", "kl and truncated importance sampling"), ("cispo", "plain"), ("two-sided", "plain")),
    *(("vespo", "kl and truncated importance sampling"), ("luspo", "kl under a ratio")),
}


# The extras are the same factor and term of every loss: each loss has one of them.
@helpers.cover("case, extra", itertools.product(CASES, EXTRAS), lambda *x: x in IN_MAKE_TEST)
def test_loss_gradient_and_metrics_are_those_of_trl(case, extra):
    """TRL's code stays the same where ours changes. In `make test`,
    tests/losses/test_losses.py::test_loss_gradient_and_metrics_equal_the_definition catches a loss that changes; it has
    every loss but bnpo.
    """
    tokens = make_tokens()
    (theirs, mine), (theirs_too, mine_too) = CASES[case], EXTRAS[extra]
    loss, gradient, metrics, _ = trl_loss(tokens, theirs | theirs_too)
    value, our_gradient = ours(tokens, LossOptions(**mine | mine_too))
    pairs = [(value.loss, loss), (value.entropy, metrics["entropy"])]
    if "beta" in theirs_too and value.denominator == tokens["mask"].sum():  # TRL logs the mean over tokens in any case
        pairs.append((value.kl, metrics["kl"]))
    if theirs["loss_type"] == "cispo":
        capped = np.exp(tokens["logp"] - tokens["old"]) > 1.3
        # TRL's leaves out A < 0, whose weight is capped, too.
        assert 0 < metrics["cispo_clip_ratio"] < value.clip_fraction_high
        pairs.append((value.clip_fraction_high, capped[tokens["mask"]].mean()))
    elif theirs["loss_type"] not in ("sapo", "vespo") and theirs.get("importance_sampling_level") != "sequence":
        # At the sequence level TRL logs the mean over sequences.
        pairs += [(value.clip_fraction_low, metrics["clip_ratio/low_mean"])]
        pairs += [(value.clip_fraction_high, metrics["clip_ratio/high_mean"])]
    for actual, expected in pairs:
        helpers.assert_within_contract(actual, expected, "grpo_losses", jnp.float32, "forward")
    helpers.assert_within_contract(our_gradient, gradient, "grpo_losses", jnp.float32, "gradient")


def test_the_top_share_and_its_bonus_are_those_of_trl():
    """TRL's bonus is a mean over the top share alone; ours has the loss's denominator, so its weight is another one."""
    tokens = make_tokens()
    config = {"loss_type": "dapo", "top_entropy_quantile": 0.4, "entropy_coef": 0.05}
    expected = trl_loss(tokens, config)
    threshold = entropy_threshold(tokens["entropy"], tokens["mask"], top_share=0.4)
    top = tokens["mask"] & (tokens["entropy"] >= np.asarray(threshold))
    options = LossOptions(entropy_coef=float(0.05 * tokens["mask"].sum() / top.sum()), **CLIPPED)

    def loss(logp: Any, entropy: Any) -> jax.Array:
        given = tokens["old"], tokens["advantages"], tokens["mask"]
        return policy_loss(logp, *given, entropy=entropy, entropy_threshold=threshold, options=options).loss

    value, (by_logp, by_entropy) = jax.value_and_grad(loss, (0, 1))(tokens["logp"], tokens["entropy"])
    helpers.assert_within_contract(value, expected.loss, "grpo_losses", jnp.float32, "forward")
    helpers.assert_within_contract(by_logp, expected.gradient, "grpo_losses", jnp.float32, "gradient")
    helpers.assert_within_contract(by_entropy, expected.entropy_gradient, "grpo_losses", jnp.float32, "gradient")


def test_the_data_meets_every_bound():
    value, _ = ours(make_tokens(), LossOptions(dual_clip=1.6, importance_cap=CAP, **CLIPPED))
    assert min(value.clip_fraction_low, value.clip_fraction_high, value.clip_fraction_dual) > 0
    assert 0 < value.importance_capped_fraction < 1


class Recorder(GRPOTrainer):
    """A trainer that keeps, of each micro-batch, what its loss was computed from and what came out."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        arrays = {name: x.numpy() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        self.micro_batches.append((arrays, self.logps, loss.item()))
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.logps = found[0].detach().numpy()
        return found


@pytest.fixture(scope="module")
def micro_batches(tmp_path_factory) -> list[tuple[dict[str, np.ndarray], np.ndarray, float]]:
    """One step of TRL's trainer, on two of four sequences: its inputs, log-probs and loss."""
    trainer = tiny_trl.trainer(
        Recorder,
        str(tmp_path_factory.mktemp("trl")),
        loss_type="dapo",
        max_steps=1,
        gradient_accumulation_steps=2,
        max_completion_length=LENGTH,
    )
    trainer.micro_batches = []
    trainer.train()
    assert len(trainer.micro_batches) == 2
    return trainer.micro_batches


def test_advantages_are_those_of_a_trl_step(micro_batches):
    rows = [row for inputs, *_ in micro_batches for row in zip(*map(inputs.get, ROW), strict=True)]
    rows.sort(key=lambda row: row[0].tolist())  # TRL shuffles sequences over micro-batches; ours stand by prompt
    rewards = np.array([tiny_trl.reward_of(ids[mask != 0]) for _, ids, mask, _ in rows], np.float32)
    assert len(set(rewards[:4])) > 1
    advantages = group_advantages(rewards, samples_per_prompt=4, std="sample", eps=1e-4)
    theirs = [advantage for *_, advantage in rows]
    helpers.assert_within_contract(advantages, theirs, "grpo_losses", jnp.float32, "forward")


ROW = ("prompt_ids", "completion_ids", "completion_mask", "advantages")


def test_losses_of_micro_batches_are_those_of_a_trl_step(micro_batches):
    """TRL's dapo divides by the tokens of all micro-batches: our `denominator`."""
    total = sum(loss_denominator(inputs["completion_mask"], options=LossOptions()) for inputs, *_ in micro_batches)
    for inputs, logp, loss in micro_batches:
        value = policy_loss(logp, logp, inputs["advantages"], inputs["completion_mask"], denominator=total)
        assert value.denominator < total
        helpers.assert_within_contract(value.loss, loss, "grpo_losses", jnp.float32, "forward")
