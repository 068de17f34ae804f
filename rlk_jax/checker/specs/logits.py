"""What the checker knows of the ops over logits: logp, ratio_kl and grpo_loss."""

from dataclasses import replace
from typing import Any

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.inputs import Draw, Sizes
from rlk_jax.checker.op_spec import OpSpec, Output, Problem, Results, arrange_sequences, per_token, scalar


def _logp_inputs(draw: Draw) -> dict[str, np.ndarray]:
    return {"logits": draw.logits(0), "token_ids": draw.ids()}


def _logp_gold(problem: Problem) -> tuple[Results, float]:
    logits, g = problem.inputs["logits"], problem.upstream["logp"]
    found = gold.softmax_gold(
        logits.reshape(-1, logits.shape[-1]), problem.inputs["token_ids"], 1.0, (g, 0 * g, 0 * g), {}
    )
    results = {"logp": found.values[0].reshape(g.shape), "gradient:logits": found.d_raw.reshape(logits.shape)}
    return results, gold.largest_finite(found.logits)


def _policies(draw: Draw) -> dict[str, np.ndarray]:
    """The inputs of ratio_kl: a reference policy near the policy, or equal to it in mode "ties"."""
    lead, ids, mask = draw.sizes.lead, draw.ids(), draw.mask()
    policy = draw.logits(0)
    noise = 0 if draw.mode == "ties" else 0.3 * draw.tensor(1, *policy.shape).astype(np.float32)
    ref = draw.cast(policy.astype(np.float32) + noise)
    old = gold.logps(policy, ids) + 0.2 * draw.tensor(3, *lead).astype(np.float32)
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
    ratio, kl, gradient = gold.ratio_kl_gold(policy, ref, ids, mask, old, (upstream["ratio"], upstream["kl"]))
    results = {"ratio": ratio, "kl": kl, "gradient:policy_logits": gradient}
    return results, gold.largest_finite(policy)


def _grpo_inputs(draw: Draw) -> dict[str, np.ndarray]:
    policy, ref, ids, mask, old = _policies(draw).values()
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


def _grpo_gold(problem: Problem) -> tuple[Results, float]:
    policy, ref, ids, old, rewards, mask = problem.inputs.values()
    boundaries = range(0, len(rewards) + 1, problem.options["samples_per_prompt"])
    advantages = gold.group_advantages_gold(rewards, boundaries)
    found = gold.grpo_loss_gold(policy, ref, ids, mask, old, advantages, clip=(_CLIP, _CLIP), beta=_BETA)
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


LOGITS = (
    OpSpec(
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
    ),
    OpSpec(
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
    ),
    OpSpec(
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
    ),
)
"""The specs of the ops over logits."""
