"""ratio_kl for tensors: importance ratio and KL estimate of the taken tokens, from the logits of two policies."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from torch import Tensor

import rlk_jax
from rlk_jax.core.allowed import with_allowed
from rlk_jax.core.tokens import checked_tokens
from torch_bridge import _calls, _exchange, _inputs, _padding
from torch_bridge._programs import Arrays, Op


class RatioKl(NamedTuple):
    """What `ratio_kl` returns: float32 `[*lead]`, 1 and 0 at masked tokens."""

    ratio: Tensor
    kl: Tensor


def ratio_kl(
    policy_logits: Tensor,
    ref_logits: Tensor,
    action_ids: Tensor,
    completion_mask: Tensor,
    old_logps: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    allowed_ids: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    log_ratio_bound: float | None = None,
    validate: bool | None = None,
    implementation: str | None = None,
) -> RatioKl:
    """Importance ratio to the old policy and KL estimate to the reference; `rlk_jax.ratio_kl` for tensors.

        ratio = exp(logp − old_logps),   kl = exp(d) − 1 − d,   d = ref − logp

    Args:
      policy_logits, ref_logits: `[*lead, V]`, bfloat16, float16 or float32; sums run in float32, under autocast too.
      action_ids: `[*lead]`, any integer dtype; at masked tokens they may be anything.
      completion_mask: `[*lead]`, bool, integer or float: a token is active where it is not 0.
      old_logps: `[*lead]`, log-probabilities when the tokens were sampled.
      log_ratio_bound: log-ratios count as at most this, and at least its negative; None for no bound.
      allowed_ids, allowed_mask: which tokens each row may take under policy and reference alike, as in `linear_logp`.
      temperature, validate, implementation: as in `logp`.

    Returns:
      `RatioKl(ratio, kl)`, float32 `[*lead]`; 1 and 0 at masked tokens.

    Raises:
      ValueError: for every argument that does not fit, in rlk_jax's words, before anything runs; for ref_logits or
        old_logps that require a gradient.
      RuntimeError: for second derivatives. Torch's own errors pass through.

    Gradients flow to policy_logits only. Both logits are copied where their number of rows is no bucket's.

    Same bits: the results have the bits of `rlk_jax.ratio_kl` on the same arrays, for the implementations that promise
    bits.
    """
    per_token, number = _inputs.temperature(temperature)
    tensors = policy_tensors(policy_logits, ref_logits, action_ids, completion_mask, old_logps, per_token)
    tensors |= {"allowed_ids": allowed_ids, "allowed_mask": allowed_mask}
    _inputs.check_tensors(**tensors)
    _inputs.check_constants("ratio_kl", ref_logits=ref_logits, old_logps=old_logps, temperature=per_token)
    _inputs.check_static(
        "ratio_kl",
        tensors,
        temperature=number,
        log_ratio_bound=log_ratio_bound,
        validate=validate,
        implementation=implementation,
    )
    ratio, kl, _ = _ratio_kl(
        policy_logits,
        ref_logits,
        action_ids,
        completion_mask,
        old_logps,
        allowed_ids,
        allowed_mask,
        per_token,
        number,
        log_ratio_bound,
        _inputs.should_validate(validate, policy_logits),
        implementation,
        _inputs.needs(policy_logits),
    )
    return RatioKl(ratio, kl)


def policy_tensors(
    policy_logits: Any, ref_logits: Any, action_ids: Any, completion_mask: Any, old_logps: Any, temperature: Any
) -> dict[str, Any]:
    """The tensors of a call on two policies, by the names of their arguments in `rlk_jax`."""
    tensors = {"policy_logits": policy_logits, "ref_logits": ref_logits, "action_ids": action_ids}
    return tensors | {"completion_mask": completion_mask, "old_logps": old_logps, "temperature": temperature}


def tokens(
    padding: _padding.RowPadding,
    ref_logits: Tensor,
    action_ids: Tensor,
    completion_mask: Tensor,
    old_logps: Tensor,
    temperature: tuple[Tensor | None, float],
    vocab_size: int | None,
    allowed: Arrays,
) -> Arrays:
    """The arrays of a call's tokens beside the policy's logits, with padded rows, which are masked; what tokens are
    allowed is that of `padding.allowed`.

    Values are checked unless `vocab_size` is None.
    """
    ids, mask = padding.ids(action_ids), padding.rows(completion_mask != 0, 0)
    scale = padding.temperature(*temperature, ref_logits.device)
    if vocab_size is not None:
        _exchange.wait(ids.device)
        int32_ids, is_active = _exchange.ids_of(ids, mask.shape), mask.reshape(-1)
        check: Any = {"vocab_size": vocab_size, "validate": True, "name": "action_ids"}
        checked = checked_tokens(int32_ids, scale, is_active, **check)
        with_allowed(checked, _padding.allowed_values(*allowed, lead=mask.ndim), **check)
    return padding.rows(ref_logits, columns=1), ids, mask, padding.rows(old_logps, 0), scale, *allowed


def _run(
    policy: Any,
    ref: Any,
    ids: Any,
    mask: Any,
    old: Any,
    temperature: Any,
    allowed_ids: Any,
    allowed_mask: Any,
    **options: Any,
) -> tuple[jax.Array, ...]:
    ids = _exchange.ids_of(ids, mask.shape)
    options |= _padding.allowed_values(allowed_ids, allowed_mask)._asdict()
    return tuple(rlk_jax.ratio_kl(policy, ref, ids, mask, old, temperature=temperature, validate=False, **options))


_OP = Op("ratio_kl", _run, differentiable=1)


def _kernel(
    policy_logits: Tensor,
    ref_logits: Tensor,
    action_ids: Tensor,
    completion_mask: Tensor,
    old_logps: Tensor,
    allowed_ids: Tensor | None,
    allowed_mask: Tensor | None,
    per_token: Tensor | None,
    temperature: float,
    log_ratio_bound: float | None,
    validate: bool,
    implementation: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """ratio, kl, and the handle for the backward."""
    lead = action_ids.shape
    padding = _padding.flat(lead)

    def other_inputs() -> Arrays:
        vocab_size = policy_logits.shape[-1] if validate else None
        scale, allowed = (per_token, temperature), padding.allowed(allowed_ids, allowed_mask)
        return tokens(padding, ref_logits, action_ids, completion_mask, old_logps, scale, vocab_size, allowed)

    options = (("log_ratio_bound", log_ratio_bound), ("implementation", implementation))
    call = _calls.Call(_OP, padding, options, (lambda x: padding.rows(x, columns=1),), padding.rows)
    ratio, kl, handle = call.forward([policy_logits], other_inputs, needs, [_calls.Output(lead)] * 2)
    return ratio, kl, handle


def _fake(policy_logits: Tensor, ref_logits: Tensor, action_ids: Tensor, *options: Any) -> Any:
    return _calls.fake([_calls.Output(action_ids.shape)] * 2, policy_logits.device)


_ratio_kl = _calls.as_torch_op("ratio_kl", _kernel, _fake, [0])
