"""ratio_kl: importance ratio and KL estimate of the taken tokens, from the logits of two policies."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int

from rlk_jax import dispatch, validation
from rlk_jax._problem import RatioKlInputs, SoftmaxOptions, rounded_product
from rlk_jax.grpo.losses import exp, k3_kl, k3_slope
from rlk_jax.logp import values


class RatioKl(NamedTuple):
    """What `ratio_kl` returns: float32 `[*lead]`, 1 and 0 at masked tokens."""

    ratio: Float32[Array, "*lead"]
    kl: Float32[Array, "*lead"]


def ratio_kl(
    policy_logits: Float[Array, "*lead V"],
    ref_logits: Float[Array, "*lead V"],
    action_ids: Int[Array, "*lead"],
    completion_mask: Bool[Array, "*lead"] | Int[Array, "*lead"] | Float[Array, "*lead"],
    old_logps: Float[Array, "*lead"],
    *,
    temperature: float | Float[ArrayLike, "*lead"] = 1.0,
    donate_logits: bool = False,
    validate: bool | None = None,
    implementation: str | None = None,
) -> RatioKl:
    """Importance ratio to the old policy and KL estimate to the reference, of each token that was taken.

        ratio = exp(logp − old_logps),   kl = exp(d) − 1 − d,   d = ref − logp

    with logp and ref the log-probabilities of `action_ids` under `policy_logits / temperature` and
    `ref_logits / temperature`.

    Args:
      policy_logits, ref_logits: `[*lead, V]`, bfloat16, float16 or float32, each its own; sums run in float32.
      action_ids: `[*lead]`, any integer dtype; at masked tokens they may be anything.
      completion_mask: `[*lead]`, bool, integer or float: a token is active where it is not 0.
      old_logps: `[*lead]`, log-probabilities when the tokens were sampled.
      temperature: positive; a scalar or one per token. Not differentiated.
      donate_logits: the gradient may stand where policy_logits do, as in `logp`.
      validate: as in `logp`; an active id that is out of range and not checked gives NaN, never another token's values.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here.

    Returns:
      `RatioKl(ratio, kl)`, float32 `[*lead]`. A masked token has ratio 1 and kl 0. A token that the policy cannot take
      (logp −inf) has ratio 0, and an infinite kl where the reference can.

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow to policy_logits only. Masked tokens are masked before anything is computed of them: their logits are
    not read, and nothing they hold, NaN included, reaches a value or a gradient.

    Same bits: as `logp`. Each of the logits is read once; the backward reads policy_logits once more.

    Source: RL-Kernel's ratio_kl; the estimator k3 of J. Schulman, "Approximating KL divergence" (2020).
    """
    inputs, options = validation.ratio_kl(
        policy_logits, ref_logits, action_ids, completion_mask, old_logps, temperature, validate=validate
    )
    validation.require_values(inputs)
    chosen = dispatch.choose(problem("ratio_kl", inputs, options), implementation)
    taken = of_actions(chosen, inputs, options, donate=donate_logits, validate=validate)
    return _ratio_and_kl(taken.logp, taken.ref_logps, taken.old_logps)


@jax.custom_vjp
def _ratio_and_kl(logp: Array, ref_logps: Array, old_logps: Array) -> RatioKl:
    return RatioKl(exp(logp - old_logps), k3_kl(logp, ref_logps))


def _save(logp: Array, ref_logps: Array, old_logps: Array) -> tuple[RatioKl, tuple[Array, Array, Array]]:
    found = _ratio_and_kl(logp, ref_logps, old_logps)
    return found, (found.ratio, logp, ref_logps)


def _pull_back(saved: tuple[Array, Array, Array], upstream: RatioKl) -> tuple[Array, None, None]:
    """g_ratio·ratio + g_kl·(1 − exp d), products rounded whatever program this is in; nothing of what has no upstream
    gradient, even where its ratio or KL is no number.
    """
    ratio, logp, ref_logps = saved

    def of(g: Array, slope: Array) -> Array:
        return rounded_product(g, jnp.where(g == 0, 0, slope))

    return of(upstream.ratio, ratio) + of(upstream.kl, k3_slope(logp, ref_logps)), None, None


_ratio_and_kl.defvjp(_save, _pull_back)


class TakenTokens(NamedTuple):
    """Log-probabilities of the taken tokens, float32 `[*lead]`, all 0 where masked; and the mask as bool."""

    logp: Array
    ref_logps: Array
    old_logps: Array
    mask: Array


def of_actions(
    chosen: dispatch.Implementation,
    inputs: RatioKlInputs,
    options: SoftmaxOptions,
    *,
    donate: bool,
    validate: bool | None,
) -> TakenTokens:
    """What both policies, and the old one, say of the actions. Only `logp` carries a gradient."""
    mask = validation.active(inputs.completion_mask)
    tokens = validation.tokens(
        inputs.action_ids,
        inputs.temperature,
        mask.reshape(-1),
        vocab_size=options.real_vocab_size,
        validate=validate,
        name="action_ids",
    )
    policy, ref = jnp.asarray(inputs.policy_logits), lax.stop_gradient(jnp.asarray(inputs.ref_logits))
    old_logps = lax.stop_gradient(jnp.asarray(inputs.old_logps, jnp.float32))
    return TakenTokens(
        values(chosen.functions, options, donate, policy, tokens).logp,
        values(chosen.functions, options, False, ref, tokens).logp,
        jnp.where(mask, old_logps, 0),
        mask,
    )


def describe(*args: Any, **kwargs: Any) -> tuple[dispatch.Problem, str | None]:
    """What `dispatch` sees of the call `ratio_kl(*args, **kwargs)`, and the implementation it names."""
    call = inspect.signature(ratio_kl).bind(*args, **kwargs)
    call.apply_defaults()
    implementation = call.arguments.pop("implementation")
    del call.arguments["donate_logits"]
    return problem("ratio_kl", *validation.ratio_kl(**call.arguments)), implementation


def problem(op: str, inputs: RatioKlInputs, options: SoftmaxOptions) -> dispatch.Problem:
    """What `dispatch` sees of an op on the logits of two policies."""
    return dispatch.problem_of(op, (inputs.policy_logits, inputs.ref_logits), options)
