"""linear_cross_entropy for tensors: the bridge's linear_logp, and then the loss of its log-probabilities as an op of
its own, which runs alike on one process and on every rank of a head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from rlk_jax.ops.linear_cross_entropy import (
    LossReduction,
    check_cross_entropy,
    checked_weights,
    ignored_id,
    loss_of_values,
)
from torch_bridge import _calls, _exchange, _inputs, _padding
from torch_bridge._programs import Arrays, Op
from torch_bridge.linear_logp import smoothed_linear_logp


def linear_cross_entropy(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: LossReduction = "mean",
    ignore_index: int | None = None,
    token_weights: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    validate: bool | None = None,
    tp_group: Any = None,
    vocab_start_index: int = 0,
    **head: Any,
) -> Tensor:
    """Cross-entropy of the target tokens under the LM head; `rlk_jax.linear_cross_entropy` for tensors.

        loss_i = w_i·(−(1 − s)·logp_i − s·mean_v ln p_iv + z_loss·lse_i²),   s = label_smoothing
        "none": loss_i      "sum": Σ loss_i      "mean": Σ loss_i / Σ w_i, and 0 where no token counts

    With `ignore_index=-100` it is `torch.nn.functional.cross_entropy(logits, target_ids)` without the logits, but for a
    batch in which no token counts, where torch's mean is NaN.

    Args:
      hidden, lm_head_weight, bias: as in `linear_logp`.
      target_ids: `[*lead]`, any integer dtype; ids of tokens of weight 0 may be anything.
      reduction: "mean", "sum" or "none".
      ignore_index: tokens with this id do not count, which is None here and -100 in torch. It must lie outside the
        vocabulary.
      token_weights: `[*lead]`, one weight for each token, finite and not negative; a mask of bools is one, too. They
        are not differentiated. Weights of ignored tokens may be anything.
      z_loss: the coefficient of lse², 0 or positive.
      label_smoothing: s from 0 to 1, as in torch's cross_entropy: the part of each target that is spread evenly over
        the true vocabulary. It cannot be given beside allowed_ids or allowed_mask. A logit of −inf makes a loss inf.
      validate: as in `linear_logp`; it checks the values of weights too. A bad weight that is not checked gives NaN.
      tp_group, vocab_start_index: as in `linear_logp`; token_weights are the same on every rank.
      **head: `linear_logp`'s other options but those that begin with `return_`.

    Returns:
      The loss, float32: a scalar, or `[*lead]` with reduction="none".

    Raises:
      ValueError: for every argument that does not fit, in rlk_jax's words, before anything runs.
      RuntimeError: for second derivatives. Torch's own errors pass through.

    Gradients are those of `linear_logp`. Tokens that do not count cost no work.

    Same bits: the results have the bits of `rlk_jax.linear_cross_entropy` on the same arrays, for the implementations
    that promise bits.
    """
    check = functools.partial(_check, target_ids, reduction, ignore_index, token_weights, z_loss, validate, head)
    _check_on_all_ranks(check, tp_group, vocab_start_index)
    weights = _weights(target_ids, ignore_index, token_weights)
    if token_weights is not None:
        target_ids, ignore_index = _left_out(target_ids, weights, ignore_index)
    found = smoothed_linear_logp(
        hidden,
        lm_head_weight,
        target_ids,
        bias,
        ignore_index=ignore_index,
        return_lse=bool(z_loss > 0),
        return_entropy=False,
        validate=validate,
        tp_group=tp_group,
        vocab_start_index=vocab_start_index,
        label_smoothing=label_smoothing,
        **head,
    )
    logp, lse = (found, None) if isinstance(found, torch.Tensor) else (found.logp, found.lse)
    reads_weights = token_weights is not None and _inputs.should_validate(validate, weights)
    loss, _ = _loss(logp, lse, weights, float(z_loss), reduction, reads_weights, _inputs.needs(logp, lse))
    return loss


def _check_on_all_ranks(check: Callable[[], str], tp_group: Any, vocab_start_index: int) -> None:
    """Run `check`; where a head lies over ranks, all of them raise what it raises on one."""
    if tp_group is not None:
        from torch_bridge import _process_groups  # It takes torch's compiler, whose import takes seconds.

        if _process_groups.has_other_ranks(tp_group, vocab_start_index):
            return _process_groups.agree(tp_group, check)
    check()
    return None


def _check(
    target_ids: Any,
    reduction: Any,
    ignore_index: Any,
    token_weights: Any,
    z_loss: Any,
    validate: Any,
    head: dict[str, Any],
) -> str:
    """Run all checks that read no values and are not linear_logp's. Returns what must be the same on all ranks."""
    _inputs.check_tensors(target_ids=target_ids, token_weights=token_weights)
    _inputs.check_constants("linear_cross_entropy", token_weights=token_weights)
    if torch.compiler.is_compiling():
        # Torch's compiler cannot trace the checks of rlk_jax; those of the custom ops follow when the graph runs.
        torch._check(token_weights is None or token_weights.shape == target_ids.shape)
        return ""
    ids, weights = (None if x is None else jax.ShapeDtypeStruct(*_inputs.spec(x)) for x in (target_ids, token_weights))
    check_cross_entropy(ids, reduction, ignore_index, weights, z_loss, validate, head)
    return f"{reduction=}, {z_loss=}, weights={token_weights is not None}"


def _weights(target_ids: Tensor, ignore_index: int | None, token_weights: Tensor | None) -> Tensor:
    """float32 weights, 0 for ignored tokens."""
    ids = _exchange.as_int64(target_ids)
    counts = torch.ones_like(ids, dtype=torch.bool) if ignore_index is None else ids != ignore_index
    return counts.float() if token_weights is None else token_weights.float().where(counts, 0.0)


def _left_out(target_ids: Tensor, weights: Tensor, ignore_index: int | None) -> tuple[Tensor, int]:
    """Ids of which those of weight 0 are ignored, as `rlk_jax.core.tokens.left_out` has them, and the ignored id."""
    ignored = ignored_id(ignore_index)
    ids = _exchange.as_int64(target_ids)
    return ids.where(ids != ignored, -1).where(weights != 0, ignored), ignored


def _run(logp: Any, lse: Any, weights: Any, *, z_loss: float, reduction: LossReduction) -> tuple[jax.Array]:
    weights = checked_weights(weights, validate=False)
    return (loss_of_values(logp, lse, weights, z_loss=z_loss, reduction=reduction),)


_OP = Op("linear_cross_entropy", _run, differentiable=2)


def _output(lead: torch.Size, reduction: str) -> _calls.Output:
    return _calls.Output(lead if reduction == "none" else ())


def _kernel(
    logp: Tensor,
    lse: Tensor | None,
    weights: Tensor,
    z_loss: float,
    reduction: str,
    validate: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """The loss, and the handle for the backward."""
    padding = _padding.flat(logp.shape)

    def padded_weights() -> Arrays:
        lent = padding.rows(weights, 0.0)
        if validate:
            _exchange.wait(lent.device)
            checked_weights(lent, validate=True)
        return (lent,)

    lend = functools.partial(padding.rows, fill=0.0)
    lend_upstream = lend if reduction == "none" else _exchange.lend
    options = (("z_loss", z_loss), ("reduction", reduction))
    call = _calls.Call(_OP, padding, options, (lend, lend), lend_upstream)
    loss, handle = call.forward([logp, lse], padded_weights, needs, [_output(logp.shape, reduction)])
    return loss, handle


def _fake(
    logp: Tensor,
    lse: Tensor | None,
    weights: Tensor,
    z_loss: float,
    reduction: str,
    validate: bool,
    needs: Sequence[bool],
) -> Any:
    return _calls.fake([_output(logp.shape, reduction)], logp.device)


def _check_options(name: str, arguments: dict[str, Any]) -> None:
    """The checks of options in a compiled graph; its tensors come from linear_logp."""
    ids = jax.ShapeDtypeStruct((), jnp.int32)
    check_cross_entropy(ids, arguments["reduction"], None, None, arguments["z_loss"], None, {})


_loss = _calls.as_torch_op("linear_cross_entropy", _kernel, _fake, [0, 1], check=_check_options)
