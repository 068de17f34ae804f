"""linear_grpo_loss: a loss of the GRPO family straight from hidden states and the LM head, without the logits.

It is composed of `linear_logp` and `policy_loss`, and runs on the implementations of `linear_logp`.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from rlk_jax.core.checks import INT32, as_array, check_flag, check_inner_dim, require
from rlk_jax.core.dispatch import CallFacts, bound_arguments, choose
from rlk_jax.core.mesh import lies_over_a_mesh
from rlk_jax.core.tokens import LinearLogp, active_mask, as_int32, left_out
from rlk_jax.losses import LossOptions, PolicyLoss, policy_loss
from rlk_jax.losses.checks import check_advantages, check_completion_mask, check_policy_loss
from rlk_jax.losses.options import check_loss_options
from rlk_jax.ops.linear_logp.api import describe as describe_linear_logp
from rlk_jax.ops.linear_logp.api import inputs_and_options, linear_logp
from rlk_jax.ops.linear_logp.block_loss import loss_by_blocks, on_one_device
from rlk_jax.ops.linear_logp.options import TokenBlocks

_MASKED = INT32.min
"""The id of masked tokens in the call of `linear_logp`: no id that a token which counts is likely to have."""


def linear_grpo_loss(
    hidden: Float[Array, "B T D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "B T"],
    old_logps: Float[Array, "B T"],
    ref_logps: Float[Array, "B T"] | None,
    advantages: Num[Array, "B"] | Num[Array, "B T"],
    completion_mask: Num[Array, "B T"] | Bool[Array, "B T"],
    bias: Float[Array, " V"] | None = None,
    *,
    ref_hidden: Float[Array, "B T E"] | None = None,
    ref_weight: Float[Array, "V E"] | Float[Array, "E V"] | None = None,
    rollout_logps: Float[Array, "B T"] | None = None,
    entropy_threshold: Float[Array, ""] | float | None = None,
    denominator: Float[Array, ""] | float | None = None,
    return_entropy: bool = False,
    options: LossOptions = LossOptions(),
    **head: Any,
) -> PolicyLoss:
    """`rlk_jax.grpo.policy_loss` of the log-probabilities that `linear_logp` computes, in one call.

        logp = linear_logp(hidden, lm_head_weight, target_ids),   loss = policy_loss(logp, old_logps, advantages, …)

    Masked tokens cost no work: they are left out of the products, in the forward and in the backward.

    Args:
      hidden: last hidden states `[B, T, D]` of B sequences of T completion tokens, shifted so that a row predicts its
        target. Masked rows may hold anything, NaN included.
      lm_head_weight, bias: as in `linear_logp`.
      target_ids: `[B, T]`, the tokens taken; at masked tokens they may be anything.
      old_logps: `[B, T]`, log-probabilities of the taken tokens when they were sampled.
      ref_logps: `[B, T]`, their log-probabilities under a reference model; None without one, or beside ref_hidden.
      advantages: one for every sequence `[B]` or token `[B, T]`.
      completion_mask: `[B, T]`, bool, integer or float: a token is active where it is not 0.
      ref_hidden, ref_weight: hidden states and head of a frozen reference model, instead of ref_logps. That head has no
        bias, and the same layout, temperature and softcap.
      rollout_logps, entropy_threshold, denominator, options: as in `policy_loss`.
      return_entropy: whether the metrics have the mean entropy, which carries no gradient. They have it in any case
        where the loss needs entropies: with options.entropy_coef, which differentiates them, or an entropy_threshold.
      **head: `linear_logp`'s other options but `ignore_index` and those that return more: temperature, allowed_ids or
        allowed_mask, logit_softcap, weight_layout, global_vocab_size, memory_budget, axis_name, implementation and so
        on. They are those of the model of `ref_hidden` too; a `low_rank` term is the policy's alone.

    Returns:
      `PolicyLoss`: the loss and its metrics, float32 scalars, of which only `loss` carries gradients.

    Raises:
      ValueError: for everything that `linear_logp` and `policy_loss` refuse, a mask of another shape than target_ids,
        `ignore_index`, one of ref_hidden and ref_weight without the other, both beside ref_logps or a bias.

    Gradients flow to hidden, lm_head_weight, bias and a low-rank term: those of `linear_logp` followed by
    `policy_loss`, to the bit where all tokens are worked on at once.
    Within `memory_budget` the forward keeps exponentials, so that the backward repeats fewer products
    (docs/linear_logp.md). Where it lacks many of them, `mosaic` works on blocks of tokens, and forms the gradients in
    the forward (docs/linear_grpo_loss.md).

    Same bits: those that `linear_logp` and `policy_loss` promise.

    Source: DeepSeekMath, arXiv 2402.03300; the losses of docs/losses.md.
    """
    _check(
        lm_head_weight=lm_head_weight,
        target_ids=target_ids,
        bias=bias,
        advantages=advantages,
        completion_mask=completion_mask,
        ref_hidden=ref_hidden,
        ref_weight=ref_weight,
        entropy_threshold=entropy_threshold,
        denominator=denominator,
        options=options,
        return_entropy=return_entropy,
        head=head,
        old_logps=old_logps,
        ref_logps=ref_logps,
        rollout_logps=rollout_logps,
    )
    mask = active_mask(completion_mask)
    ids = left_out(as_int32(target_ids), mask, _MASKED)
    head["ignore_index"] = _MASKED
    if ref_hidden is not None and ref_weight is not None:
        # As constants they get no backward, for which their forward would keep exponentials.
        frozen = jax.lax.stop_gradient((ref_hidden, ref_weight))
        ref_logps = linear_logp(*frozen, ids, **{**head, "low_rank": None})
    head["return_entropy"] = _needs_entropy(return_entropy, entropy_threshold, options)
    loss = _LossOfValues(options)
    constants = _Constants(old_logps, ref_logps, rollout_logps, advantages, mask, entropy_threshold, denominator)
    given = bound_arguments("linear_grpo_loss", linear_logp, hidden, lm_head_weight, ids, bias, **head)
    blocks = _blocks_or_reason(given, constants, options)
    if isinstance(blocks, TokenBlocks):
        inputs, head_options, _ = inputs_and_options(given)
        return loss_by_blocks(inputs, head_options, blocks, loss, constants)
    # With return_lse it is a LinearLogp, also without the entropy.
    return loss(constants, linear_logp(**{**given, "return_lse": True}))


class _Constants(NamedTuple):
    """What a loss is computed from beside the policy's log-probs: arrays per token, advantages, and scalars."""

    old_logps: Any
    ref_logps: Any
    rollout_logps: Any
    advantages: Any
    mask: Any
    entropy_threshold: Any
    denominator: Any


@dataclass(frozen=True)
class _LossOfValues:
    """`policy_loss` as a function of the log-probs and entropies of tokens, be they `[B, T]` or flat."""

    options: LossOptions

    def __call__(self, constants: _Constants, values: LinearLogp) -> PolicyLoss:
        values = jax.tree.map(lambda x: x.reshape(constants.mask.shape), values)
        return policy_loss(
            values.logp,
            constants.old_logps,
            constants.advantages,
            constants.mask,
            ref_logps=constants.ref_logps,
            rollout_logps=constants.rollout_logps,
            entropy=values.entropy,
            entropy_threshold=constants.entropy_threshold,
            denominator=constants.denominator,
            options=self.options,
        )


def _blocks_or_reason(given: Mapping[str, Any], others: Iterable[Any], options: LossOptions) -> TokenBlocks | str:
    """The blocks of tokens that a gradient through a call of `linear_logp` with these arguments takes, or why it takes
    all tokens at once. `others` are the other arguments of the loss.
    """
    if options.entropy_coef:
        return "an entropy bonus needs the logits once more"
    if given["low_rank"] is not None:
        return "a low-rank term has sums of its own"
    if lies_over_a_mesh((*given.values(), *others)):
        return "the arrays lie over a mesh"
    facts, implementation = describe_linear_logp(given)
    chosen = choose(facts, implementation)
    of_blocks = on_one_device(chosen.functions).of_blocks
    if of_blocks is None:
        return f"{chosen.name} has no sums over blocks of tokens"
    sequences, length = given["target_ids"].shape
    known_together = 1 if options.is_sum_over_tokens else length
    return of_blocks.plan(facts.config, facts.dim, sequences * length, known_together, jnp.dtype(facts.dtypes[0]))


def _check(
    *,
    lm_head_weight: Any,
    target_ids: Any,
    bias: Any,
    advantages: Any,
    completion_mask: Any,
    ref_hidden: Any,
    ref_weight: Any,
    entropy_threshold: Any,
    denominator: Any,
    options: Any,
    return_entropy: Any,
    head: Any,
    **logps: Any,
) -> None:
    """All static checks that are not `linear_logp`'s; `logps` are per token."""
    check_loss_options(options)
    _check_names(head)
    check_flag("return_entropy", return_entropy)
    for name in ("return_lse", "return_top_k", "return_target_rank"):
        require(name not in head, f"linear_grpo_loss has no option {name}: it returns no log-probs.")
    layout = head.get("weight_layout", "vd")
    reference = {"bias": bias, "mask": completion_mask, "head": lm_head_weight, "layout": layout}
    _check_reference(logps["ref_logps"], ref_hidden, ref_weight, **reference)
    _check_targets(target_ids, completion_mask, head.get("ignore_index"))
    has_reference = logps["ref_logps"] is not None or ref_hidden is not None
    check_policy_loss(logps, completion_mask, denominator, entropy_threshold, options, has_reference=has_reference)
    check_advantages(advantages, completion_mask)


def _check_names(head: Mapping[str, Any]) -> None:
    """Every further option is one of `linear_logp`'s."""
    unknown = sorted(head.keys() - inspect.signature(linear_logp).parameters.keys())
    if unknown:
        is_of_loss = unknown[0] in LossOptions.__dataclass_fields__
        hint = f": it is a field of options=LossOptions({unknown[0]}=…)" if is_of_loss else ""
        raise TypeError(f"linear_grpo_loss() got an unexpected keyword argument {unknown[0]!r}{hint}")


def _needs_entropy(return_entropy: bool, entropy_threshold: Any, options: LossOptions) -> bool:
    return return_entropy or entropy_threshold is not None or bool(options.entropy_coef > 0)


def _check_targets(target_ids: Any, mask: Any, ignore_index: int | None) -> None:
    """There is a target for each token of the mask, and no ignore_index: the mask alone says what is left out."""
    ids, shape = as_array("target_ids", target_ids), check_completion_mask(mask)
    require(ids.shape == shape, f"target_ids shape {ids.shape} does not match completion_mask shape {shape}.")
    require(jnp.issubdtype(ids.dtype, jnp.integer), f"target_ids must be integers, got {ids.dtype}.")
    require(ignore_index is None, "completion_mask says which tokens count: ignore_index must be None.")


def _check_reference(logps: Any, hidden: Any, weight: Any, *, bias: Any, mask: Any, head: Any, layout: Any) -> None:
    """A reference model comes as its log-probs, or as hidden states of the mask's tokens and a head of as many columns
    as the policy's, or not at all.
    """
    require((hidden is None) == (weight is None), "ref_hidden and ref_weight must be given together.")
    if hidden is None:
        return
    require(logps is None, "Give ref_logps, or ref_hidden and ref_weight, not both.")
    require(bias is None, "The head of ref_hidden has no bias: beside a bias, give ref_logps instead.")
    hidden, weight, head = (
        as_array("ref_hidden", hidden),
        as_array("ref_weight", weight),
        as_array("lm_head_weight", head),
    )
    shape = check_completion_mask(mask)
    require(
        hidden.ndim == 3 and hidden.shape[:2] == shape,
        f"ref_hidden must be [B, T, E] of completion_mask shape {shape}, got shape {hidden.shape}.",
    )
    rows = 1 if layout == "dv" else 0
    require(
        weight.ndim == head.ndim == 2 and weight.shape[rows] == head.shape[rows],
        f"ref_weight shape {weight.shape} must have the vocabulary of lm_head_weight shape {head.shape}.",
    )
    check_inner_dim(("ref_hidden", "ref_weight"), hidden, weight, layout)


def describe(arguments: Mapping[str, Any]) -> tuple[CallFacts, str | None]:
    """`describe` of the call of `linear_logp` that these arguments, which are checked, lead to."""
    given = dict(arguments)
    del given["hidden"]
    _check(**given)
    return describe_linear_logp(_head_call(arguments))


def describe_plan(arguments: Mapping[str, Any]) -> str:
    """In a sentence, whether a call with these arguments works on blocks of tokens under a gradient, and why not."""
    blocks = _blocks_or_reason(_head_call(arguments), arguments.values(), arguments["options"])
    if isinstance(blocks, TokenBlocks):
        return f"a gradient takes {blocks}, each through all three products, in a program of one device"
    return f"a gradient takes all tokens at once: {blocks}"


def _head_call(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the call of `linear_logp` that a call with these arguments leads to."""
    return_entropy = (arguments[name] for name in ("return_entropy", "entropy_threshold", "options"))
    operands = {name: arguments[name] for name in ("hidden", "lm_head_weight", "target_ids", "bias")}
    asked = {"ignore_index": _MASKED, "return_entropy": _needs_entropy(*return_entropy), **arguments["head"]}
    return bound_arguments("linear_grpo_loss", linear_logp, **operands, **asked)
