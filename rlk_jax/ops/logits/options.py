"""What a call of logp, ratio_kl or grpo_loss carries, and what every implementation takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from rlk_jax.core.softmax import SoftmaxConfig
from rlk_jax.core.tokens import LinearLogp, Tokens

Array = jax.Array


@dataclass(frozen=True)
class LogitsOptions:
    """The options of one call as the user gave them; `logp` documents them, and ratio_kl and grpo_loss take some."""

    logit_softcap: float | None = None
    ignore_index: int | None = None
    global_vocab_size: int | None = None
    return_lse: bool = False
    return_entropy: bool = False
    donate_logits: bool = False
    as_linear_logp: bool = False
    validate: bool | None = None
    implementation: str | None = None


@dataclass(frozen=True)
class LogpConfig(SoftmaxConfig):
    """The static facts of one call, of logp or of an op composed of it, that an implementation is compiled for."""

    as_linear_logp: bool = False
    """Whether the values are to have the bits of linear_logp; a call that asks for them has no gradient."""


class LogpInputs(NamedTuple):
    """The arrays of logp: logits `[*lead, V]`, ids `[*lead]`; rows `[K]` and initial `[*lead]`, or None; what each
    token may take, as ids `[*lead, K]` or as words `[*lead, W]`, or None.
    """

    logits: Any
    token_ids: Any
    temperature: Any
    row_indices: Any
    initial: Any
    allowed_ids: Any
    allowed_mask: Any


class RatioKlInputs(NamedTuple):
    """The arrays of ratio_kl: both logits `[*lead, V]`, temperature `[]` or `[*lead]`, what each token may take as in
    LogpInputs, all others `[*lead]`.
    """

    policy_logits: Any
    ref_logits: Any
    action_ids: Any
    completion_mask: Any
    old_logps: Any
    temperature: Any
    allowed_ids: Any
    allowed_mask: Any


class TakenTokens(NamedTuple):
    """Log-probabilities of the taken tokens, float32 `[*lead]`, all 0 where masked; and the mask as bool."""

    logp: Array
    ref_logps: Array
    old_logps: Array
    mask: Array


@dataclass(frozen=True)
class LogitsFunctions:
    """One implementation, on logits `[N, V]`.

    `forward` gives values and a residual, with a row `[N]` per token. `gradient` gives the gradient of the logits, in
    their dtype and 0 in inactive rows; its last argument says that the gradient may be written where the logits are.
    `as_linear_logp` gives the values of float32 logits with the bits of linear_logp, and nothing beside them; where it
    is None, dispatch keeps such calls away.
    """

    forward: Callable[[SoftmaxConfig, Array, Tokens], tuple[LinearLogp, Any]]
    gradient: Callable[[SoftmaxConfig, Array, Tokens, Any, LinearLogp, bool], Array]
    as_linear_logp: Callable[[SoftmaxConfig, Array, Tokens], tuple[LinearLogp, None]] | None = None
