"""logp for tensors: log-probabilities of the taken tokens from logits that are in memory already."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import torch
from torch import Tensor

import rlk_jax
from rlk_jax.core.tokens import rows_in_range
from rlk_jax.ops.logits.options import LogitsOptions
from torch_bridge import _calls, _exchange, _inputs, _options, _padding, _programs
from torch_bridge._programs import Arrays, Op
from torch_bridge.linear_logp import LinearLogp, as_outputs, outputs, values


def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    allowed_ids: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    logit_softcap: float | None = None,
    ignore_index: int | None = None,
    global_vocab_size: int | None = None,
    row_indices: Tensor | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    out: Tensor | None = None,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Tensor | LinearLogp:
    """Log-probability of each token under its row of logits; `rlk_jax.logp` for tensors.

        z = softcap(logits) / temperature,   softcap(x) = c·tanh(x/c)
        logp = z[token] − ln Σ_v exp z_v,   lse = ln Σ_v exp z_v,   entropy = −Σ_v p_v·ln p_v     (natural logarithms)

    Where hidden states are at hand, `linear_logp` needs no logits.

    Args:
      logits: `[*lead, V]`, bfloat16, float16 or float32; sums run in float32, under autocast too.
      token_ids: `[*lead]`, any integer dtype.
      temperature, logit_softcap, ignore_index, global_vocab_size: as in `linear_logp`.
      allowed_ids, allowed_mask: which tokens each row may take, as in `linear_logp`.
      row_indices: numbers of the rows to compute, `[K]`, counting tokens of all lead dimensions from 0, in any order.
        The other rows are treated as ignored tokens, except that `out` keeps its values there.
      return_lse, return_entropy: also return these, from the same pass, differentiable.
      out: float32 `[*lead]` that logp is written into and that is returned. Rows that `row_indices` does not list stay
        as they are. It is refused where a gradient is needed.
      validate: as in `linear_logp`; a bad entry of row_indices that is not checked gives NaN in all rows.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here.

    Returns:
      float32 logp `[*lead]`, or `LinearLogp(logp, lse, entropy)` where more was asked for (None for what was not).

    Raises:
      ValueError: for every argument that does not fit, in rlk_jax's words, before anything runs.
      RuntimeError: for second derivatives. Torch's own errors pass through.

    The gradient has the logits' dtype. Logits are read in place where their number of rows is a bucket's; others are
    copied into padded memory first (docs/torch_bridge.md).

    Same bits: the results have the bits of `rlk_jax.logp` on the same arrays, for the implementations that promise
    bits.
    """
    options = LogitsOptions(
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
        global_vocab_size=global_vocab_size,
        return_lse=return_lse,
        return_entropy=return_entropy,
        validate=validate,
        implementation=implementation,
    )
    per_token, number = _inputs.temperature(temperature)
    tensors = {"logits": logits, "token_ids": token_ids, "temperature": per_token, "row_indices": row_indices}
    tensors |= {"allowed_ids": allowed_ids, "allowed_mask": allowed_mask}
    _inputs.check_tensors(**tensors, out=out)
    _inputs.check_constants("logp", temperature=per_token)
    _inputs.check_options("logp", tensors, options, temperature=number)
    needs = _inputs.needs(logits)
    if out is not None:
        _inputs.check_out(out, token_ids.shape, any(needs))
    checked = replace(options, validate=_inputs.should_validate(validate, logits))
    initial = None if row_indices is None else out
    others = (token_ids, allowed_ids, allowed_mask, per_token, number, row_indices, initial)
    found, lse, entropy, _ = _logp(logits, *others, checked, needs)
    if out is not None:
        found = out.copy_(found)
    return values((found, lse, entropy), options)


def _run(
    logits: Any,
    ids: Any,
    count: Any,
    temperature: Any,
    allowed_ids: Any,
    allowed_mask: Any,
    row_indices: Any,
    initial: Any,
    *,
    ignore_index: int | None,
    **options: Any,
) -> tuple[jax.Array, ...]:
    ids = _padding.token_ids(ids, count, ignore_index=ignore_index)
    token_options = {"temperature": temperature, "row_indices": row_indices, "initial": initial}
    token_options["ignore_index"] = _padding.ignored(ignore_index)
    token_options["allowed_ids"], token_options["allowed_mask"] = _padding.allowed_values(allowed_ids, allowed_mask)
    return as_outputs(rlk_jax.logp(logits, ids, **token_options, validate=False, **options))


_OP = Op("logp", _run, differentiable=1)
_OPTIONS = _options.OptionFields(LogitsOptions, without=("donate_logits",))


def _kernel(
    logits: Tensor,
    token_ids: Tensor,
    allowed_ids: Tensor | None,
    allowed_mask: Tensor | None,
    per_token: Tensor | None,
    temperature: float,
    row_indices: Tensor | None,
    initial: Tensor | None,
    options: LogitsOptions,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, lse, entropy, and the handle for the backward."""
    lead = token_ids.shape
    padding = _padding.flat(lead)

    def tokens() -> Arrays:
        checked_against = (options.global_vocab_size or logits.shape[-1]) if options.validate else None
        scale, allowed = (per_token, temperature), padding.allowed(allowed_ids, allowed_mask)
        token_arrays = padding.tokens(token_ids, scale, options.ignore_index, "token_ids", checked_against, allowed)
        rows = None if row_indices is None else _rows(row_indices, padding.sizes[0], bool(options.validate))
        return *token_arrays, rows, None if initial is None else padding.rows(initial)

    lend = (lambda x: padding.rows(x, columns=1),)
    call = _calls.Call(_OP, padding, _OPTIONS.static(options), lend, padding.rows)
    found, lse, entropy, handle = call.forward([logits], tokens, needs, outputs(lead, options))
    return found, lse, entropy, handle


def _rows(row_indices: Tensor, count: int, validate: bool) -> jax.Array:
    """row_indices as an array, padded to a bucket by repeating the first index.

    Indices from `count` on become the largest int32, so that none selects a row of padding.
    """
    indices = _exchange.as_int32(row_indices)
    k = len(indices)
    if k and (padding := _programs.bucket(k) - k):
        indices = torch.cat([indices, indices[:1].expand(padding)])
    if validate:
        rows_in_range(_exchange.to_jax(indices), count, True)
    return _exchange.lend(indices.where(indices < count, _exchange.INT32.max))


def _fake(
    logits: Tensor,
    token_ids: Tensor,
    allowed_ids: Tensor | None,
    allowed_mask: Tensor | None,
    per_token: Tensor | None,
    temperature: float,
    row_indices: Tensor | None,
    initial: Tensor | None,
    options: LogitsOptions,
    needs: Sequence[bool],
) -> Any:
    return _calls.fake(outputs(token_ids.shape, options), logits.device)


_logp = _calls.as_torch_op("logp", _kernel, _fake, [0], options=_OPTIONS)
