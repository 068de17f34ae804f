"""FusedLMHead: an LM head that answers with log-probabilities."""

from typing import Any

from torch import Tensor, nn

from torch_bridge.linear_logp import LinearLogp, linear_logp


class FusedLMHead(nn.Linear):
    """An `nn.Linear` from hidden states to the vocabulary whose forward takes target ids, too, and holds no logits.

    Its weight is `[V, D]`, as Hugging Face's, and its state dict that of the `nn.Linear` it stands for, so that either
    loads the other's; a tied embedding is `head.weight = embedding.weight`.

    Args:
      in_features, out_features, bias, device, dtype: as in `nn.Linear`, D and V.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> "FusedLMHead":
        """A head on the very parameters of a linear layer, tied as they are, and as much in training. Hooks stay where
        they are; ValueError for another kind of layer, and one whose forward or weight is not a linear layer's.
        """
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"FusedLMHead.of takes an nn.Linear, got {type(linear).__name__}.")
        if getattr(linear.forward, "__func__", None) not in (nn.Linear.forward, cls.forward):
            raise ValueError(f"FusedLMHead.of would leave out what the forward of this {type(linear).__name__} does.")
        if not isinstance(linear.weight, nn.Parameter) or nn.parameter.is_lazy(linear.weight):
            raise ValueError(f"FusedLMHead.of shares a weight, but this {type(linear).__name__} has none of its own.")
        bias = linear.bias is not None
        head = cls(linear.in_features, linear.out_features, bias=bias, device="meta", dtype=linear.weight.dtype)
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    def forward(self, hidden: Tensor, target_ids: Tensor, **options: Any) -> Tensor | LinearLogp:  # type: ignore[override]
        """`linear_logp` of this head's weight and bias; options are its."""
        return linear_logp(hidden, self.weight, target_ids, self.bias, **options)

    def logits(self, hidden: Tensor) -> Tensor:
        """What `nn.Linear` gives, for sampling."""
        return super().forward(hidden)
