"""verl: the log-probabilities and entropies of its fused forwards."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_bridge.clients._patch_point import PatchPoint
from torch_bridge.linear_logp import linear_logp


def linear_cross_entropy(original: Any, options: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The replacement of verl's function of this name, which verl calls with positional arguments only."""

    def bridged(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        reduction: str = "none",
        tp_group: torch.distributed.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The logp and entropy `[N]` of N labels `[*lead]` under hidden `[*lead, D]` and weight `[V, D]`.

        With a tp_group, each of its ranks holds equally many rows of the weight, in the order of ranks, as in
        Megatron.
        """
        if reduction != "none":
            raise ValueError(f"reduction must be 'none', the one that verl asks for, got {reduction!r}.")
        start = 0 if tp_group is None else torch.distributed.get_rank(tp_group) * weight.shape[0]
        found: Any = linear_logp(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            labels.reshape(-1),
            temperature=temperature,
            return_entropy=True,
            tp_group=tp_group,
            vocab_start_index=start,
            # verl's kernel returns a rank's own part of hidden's gradient too: Megatron sums it over the group itself.
            reduce_hidden_grad=tp_group is None,
            **options,
        )
        return found.logp, found.entropy

    return bridged


PATCH_POINT = PatchPoint(
    "verl",
    ("0.9",),
    'pip install "verl==0.9.*"',
    "verl.utils.kernel.linear_cross_entropy",
    "linear_cross_entropy",
    ("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap"),
    linear_cross_entropy,
)
