"""Static checks of the losses and their messages.

The docstring of a check says what must hold. Where it does not, the check raises ValueError before anything runs.
"""

from typing import Any

import jax
import numpy as np

from rlk_jax.core.checks import (
    FLOAT_DTYPES,
    as_array,
    check_mask_dtype,
    holds_reals,
    is_concrete,
    is_integer,
    is_number,
    require,
    require_not_negative,
    require_positive,
    require_positive_integer,
)


def check_unused_option(loss_type: str, name: str, x: Any, default: Any) -> None:
    """An option that the loss type does not use keeps its default."""
    require(x == default, f"{name} has no meaning for loss_type={loss_type!r}.")


def check_dual_clip(x: float | None, upper: float) -> None:
    """dual_clip lies above the clip range, which ends at `upper`."""
    require(
        x is None or x > upper,
        f"dual_clip must be above the clip range, which ends at {upper}, got {x}.",
    )


def check_importance(options: Any) -> None:
    """What shapes importance weights comes with their cap, and the floor is below it. VESPO takes weights of tokens."""
    cap, floor = options.importance_cap, options.importance_floor
    for name, default in (("importance_floor", None), ("importance_level", "token"), ("importance_beyond", "truncate")):
        require(cap is not None or getattr(options, name) == default, f"{name} has no meaning without importance_cap.")
    require(floor is None or floor < cap, f"importance_floor must be below importance_cap={cap}, got {floor}.")
    is_vespo = options.loss_type == "vespo"
    require(
        not (is_vespo and options.importance_level == "sequence"),
        "importance_level must be 'token' for loss_type='vespo', which multiplies the weights of a sequence itself.",
    )


def check_log_ratio_bound(x: float | None) -> None:
    """A bound is positive, and its exp is finite in float32, with room for a sum over tokens."""
    if x is not None:
        require_positive("log_ratio_bound", x)
        require(x <= 80, f"log_ratio_bound must be at most 80, whose exp is still finite, got {x}.")


def check_constant_length(normaliser: str, max_completion_length: Any) -> None:
    """max_completion_length is given with the constant normaliser, which counts it, and with no other."""
    require(
        (normaliser == "constant") == (max_completion_length is not None),
        "max_completion_length must be given with normaliser='constant' and with no other, got "
        f"{max_completion_length!r} with {normaliser!r}.",
    )
    if max_completion_length is not None:
        require_positive_integer("max_completion_length", max_completion_length)


def _require_real(name: str, x: Any) -> None:
    """x holds bools or real numbers."""
    require(holds_reals(x), f"{name} must be bool or real numbers, got {x.dtype}.")


def _given_boundaries(num_sequences: int, group_boundaries: Any) -> tuple[int, ...]:
    """The boundaries that the user gave, as integers."""
    require(
        all(map(is_concrete, jax.tree.leaves(group_boundaries))),
        "group_boundaries must be static: a sequence of integers or a concrete array, not a traced one. "
        "Under jit close over it or make it a static argument.",
    )
    edges = np.asarray(group_boundaries)
    require(edges.ndim == 1 and edges.size >= 2, "group_boundaries must be a 1D tensor of length num_groups + 1.")
    require(np.issubdtype(edges.dtype, np.integer), f"group_boundaries must be integers, got {edges.dtype}.")
    require(edges[0] == 0 and edges[-1] == num_sequences, "group_boundaries must start at 0 and end at num_sequences.")
    require(np.all(edges[1:] > edges[:-1]), "each group must contain at least one sequence.")
    return tuple(edges.tolist())


def checked_boundaries(rewards: Any, samples_per_prompt: Any, group_boundaries: Any) -> tuple[int, ...]:
    """Where each group of `rewards [B]` begins, and the end: 0, ..., B."""
    rewards = as_array("rewards", rewards)
    require(rewards.ndim == 1, f"rewards must be 1D [num_sequences], got shape {rewards.shape}.")
    _require_real("rewards", rewards)
    require(
        (samples_per_prompt is None) != (group_boundaries is None),
        "Provide exactly one of samples_per_prompt or group_boundaries.",
    )
    count = rewards.shape[0]
    if group_boundaries is not None:
        return _given_boundaries(count, group_boundaries)
    require(
        is_integer(samples_per_prompt),
        f"samples_per_prompt must be an integer, got {type(samples_per_prompt).__name__}.",
    )
    require(samples_per_prompt >= 2, "samples_per_prompt must be at least 2 for group normalization.")
    require(
        count % samples_per_prompt == 0,
        "num_sequences (B) must be divisible by samples_per_prompt (n). "
        f"There are {count} sequences, and samples_per_prompt is {samples_per_prompt}.",
    )
    return tuple(range(0, count + 1, int(samples_per_prompt)))


def check_completion_mask(mask: Any) -> tuple[int, int]:
    """The mask is `[B, T]` of bools or real numbers; returns its shape."""
    mask = as_array("completion_mask", mask)
    require(
        mask.ndim == 2,
        f"completion_mask must be 2D [num_sequences, completion_len]. The one given has shape {mask.shape}.",
    )
    check_mask_dtype(mask)
    return mask.shape


def check_advantages(x: Any, mask: Any) -> None:
    """There is one advantage for each sequence of the mask, or one for each token."""
    x, shape = as_array("advantages", x), check_completion_mask(mask)
    require(
        x.shape in (shape[:1], shape),
        f"advantages must be [B] or [B, T] of completion_mask shape {shape}, got shape {x.shape}.",
    )
    _require_real("advantages", x)


def check_per_token(name: str, x: Any, shape: tuple[int, int]) -> None:
    """An array per token is of floats, and of the mask's shape."""
    x = as_array(name, x)
    require(x.shape == shape, f"{name} shape {x.shape} does not match completion_mask shape {shape}.")
    require(x.dtype in FLOAT_DTYPES, f"{name} must be bfloat16, float16 or float32, got {x.dtype}.")


def check_policy_loss(
    per_token: dict[str, Any], mask: Any, denominator: Any, entropy_threshold: Any, options: Any, *, has_reference: bool
) -> None:
    """Every array of `policy_loss` fits the mask, and what the options ask for is there."""
    shape = check_completion_mask(mask)
    for name, x in per_token.items():
        if x is not None or name in ("logp", "old_logps"):
            check_per_token(name, x, shape)
    require(
        options.beta == 0 or has_reference,
        f"beta={options.beta} requires ref_logps. In linear_grpo_loss ref_hidden and ref_weight may take their place.",
    )
    require(
        (per_token["rollout_logps"] is None) == (options.importance_cap is None),
        "rollout_logps and importance_cap must be given together.",
    )
    for name, x in (("denominator", denominator), ("entropy_threshold", entropy_threshold)):
        if is_number(x):
            require_not_negative(name, x)
        elif x is not None:
            require(as_array(name, x).ndim == 0, f"{name} must be a scalar, got shape {x.shape}.")


def check_entropy(has_entropy: bool, entropy_threshold: Any, entropy_coef: float) -> None:
    """A bonus and a threshold are of entropies that are given."""
    require(has_entropy or entropy_coef == 0, f"entropy_coef={entropy_coef} requires entropy.")
    require(has_entropy or entropy_threshold is None, "entropy_threshold requires entropy.")


def check_top_share(x: Any) -> None:
    """A share of tokens is a number above 0 and at most 1."""
    require_positive("top_share", x)
    require(x <= 1, f"top_share must be at most 1, got {x}.")
