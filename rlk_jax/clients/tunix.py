"""Tunix: its policy losses with `linear_logp`, from hidden states and the head of the model, without logits."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from operator import attrgetter
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.rl import common, function_registry

from rlk_jax.core.tokens import LinearLogp
from rlk_jax.ops.linear_logp.api import linear_logp
from rlk_jax.ops.linear_logp.options import LowRank, WeightLayout

__all__ = [
    "Head",
    "head_of",
    "hidden_of",
    "install_chunked_logps",
    "register_policy_loss",
    "uninstall_chunked_logps",
]


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


def head_of(model: Any, lora_scale: float | None = None) -> Head:
    """The head of a model that comes with Tunix: llama3, qwen2, qwen3, gemma, gemma3, gemma4, and its tests' toy.

    Args:
      model: the model.
      lora_scale: alpha / rank of the LoRA rule that adapts the lm_head, which Qwix does not keep in the model; its
        dropout must be 0. None where LoRA does not adapt the head.

    Raises:
      ValueError: for any other model, for a head that LoRA adapts without a lora_scale or that is an embedding, and for
        a quantized head.
    """
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

    The head must be an `lm_head` of the model, or else its `embedder.decode`.

    Raises:
      ValueError: for a model without such a head, and for one that does not call it exactly once.
    """
    inputs: list[Array] = []

    def record(hidden: Array) -> Array:
        inputs.append(hidden)
        return hidden[..., :1]

    with _replaced(*_head_attribute(model), record):
        model(tokens, **arguments)
    if len(inputs) != 1:
        raise _not_understood(model, f"one call of the model calls its head {len(inputs)} times")
    return inputs[0]


def register_policy_loss(
    name: str = "rlk_grpo",
    *,
    loss: str = "grpo",
    head: Callable[[Any], Head] = head_of,
    hidden: Callable[..., Array] = hidden_of,
    implementation: str | None = None,
    memory_budget: int | None = None,
) -> Callable[..., Any]:
    """Registers a copy of a policy loss of Tunix whose log-probabilities and entropy come from `linear_logp`.

    The copy is Tunix's own function, run with another `common.compute_per_token_logps`; Tunix itself and the loss under
    its old name stay as they are.

    Args:
      name: the name of the copy, for `GRPOConfig(policy_loss_fn=name)`.
      loss: the name of the registered loss to copy. A user's own loss must call `common.compute_per_token_logps` with
        return_logits=True, and pass the logits to `compute_entropy_from_logits` only, as "grpo" and "ppo" do.
      head: a function from the model to the `Head` that makes its logits.
      hidden: a function that returns the last hidden states `[B, T, D]`. It is called with a model, which it may
        change, and then with the arguments of the model's own call.
      implementation, memory_budget: as in `linear_logp`.

    Returns:
      The loss that was registered under `name`.

    Raises:
      LookupError: Tunix's own error, for a loss that is not registered.
      RuntimeError: for a loss that does not call `compute_per_token_logps` itself, and for a version of Tunix in which
        that function takes no `return_logits`.
    """
    stock = function_registry.get_policy_loss_fn(loss)
    if "return_logits" not in inspect.signature(common.compute_per_token_logps).parameters:
        raise RuntimeError(
            "this version of Tunix has no compute_per_token_logps(return_logits=...): install_chunked_logps serves it."
        )
    if not isinstance(stock, FunctionType) or not {"common", "compute_per_token_logps"} <= {*stock.__code__.co_names}:
        raise RuntimeError(f"the policy loss {loss!r} does not call common.compute_per_token_logps itself.")
    logps = _PerTokenLogps(head, hidden, {"implementation": implementation, "memory_budget": memory_budget})
    names = {
        **stock.__globals__,
        "common": SimpleNamespace(**{**vars(common), "compute_per_token_logps": logps}),
        "compute_entropy_from_logits": attrgetter("value"),
    }
    ours = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
    ours.__kwdefaults__ = stock.__kwdefaults__
    return function_registry.register_policy_loss_fn(name)(update_wrapper(ours, stock))


@dataclass(frozen=True)
class _EntropyInsteadOfLogits:
    """Stands for the logits. It is no array, so a loss that does anything but compute the entropy of it fails."""

    value: Float[Array, "B C"] | None


@dataclass(frozen=True)
class _PerTokenLogps:
    """The replacement of `common.compute_per_token_logps` in a copied loss."""

    head: Callable[[Any], Head]
    hidden: Callable[..., Array]
    options: dict[str, Any]

    def __call__(
        self,
        graphdef: Any,
        state: Any,
        prompt_tokens: Int[Array, "B P"],
        completion_tokens: Int[Array, "B C"],
        pad_id: int,
        eos_id: int,
        images: Array | None = None,
        stop_gradient: bool = True,
        return_logits: bool = False,
        segment_ids: Int[Array, "B C"] | None = None,
        segment_positions: Int[Array, "B C"] | None = None,
        temperature: float = 1.0,
    ) -> Any:
        """The logp of the completion `[B, C]`; with return_logits also its entropy, where Tunix returns logits.

        Packed sequences come with an empty prompt. No token predicts the first one of a row, so its values are 0.
        """
        model = nnx.merge(graphdef, state)
        tokens, positions, mask, segments = common.process_ids(
            prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids, segment_positions
        )
        arguments = {"positions": positions, "cache": None, "attention_mask": mask}
        if _accepts_argument(model, "segment_ids"):
            arguments["segment_ids"] = segments if segment_ids is None else segment_ids
        if images is not None:
            arguments["images"] = images
        hidden = self.hidden(model, tokens, **arguments)
        is_packed = segment_ids is not None
        count = completion_tokens.shape[1] - is_packed
        found = _logps_on_head(
            self.head(model), hidden[:, -count - 1 : -1], tokens[:, -count:], temperature, self.options
        )
        if is_packed:
            found = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), found)
        if stop_gradient:
            found = jax.lax.stop_gradient(found)
        return (found.logp, _EntropyInsteadOfLogits(found.entropy)) if return_logits else found.logp


def _logps_on_head(
    head: Head, hidden: Array, target_ids: Array, temperature: float, options: dict[str, Any], entropy: bool = True
) -> LinearLogp:
    dtype = head.dtype or jnp.result_type(*(x for x in (hidden, head.weight, head.bias) if x is not None))
    return linear_logp(
        hidden.astype(dtype),
        head.weight.astype(dtype),
        target_ids,
        None if head.bias is None else head.bias.astype(dtype),
        weight_layout=head.weight_layout,
        low_rank=head.low_rank,
        logit_softcap=head.logit_softcap,
        # After a greedy rollout Tunix passes a temperature of 0 and does not divide the logits.
        temperature=temperature or 1.0,
        return_lse=True,  # This makes the result a LinearLogp also without the entropy.
        return_entropy=entropy,
        **options,
    )


@dataclass(frozen=True)
class _ChunkedLogps:
    """The replacement of Tunix's `common.compute_chunked_logps`."""

    stock: Any
    head: Callable[[Any], Head]
    options: dict[str, Any]

    def __call__(
        self,
        model: Any,
        hidden_states: Float[Array, "B T D"],
        target_ids: Int[Array, "B T"],
        temperature: float,
        chunk_size: int,
        return_entropy: bool,
    ) -> Any:
        found = _logps_on_head(self.head(model), hidden_states, target_ids, temperature, self.options, return_entropy)
        return (found.logp, found.entropy) if return_entropy else found.logp


def install_chunked_logps(
    *,
    head: Callable[[Any], Head] = head_of,
    implementation: str | None = None,
    memory_budget: int | None = None,
) -> None:
    """Replaces Tunix's `common.compute_chunked_logps` by `linear_logp`.

    No release up to 0.1.7 has that function. Tunix's development head calls it, with a positive
    `compute_logps_chunk_size`, for every log-probability: of the policy, the reference and the rollout. A second call
    changes the options. A step that is compiled already keeps what it was compiled with.

    Args:
      head: a function from the model to the `Head` that makes its logits.
      implementation, memory_budget: as in `linear_logp`; they stand in for Tunix's chunk size.

    Raises:
      RuntimeError: for a version of Tunix without that function, or where it has other parameters; nothing is changed
        then.
    """
    found = getattr(common, "compute_chunked_logps", None)
    parameters = [] if found is None else list(inspect.signature(found).parameters)
    if parameters != list(inspect.signature(_ChunkedLogps.__call__).parameters)[1:]:
        has = f"with parameters {', '.join(parameters)}" if parameters else "missing"
        raise RuntimeError(f"tunix.rl.common.compute_chunked_logps is {has}: nothing was changed.")
    stock = found.stock if isinstance(found, _ChunkedLogps) else found
    _write_chunked(_ChunkedLogps(stock, head, {"implementation": implementation, "memory_budget": memory_budget}))


def uninstall_chunked_logps() -> None:
    """Puts back Tunix's own function if `install_chunked_logps` has replaced it."""
    found = getattr(common, "compute_chunked_logps", None)
    if isinstance(found, _ChunkedLogps):
        _write_chunked(found.stock)


def _write_chunked(function: Callable[..., Any]) -> None:
    common.compute_chunked_logps = function
    # This jitted function looks the other one up in the module only when it is traced.
    common.compute_per_token_logps.clear_cache()


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


def _accepts_argument(model: Any, name: str) -> bool:
    parameters = inspect.signature(model.__call__).parameters
    return name in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def _not_understood(model: Any, reason: str) -> ValueError:
    return ValueError(
        f"the head of {type(model).__name__} is not understood: {reason}. "
        "Say with head= (and hidden=) what makes its logits."
    )
