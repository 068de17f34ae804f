"""Tunix's GRPOLearner on models of random weights, with clocks around its rollouts and updates. It imports Tunix."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tunix
from flax import nnx
from tunix.models.qwen3 import model as qwen3

from benchmarks.tunix_cases import CANDIDATES, DECODER, HEAD_SIZE, STOCK, Case
from rlk_jax import models
from rlk_jax.clients import tunix as client

UPDATES_PER_ROLLOUT = 2
"""With fewer, Tunix takes the log-probs of the loss itself for the old ones."""
_PROMPT_TOKENS = 16


class _Tokenizer:
    """Prompts are digits, each of which is a token; the text of a completion is its ids."""

    def encode(self, text: str) -> list[int]:
        return [3 + int(digit) for digit in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def pad_id(self) -> int:
        return 0

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2


class ObservedCluster(tunix.RLCluster):
    """A cluster that keeps how long its rollouts and updates took, and whose old log-probs are those that the tokens
    were drawn with. Tunix's own cluster computes them again, as the loss does.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.rollout_ms: list[float] = []
        self.update_ms: list[float] = []
        super().__init__(*arguments, **options)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        with _clocked(self.rollout_ms):
            self._drawn = super().generate(*arguments, **options)
        return self._drawn

    def update_actor(self, *arguments: Any, **options: Any) -> None:
        with _clocked(self.update_ms):
            super().update_actor(*arguments, **options)
            jax.block_until_ready(nnx.state(self.actor_trainer.model))

    def get_old_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any, **_: Any) -> jax.Array:
        width = completion_tokens.shape[1]
        return jnp.array([np.pad(x, (0, width - len(x))) for x in self._drawn.logprobs], jnp.float32)


@contextmanager
def _clocked(milliseconds: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    milliseconds.append(1e3 * (time.perf_counter() - began))


def run(case: Case, candidate: str, rollouts: int) -> ObservedCluster:
    """A cluster whose actor has had so many rollouts, each of which is trained on `UPDATES_PER_ROLLOUT` times."""
    if candidate not in CANDIDATES:
        raise ValueError(f"candidates are {', '.join(CANDIDATES)}, got {candidate!r}.")
    if candidate == STOCK:
        return _run(case, _model_of_tunix(case), "vanilla", rollouts)
    client.install_logps()
    try:
        if candidate == DECODER:
            return _run(case, _decoder(case), client.DecoderRollout, rollouts)
        return _run(case, _model_of_tunix(case), "vanilla", rollouts)
    finally:
        client.uninstall_logps()


def _run(case: Case, actor: Any, rollout_engine: Any, rollouts: int) -> ObservedCluster:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = ObservedCluster(
        actor=actor,
        tokenizer=_Tokenizer(),
        cluster_config=tunix.ClusterConfig(
            role_to_mesh=dict.fromkeys((tunix.Role.ACTOR, tunix.Role.REFERENCE, tunix.Role.ROLLOUT), mesh),
            rollout_engine=rollout_engine,
            training_config=tunix.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6),
                eval_every_n_steps=1000,
                max_steps=UPDATES_PER_ROLLOUT * rollouts,
            ),
            rollout_config=tunix.RolloutConfig(
                max_tokens_to_generate=case.tokens,
                max_prompt_length=_PROMPT_TOKENS,
                kv_cache_size=_PROMPT_TOKENS + case.tokens,
                temperature=1.0,
                return_logprobs=True,
            ),
        ),
    )
    learner = tunix.GRPOLearner(
        rl_cluster=cluster,
        algo_config=tunix.GRPOConfig(num_generations=case.samples, num_iterations=UPDATES_PER_ROLLOUT, beta=0.0),
        reward_fns=_rewards,
    )
    cluster.actor_trainer.with_rl_metrics_to_log({"is_ratio/min": np.min, "is_ratio/max": np.max})
    learner.train([{"prompts": _prompts(case)}] * rollouts)
    return cluster


def history(cluster: ObservedCluster, metric: str) -> list[float]:
    """What Tunix reports of each update under this name."""
    return cluster.actor_trainer.metrics_logger.get_metric_history("actor", metric, "train").tolist()


def _rewards(completions: list[str], **_: Any) -> list[float]:
    """The sum of a completion's ids, modulo 11."""
    return [float(sum(map(int, text.split())) % 11) for text in completions]


def _prompts(case: Case) -> np.ndarray:
    """Prompts of one token less than their width, behind the one that begins a text."""
    return np.array(["".join(str((i + j) % 10) for j in range(_PROMPT_TOKENS - 1)) for i in range(case.prompts)])


def _model_of_tunix(case: Case) -> nnx.Module:
    """Tunix's own Qwen3."""
    config = qwen3.ModelConfig(
        num_layers=case.layers,
        vocab_size=case.vocabulary,
        embed_dim=case.width,
        hidden_dim=case.inner,
        num_heads=2 * case.groups,
        num_kv_heads=case.groups,
        head_dim=HEAD_SIZE,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.bfloat16,
    )
    return _drawn_anew(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))


def _decoder(case: Case) -> models.CausalLM:
    """The same architecture in `rlk_jax.models`, of invariant layers."""
    fields = {
        "model_type": "qwen3",
        "vocab_size": case.vocabulary,
        "hidden_size": case.width,
        "intermediate_size": case.inner,
        "num_hidden_layers": case.layers,
        "num_attention_heads": 2 * case.groups,
        "num_key_value_heads": case.groups,
        "head_dim": HEAD_SIZE,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
    }
    return _drawn_anew(models.CausalLM(models.config_of(fields), kind="invariant", rngs=nnx.Rngs(0)))


def _drawn_anew[Model: nnx.Module](model: Model) -> Model:
    """The model with other weights, in float32. Tunix's has zeros in its feed-forward layers, and the decoder's are all
    in the middle between two roundings to bfloat16, which small updates would not leave.
    """
    rngs = nnx.Rngs(1)

    def drawn(x: jax.Array) -> jax.Array:
        if x.ndim == 1:
            return x.astype(jnp.float32)
        return 0.02 * jax.random.normal(rngs.params(), x.shape, jnp.float32)

    nnx.update(model, jax.tree.map(drawn, nnx.state(model, nnx.Param)))
    return model
