"""peft: LoRA around a FusedLMHead, whose log-probabilities take the adapter as a low-rank term.

This module imports peft; `torch_bridge.head` imports it once peft wraps a head.
"""

from typing import Any

from peft.tuners.lora.layer import Linear
from torch import Tensor

from torch_bridge.linear_logp import LinearLogp


class LoraHead(Linear):
    """peft's LoRA layer around a FusedLMHead. With target ids it gives log-probabilities under the adapter.

    peft would add the adapter's logits `[*lead, V]` to log-probabilities `[*lead]`. Without target ids it gives peft's
    own logits. A layer becomes a LoraHead when peft wraps a FusedLMHead in it.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, target_ids: Tensor | None = None, **options: Any
    ) -> Tensor | LinearLogp:
        """`linear_logp` with the head's weight and bias and the active adapter; dropout acts on what A is applied to.

        Raises ValueError, beside target ids, for several active adapters and for those that are more than a low-rank
        term: variants of LoRA such as DoRA, a bias of B, and the adapter_names of a mixed batch.
        """
        active = [name for name in self.active_adapters if name in self.lora_A]
        log_probs = getattr(self.base_layer, "log_probs", None)
        if target_ids is None or log_probs is None or self.merged or self.disable_adapters or not active:
            return super().forward(hidden, *([] if target_ids is None else [target_ids]), **options)
        if "adapter_names" in options:
            raise ValueError("FusedLMHead has no log-probs of a batch whose rows have different adapters.")
        self._check_active(active)
        (name,) = active
        a, b, dropped = self.lora_A[name].weight, self.lora_B[name].weight, self.lora_dropout[name](hidden)
        term = (a, b, self.scaling[name], None if dropped is hidden else dropped)
        return log_probs(hidden, target_ids, low_rank=term, **options)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits `[*lead, V]` of the adapted head, as `FusedLMHead.logits` gives them of its own."""
        return super().forward(hidden)

    def _check_active(self, active: list[str]) -> None:
        """There is one active adapter, and it is a low-rank term and nothing else."""
        if len(active) > 1:
            raise ValueError(f"FusedLMHead has log-probs under one active adapter, not under {', '.join(active)}.")
        (name,) = active
        if name in self.lora_variant:
            variant = type(self.lora_variant[name]).__name__
            raise ValueError(f"FusedLMHead has no log-probs under adapter {name!r}, a {variant}: merge it.")
        if self.lora_B[name].bias is not None:
            raise ValueError(f"FusedLMHead has no log-probs under adapter {name!r}, whose B has a bias: merge it.")
