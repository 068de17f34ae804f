"""TRL: the log-probabilities and entropies of its fused LM head, which its trainers share, and the divergence from a
teacher that DistillationTrainer trains on.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlk_jax.core.packages import install_command
from torch_bridge import _inputs
from torch_bridge.clients._patch_point import PatchPoint
from torch_bridge.linear_kl import linear_kl
from torch_bridge.linear_logp import linear_logp

_TOP_1 = "is_top1"
"""Whether the target is the most probable token, the first of equal ones: SFTTrainer's token accuracy."""
_SUMS = ("log_sum_sq_probs", "mean_logits")
"""Outputs for metrics of DPO and KTO trainers. They have no gradient, and TRL's own function computes them, for the
bridge's ops do not.
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
        outputs: tuple[str, ...] = ("entropy", *_SUMS, _TOP_1),
    ) -> tuple[Tensor | None, ...]:
        """The log_probs, entropy and statistics, each `[N]`, of the logits z of hidden `[N, D]` under weight `[V, D]`.

            z = softcap(logit_scale·(hidden·Wᵀ + bias)) / temperature

        Outputs that are not asked for are None, except log_probs.
        """
        unknown = [x for x in outputs if x not in ("log_probs", "entropy", *_SUMS, _TOP_1)]
        if unknown:
            raise ValueError(f"TRL asks for outputs that torch_bridge does not know: {', '.join(unknown)}.")
        scale, softcap = _scaled(temperature, final_logit_softcapping, logit_scale)
        rows, head, own_bias = _in_dtype_of_rows(hidden, weight, bias)
        found: Any = linear_logp(
            rows,
            head,
            targets,
            own_bias,
            temperature=scale,
            logit_softcap=softcap,
            return_entropy="entropy" in outputs,
            return_top_k=1 if _TOP_1 in outputs else None,
            **self.options,
        )
        logp, entropy = (found, None) if isinstance(found, Tensor) else (found.logp, found.entropy)
        is_top_1 = found.top_ids[:, 0] == targets if _TOP_1 in outputs else None
        asked = tuple(x for x in _SUMS if x in outputs)
        sums = [None] * len(_SUMS)
        if asked:
            given = (hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale)
            with torch.no_grad():
                _, _, *sums, _ = self.original.apply(*given, asked)
        return logp, entropy, *sums, is_top_1


@dataclass(frozen=True)
class ChunkedDivergence:
    """The replacement of TRL's `ChunkedDivergenceFunction`."""

    original: Any
    options: dict[str, Any]

    def apply(
        self,
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The divergence `[N]` of the student from the teacher, and the student's entropy `[N]`, which is a metric and
        has no gradient. Hidden states are `[N, D]`, weights `[V, D]`; logits are scaled as those of ChunkedLogProb.
        """
        own, softcap = _scaled(temperature, student_final_logit_softcapping, student_logit_scale)
        theirs, teacher_softcap = _scaled(temperature, teacher_final_logit_softcapping, teacher_logit_scale)
        rows, weight, bias = _in_dtype_of_rows(student_hidden, student_weight, student_bias)
        frozen = (None if x is None else x.detach() for x in (teacher_hidden, teacher_weight, teacher_bias))
        teacher_rows, teacher_head, teacher_bias = _in_dtype_of_rows(*frozen)
        divergence = linear_kl(
            rows,
            weight,
            teacher_rows,
            teacher_head,
            bias,
            teacher_bias,
            kind="jsd",
            beta=beta,
            temperature=own,
            teacher_temperature=theirs,
            logit_softcap=softcap,
            teacher_logit_softcap=teacher_softcap,
            **self.options,
        )
        ids = torch.zeros(rows.shape[:-1], dtype=torch.int32, device=rows.device)
        scaling: dict[str, Any] = {"temperature": own, "logit_softcap": softcap, "return_entropy": True}
        with torch.no_grad():
            found: Any = linear_logp(rows, weight, ids, bias, **scaling, **self.options)
        return divergence, found.entropy


def _in_dtype_of_rows(hidden: Any, weight: Any, bias: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, head and bias in the dtype that TRL computes in: that of autocast, or else that of hidden."""
    (rows,) = _inputs.autocast(hidden)
    return rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)


def _scaled(temperature: float, softcap: float | None, logit_scale: float) -> tuple[float, float | None]:
    """The temperature and softcap of logits that are scaled before their softcap.

    softcap_c(s·x) = s·softcap_{c/s}(x), and a factor s of the logits is the same as a temperature of 1/s.
    """
    if not logit_scale > 0:
        raise ValueError(f"logit_scale must be positive, got {logit_scale}.")
    return temperature / logit_scale, None if softcap is None else softcap / logit_scale


_LIBRARY = ("trl", ("1.16",), install_command("clients"))
PATCH_POINTS = (
    PatchPoint(*_LIBRARY, "trl.trainer.utils", "_ChunkedLogProbFunction", (), ChunkedLogProb),
    PatchPoint(
        *_LIBRARY,
        "trl.kernels.chunked_divergence",
        "ChunkedDivergenceFunction",
        ("trl.trainer.distillation_trainer",),
        ChunkedDivergence,
    ),
)
