"""Tunix: its policy losses on `linear_logp`, from hidden states and the head of the model, without the logits."""

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
from rlk_jax.ops.linear_logp.options import WeightLayout

__all__ = [
    "Head",
    "head_of",
    "hidden_of",
    "install_chunked_logps",
    "register_policy_loss",
    "uninstall_chunked_logps",
]


class Head(NamedTuple):
    """How a model's logits come from its last hidden states: softcap(hidden·Wᵀ + bias), as in `linear_logp`."""

    weight: Float[Array, "V D"] | Float[Array, "D V"]
    weight_layout: WeightLayout = "vd"
    bias: Float[Array, " V"] | None = None
    logit_softcap: float | None = None
    dtype: Any = None
    """Of the product; None for the one that hidden, weight and bias promote to."""


def head_of(model: Any) -> Head:
    """The head of a model that comes with Tunix: llama3, qwen2, qwen3, gemma, gemma3, gemma4, and its tests' toy.

    Raises:
      ValueError: for any other model, and for a head that LoRA adapts or that is quantized.
    """
    if not any(c.__module__.partition(".")[0] == "tunix" for c in type(model).__mro__):
        raise _not_understood(model, "it is no model of Tunix's")
    owner, name = _place(model)
    module = model.lm_head if name == "lm_head" else owner
    if jax.tree.leaves(nnx.state(module, nnx.LoRAParam)):
        raise _not_understood(model, "LoRA adapts it")
    dtype = getattr(module, "dtype", None)
    softcap = getattr(getattr(model, "config", None), "final_logit_softcap", None)
    if name == "decode":
        dtype = dtype or getattr(getattr(module, "config", None), "dtype", None)
        return Head(_array(model, module.input_embedding), logit_softcap=softcap, dtype=dtype)
    if isinstance(module, nnx.Linear):
        bias = None if module.bias is None else _array(model, module.bias)
        return Head(_array(model, module.kernel), "dv", bias, softcap, dtype)
    if getattr(module, "einsum_str", None) == "BTD,DV->BTV":
        return Head(_array(model, module.w), "dv", None, softcap, dtype)
    raise _not_understood(model, f"its lm_head is {type(module).__module__}.{type(module).__name__}")


def hidden_of(model: Any, tokens: Int[Array, "B T"], **arguments: Any) -> Float[Array, "B T D"]:
    """What the model hands to its head when it is called; the head itself does not run.

    For models whose head is their `lm_head`, or else their `embedder.decode`.
    """
    inputs: list[Array] = []

    def record(hidden: Array) -> Array:
        inputs.append(hidden)
        return hidden[..., :1]

    with _replaced(*_place(model), record):
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
    """Registers a policy loss of Tunix's once more, with log-probabilities and entropy from `linear_logp`.

    The formula is Tunix's own function, run with another `common.compute_per_token_logps`; Tunix itself and the loss of
    the old name stay as they are.

    Args:
      name: for `GRPOConfig(policy_loss_fn=name)`.
      loss: name of the registered loss; one of a user's own must call `common.compute_per_token_logps` with
        return_logits=True, and hand the logits to `compute_entropy_from_logits` alone, as "grpo" and "ppo" do.
      head: of the model, what makes its logits.
      hidden: called as the model is, with it before the tokens, for its last hidden states `[B, T, D]`. The model is
        the call's own copy.
      implementation, memory_budget: as in `linear_logp`.

    Returns:
      The loss that was registered.

    Raises:
      LookupError: Tunix's own, for a loss that is not registered.
      RuntimeError: for a loss without that call, and for a version of Tunix whose call is another.
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
    """No array: a loss that does anything else with its logits fails."""

    value: Float[Array, "B C"] | None


@dataclass(frozen=True)
class _PerTokenLogps:
    """What a loss takes for `common.compute_per_token_logps`."""

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
        """logp of the completion `[B, C]`, and with return_logits its entropy in their place.

        Packed sequences come with an empty prompt, and their first token has no row that predicts it: 0.
        """
        model = nnx.merge(graphdef, state)
        tokens, positions, mask, segments = common.process_ids(
            prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids, segment_positions
        )
        arguments = {"positions": positions, "cache": None, "attention_mask": mask}
        if _accepts(model, "segment_ids"):
            arguments["segment_ids"] = segments if segment_ids is None else segment_ids
        if images is not None:
            arguments["images"] = images
        hidden = self.hidden(model, tokens, **arguments)
        is_packed = segment_ids is not None
        count = completion_tokens.shape[1] - is_packed
        found = _on_head(self.head(model), hidden[:, -count - 1 : -1], tokens[:, -count:], temperature, self.options)
        if is_packed:
            found = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), found)
        if stop_gradient:
            found = jax.lax.stop_gradient(found)
        return (found.logp, _EntropyInsteadOfLogits(found.entropy)) if return_logits else found.logp


def _on_head(
    head: Head, hidden: Array, target_ids: Array, temperature: float, options: dict[str, Any], entropy: bool = True
) -> LinearLogp:
    dtype = head.dtype or jnp.result_type(*(x for x in (hidden, head.weight, head.bias) if x is not None))
    return linear_logp(
        hidden.astype(dtype),
        head.weight.astype(dtype),
        target_ids,
        None if head.bias is None else head.bias.astype(dtype),
        weight_layout=head.weight_layout,
        logit_softcap=head.logit_softcap,
        # Tunix leaves logits as they are where the rollout was greedy.
        temperature=temperature or 1.0,
        return_lse=True,  # a LinearLogp, also without the entropy
        return_entropy=entropy,
        **options,
    )


@dataclass(frozen=True)
class _ChunkedLogps:
    """What Tunix takes for its `compute_chunked_logps`."""

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
        found = _on_head(self.head(model), hidden_states, target_ids, temperature, self.options, return_entropy)
        return (found.logp, found.entropy) if return_entropy else found.logp


def install_chunked_logps(
    *,
    head: Callable[[Any], Head] = head_of,
    implementation: str | None = None,
    memory_budget: int | None = None,
) -> None:
    """Puts `linear_logp` in the place of Tunix's `common.compute_chunked_logps`, where there is one.

    No release up to 0.1.7 has it; Tunix's development head calls it, with a positive `compute_logps_chunk_size`, for
    every log-probability: of the policy, the reference and the rollout. Once more changes the options. A step that is
    compiled already keeps what it was compiled with.

    Args:
      head: of the model, what makes its logits.
      implementation, memory_budget: as in `linear_logp`, in the place of Tunix's chunk size.

    Raises:
      RuntimeError: for a version of Tunix without that function, or with other parameters; nothing is changed then.
    """
    found = getattr(common, "compute_chunked_logps", None)
    parameters = [] if found is None else list(inspect.signature(found).parameters)
    if parameters != list(inspect.signature(_ChunkedLogps.__call__).parameters)[1:]:
        has = f"with parameters {', '.join(parameters)}" if parameters else "missing"
        raise RuntimeError(f"tunix.rl.common.compute_chunked_logps is {has}: nothing was changed.")
    stock = found.stock if isinstance(found, _ChunkedLogps) else found
    _write_chunked(_ChunkedLogps(stock, head, {"implementation": implementation, "memory_budget": memory_budget}))


def uninstall_chunked_logps() -> None:
    """Puts back Tunix's own function, where that of `install_chunked_logps` stands in its place."""
    found = getattr(common, "compute_chunked_logps", None)
    if isinstance(found, _ChunkedLogps):
        _write_chunked(found.stock)


def _write_chunked(function: Callable[..., Any]) -> None:
    common.compute_chunked_logps = function
    # It calls the function under jit, by its name in the module.
    common.compute_per_token_logps.clear_cache()


def _place(model: Any) -> tuple[Any, str]:
    """Whose attribute the model calls for its logits."""
    if hasattr(model, "lm_head"):
        return model, "lm_head"
    if hasattr(model, "embedder") and hasattr(model.embedder, "decode"):
        return model.embedder, "decode"
    raise _not_understood(model, "it has neither an lm_head nor an embedder that decodes")


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object, replaced by another; a method is hidden by one of the object's own."""
    original = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _array(model: Any, variable: nnx.Variable) -> Array:
    value = variable.get_value()
    if not isinstance(value, jax.Array):
        raise _not_understood(model, f"it holds a {type(value).__name__} where an array was expected")
    return value


def _accepts(model: Any, name: str) -> bool:
    parameters = inspect.signature(model.__call__).parameters
    return name in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def _not_understood(model: Any, reason: str) -> ValueError:
    return ValueError(
        f"the head of {type(model).__name__} is not understood: {reason}. "
        "Say with head= (and hidden=) what makes its logits."
    )
