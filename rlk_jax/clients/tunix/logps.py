"""Tunix's log-probabilities by `linear_logp`: in a copy of a policy loss, or in the place of its own functions."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from operator import attrgetter
from types import FunctionType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.rl import algo_core, common, function_registry

from rlk_jax.clients.options import checked_options
from rlk_jax.clients.tunix.heads import Head, head_of, hidden_of
from rlk_jax.core.tokens import LinearLogp
from rlk_jax.ops import promising
from rlk_jax.ops.linear_logp.api import linear_logp


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
      implementation, memory_budget: as in `linear_logp`. A named implementation is looked for on JAX's device: that
        comes after `jax.distributed.initialize`.

    Returns:
      The loss that was registered under `name`.

    Raises:
      ValueError: for options that `linear_logp` does not take, and for an implementation that does not run here: on
        JAX's device, with bfloat16. Nothing is registered then.
      LookupError: Tunix's own error, for a loss that is not registered.
      RuntimeError: for a loss that does not call `compute_per_token_logps` itself, and for a version of Tunix in which
        that function takes no `return_logits`.
    """
    options = checked_options(implementation, memory_budget)
    stock = function_registry.get_policy_loss_fn(loss)
    if "return_logits" not in inspect.signature(common.compute_per_token_logps).parameters:
        raise RuntimeError(
            "this version of Tunix has no compute_per_token_logps(return_logits=...): install_chunked_logps serves it."
        )
    if not isinstance(stock, FunctionType) or not {"common", "compute_per_token_logps"} <= {*stock.__code__.co_names}:
        raise RuntimeError(f"the policy loss {loss!r} does not call common.compute_per_token_logps itself.")
    logps = _PerTokenLogps(head, hidden, options)
    names = {
        **stock.__globals__,
        "common": SimpleNamespace(**{**vars(common), "compute_per_token_logps": logps}),
        "compute_entropy_from_logits": attrgetter("value"),
    }
    ours = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
    ours.__kwdefaults__ = stock.__kwdefaults__
    return function_registry.register_policy_loss_fn(name)(update_wrapper(ours, stock))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _EntropyInsteadOfLogits:
    """Stands for the logits. It is no array, so a loss that does anything but compute the entropy of it fails."""

    value: Float[Array, "B C"] | None


@dataclass(frozen=True, eq=False)
class _PerTokenLogps:
    """The replacement of `common.compute_per_token_logps`, in a copied loss or in Tunix itself."""

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
    bias = None if head.bias is None else head.bias.astype(dtype)
    arrays = hidden.astype(dtype), head.weight.astype(dtype), target_ids, bias
    options = {
        "weight_layout": head.weight_layout,
        "low_rank": head.low_rank,
        "logit_softcap": head.logit_softcap,
        # After a greedy rollout Tunix passes a temperature of 0 and does not divide the logits.
        "temperature": temperature or 1.0,
        "return_lse": True,  # This makes the result a LinearLogp also without the entropy.
        "return_entropy": entropy,
        **options,
    }
    if head.keeps_bits:
        options["implementation"] = promising("linear_logp", *arrays, **options)
    return linear_logp(*arrays, **options)


@dataclass(frozen=True)
class _Entropy:
    """The replacement of `algo_core.compute_entropy_from_logits`. It remembers both functions that were replaced."""

    stock: Callable[..., Any]
    stock_logps: Callable[..., Any]

    def __call__(self, logits: Any) -> Any:
        return logits.value if isinstance(logits, _EntropyInsteadOfLogits) else self.stock(logits)


def install_logps(
    *,
    head: Callable[[Any], Head] = head_of,
    hidden: Callable[..., Array] = hidden_of,
    implementation: str | None = None,
    memory_budget: int | None = None,
) -> None:
    """Replaces Tunix's `common.compute_per_token_logps` by `linear_logp`, and its `compute_entropy_from_logits` by the
    entropy that comes from the same pass.

    Tunix calls the first for every log-probability: of the policy in its losses, of the reference, and of the policy
    that sampled. No loss need be registered. A second call changes the options. A step that is compiled already keeps
    what it was compiled with.

    Args:
      head, hidden, implementation, memory_budget: as in `register_policy_loss`.

    Raises:
      ValueError: for options that `register_policy_loss` refuses; nothing is changed then.
      RuntimeError: for a version of Tunix whose function has other parameters; nothing is changed then.
    """
    options = checked_options(implementation, memory_budget)
    _check_parameters("compute_per_token_logps", _PerTokenLogps)
    found = algo_core.compute_entropy_from_logits
    if not isinstance(found, _Entropy):
        algo_core.compute_entropy_from_logits = _Entropy(found, common.compute_per_token_logps)
    logps = _PerTokenLogps(head, hidden, options)
    common.compute_per_token_logps = jax.jit(
        logps, static_argnames=("pad_id", "eos_id", "stop_gradient", "return_logits", "temperature")
    )


def uninstall_logps() -> None:
    """Puts back Tunix's own functions if `install_logps` has replaced them."""
    if has_installed_logps():
        found = algo_core.compute_entropy_from_logits
        algo_core.compute_entropy_from_logits, common.compute_per_token_logps = found.stock, found.stock_logps


def has_installed_logps() -> bool:
    """Whether Tunix's log-probabilities are those of `install_logps`."""
    return isinstance(algo_core.compute_entropy_from_logits, _Entropy)


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
      ValueError: for options that `register_policy_loss` refuses; nothing is changed then.
      RuntimeError: for a version of Tunix without that function, or where it has other parameters; nothing is changed
        then.
    """
    options = checked_options(implementation, memory_budget)
    found = _check_parameters("compute_chunked_logps", _ChunkedLogps)
    stock = found.stock if isinstance(found, _ChunkedLogps) else found
    _write_chunked(_ChunkedLogps(stock, head, options))


def uninstall_chunked_logps() -> None:
    """Puts back Tunix's own function if `install_chunked_logps` has replaced it."""
    found = getattr(common, "compute_chunked_logps", None)
    if isinstance(found, _ChunkedLogps):
        _write_chunked(found.stock)


def _write_chunked(function: Callable[..., Any]) -> None:
    common.compute_chunked_logps = function
    # This jitted function looks the other one up in the module only when it is traced.
    common.compute_per_token_logps.clear_cache()


def _check_parameters(name: str, replacement: Any) -> Any:
    """The function of `tunix.rl.common`, which has the parameters of its replacement."""
    found = getattr(common, name, None)
    parameters = [] if found is None else list(inspect.signature(found).parameters)
    if parameters != list(inspect.signature(replacement.__call__).parameters)[1:]:
        has = f"with parameters {', '.join(parameters)}" if parameters else "missing"
        raise RuntimeError(f"tunix.rl.common.{name} is {has}: nothing was changed.")
    return found


def _accepts_argument(model: Any, name: str) -> bool:
    parameters = inspect.signature(model.__call__).parameters
    return name in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())
