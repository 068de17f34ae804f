"""logp, ratio_kl and grpo_loss: log-probabilities of the taken tokens from logits in memory, and losses on them."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int

from rlk_jax.core.allowed import with_allowed
from rlk_jax.core.checks import require_positive, require_values
from rlk_jax.core.dispatch import CallFacts, choose, facts_of
from rlk_jax.core.exports import exportable
from rlk_jax.core.tokens import LinearLogp, Tokens, active_mask, checked_tokens, counted, listed_rows
from rlk_jax.losses import LossOptions, group_advantages, policy_loss
from rlk_jax.losses.checks import check_log_ratio_bound
from rlk_jax.ops.logits.autodiff import RatioKl, ratio_and_kl, values_of_tokens
from rlk_jax.ops.logits.checks import check_logp, check_policies, check_rewards_or_advantages
from rlk_jax.ops.logits.options import LogitsOptions, LogpConfig, LogpInputs, RatioKlInputs, TakenTokens


@exportable
class GrpoLoss(NamedTuple):
    """What `grpo_loss` returns: float32 scalars, of which only `loss` carries a gradient."""

    loss: Float32[Array, ""]
    policy_loss: Float32[Array, ""]
    kl: Float32[Array, ""]


@overload
def logp(
    logits: Float[Array, "*lead V"],
    token_ids: Int[Array, "*lead"],
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Any,
) -> Float32[Array, "*lead"]: ...


@overload
def logp(
    logits: Float[Array, "*lead V"],
    token_ids: Int[Array, "*lead"],
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Any,
) -> LinearLogp: ...


def logp(  # type: ignore[misc]  # mypy wants the overloads' **options here too
    logits: Float[Array, "*lead V"],
    token_ids: Int[Array, "*lead"],
    *,
    temperature: float | Float[ArrayLike, "*lead"] = 1.0,
    allowed_ids: Int[Array, "*lead K"] | None = None,
    allowed_mask: Int[Array, "*lead words"] | None = None,
    logit_softcap: float | None = None,
    ignore_index: int | None = None,
    global_vocab_size: int | None = None,
    row_indices: Int[Array, " K"] | None = None,
    initial: Float32[Array, "*lead"] | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    donate_logits: bool = False,
    as_linear_logp: bool = False,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Float32[Array, "*lead"] | LinearLogp:
    """Log-probability of each token under its row of logits.

        z = softcap(logits) / temperature,   softcap(x) = c·tanh(x/c)
        logp = z[token] − ln Σ_v exp z_v,   lse = ln Σ_v exp z_v,   entropy = −Σ_v p_v·ln p_v     (natural logarithms)

    The sums are over the tokens v that a row allows: all of them unless `allowed_ids` or `allowed_mask` is given. Where
    hidden states are at hand, `linear_logp` needs no logits.

    Args:
      logits: `[*lead, V]`, bfloat16, float16 or float32; sums run in float32. −inf is a token that cannot be taken
        (beside a softcap it counts as −c).
      token_ids: `[*lead]`, any integer dtype.
      temperature: positive; a scalar or one per token. Not differentiated.
      allowed_ids: the ids that each row may take, integers `[*lead, K]`: those that a sampler kept with top-k or top-p.
        −1 is padding; order and duplicates do not matter. Other tokens have z = −inf, and gradients of their logits are
        exactly 0, also where these are NaN or infinite. A row that counts must allow its own token.
      allowed_mask: the same as packed bits, int32 or uint32 `[*lead, ceil(V/32)]`, of which one of the two is given:
        bit i of word j is token 32·j + i. V is that of the logits, or `global_vocab_size`; bits behind it are ignored.
      logit_softcap: c > 0 (Gemma), or None. Not differentiated.
      ignore_index: tokens with this id give 0 in every output and exactly 0 in every gradient, and their logits are not
        read. It must lie outside the vocabulary.
      global_vocab_size: true vocabulary size where the last columns are padding: they count as −inf.
      row_indices: numbers of the rows to compute, `[K]`, counting tokens of all lead dimensions from 0, in any order.
        Rows that it does not list are treated as ignored.
      initial: float32 `[*lead]`: what logp is for the rows that `row_indices` does not list, instead of 0. Updated in
        place where it is donated to jit.
      return_lse, return_entropy: also return these, from the same pass, differentiable.
      donate_logits: the gradient may be written where the logits are. This is for logits that nothing else uses,
        computed in the same program or donated to jit. Where that does not hold, XLA copies them first, and the result
        is the same.
      as_linear_logp: sums run in the order of `linear_logp`'s. For rollouts, which have logits to sample from: the
        log-probs of `det_gemm(hidden, lm_head_weight, transpose_b=True, out_dtype=jnp.float32)`, plus a float32 bias,
        then have the bits of `linear_logp(hidden, lm_head_weight, …)` by the same implementation and of the same
        allowed tokens, which training differentiates. Logits are float32, and there is no gradient.
      validate: True checks ids, rows, temperatures and allowed tokens before launch (small read-backs); False never
        waits for the device; None checks concrete arrays and nothing under jit. A bad row that is not checked gives NaN
        in its outputs and its gradient (a bad entry of row_indices gives it in all rows), and is reported under
        `jax.experimental.checkify`.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here
        (`rlk_jax.explain` tells).

    Returns:
      float32 logp `[*lead]`, or `LinearLogp(logp, lse, entropy)` where more was asked for (None for what was not).

    Raises:
      ValueError: for every argument that does not fit, before anything runs, for second derivatives, and for a
        derivative with as_linear_logp.
      TypeError: JAX's own, for forward-mode differentiation.

    The gradient is written once, in the logits' dtype; a row whose upstream gradients are all 0 gets exactly 0 without
    being read.

    Same bits: the implementations that promise bits (docs/logp.md lists them and has the whole contract) give a row the
    same raw bits in any batch, at any position and beside any neighbours; `xla` promises accuracy only.

    Source: RL-Kernel's logp; the online softmax (Milakov and Gimelshein, arXiv 1805.02867).
    """
    given = LogpInputs(logits, token_ids, temperature, row_indices, initial, allowed_ids, allowed_mask)
    options = LogitsOptions(
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
        global_vocab_size=global_vocab_size,
        return_lse=return_lse,
        return_entropy=return_entropy,
        donate_logits=donate_logits,
        as_linear_logp=as_linear_logp,
        validate=validate,
        implementation=implementation,
    )
    inputs, config = check_logp(given, options)
    require_values(inputs)
    chosen = choose(facts_of("logp", (inputs.logits,), config), implementation)
    tokens, kept = _tokens_of_rows(inputs, config, options)
    found = values_of_tokens(chosen.functions, config, donate_logits, jnp.asarray(inputs.logits), tokens)
    if kept is not None:
        found = found._replace(logp=jnp.where(kept, inputs.initial, found.logp))
    return found if return_lse or return_entropy else found.logp


def _tokens_of_rows(inputs: LogpInputs, config: LogpConfig, options: LogitsOptions) -> tuple[Tokens, Array | None]:
    """The flat tokens, active where they count; and a mask `[*lead]` of the rows that keep their value of `initial`."""
    ids, kept, temperature = inputs.token_ids, None, inputs.temperature
    is_counted = counted(ids, options.ignore_index)
    if inputs.row_indices is not None:
        listed, fit = listed_rows(inputs.row_indices, is_counted.shape[0], options.validate)
        # Which row a bad index meant cannot be known: all turn NaN.
        is_counted &= listed | ~fit
        temperature = jnp.where(fit, temperature, jnp.nan)
        kept = None if inputs.initial is None else ~listed.reshape(ids.shape) & fit
    return _tokens("token_ids", inputs._replace(temperature=temperature), is_counted, config, options), kept


def _tokens(
    name: str, inputs: LogpInputs | RatioKlInputs, counts: Array, config: LogpConfig, options: LogitsOptions
) -> Tokens:
    """The flat tokens of the ids of this name, active where they count, with their values checked."""
    how: dict[str, Any] = {"vocab_size": config.real_vocab_size, "validate": options.validate, "name": name}
    return with_allowed(checked_tokens(getattr(inputs, name), inputs.temperature, counts, **how), inputs, **how)


def describe_logp(arguments: Mapping[str, Any]) -> tuple[CallFacts, str | None]:
    """Check a call's arguments, by name. Returns the facts that dispatch decides by, and the implementation named."""
    given = dict(arguments)
    inputs = LogpInputs(*(given.pop(name) for name in LogpInputs._fields))
    options = LogitsOptions(**given)
    inputs, config = check_logp(inputs, options)
    return facts_of("logp", (inputs.logits,), config), options.implementation


def ratio_kl(
    policy_logits: Float[Array, "*lead V"],
    ref_logits: Float[Array, "*lead V"],
    action_ids: Int[Array, "*lead"],
    completion_mask: Bool[Array, "*lead"] | Int[Array, "*lead"] | Float[Array, "*lead"],
    old_logps: Float[Array, "*lead"],
    *,
    temperature: float | Float[ArrayLike, "*lead"] = 1.0,
    allowed_ids: Int[Array, "*lead K"] | None = None,
    allowed_mask: Int[Array, "*lead words"] | None = None,
    log_ratio_bound: float | None = None,
    donate_logits: bool = False,
    validate: bool | None = None,
    implementation: str | None = None,
) -> RatioKl:
    """Importance ratio to the old policy and KL estimate to the reference, of each token that was taken.

        ratio = exp(logp − old_logps),   kl = exp(d) − 1 − d,   d = ref − logp

    with logp and ref the log-probabilities of `action_ids` under `policy_logits / temperature` and
    `ref_logits / temperature`.

    Args:
      policy_logits, ref_logits: `[*lead, V]`, bfloat16, float16 or float32, each in its own dtype; sums run in float32.
      action_ids: `[*lead]`, any integer dtype; at masked tokens they may be anything.
      completion_mask: `[*lead]`, bool, integer or float: a token is active where it is not 0.
      old_logps: `[*lead]`, log-probabilities when the tokens were sampled.
      temperature: positive; a scalar or one per token. Not differentiated.
      allowed_ids, allowed_mask: which tokens each row may take under policy and reference alike, as in `logp`.
      log_ratio_bound: log-ratios count as at most this, and at least its negative, before exp and KL are taken of them;
        a token beyond it has no gradient from that. At most 80; None for no bound.
      donate_logits: the gradient may be written where policy_logits are, as in `logp`.
      validate: as in `logp`; an active id that is out of range and not checked gives NaN, never another token's values.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here.

    Returns:
      `RatioKl(ratio, kl)`, float32 `[*lead]`. A masked token has ratio 1 and kl 0. A token that the policy cannot take
      (logp −inf) has ratio 0, and an infinite kl where the reference can.

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow to policy_logits only. Masked tokens are masked before anything is computed from them: their logits
    are not read, and nothing they hold, NaN included, reaches a value or a gradient.

    Same bits: what `logp` promises. Both arrays of logits are read once; the backward reads policy_logits once more.

    Source: RL-Kernel's ratio_kl; the estimator k3 of J. Schulman, "Approximating KL divergence" (2020).
    """
    arrays = (policy_logits, ref_logits, action_ids, completion_mask, old_logps, temperature)
    given = RatioKlInputs(*arrays, allowed_ids, allowed_mask)
    options = LogitsOptions(donate_logits=donate_logits, validate=validate, implementation=implementation)
    check_log_ratio_bound(log_ratio_bound)
    taken = _taken_tokens("ratio_kl", *check_policies(given, options), options)
    return ratio_and_kl(taken.logp, taken.ref_logps, taken.old_logps, log_ratio_bound)


def _taken_tokens(op: str, inputs: RatioKlInputs, config: LogpConfig, options: LogitsOptions) -> TakenTokens:
    """The actions' log-probabilities under policy, reference and old policy. Only `logp` carries a gradient."""
    require_values(inputs)
    functions = choose(_facts_of_policies(op, inputs, config), options.implementation).functions
    mask = active_mask(inputs.completion_mask)
    tokens = _tokens("action_ids", inputs, mask.reshape(-1), config, options)
    policy, ref = jnp.asarray(inputs.policy_logits), lax.stop_gradient(jnp.asarray(inputs.ref_logits))
    old_logps = lax.stop_gradient(jnp.asarray(inputs.old_logps, jnp.float32))
    return TakenTokens(
        values_of_tokens(functions, config, options.donate_logits, policy, tokens).logp,
        values_of_tokens(functions, config, False, ref, tokens).logp,
        jnp.where(mask, old_logps, 0),
        mask,
    )


def _facts_of_policies(op: str, inputs: RatioKlInputs, config: LogpConfig) -> CallFacts:
    """The facts by which dispatch decides a call on the logits of two policies."""
    return facts_of(op, (inputs.policy_logits, inputs.ref_logits), config)


def _policies_of(arguments: Mapping[str, Any]) -> RatioKlInputs:
    return RatioKlInputs(*(arguments[name] for name in RatioKlInputs._fields))


def _options_of(arguments: Mapping[str, Any]) -> LogitsOptions:
    return LogitsOptions(donate_logits=arguments["donate_logits"], validate=arguments["validate"])


def describe_ratio_kl(arguments: Mapping[str, Any]) -> tuple[CallFacts, str | None]:
    """Check a call's arguments, by name. Returns the facts that dispatch decides by, and the implementation named."""
    options = _options_of(arguments)
    check_log_ratio_bound(arguments["log_ratio_bound"])
    facts = _facts_of_policies("ratio_kl", *check_policies(_policies_of(arguments), options))
    return facts, arguments["implementation"]


def grpo_loss(
    policy_logits: Float[Array, "B T V"],
    ref_logits: Float[Array, "B T V"],
    action_ids: Int[Array, "B T"],
    old_logps: Float[Array, "B T"],
    rewards: Float[Array, "B"] | None,
    completion_mask: Bool[Array, "B T"] | Int[Array, "B T"] | Float[Array, "B T"],
    *,
    advantages: Float[Array, "B"] | Float[Array, "B T"] | None = None,
    samples_per_prompt: int | None = None,
    group_boundaries: Int[ArrayLike, " G+1"] | None = None,
    eps: float = 1e-6,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    beta: float = 0.0,
    log_ratio_bound: float | None = None,
    temperature: float | Float[ArrayLike, "B T"] = 1.0,
    allowed_ids: Int[Array, "B T K"] | None = None,
    allowed_mask: Int[Array, "B T words"] | None = None,
    donate_logits: bool = False,
    validate: bool | None = None,
    implementation: str | None = None,
) -> GrpoLoss:
    """Clipped policy loss with a KL penalty, averaged over all active tokens of the batch.

        loss = policy_loss + beta · kl,   policy_loss = mean of −min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A)
        ρ = exp(logp − old_logps),   kl = mean of exp(d) − 1 − d,   d = ref − logp

    The log-probabilities are those of `logp`, the formulas those of `rlk_jax.grpo.policy_loss`, which has the other
    losses of the family for log-probabilities that are at hand.

    Args:
      policy_logits, ref_logits: `[B, T, V]`, bfloat16, float16 or float32, of B sequences of T completion tokens.
      action_ids: `[B, T]`, the tokens taken; at masked tokens they may be anything.
      old_logps: `[B, T]`, log-probabilities of the taken tokens when they were sampled.
      rewards: `[B]`, normalised within their groups by `rlk_jax.grpo.group_advantages`; None beside `advantages`.
      completion_mask: `[B, T]`, bool, integer or float: a token is active where it is not 0.
      advantages: A itself, of every sequence `[B]` or token `[B, T]`, instead of rewards.
      samples_per_prompt: how many sequences each group has; the sequences of a group stand together.
      group_boundaries: `[G + 1]`, where groups start, from 0 to B, instead of samples_per_prompt. Both are static.
      eps: the least standard deviation that rewards are divided by.
      clip_eps, clip_eps_high: the clip range [1 − clip_eps, 1 + clip_eps_high]; clip_eps_high None is clip_eps.
      beta: weight of the KL.
      log_ratio_bound, temperature, allowed_ids, allowed_mask, donate_logits, validate: as in `ratio_kl`.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here.

    Returns:
      `GrpoLoss(loss, policy_loss, kl)`; all 0 where no token is active.

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow from `loss` to policy_logits only; at ρ = 1 and on the bounds of the clip range they are those of the
    unclipped objective. Masked tokens are masked before anything is computed from them.

    Same bits, with the implementations that promise bits: run to run, and with padding sequences or tokens appended,
    because sums are taken in one fixed order.

    Source: DeepSeekMath, arXiv 2402.03300, eq. 3, with the mean over tokens of the batch; RL-Kernel's grpo_loss.
    """
    arrays = (policy_logits, ref_logits, action_ids, completion_mask, old_logps, temperature)
    given = RatioKlInputs(*arrays, allowed_ids, allowed_mask)
    options = LogitsOptions(donate_logits=donate_logits, validate=validate, implementation=implementation)
    inputs, config = check_policies(given, options)
    require_values(inputs)
    check_rewards_or_advantages(inputs.completion_mask, rewards, advantages, samples_per_prompt, group_boundaries)
    loss_options = _loss_options(clip_eps, clip_eps_high, beta, log_ratio_bound, eps)
    if rewards is not None:
        advantages = group_advantages(
            rewards, samples_per_prompt=samples_per_prompt, group_boundaries=group_boundaries, eps=eps
        )
    assert advantages is not None
    taken = _taken_tokens("grpo_loss", inputs, config, options)
    found = policy_loss(
        taken.logp, taken.old_logps, advantages, taken.mask, ref_logps=taken.ref_logps, options=loss_options
    )
    return GrpoLoss(found.loss, found.policy_loss, found.kl)


def _loss_options(
    clip_eps: float, clip_eps_high: float | None, beta: float, log_ratio_bound: float | None, eps: float
) -> LossOptions:
    """The options of the loss; eps is checked even where there are no rewards for it."""
    require_positive("eps", eps)
    return LossOptions(clip_eps=clip_eps, clip_eps_high=clip_eps_high, beta=beta, log_ratio_bound=log_ratio_bound)


def describe_grpo_loss(arguments: Mapping[str, Any]) -> tuple[CallFacts, str | None]:
    """Check a call's arguments, by name. Returns the facts that dispatch decides by, and the implementation named."""
    inputs, config = check_policies(_policies_of(arguments), _options_of(arguments))
    chosen = ("rewards", "advantages", "samples_per_prompt", "group_boundaries")
    check_rewards_or_advantages(inputs.completion_mask, *(arguments[name] for name in chosen))
    _loss_options(*(arguments[name] for name in ("clip_eps", "clip_eps_high", "beta", "log_ratio_bound", "eps")))
    return _facts_of_policies("grpo_loss", inputs, config), arguments["implementation"]
