"""What stands behind a model's logits: its last hidden states, and the head that takes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rlk_jax.models import CausalLM
from rlk_jax.models.placement import rounded
from rlk_jax.ops.linear_logp.options import LowRank, WeightLayout


class Head(NamedTuple):
    """How logits come from a model's last hidden states: softcap(hidden·(W + s·B·A)ᵀ + bias), as in `linear_logp`."""

    weight: Float[Array, "V D"] | Float[Array, "D V"]
    weight_layout: WeightLayout = "vd"
    bias: Float[Array, " V"] | None = None
    logit_softcap: float | None = None
    dtype: Any = None
    """The dtype of the product; None for the one that hidden, weight and bias promote to."""
    low_rank: LowRank | None = None
    """What LoRA adds to the weight; None for nothing."""
    keeps_bits: bool = False
    """Whether only implementations that promise bits are taken, as the sampler of an invariant model takes them."""


def head_of(model: Any, lora_scale: float | None = None) -> Head:
    """The head of a model of Tunix's (llama3, qwen2, qwen3, gemma, gemma3, gemma4, and its tests' toy), or of a decoder
    of `rlk_jax.models`.

    Args:
      model: the model.
      lora_scale: alpha / rank of the LoRA rule that adapts the lm_head, which Qwix does not keep in the model; its
        dropout must be 0. None where LoRA does not adapt the head. A decoder of `rlk_jax.models` needs none.

    Raises:
      ValueError: for any other model, for a head that LoRA adapts without a lora_scale or that is an embedding, and for
        a quantized head.
    """
    if isinstance(model, CausalLM):
        return _head_of_decoder(model)
    if not any(c.__module__.partition(".")[0] == "tunix" for c in type(model).__mro__):
        raise _not_understood(model, "it is no model of Tunix's")
    owner, name = _head_attribute(model)
    module = model.lm_head if name == "lm_head" else owner
    is_adapted = bool(jax.tree.leaves(nnx.state(module, nnx.LoRAParam)))
    if is_adapted and (lora_scale is None or name == "decode"):
        raise _not_understood(
            model, "LoRA adapts it" + ("" if name == "decode" else ", and its lora_scale is not given")
        )

    def low_rank(weight: str) -> LowRank | None:
        """What LoRA adds to a weight `[D, V]`, by the names that Qwix gives its factors."""
        if not is_adapted:
            return None
        a, b = (_array_of(model, getattr(module, f"{weight}_lora_{factor}")) for factor in ("a", "b"))
        return LowRank(a, b, lora_scale)

    dtype = getattr(module, "dtype", None)
    softcap = getattr(getattr(model, "config", None), "final_logit_softcap", None)
    if name == "decode":
        dtype = dtype or getattr(getattr(module, "config", None), "dtype", None)
        return Head(_array_of(model, module.input_embedding), logit_softcap=softcap, dtype=dtype)
    if isinstance(module, nnx.Linear):
        bias = None if module.bias is None else _array_of(model, module.bias)
        return Head(_array_of(model, module.kernel), "dv", bias, softcap, dtype, low_rank("kernel"))
    if getattr(module, "einsum_str", None) == "BTD,DV->BTV":
        return Head(_array_of(model, module.w), "dv", None, softcap, dtype, low_rank("w"))
    raise _not_understood(model, f"its lm_head is {type(module).__module__}.{type(module).__name__}")


def hidden_of(model: Any, tokens: Int[Array, "B T"], **arguments: Any) -> Float[Array, "B T D"]:
    """The hidden states that the model passes to its head when it is called; the head itself does not run.

    The head must be an `lm_head` of the model, or else its `embedder.decode`. A decoder of `rlk_jax.models` gives its
    hidden states itself; it is called as Tunix calls a model, with `positions` and an `attention_mask`.

    Raises:
      ValueError: for a model without such a head, and for one that does not call it exactly once.
    """
    if isinstance(model, CausalLM):
        return _hidden_of_decoder(model, tokens, **arguments)
    inputs: list[Array] = []

    def record(hidden: Array) -> Array:
        inputs.append(hidden)
        return hidden[..., :1]

    with _replaced(*_head_attribute(model), record):
        model(tokens, **arguments)
    if len(inputs) != 1:
        raise _not_understood(model, f"one call of the model calls its head {len(inputs)} times")
    return inputs[0]


def in_its_dtype(model: CausalLM) -> CausalLM:
    """The decoder with its parameters rounded to the dtype that it computes in. An optimizer may hold them in float32,
    where small updates are not lost.
    """
    graph, state = nnx.split(model)
    parameters, rest = nnx.split_state(state, nnx.Param, ...)
    parameters = jax.tree.map(lambda x: rounded(x, model.dtype), parameters)
    return nnx.merge(graph, nnx.merge_state(parameters, rest))


def _head_of_decoder(model: CausalLM) -> Head:
    head = in_its_dtype(model).lm_head
    term = None if head.low_rank is None else LowRank(*head.low_rank.operands)
    return Head(head.weight[...], logit_softcap=head.softcap, low_rank=term, keeps_bits=model.keeps_bits)


def _hidden_of_decoder(
    model: CausalLM,
    tokens: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"],
    attention_mask: Array | None,
    cache: None = None,
) -> Float[Array, "B T D"]:
    """A row begins behind its left padding, which the mask leaves out; in packed rows, which have no mask, a sequence
    begins where its positions do. Padding behind a sequence changes nothing before it.
    """
    if attention_mask is None:
        padding = jnp.arange(tokens.shape[1]) - positions
    else:
        padding = jnp.argmax(attention_mask[:, -1] != 0, axis=-1)
    return in_its_dtype(model)(tokens, padding)


def _head_attribute(model: Any) -> tuple[Any, str]:
    """The object and the name of its attribute that the model calls for its logits."""
    if hasattr(model, "lm_head"):
        return model, "lm_head"
    if hasattr(model, "embedder") and hasattr(model.embedder, "decode"):
        return model.embedder, "decode"
    raise _not_understood(model, "it has neither an lm_head nor an embedder that decodes")


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object while the context is open; a method is hidden by an attribute of the object."""
    original = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _array_of(model: Any, variable: nnx.Variable) -> Array:
    value = variable.get_value()
    if not isinstance(value, jax.Array):
        raise _not_understood(model, f"it holds a {type(value).__name__} where an array was expected")
    return value


def _not_understood(model: Any, reason: str) -> ValueError:
    return ValueError(
        f"the head of {type(model).__name__} is not understood: {reason}. "
        "Say with head= (and hidden=) what makes its logits."
    )
