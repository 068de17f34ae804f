"""linear_cross_entropy: the cross-entropy of next tokens straight from hidden states and the LM head, without the
logits.

It is composed of `linear_logp` and a weighted sum over tokens, and runs on the implementations of `linear_logp`.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from rlk_jax.core.checks import (
    as_array,
    check_flag,
    check_ignore_index,
    holds_reals,
    require,
    require_not_negative,
    require_one_of,
)
from rlk_jax.core.dispatch import CallFacts, bound_arguments
from rlk_jax.core.fixed_order import pairwise_sum, rounded_product
from rlk_jax.core.mesh import whole_on_every_device
from rlk_jax.core.shard import Reduction
from rlk_jax.core.shard_checks import check_reduction
from rlk_jax.core.tokens import IGNORED, LinearLogp, as_int32, checked, fit, left_out
from rlk_jax.ops.linear_logp.api import describe as describe_linear_logp
from rlk_jax.ops.linear_logp.api import linear_logp, smoothed_linear_logp

LossReduction = Literal["mean", "sum", "none"]
_BAD_WEIGHTS = "token_weights must be finite and not negative, got values in [{low}, {high}]."


def linear_cross_entropy(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    reduction: LossReduction = "mean",
    ignore_index: int | None = None,
    token_weights: Num[Array, "*lead"] | Bool[Array, "*lead"] | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    validate: bool | None = None,
    hidden_grad_reduction: Reduction = "sum",
    **head: Any,
) -> Float[Array, ""] | Float[Array, "*lead"]:
    """Cross-entropy of the target tokens under the LM head, in one call of `linear_logp`.

        loss_i = w_i·(−(1 − s)·logp_i − s·mean_v ln p_iv + z_loss·lse_i²),   s = label_smoothing
        "none": loss_i      "sum": Σ loss_i      "mean": Σ loss_i / Σ w_i, and 0 where no token counts

    logp_i and lse_i are those of `linear_logp`, of the same pass. w_i is the token's weight: 1 without token_weights,
    and 0 for an ignored token. Tokens of weight 0 cost no work: they are left out of the products, in the forward and
    in the backward.

    Args:
      hidden: last hidden states `[*lead, D]`, already shifted so that a row predicts its target. Rows of tokens that do
        not count may hold anything, NaN included.
      lm_head_weight, bias: as in `linear_logp`.
      target_ids: `[*lead]`; ids of tokens of weight 0 may be anything.
      reduction: "mean" (the default of torch's cross_entropy), "sum" or "none".
      ignore_index: tokens with this id do not count. It must lie outside the vocabulary.
      token_weights: `[*lead]`, one weight for each token, finite and not negative; a mask of bools is one, too. They
        are not differentiated. Weights of ignored tokens may be anything.
      z_loss: the coefficient of lse², 0 or positive. It keeps ln Σ exp z near 0 (PaLM takes 1e-4).
      label_smoothing: s from 0 to 1, as in torch's cross_entropy: the part of each target that is spread evenly over
        the true vocabulary. The mean over it comes from the same pass. It cannot be given beside allowed_ids or
        allowed_mask. A logit of −inf makes a loss inf.
      validate: as in `linear_logp`; it checks the values of weights too. A bad weight that is not checked gives NaN.
      hidden_grad_reduction: `linear_logp`'s `reduction`: how dH is summed over the ranks of axis_name.
      **head: `linear_logp`'s other options but those that return more: temperature, low_rank, logit_softcap,
        weight_layout, global_vocab_size, memory_budget, axis_name, implementation and so on. logp and lse are those
        after temperature and softcap.

    Returns:
      The loss, float32: `[]`, or `[*lead]` with reduction="none".

    Raises:
      ValueError: for everything that `linear_logp` refuses, an unknown reduction, weights of another shape or kind, a
        z_loss that is negative or not finite, and a label_smoothing that is not in [0, 1] or stands beside allowed
        tokens.

    Gradients flow to hidden, lm_head_weight, bias and a low-rank term: they are those of `linear_logp`.

    Same bits: those that `linear_logp` promises. Sums over tokens go by pairs: tokens of weight 0 that are appended
    change no bit of a loss.

    Source: the z-loss of PaLM, arXiv 2204.02311, section 5; label smoothing, arXiv 1512.00567, section 7.
    """
    check_cross_entropy(target_ids, reduction, ignore_index, token_weights, z_loss, validate, head)
    check_reduction(hidden_grad_reduction, head.get("axis_name"), "hidden_grad_reduction")
    tokens = _weighted_tokens(target_ids, ignore_index, token_weights, validate)
    options = _head_options(tokens.ignore_index, z_loss, validate, hidden_grad_reduction)
    operands = hidden, lm_head_weight, tokens.target_ids, bias
    found = smoothed_linear_logp(*operands, label_smoothing=label_smoothing, **options, **head)
    logp, lse = (found.logp, found.lse) if isinstance(found, LinearLogp) else (found, None)
    return loss_of_values(logp, lse, tokens.weights, z_loss=z_loss, reduction=reduction)


def loss_of_values(
    logp: Float[Array, "*lead"],
    lse: Float[Array, "*lead"] | None,
    weights: Float[Array, "*lead"],
    *,
    z_loss: float,
    reduction: LossReduction,
) -> Float[Array, ""] | Float[Array, "*lead"]:
    """The loss of tokens of known log-probs; lse is None without a z_loss. A token of weight 0 does not count."""
    per_token = -logp if lse is None else rounded_product(jnp.float32(z_loss), jnp.square(lse)) - logp
    losses = jnp.where(weights == 0, 0.0, weights * per_token)
    if reduction == "none":
        return losses
    losses, weights = (x.reshape(-1) for x in whole_on_every_device((losses, weights)))
    total = pairwise_sum(losses)
    if reduction == "sum":
        return total
    count = pairwise_sum(weights)
    return total / jnp.where(count > 0, count, 1.0)


class _WeightedTokens(NamedTuple):
    """The tokens of a call as `linear_logp` takes them, and their float32 weights `[*lead]`: 0 for those that do not
    count.
    """

    target_ids: Any
    ignore_index: int | None
    weights: Array


def _weighted_tokens(
    target_ids: Any, ignore_index: int | None, token_weights: Any, validate: bool | None
) -> _WeightedTokens:
    """Tokens of weight 0 have the id of ignored ones."""
    ids = as_int32(as_array("target_ids", target_ids), ignore_index)
    counts = jnp.ones_like(ids, bool) if ignore_index is None else ids != ignore_index
    if token_weights is None:
        return _WeightedTokens(target_ids, ignore_index, counts.astype(jnp.float32))
    weights = jax.lax.stop_gradient(jnp.asarray(token_weights).astype(jnp.float32))
    weights, ignored = checked_weights(jnp.where(counts, weights, 0.0), validate), ignored_id(ignore_index)
    return _WeightedTokens(left_out(ids, weights != 0, ignored), ignored, weights)


def ignored_id(ignore_index: int | None) -> int:
    """The id of the tokens that weights leave out."""
    return IGNORED if ignore_index is None else ignore_index


def checked_weights(weights: Array, validate: bool | None) -> Array:
    """float32 weights, of which a bad one is NaN; their values are checked as those of ids are."""
    is_good = (weights >= 0) & (weights < jnp.inf)
    found = fit(weights, is_good, weights != 0, (-jnp.inf, jnp.inf))
    return jnp.where(is_good, checked(weights, ((found, _BAD_WEIGHTS),), validate, "token_weights"), jnp.nan)


def check_cross_entropy(
    target_ids: Any,
    reduction: Any,
    ignore_index: Any,
    token_weights: Any,
    z_loss: Any,
    validate: Any,
    head: Mapping[str, Any],
) -> None:
    """All static checks that are not `linear_logp`'s, and those of what is looked at before it is called. `head` are
    the options of `linear_logp` that a caller gives.
    """
    for name in ("return_lse", "return_entropy", "return_top_k", "return_target_rank"):
        require(name not in head, f"linear_cross_entropy has no option {name}: it returns a loss alone.")
    ids = as_array("target_ids", target_ids)
    require(jnp.issubdtype(ids.dtype, jnp.integer), f"target_ids must be integers, got {ids.dtype}.")
    check_ignore_index(ignore_index)
    check_flag("validate", validate, may_be_none=True)
    require_one_of("reduction", reduction, get_args(LossReduction))
    require_not_negative("z_loss", z_loss)
    if token_weights is not None:
        _check_token_weights(token_weights, ids.shape)


def _check_token_weights(token_weights: Any, shape: tuple[int, ...]) -> None:
    """There is one weight for each token, a bool or a real number."""
    weights = as_array("token_weights", token_weights)
    require(weights.shape == shape, f"token_weights shape {weights.shape} does not match target_ids shape {shape}.")
    require(holds_reals(weights), f"token_weights must be bool or real numbers, got {weights.dtype}.")


def _head_options(
    ignore_index: int | None, z_loss: float, validate: bool | None, hidden_grad_reduction: Reduction
) -> dict[str, Any]:
    """The options of the call of `linear_logp` that are not the user's own `head`."""
    return {
        "ignore_index": ignore_index,
        "return_lse": bool(z_loss > 0),
        "return_entropy": False,
        "return_top_k": None,
        "return_target_rank": False,
        "validate": validate,
        "reduction": hidden_grad_reduction,
    }


def describe(arguments: Mapping[str, Any]) -> tuple[CallFacts, str | None]:
    """`describe` of the call of `linear_logp` that these arguments lead to, which are checked."""
    checked_here = ("target_ids", "reduction", "ignore_index", "token_weights", "z_loss", "validate", "head")
    check_cross_entropy(*(arguments[name] for name in checked_here))
    check_reduction(arguments["hidden_grad_reduction"], arguments["head"].get("axis_name"), "hidden_grad_reduction")
    ignored = arguments["ignore_index"]
    if arguments["token_weights"] is not None:
        ignored = ignored_id(ignored)
    rest = (arguments[name] for name in ("z_loss", "validate", "hidden_grad_reduction"))
    operands = {name: arguments[name] for name in ("hidden", "lm_head_weight", "target_ids", "bias")}
    options = _head_options(ignored, *rest)
    bound = bound_arguments("linear_cross_entropy", linear_logp, **operands, **options, **arguments["head"])
    return describe_linear_logp(bound, arguments["label_smoothing"])
