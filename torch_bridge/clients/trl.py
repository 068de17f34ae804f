"""TRL: the log-probabilities and entropies of its fused LM head, which all of its trainers share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bridge import _inputs
from torch_bridge.clients._patch_point import PatchPoint
from torch_bridge.linear_logp import LinearLogp, linear_logp

_STATISTICS = ("log_sum_sq_probs", "mean_logits", "is_top1")
"""Outputs for metrics of some trainers, GRPO not among them. They have no gradient, and TRL's own function computes
them, for the bridge's ops do not.
"""


@dataclass(frozen=True)
class ChunkedLogProb:
    """The replacement of TRL's `_ChunkedLogProbFunction`."""

    original: Any
    options: dict[str, Any]

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", *_STATISTICS),
    ) -> tuple[Tensor | None, ...]:
        """The log_probs, entropy and statistics, each `[N]`, of the logits z of hidden `[N, D]` under weight `[V, D]`.

            z = softcap(logit_scale·(hidden·Wᵀ + bias)) / temperature

        Outputs that are not asked for are None, except log_probs.
        """
        unknown = [x for x in outputs if x not in ("log_probs", "entropy", *_STATISTICS)]
        if unknown:
            raise ValueError(f"TRL asks for outputs that torch_bridge does not know: {', '.join(unknown)}.")
        if not logit_scale > 0:
            raise ValueError(f"logit_scale must be positive, got {logit_scale}.")
        # TRL computes in the dtype of autocast, or else in that of hidden.
        (rows,) = _inputs.autocast(hidden)
        found = linear_logp(
            rows,
            weight.to(rows.dtype),
            targets,
            None if bias is None else bias.to(rows.dtype),
            # softcap_c(s·x) = s·softcap_{c/s}(x), and a factor s of the logits is the same as a temperature of 1/s.
            temperature=temperature / logit_scale,
            logit_softcap=None if final_logit_softcapping is None else final_logit_softcapping / logit_scale,
            return_entropy="entropy" in outputs,
            **self.options,
        )
        logp, entropy = (found.logp, found.entropy) if isinstance(found, LinearLogp) else (found, None)
        asked = tuple(x for x in _STATISTICS if x in outputs)
        statistics = [None] * len(_STATISTICS)
        if asked:
            given = (hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale)
            with torch.no_grad():
                _, _, *statistics = self.original.apply(*given, asked)
        return logp, entropy, *statistics


PATCH_POINT = PatchPoint("trl", ("1.16",), "trl.trainer.utils", "_ChunkedLogProbFunction", (), ChunkedLogProb)
