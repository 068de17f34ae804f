"""FusedLMHead: an LM head whose forward returns log-probabilities of target ids."""

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from torch_bridge.linear_logp import LinearLogp, RankedLogp, linear_logp


class FusedLMHead(nn.Linear):
    """An `nn.Linear` from hidden states to the vocabulary that takes target ids, too, and then holds no logits.

    Without target ids it is an `nn.Linear`: as a Hugging Face model's head it leaves `generate` and `labels=` as they
    were.

    Its weight is `[V, D]`, as Hugging Face's. Its state dict is that of an `nn.Linear`, so that either module loads the
    other's. `head.weight = embedding.weight` ties an embedding to the head.

    Args:
      in_features, out_features, bias, device, dtype: as in `nn.Linear`; in_features is D, and out_features is V.
    """

    _adapter: nn.Module | None = None
    """What wraps this head as its base layer, as peft's adapters do."""

    @classmethod
    def of(cls, linear: nn.Linear) -> "FusedLMHead":
        """A head that shares the parameters of a linear layer, with their ties, and is in the layer's training mode.

        The layer's hooks are not taken over. It raises a ValueError for another kind of layer, and for a layer whose
        forward or weight is not that of an `nn.Linear`.
        """
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"FusedLMHead.of takes an nn.Linear, got {_name(linear)}.")
        if getattr(linear.forward, "__func__", None) not in (nn.Linear.forward, cls.forward):
            raise ValueError(f"FusedLMHead.of would leave out what the forward of this {_name(linear)} does.")
        if not isinstance(linear.weight, nn.Parameter) or nn.parameter.is_lazy(linear.weight):
            raise ValueError(f"FusedLMHead.of shares a weight, but this {_name(linear)} has none of its own.")
        bias = linear.bias is not None
        head = cls(linear.in_features, linear.out_features, bias=bias, device="meta", dtype=linear.weight.dtype)
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, target_ids: Tensor | None = None, **options: Any
    ) -> Tensor | LinearLogp | RankedLogp:
        """`linear_logp` with this head's weight and bias; `options` are the options of `linear_logp`.

        Without target ids, the logits. Under LoRA (peft) log-probabilities are those of the adapted head
        (`torch_bridge.clients.peft`). Raises ValueError for options beside logits, which only log-probabilities have,
        and for target ids where another adapter would add its logits to log-probabilities.
        """
        if target_ids is not None:
            _check_adapter(self._adapter)
            return self.log_probs(hidden, target_ids, **options)
        if options:
            raise ValueError(f"FusedLMHead gives logits without target_ids, which have no {', '.join(options)}.")
        return self.logits(hidden)

    def log_probs(self, hidden: Tensor, target_ids: Tensor, **options: Any) -> Tensor | LinearLogp | RankedLogp:
        """`linear_logp` with this head's own weight and bias, whatever adapter is around it."""
        return linear_logp(hidden, self.weight, target_ids, self.bias, **options)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits `[*lead, V]` that an `nn.Linear` returns, for sampling."""
        return super().forward(hidden)


def _remember_adapter(module: nn.Module, name: str, part: nn.Module | None) -> None:
    """Note on a head what wraps it, or what it is in, as its base layer, as peft's adapters do, until it takes the
    adapter's place.
    """
    before = module._modules.get(name)
    if part is None or (name != "base_layer" and before is None):  # As almost always: nothing is walked then.
        return
    for head in (x for x in part.modules() if isinstance(x, FusedLMHead)):
        if name == "base_layer":
            vars(head)["_adapter"] = module  # torch would make it a part of the head
            if not _is_lora(module):
                module.register_forward_pre_hook(_refuse_target_ids, with_kwargs=True)
        elif before is head._adapter:
            vars(head)["_adapter"] = None
    if name == "base_layer" and isinstance(part, FusedLMHead) and _is_lora(module):
        from torch_bridge.clients.peft import LoraHead

        module.__class__ = LoraHead


def _refuse_target_ids(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise where an adapter is given target ids: some compute logits themselves, and would drop the ids."""
    if len(arguments) > 1 or "target_ids" in options:
        _check_adapter(module)


def _is_lora(module: nn.Module) -> bool:
    """Whether a module is peft's LoRA layer around a linear layer; peft is not imported for it."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    return layers is not None and type(module) is layers.Linear


register_module_module_registration_hook(_remember_adapter)


def _check_adapter(adapter: Any) -> None:
    """An adapter around a head is merged into its weight, or turned off, or has no active layers on it."""
    if adapter is None or getattr(adapter, "merged", False) or getattr(adapter, "disable_adapters", False):
        return
    layers = [getattr(adapter, name, ()) for name in getattr(adapter, "adapter_layer_names", ())]
    if layers and not any(name in layer for layer in layers for name in adapter.active_adapters):
        return
    raise ValueError(
        f"FusedLMHead has no log-probabilities under {_name(adapter)}, which adds logits to them: merge the adapter "
        "(merge_adapter), turn it off, or leave the head out of target_modules. Without target_ids it gives logits."
    )


def _name(module: Any) -> str:
    """The class of a module, with the Python module that it is defined in: many libraries have a `Linear`."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
