"""What the checker knows of the ops over logits: logp, ratio_kl and grpo_loss."""

from dataclasses import replace
from typing import Any

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.inputs import Draw, Sizes
from rlk_jax.checker.op_spec import OpSpec, Output, Problem, Results, arrange_sequences, per_token, scalar
from rlk_jax.checker.specs.allowed import allowed_options, allowed_targets, are_allowed, never_allowed


def _logp_inputs(draw: Draw) -> dict[str, np.ndarray]:
    return {"logits": draw.logits(0), "token_ids": draw.ids()}


def _logp_gold(problem: Problem) -> tuple[Results, float]:
    logits, g = problem.inputs["logits"], problem.upstream["logp"]
    allowed = _allowed_by(problem, logits)
    ids = allowed_targets(problem.inputs["token_ids"], allowed)
    raw = logits.reshape(-1, logits.shape[-1])
    found = gold.softmax_gold(raw, ids, 1.0, (g, 0 * g, 0 * g), {"allowed": allowed})
    results = {"logp": found.values[0].reshape(g.shape), "gradient:logits": found.d_raw.reshape(logits.shape)}
    return results, gold.largest_finite(found.logits)


def _allowed_by(problem: Problem, logits: np.ndarray) -> np.ndarray:
    """Which of these logits `[*lead, V]` the problem's mask allows, `[N, V]`: all of them without a mask."""
    vocab, words = logits.shape[-1], problem.options.get("allowed_mask")
    return np.ones((logits.size // vocab, vocab), bool) if words is None else are_allowed(words, vocab)


def _masked_logp_inputs(draw: Draw) -> dict[str, np.ndarray]:
    """Those of logp. In mode "masked-nan" the logits of tokens that no row allows are NaN."""
    found = _logp_inputs(draw)
    found["logits"][..., never_allowed(draw)] = np.nan
    return found


def _masked_policies(draw: Draw) -> dict[str, np.ndarray]:
    """Those of ratio_kl over allowed tokens. In mode "masked-nan" the logits of those that no row allows are NaN."""
    found = _policies(draw, are_allowed(allowed_options(draw)["allowed_mask"], draw.sizes.vocab))
    for name in ("policy_logits", "ref_logits"):
        found[name][..., never_allowed(draw)] = np.nan
    return found


def _policies(draw: Draw, allowed: Any = True) -> dict[str, np.ndarray]:
    """The inputs of ratio_kl: a reference policy near the policy, or equal to it in mode "ties"."""
    lead, ids, mask = draw.sizes.lead, draw.ids(), draw.mask()
    policy = draw.logits(0)
    noise = 0 if draw.mode == "ties" else 0.3 * draw.tensor(1, *policy.shape).astype(np.float32)
    ref = draw.cast(policy.astype(np.float32) + noise)
    old = gold.logps(policy, ids, allowed=allowed) + 0.2 * draw.tensor(3, *lead).astype(np.float32)
    if draw.mode == "masked-nan":
        policy[~mask], ref[~mask], ids[~mask], old[~mask] = np.nan, np.nan, -100, np.nan
    return {
        "policy_logits": policy,
        "ref_logits": ref,
        "action_ids": ids,
        "completion_mask": mask,
        "old_logps": old.astype(np.float32),
    }


def _ratio_kl_gold(problem: Problem) -> tuple[Results, float]:
    upstream = problem.upstream
    policy, ref, ids, mask, old = problem.inputs.values()
    both, allowed = (upstream["ratio"], upstream["kl"]), _allowed_by(problem, policy)
    ratio, kl, gradient = gold.ratio_kl_gold(policy, ref, ids, mask, old, both, allowed=allowed)
    results = {"ratio": ratio, "kl": kl, "gradient:policy_logits": gradient}
    return results, gold.largest_finite(policy)


def _grpo_inputs(draw: Draw) -> dict[str, np.ndarray]:
    return _with_rewards(draw, _policies(draw))


def _masked_grpo_inputs(draw: Draw) -> dict[str, np.ndarray]:
    return _with_rewards(draw, _masked_policies(draw))


def _with_rewards(draw: Draw, policies: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of grpo_loss, from those of ratio_kl."""
    policy, ref, ids, mask, old = policies.values()
    rewards = draw.tensor(4, draw.sizes.batch).astype(np.float32)
    # This noise puts ratios on both sides of the clip.
    old = old + 0.3 * draw.tensor(5, *draw.sizes.lead).astype(np.float32)
    return {
        "policy_logits": policy,
        "ref_logits": ref,
        "action_ids": ids,
        "old_logps": old,
        "rewards": rewards,
        "completion_mask": mask,
    }


_BETA, _CLIP, _GROUP = 0.1, 0.2, 4


def _whole_groups(sizes: Sizes) -> Sizes:
    """The sizes with a batch of whole groups, at least two."""
    return replace(sizes, batch=_GROUP * max(2, -(-sizes.batch // _GROUP)))


def _grpo_options(draw: Draw) -> dict[str, Any]:
    return {"samples_per_prompt": _GROUP, "beta": _BETA, "clip_eps": _CLIP}


def _masked_grpo_options(draw: Draw) -> dict[str, Any]:
    return _grpo_options(draw) | allowed_options(draw)


def _grpo_gold(problem: Problem) -> tuple[Results, float]:
    policy, ref, ids, old, rewards, mask = problem.inputs.values()
    boundaries = range(0, len(rewards) + 1, problem.options["samples_per_prompt"])
    advantages = gold.group_advantages_gold(rewards, boundaries)
    allowed = _allowed_by(problem, policy)
    found = gold.grpo_loss_gold(
        policy, ref, ids, mask, old, advantages, clip=(_CLIP, _CLIP), beta=_BETA, allowed=allowed
    )
    results = {name: np.asarray(x) for name, x in found._asdict().items()}
    results["gradient:policy_logits"] = problem.upstream["loss"] * results.pop("gradient")
    return results, gold.largest_finite(policy)


def _logits_shape(sizes: Sizes) -> tuple[int, ...]:
    return *sizes.lead, sizes.vocab


_PADDING_OF_POLICIES = {
    "policy_logits": np.nan,
    "ref_logits": np.nan,
    "action_ids": -100,
    "completion_mask": False,
    "old_logps": 0,
}
_MODES_OF_POLICIES = ("random", "constant", "peaked", "neg-inf", "ties", "masked-nan", "bad-ids")


def _masked(spec: OpSpec, inputs: Any, options: Any, modes: tuple[str, ...]) -> OpSpec:
    """The spec of the same op over allowed tokens. Rows of padding allow everything."""
    padding = {**spec.padding, "allowed_mask": 2**32 - 1}
    return replace(
        spec, op=f"masked_{spec.op}", inputs=inputs, options=options, modes=modes, padding=padding, calls=spec.op
    )


_LOGP = OpSpec(
    "logp",
    _logp_inputs,
    _logp_gold,
    outputs=(Output("logp", per_token),),
    gradients=("logits",),
    shape=_logits_shape,
    padding={"logits": 100.0, "token_ids": 0},
    per_row=frozenset(("logp", "gradient:logits")),
    modes=("random", "constant", "peaked", "huge", "neg-inf", "ties", "bad-ids"),
    large_class="logp_large",
)

_RATIO_KL = OpSpec(
    "ratio_kl",
    _policies,
    _ratio_kl_gold,
    outputs=(Output("ratio", per_token), Output("kl", per_token)),
    gradients=("policy_logits",),
    shape=_logits_shape,
    padding=_PADDING_OF_POLICIES,
    per_row=frozenset(("ratio", "kl", "gradient:policy_logits")),
    no_gradients=("ref_logits", "old_logps"),
    modes=_MODES_OF_POLICIES,
)

_GRPO_LOSS = OpSpec(
    "grpo_loss",
    _grpo_inputs,
    _grpo_gold,
    outputs=(
        Output("loss", scalar),
        Output("policy_loss", scalar, differentiable=False),
        Output("kl", scalar, differentiable=False),
    ),
    gradients=("policy_logits",),
    shape=_logits_shape,
    padding={**_PADDING_OF_POLICIES, "rewards": 0},
    per_row=frozenset(("gradient:policy_logits",)),
    modes=_MODES_OF_POLICIES,
    no_gradients=("ref_logits", "old_logps", "rewards"),
    arrangements=arrange_sequences,
    sizes=_whole_groups,
    options=_grpo_options,
)

LOGITS = (
    _LOGP,
    _masked(_LOGP, _masked_logp_inputs, allowed_options, ("random", "masked-nan", "bad-ids")),
    _RATIO_KL,
    _masked(_RATIO_KL, _masked_policies, allowed_options, ("random", "masked-nan")),
    _GRPO_LOSS,
    _masked(_GRPO_LOSS, _masked_grpo_inputs, _masked_grpo_options, ("random",)),
)
"""The specs of the ops over logits, each over all tokens and over those that rows allow."""
