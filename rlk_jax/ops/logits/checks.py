"""Every static check of logp, ratio_kl and grpo_loss, and its message.

The docstring of a check says what must hold. Where it does not, the check raises ValueError before anything runs.
"""

import math
from typing import Any

import jax.numpy as jnp

from rlk_jax.core.allowed import allowed_arrays, check_allowed
from rlk_jax.core.checks import (
    INT32,
    as_array,
    check_devices,
    check_dtypes,
    check_flags,
    check_mask_dtype,
    check_temperature_shape,
    check_vocabulary_options,
    checked_temperature,
    no_explicit_axes,
    require,
)
from rlk_jax.losses.checks import check_advantages, check_completion_mask, checked_boundaries
from rlk_jax.ops.logits.options import LogitsOptions, LogpConfig, LogpInputs, RatioKlInputs


def _checked_vocab_size(name: str, logits: Any) -> int:
    """V of logits whose rows and columns 32 bits can count."""
    require(logits.ndim >= 1, f"{name} must be [*lead, V], got a scalar.")
    rows, vocab_size = math.prod(logits.shape[:-1]), logits.shape[-1]
    require(vocab_size > 0, f"{name} must have at least one vocab column.")
    require(
        max(rows, vocab_size) <= INT32.max,
        f"{name} rows and columns must fit into 32 bits, got {rows} x {vocab_size}.",
    )
    return vocab_size


def _config(vocab_size: int, options: LogitsOptions) -> LogpConfig:
    """What an implementation is compiled for, from options that have been checked."""
    real, softcap = options.global_vocab_size, options.logit_softcap
    return LogpConfig(
        vocab_size=vocab_size,
        real_vocab_size=vocab_size if real is None else int(real),
        logit_softcap=None if softcap is None else float(softcap),
        return_lse=options.return_lse,
        return_entropy=options.return_entropy,
        as_linear_logp=options.as_linear_logp,
    )


def check_logp(inputs: LogpInputs, options: LogitsOptions) -> tuple[LogpInputs, LogpConfig]:
    """All static checks of logp: its inputs as arrays, and what an implementation is compiled for."""
    check_flags(options)
    rows, initial = inputs.row_indices, inputs.initial
    inputs = LogpInputs(
        logits=as_array("logits", inputs.logits),
        token_ids=as_array("token_ids", inputs.token_ids),
        temperature=checked_temperature(inputs.temperature),
        row_indices=None if rows is None else as_array("row_indices", rows),
        initial=None if initial is None else as_array("initial", initial),
        **allowed_arrays(inputs),
    )
    vocab_size, lead = _checked_vocab_size("logits", inputs.logits), inputs.logits.shape[:-1]
    require(
        lead == inputs.token_ids.shape,
        f"logits leading shape {lead} must match token_ids shape {inputs.token_ids.shape}.",
    )
    check_temperature_shape(inputs.temperature, "token_ids", inputs.token_ids)
    check_dtypes(inputs, integers=("token_ids", "row_indices", "allowed_ids", "allowed_mask"))
    if inputs.row_indices is not None:
        require(inputs.row_indices.ndim == 1, f"row_indices must be 1-D, got shape {inputs.row_indices.shape}.")
    if inputs.initial is not None:
        require(inputs.row_indices is not None, "initial requires row_indices, the rows that it does not keep.")
        require(
            inputs.initial.shape == lead and inputs.initial.dtype == jnp.float32,
            f"initial must be float32 of token_ids shape {lead}, got {inputs.initial.dtype}{inputs.initial.shape}.",
        )
    check_vocabulary_options(vocab_size, options.logit_softcap, options.ignore_index, options.global_vocab_size)
    config = _config(vocab_size, options)
    check_allowed(inputs, "token_ids", lead, (config.real_vocab_size, vocab_size))
    dtype = inputs.logits.dtype
    require(
        not options.as_linear_logp or dtype == jnp.float32,
        f"as_linear_logp needs float32 logits, the sums hidden·Wᵀ before they are rounded, got {dtype}.",
    )
    no_explicit_axes("logp", inputs)
    check_devices(inputs)
    return inputs, config


def check_policies(inputs: RatioKlInputs, options: LogitsOptions) -> tuple[RatioKlInputs, LogpConfig]:
    """All static checks of ratio_kl, which are also the first checks of grpo_loss."""
    check_flags(options)
    inputs = RatioKlInputs(
        policy_logits=as_array("policy_logits", inputs.policy_logits),
        ref_logits=as_array("ref_logits", inputs.ref_logits),
        action_ids=as_array("action_ids", inputs.action_ids),
        completion_mask=as_array("completion_mask", inputs.completion_mask),
        old_logps=as_array("old_logps", inputs.old_logps),
        temperature=checked_temperature(inputs.temperature),
        **allowed_arrays(inputs),
    )
    policy, lead = inputs.policy_logits, inputs.policy_logits.shape[:-1]
    vocab_size = _checked_vocab_size("policy_logits", policy)
    _checked_vocab_size("ref_logits", inputs.ref_logits)
    require(
        inputs.ref_logits.shape == policy.shape,
        f"ref_logits shape {inputs.ref_logits.shape} does not match policy_logits shape {policy.shape}.",
    )
    for name in ("action_ids", "completion_mask", "old_logps"):
        shape = getattr(inputs, name).shape
        require(shape == lead, f"{name} shape {shape} does not match policy_logits.shape[:-1] {lead}.")
    check_temperature_shape(inputs.temperature, "action_ids", inputs.action_ids)
    check_dtypes(inputs, integers=("action_ids", "allowed_ids", "allowed_mask"), unchecked=("completion_mask",))
    check_mask_dtype(inputs.completion_mask)
    check_allowed(inputs, "action_ids", lead, (vocab_size, vocab_size))
    no_explicit_axes("ratio_kl", inputs)
    check_devices(inputs)
    return inputs, _config(vocab_size, options)


def check_rewards_or_advantages(
    mask: Any, rewards: Any, advantages: Any, samples_per_prompt: Any, group_boundaries: Any
) -> None:
    """grpo_loss has either rewards or advantages, for the sequences of its mask."""
    shape = check_completion_mask(mask)
    has_groups = samples_per_prompt is not None or group_boundaries is not None
    require((rewards is None) != (advantages is None), "Provide exactly one of rewards or advantages.")
    require(
        advantages is None or not has_groups, "samples_per_prompt and group_boundaries are for rewards, not advantages."
    )
    if advantages is not None:
        check_advantages(advantages, mask)
        return
    found = as_array("rewards", rewards).shape
    require(found == shape[:1], f"rewards must be one number for each of {shape[0]} sequences, got shape {found}.")
    checked_boundaries(rewards, samples_per_prompt, group_boundaries)
