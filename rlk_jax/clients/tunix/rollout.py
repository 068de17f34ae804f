"""A rollout of Tunix's that samples from a decoder of `rlk_jax.models`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32, PRNGKeyArray
from tunix.generate import utils
from tunix.rl import common, reshard
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from rlk_jax.clients.tunix.heads import in_its_dtype
from rlk_jax.clients.tunix.logps import has_installed_logps
from rlk_jax.core.allowed import EVERY_TOKEN
from rlk_jax.core.checks import require, type_name
from rlk_jax.models import CausalLM, Completions, Sampling, sample
from rlk_jax.models.sampling import logps_of


class DecoderRollout(BaseRollout):
    """A `rollout_engine` for `ClusterConfig`, which samples from an actor that is a `CausalLM` of `rlk_jax.models`.

    The log-probs of an invariant model have the bits that Tunix's losses compute of them after `install_logps`: those
    of the whole vocabulary at the temperature, whatever `top_k` and `top_p` leave to draw from. Prompts are encoded and
    padded as by Tunix's own sampler. A completion ends with its stop token, whose log-prob counts; its text does not
    have it. Every call draws by other keys, which come from `RolloutConfig.seed` and the number of calls before.

    Raises ValueError for another model, and for a prompt without a token; RuntimeError before `install_logps`.
    """

    def __init__(self, rollout_actor: CausalLM, tokenizer: Any, mesh: Mesh, rollout_config: RolloutConfig) -> None:
        require(
            isinstance(rollout_actor, CausalLM),
            f"DecoderRollout samples from a CausalLM of rlk_jax.models, got {type_name(rollout_actor)}.",
        )
        if not has_installed_logps():
            raise RuntimeError("Tunix would ask the model for logits: call install_logps() before DecoderRollout.")
        self._model = rollout_actor if mesh.empty else reshard.reshard_model_to_mesh(rollout_actor, mesh)
        self._tokenizer, self._temperature, self._calls = tokenizer, rollout_config.temperature, 0

    def generate(self, prompts: list[str], rollout_config: RolloutConfig) -> RolloutOutput:
        """A completion of each prompt, with its log-probs."""
        prompt_ids = self._padded(prompts, rollout_config.max_prompt_length)
        keys = jax.random.split(jax.random.fold_in(_key(rollout_config.seed), self._calls), len(prompts))
        self._calls += 1
        stop_ids = tuple(rollout_config.eos_tokens or [self.eos_id()])
        found = jax.device_get(
            _sampled(
                *nnx.split(self._model),
                prompt_ids,
                keys,
                sampling=_sampling(rollout_config),
                max_new_tokens=rollout_config.max_tokens_to_generate,
                stop_ids=stop_ids,
                pad_id=self.pad_id(),
            )
        )
        tokens, logps = ([x[:n] for x, n in zip(rows, found.lengths, strict=True)] for rows in (found.ids, found.logps))
        texts = [self._tokenizer.decode([int(x) for x in ids if x not in stop_ids]) for ids in tokens]
        return RolloutOutput(texts, None, tokens, prompt_ids, logps)

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """The log-probs of completions at the temperature that Tunix trains with."""
        ids = {"pad_id": self.pad_id(), "eos_id": self.eos_id()}
        return common.compute_per_token_logps(
            *nnx.split(self._model), prompt_tokens, completion_tokens, **ids, temperature=self._temperature
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Take the trained parameters: those of these types onto the devices of the rollout, or all as they lie."""
        if filter_types is not None:
            params = reshard.reshard_pytree(params, nnx.state(self._model, filter_types))
        nnx.update(self._model, params)

    def pad_id(self) -> int:
        """The token that pads prompts and completions."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The token that ends completions where `RolloutConfig.eos_tokens` names none."""
        return self._tokenizer.eos_id()

    def model(self) -> CausalLM:
        """The model that is sampled from."""
        return self._model

    def _padded(self, prompts: Sequence[str], width: int) -> Int32[np.ndarray, "B P"]:
        """The left-padded tokens of prompts. Longer ones get the next power of two, as in Tunix's own sampler."""
        rows = [self._tokens(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        width = width if longest <= width else utils.next_power_of_2(longest)
        return np.stack([utils.pad_to_length(np.array(x, np.int32), width, self.pad_id(), left=True) for x in rows])

    def _tokens(self, prompt: str) -> list[int]:
        """The tokens of a prompt, behind one that begins a text where the tokenizer has it."""
        begin = self._tokenizer.bos_id()
        tokens = self._tokenizer.dedup_bos_ids([*([begin] if begin else []), *self._tokenizer.encode(prompt)])
        require(any(x != self.pad_id() for x in tokens), f"the prompt {prompt!r} has no token but padding.")
        return tokens


@functools.partial(jax.jit, static_argnames=("graph", "sampling", "max_new_tokens", "stop_ids", "pad_id"))
def _sampled(
    graph: nnx.GraphDef[CausalLM],
    state: nnx.State,
    prompt_ids: Int[Array, "B P"],
    keys: PRNGKeyArray,
    *,
    sampling: Sampling,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Completions:
    model = in_its_dtype(nnx.merge(graph, state))
    padding = jnp.argmax(prompt_ids != pad_id, axis=1)
    of_all = logps_of(model, sampling)
    return sample(
        model,
        prompt_ids,
        padding,
        keys,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        pad_id=pad_id,
        score=lambda hidden, products, ids, allowed: of_all(hidden, products, ids, EVERY_TOKEN),
    )


def _sampling(config: RolloutConfig) -> Sampling:
    """How Tunix's rollout configuration asks for tokens to be drawn; there, a top_k of -1 takes none away."""
    return Sampling(config.temperature, None if config.top_k in (None, -1) else config.top_k, config.top_p)


def _key(seed: Any) -> PRNGKeyArray:
    """The key of a seed: none, a number, a key, or the numbers of a key as `jax.random.PRNGKey` gives them."""
    if seed is None or isinstance(seed, int):
        return jax.random.key(seed or 0)
    return seed if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(seed)
