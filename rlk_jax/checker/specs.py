"""What the checker knows of each op: its inputs, gold, results, and the rows that keep their bits.

A new op joins with one entry of `SPECS`.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.arrange_attention import arrange_attention
from rlk_jax.checker.inputs import Draw, Sizes
from rlk_jax.checker.linear_kl_problem import (
    linear_kl_gold,
    linear_kl_inputs,
    linear_kl_options,
    listed_kl_gold,
    listed_kl_inputs,
    listed_kl_options,
)
from rlk_jax.checker.linear_logp_problem import (
    largest_finite,
    linear_logp_gold,
    linear_logp_inputs,
    masked_gold,
    masked_inputs,
    masked_options,
)
from rlk_jax.checker.op_spec import OpSpec, Output, Problem, Results, arrange_padding_behind, arrange_sequences


def _logp_inputs(draw: Draw) -> dict[str, np.ndarray]:
    return {"logits": draw.logits(0), "token_ids": draw.ids()}


def _logp_gold(problem: Problem) -> tuple[Results, float]:
    logits, g = problem.inputs["logits"], problem.upstream["logp"]
    found = gold.softmax_gold(
        logits.reshape(-1, logits.shape[-1]), problem.inputs["token_ids"], 1.0, (g, 0 * g, 0 * g), {}
    )
    results = {"logp": found.values[0].reshape(g.shape), "gradient:logits": found.d_raw.reshape(logits.shape)}
    return results, largest_finite(found.logits)


_LEFT_OUT = -100


def _cross_entropy_inputs(draw: Draw) -> dict[str, np.ndarray]:
    """Those of linear_logp, with a mask's ignored tokens among them."""
    found, ignored = linear_logp_inputs(draw), ~draw.mask()
    if draw.mode == "masked-nan":
        found["hidden"][ignored] = np.nan
    found["target_ids"] = np.where(ignored, _LEFT_OUT, found["target_ids"])
    return found


def _cross_entropy_options(draw: Draw) -> dict[str, Any]:
    """A mean over weights from 0 to 2, some of them 0."""
    weights = np.maximum(draw.random(7).uniform(-0.5, 2, draw.sizes.lead), 0).astype(np.float32)
    weights[0] = 1
    return {"reduction": "mean", "ignore_index": _LEFT_OUT, "token_weights": weights, "z_loss": 1e-3}


def _cross_entropy_gold(problem: Problem) -> tuple[Results, float]:
    hidden, weight, ids, bias = problem.inputs.values()
    options = dict(problem.options)
    weights = np.where(ids == options.pop("ignore_index"), 0, options.pop("token_weights"))
    h, w = np.asarray(hidden, np.float64).reshape(-1, hidden.shape[-1]), np.asarray(weight, np.float64)
    h = np.where(weights.reshape(-1, 1) == 0, 0, h)
    raw = h @ w.T + np.asarray(bias, np.float64)
    found = gold.cross_entropy_gold(raw, ids, weights, problem.upstream["loss"], **options)
    results = {
        "loss": found.loss,
        "gradient:hidden": (found.d_raw @ w).reshape(hidden.shape),
        "gradient:lm_head_weight": found.d_raw.T @ h,
        "gradient:bias": found.d_raw.sum(axis=0),
    }
    return results, largest_finite(found.logits)


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
    return results, largest_finite(policy)


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
    return results, largest_finite(policy)


def _det_gemm_inputs(draw: Draw) -> dict[str, np.ndarray]:
    m, k, n = _gemm_shape(draw.sizes)
    return {"a": draw.tensor(0, m, k), "b": draw.tensor(1, k, n, scale=k**-0.5)}


def _gemm_shape(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.batch * sizes.seq, sizes.k_dim, sizes.n_dim


def _det_gemm_gold(problem: Problem) -> tuple[Results, float]:
    a, b, g = (np.asarray(x, np.float64) for x in (*problem.inputs.values(), problem.upstream["c"]))
    return {"c": a @ b, "gradient:a": g @ b.T, "gradient:b": a.T @ g}, largest_finite(a)


_HEADS, _KEY_HEADS, _PADDING_BEFORE = 4, 2, 7


def _several_blocks(sizes: Sizes) -> Sizes:
    """The sizes with 128 tokens more, so that keys and queries are cut into several blocks."""
    return replace(sizes, seq=sizes.seq + 128)


def _attention_padding(sizes: Sizes) -> np.ndarray:
    """Padding `[batch]` of every second sequence, the last one among them."""
    return np.where(np.arange(sizes.batch) % 2 == (sizes.batch - 1) % 2, _PADDING_BEFORE, 0).astype(np.int32)


def _attention_shape(sizes: Sizes) -> tuple[int, ...]:
    return *sizes.lead, _HEADS, sizes.hidden


def _attention_inputs(draw: Draw) -> dict[str, np.ndarray]:
    lead, size = draw.sizes.lead, draw.sizes.hidden
    found = {
        "query": draw.tensor(0, *lead, _HEADS, size, scale=12.0 if draw.mode == "peaked" else 1.0),
        "key": draw.tensor(1, *lead, _KEY_HEADS, size),
        "value": draw.tensor(2, *lead, _KEY_HEADS, size),
    }
    if draw.mode == "masked-nan":
        is_before = np.arange(draw.sizes.seq) < _attention_padding(draw.sizes)[:, None]
        found["key"][is_before] = found["value"][is_before] = np.nan
    return found


def _attention_options(draw: Draw) -> dict[str, Any]:
    """How the sequences lie; in mode "window" a window of more keys than a block of 64, and a softcap."""
    sliding_window, logit_softcap = (70, 1.5) if draw.mode == "window" else (None, None)
    return {
        "start": 0,
        "padding": _attention_padding(draw.sizes),
        "segment_starts": None,
        "sliding_window": sliding_window,
        "logit_softcap": logit_softcap,
    }


def _attention_gold(problem: Problem) -> tuple[Results, float]:
    query, key, value = problem.inputs.values()
    found = gold.attention_gold(query, key, value, problem.upstream["output"], **problem.options)
    gradients = {f"gradient:{name}": getattr(found, name) for name in problem.inputs}
    return {"output": found.output, **gradients}, largest_finite(found.scores)


def _per_token(sizes: Sizes) -> tuple[int, ...]:
    return sizes.lead


def _scalar(sizes: Sizes) -> tuple[int, ...]:
    return ()


def _logits_shape(sizes: Sizes) -> tuple[int, ...]:
    return *sizes.lead, sizes.vocab


def _shape_of_product(sizes: Sizes) -> tuple[int, ...]:
    return *sizes.lead, sizes.hidden, sizes.vocab


_PADDING_OF_POLICIES = {
    "policy_logits": np.nan,
    "ref_logits": np.nan,
    "action_ids": -100,
    "completion_mask": False,
    "old_logps": 0,
}
_MODES_OF_POLICIES = ("random", "constant", "peaked", "neg-inf", "ties", "masked-nan", "bad-ids")

SPECS = {
    spec.op: spec
    for spec in (
        OpSpec(
            "logp",
            _logp_inputs,
            _logp_gold,
            outputs=(Output("logp", _per_token),),
            gradients=("logits",),
            shape=_logits_shape,
            padding={"logits": 100.0, "token_ids": 0},
            per_row=frozenset(("logp", "gradient:logits")),
            modes=("random", "constant", "peaked", "huge", "neg-inf", "ties", "bad-ids"),
            large_class="logp_large",
        ),
        OpSpec(
            "linear_logp",
            linear_logp_inputs,
            linear_logp_gold,
            outputs=(Output("logp", _per_token),),
            gradients=("hidden", "lm_head_weight", "bias"),
            shape=_shape_of_product,
            padding={"hidden": 100.0, "target_ids": 0},
            per_row=frozenset(("logp", "gradient:hidden")),
            modes=("random", "constant", "peaked", "huge", "ties", "bad-ids"),
            # Where all rows of the head are equal the gradient of hidden is 0, so no relative error exists.
            forward_only=("bad-ids", "constant", "ties"),
            large_class="linear_logp_peaked",
        ),
        OpSpec(
            "masked_linear_logp",
            masked_inputs,
            masked_gold,
            outputs=(Output("logp", _per_token),),
            gradients=("hidden", "lm_head_weight", "bias"),
            shape=_shape_of_product,
            padding={"hidden": 100.0, "target_ids": 0, "allowed_mask": 2**32 - 1},
            per_row=frozenset(("logp", "gradient:hidden")),
            modes=("random", "constant", "peaked", "huge", "ties", "masked-nan", "bad-ids"),
            forward_only=("bad-ids", "constant", "ties"),
            large_class="linear_logp_peaked",
            options=masked_options,
            calls="linear_logp",
        ),
        OpSpec(
            "linear_kl",
            linear_kl_inputs,
            linear_kl_gold,
            outputs=(Output("divergence", _per_token),),
            gradients=("hidden", "lm_head_weight", "bias"),
            shape=_shape_of_product,
            padding={"hidden": 100.0, "teacher_hidden": 100.0},
            per_row=frozenset(("divergence", "gradient:hidden")),
            no_gradients=("teacher_hidden", "teacher_weight", "teacher_bias"),
            modes=("random", "peaked", "huge", "ties"),
            # Where all rows of a head are equal the gradient of hidden is 0, so no relative error exists.
            forward_only=("ties",),
            large_class="linear_kl_peaked",
            large_is_norm=True,
            options=linear_kl_options,
            unchecked={},
        ),
        OpSpec(
            "listed_linear_kl",
            listed_kl_inputs,
            listed_kl_gold,
            outputs=(Output("divergence", _per_token),),
            gradients=("hidden", "lm_head_weight"),
            shape=_shape_of_product,
            padding={"hidden": 100.0, "teacher_ids": -1, "teacher_logps": 0.0},
            per_row=frozenset(("divergence", "gradient:hidden")),
            modes=("random", "huge", "ties"),
            forward_only=("ties",),
            large_class="linear_kl_peaked",
            large_is_norm=True,
            options=listed_kl_options,
            unchecked={},
            calls="linear_kl",
        ),
        OpSpec(
            "linear_cross_entropy",
            _cross_entropy_inputs,
            _cross_entropy_gold,
            outputs=(Output("loss", _scalar),),
            gradients=("hidden", "lm_head_weight", "bias"),
            shape=_shape_of_product,
            padding={"hidden": np.nan, "target_ids": _LEFT_OUT, "token_weights": 1},
            per_row=frozenset(("gradient:hidden",)),
            modes=("random", "constant", "peaked", "huge", "ties", "masked-nan", "bad-ids"),
            forward_only=("bad-ids", "constant", "ties"),
            arrangements=arrange_padding_behind,
            large_class="linear_logp_peaked",
            options=_cross_entropy_options,
            runs_on="linear_logp",
        ),
        OpSpec(
            "ratio_kl",
            _policies,
            _ratio_kl_gold,
            outputs=(Output("ratio", _per_token), Output("kl", _per_token)),
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
                Output("loss", _scalar),
                Output("policy_loss", _scalar, differentiable=False),
                Output("kl", _scalar, differentiable=False),
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
        OpSpec(
            "det_gemm",
            _det_gemm_inputs,
            _det_gemm_gold,
            outputs=(Output("c", lambda sizes: _gemm_shape(sizes)[::2], dtype=None),),
            gradients=("a", "b"),
            shape=_gemm_shape,
            padding={"a": 0},
            per_row=frozenset(("c", "gradient:a")),
            modes=("random", "constant"),
            lead=1,
            dtypes=("bf16", "fp16"),
            unchecked={},
        ),
        OpSpec(
            "attention",
            _attention_inputs,
            _attention_gold,
            outputs=(Output("output", _attention_shape, dtype=None),),
            gradients=("query", "key", "value"),
            shape=_attention_shape,
            padding={"query": 1e4, "key": np.nan, "value": np.nan},
            per_row=frozenset(("output", "gradient:query")),
            sums_per_row=frozenset(("gradient:key", "gradient:value")),
            modes=("random", "peaked", "masked-nan", "window"),
            arrangements=arrange_attention,
            large_class="attention_peaked",
            large_is_norm=True,
            dtypes=("bf16", "fp16"),
            sizes=_several_blocks,
            options=_attention_options,
        ),
    )
}
"""Every op that is checked, by its name."""
