"""grpo_loss for tensors: the GRPO loss from the logits of two policies and the rewards of whole groups."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import Tensor

import rlk_jax
from rlk_jax.losses.advantages import Groups, advantages_of, groups_of
from torch_bridge import _calls, _exchange, _inputs, _padding, _programs
from torch_bridge._programs import Arrays, Op
from torch_bridge.ratio_kl import policy_tensors, tokens


class GrpoLoss(NamedTuple):
    """What `grpo_loss` returns: float32 scalars, of which only `loss` carries a gradient."""

    loss: Tensor
    policy_loss: Tensor
    kl: Tensor


def grpo_loss(
    policy_logits: Tensor,
    ref_logits: Tensor,
    action_ids: Tensor,
    old_logps: Tensor,
    rewards: Tensor | None,
    completion_mask: Tensor,
    *,
    advantages: Tensor | None = None,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | None = None,
    eps: float = 1e-6,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    beta: float = 0.0,
    log_ratio_bound: float | None = None,
    temperature: float | Tensor = 1.0,
    allowed_ids: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    validate: bool | None = None,
    implementation: str | None = None,
) -> GrpoLoss:
    """Clipped policy loss with a KL penalty, averaged over all active tokens; `rlk_jax.grpo_loss` for tensors.

        loss = policy_loss + beta · kl,   policy_loss = mean of −min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A)
        ρ = exp(logp − old_logps),   kl = mean of exp(d) − 1 − d,   d = ref − logp

    Args:
      policy_logits, ref_logits: `[B, T, V]`, bfloat16, float16 or float32, of B sequences of T completion tokens.
      action_ids: `[B, T]`, the tokens taken; at masked tokens they may be anything.
      old_logps: `[B, T]`, log-probabilities of these tokens when they were sampled.
      rewards: `[B]`, normalised within their groups by `rlk_jax.grpo.group_advantages`; None beside `advantages`.
      completion_mask: `[B, T]`, bool, integer or float: a token is active where it is not 0.
      advantages: A for every sequence `[B]` or every token `[B, T]`, in the place of rewards.
      samples_per_prompt: how many consecutive sequences form a group; give this or group_boundaries beside rewards.
      group_boundaries: `G + 1` integers from 0 to B: where each of G groups starts, and B.
      eps: the least standard deviation that rewards are divided by.
      clip_eps, clip_eps_high: the clip range below and above 1; clip_eps_high=None means clip_eps.
      beta: weight of the KL penalty.
      log_ratio_bound: log-ratios count as at most this, and at least its negative; None for no bound.
      allowed_ids, allowed_mask: which tokens each row may take under policy and reference alike, as in `linear_logp`.
      temperature, validate, implementation: as in `logp`.

    Returns:
      `GrpoLoss(loss, policy_loss, kl)`; all 0 where no token is active.

    Raises:
      ValueError: for every argument that does not fit, in rlk_jax's words, before anything runs; for constants that
        require a gradient.
      RuntimeError: for second derivatives. Torch's own errors pass through.

    Gradients flow from `loss` to policy_logits only. B and T are padded to buckets by masked tokens: both logits are
    copied where B or T is no bucket.

    Same bits: the results have the bits of `rlk_jax.grpo_loss` on the same arrays, for the implementations that promise
    bits.
    """
    per_token, number = _inputs.temperature(temperature)
    tensors = policy_tensors(policy_logits, ref_logits, action_ids, completion_mask, old_logps, per_token)
    tensors |= {"rewards": rewards, "advantages": advantages}
    tensors |= {"allowed_ids": allowed_ids, "allowed_mask": allowed_mask}
    _inputs.check_tensors(**tensors)
    constants = {name: x for name, x in tensors.items() if name != "policy_logits"}
    _inputs.check_constants("grpo_loss", **constants)
    boundaries = _as_tuples(group_boundaries)
    groups = {"samples_per_prompt": samples_per_prompt, "group_boundaries": boundaries, "eps": eps}
    clipping = {"clip_eps": clip_eps, "clip_eps_high": clip_eps_high, "beta": beta, "log_ratio_bound": log_ratio_bound}
    _inputs.check_static(
        "grpo_loss",
        tensors,
        temperature=number,
        validate=validate,
        implementation=implementation,
        **groups,
        **clipping,
    )
    loss, policy_loss, kl, _ = _grpo_loss(
        policy_logits,
        ref_logits,
        action_ids,
        completion_mask,
        old_logps,
        rewards,
        advantages,
        samples_per_prompt,
        boundaries,
        eps,
        clip_eps,
        clip_eps_high,
        beta,
        log_ratio_bound,
        allowed_ids,
        allowed_mask,
        per_token,
        number,
        _inputs.should_validate(validate, policy_logits),
        implementation,
        _inputs.needs(policy_logits),
    )
    return GrpoLoss(loss, policy_loss, kl)


def _run(
    policy: Any,
    ref: Any,
    ids: Any,
    mask: Any,
    old: Any,
    temperature: Any,
    allowed_ids: Any,
    allowed_mask: Any,
    advantages: Any,
    **options: Any,
) -> tuple[jax.Array, ...]:
    token_options = {"temperature": temperature, "advantages": advantages}
    token_options |= _padding.allowed_values(allowed_ids, allowed_mask, lead=mask.ndim)._asdict()
    ids = _exchange.ids_of(ids, mask.shape)
    return tuple(rlk_jax.grpo_loss(policy, ref, ids, old, None, mask, **token_options, validate=False, **options))


def _as_tuples(numbers: Any) -> Any:
    """A sequence of numbers as tuples, which can be a key of a cache; `rlk_jax` checks what they hold."""
    listed = numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else numbers
    return tuple(map(_as_tuples, listed)) if isinstance(listed, list | tuple) else listed


_OP = Op("grpo_loss", _run, differentiable=1)


@functools.lru_cache(maxsize=256)
def _groups(boundaries: tuple[int, ...], device: torch.device) -> Groups:
    """The groups that the boundaries give, padded to buckets, so that a program serves many batches of groups."""
    return jax.device_put(groups_of(boundaries, _programs.bucket), _exchange.jax_device(device))


def _kernel(
    policy_logits: Tensor,
    ref_logits: Tensor,
    action_ids: Tensor,
    completion_mask: Tensor,
    old_logps: Tensor,
    rewards: Tensor | None,
    advantages: Tensor | None,
    samples_per_prompt: int | None,
    group_boundaries: Sequence[int] | None,
    eps: float,
    clip_eps: float,
    clip_eps_high: float | None,
    beta: float,
    log_ratio_bound: float | None,
    allowed_ids: Tensor | None,
    allowed_mask: Tensor | None,
    per_token: Tensor | None,
    temperature: float,
    validate: bool,
    implementation: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss, policy_loss, kl, and the handle for the backward."""
    sizes = (*action_ids.shape,)
    padding = _padding.RowPadding(sizes, sizes, tuple(map(_programs.bucket, sizes)))

    def other_inputs() -> Arrays:
        sequences = _padding.RowPadding(sizes[:1], sizes[:1], padding.padded[:1])
        if advantages is not None:
            padded_advantages = (sequences if advantages.ndim == 1 else padding).rows(
                _calls.as_jax_floats(advantages), 0
            )
        else:
            assert rewards is not None
            step = samples_per_prompt or 1
            boundaries = range(0, sizes[0] + 1, step) if group_boundaries is None else group_boundaries
            groups, least_std = _groups(tuple(boundaries), rewards.device), _exchange.scalar(eps, rewards.device)
            arguments = sequences.rows(_calls.as_jax_floats(rewards), 0), groups, least_std
            padded_advantages = _programs.run("forward", advantages_of, arguments)
        vocab_size = policy_logits.shape[-1] if validate else None
        scale, allowed = (per_token, temperature), padding.allowed(allowed_ids, allowed_mask)
        arrays = tokens(padding, ref_logits, action_ids, completion_mask, old_logps, scale, vocab_size, allowed)
        return *arrays, padded_advantages

    options = (
        ("clip_eps", clip_eps),
        ("clip_eps_high", clip_eps_high),
        ("beta", beta),
        ("log_ratio_bound", log_ratio_bound),
        ("implementation", implementation),
    )
    call = _calls.Call(_OP, padding, options, (lambda x: padding.rows(x, columns=1),), _exchange.lend)
    loss, policy_loss, kl, handle = call.forward([policy_logits], other_inputs, needs, [_calls.Output(())] * 3)
    return loss, policy_loss, kl, handle


def _fake(policy_logits: Tensor, *options: Any) -> Any:
    return _calls.fake([_calls.Output(())] * 3, policy_logits.device)


_grpo_loss = _calls.as_torch_op("grpo_loss", _kernel, _fake, [0], constants=(1, 2))
