"""Tunix's GRPOLearner on a decoder of `rlk_jax.models`: what is sampled and what is trained have one set of bits."""

import dataclasses
import importlib
import pathlib
import re
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

tunix = pytest.importorskip("tunix", reason="Tunix has an environment of its own: make test-tunix")

import optax  # noqa: E402
from flax import nnx  # noqa: E402
from grain import python as grain  # noqa: E402
from tunix.generate.tokenizer_adapter import TokenizerAdapter  # noqa: E402
from tunix.rl import algo_core, common, function_registry  # noqa: E402
from tunix.tests import test_common as toys  # noqa: E402

from rlk_jax import models  # noqa: E402
from rlk_jax.clients import tunix as client  # noqa: E402
from rlk_jax.core import packages  # noqa: E402
from tests.support import helpers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
PYPROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"
TOKENIZER = toys.MockVocab()
FIELDS = {
    "model_type": "llama",
    "vocab_size": TOKENIZER.GetPieceSize(),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
ROLLOUT = tunix.RolloutConfig(max_tokens_to_generate=6, max_prompt_length=4, temperature=0.9)


def decoder(kind: str = "invariant", dtype: Any = jnp.bfloat16) -> models.CausalLM:
    return models.CausalLM(models.config_of(FIELDS), kind=kind, dtype=dtype, rngs=nnx.Rngs(0))


def with_float32(model: models.CausalLM, trained: Any) -> models.CausalLM:
    """The model with float32 parameters where they are trained."""
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model, trained)))
    return model


def with_low_rank() -> models.CausalLM:
    model = decoder()
    model.add_low_rank(2, rngs=nnx.Rngs(1))
    nnx.update(model, jax.tree.map(lambda x: x + jnp.bfloat16(0.1), nnx.state(model, nnx.LoRAParam)))
    return model


@pytest.fixture
def installed():
    client.install_logps()
    yield
    client.uninstall_logps()


def mesh(device: int = 0) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[device]).reshape(1, 1), ("fsdp", "tp"))


def rollout(model: Any, device: int = 0, config: Any = ROLLOUT) -> client.DecoderRollout:
    return client.DecoderRollout(model, TokenizerAdapter(TOKENIZER), mesh(device), config)


def padded(rows: list[np.ndarray], width: int = ROLLOUT.max_tokens_to_generate) -> jax.Array:
    return jnp.stack([np.pad(x, (0, width - len(x))) for x in rows])


def a_cluster(actor: Any, reference: Any, engine: Any, **training: Any) -> tunix.RLCluster:
    roles = tunix.Role.ACTOR, tunix.Role.REFERENCE, tunix.Role.ROLLOUT
    training |= {"actor_optimizer": optax.sgd(0.5), "eval_every_n_steps": 100, "max_steps": 4}
    config = tunix.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh()),
        rollout_engine=engine,
        training_config=tunix.RLTrainingConfig(**training),
        rollout_config=ROLLOUT,
    )
    return tunix.RLCluster(actor=actor, reference=reference, tokenizer=TOKENIZER, cluster_config=config)


class Recorded(client.DecoderRollout):
    """The old log-probs of a loss are those that its tokens were drawn with."""

    def generate(self, prompts: list[str], rollout_config: Any) -> Any:
        self.output = super().generate(prompts, rollout_config)
        return self.output

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Any:
        return padded(self.output.logprobs)


# In `make test`, test_recorded_logps_are_those_of_training has low-rank terms; that Tunix trains them is left to
# `make test-full` alone.
@pytest.mark.parametrize(
    ("make", "trained"), [(decoder, nnx.Param), pytest.param(with_low_rank, nnx.LoRAParam, marks=pytest.mark.full)]
)
def test_grpo_samples_and_trains_in_one_set_of_bits(installed, make, trained):
    """Four updates on two rollouts: in the first of each, the policy is the one that sampled."""
    metrics: list[dict[str, Any]] = []

    @function_registry.register_policy_loss_fn("observed")
    def observed(*args: Any, **kwargs: Any) -> Any:
        loss, found = algo_core.grpo_loss_fn(*args, **kwargs)
        jax.debug.callback(metrics.append, {"loss": loss, **found})
        return loss, found

    cluster = a_cluster(with_float32(make(), trained), make(), Recorded)
    learner = tunix.GRPOLearner(
        rl_cluster=cluster,
        algo_config=tunix.GRPOConfig(policy_loss_fn="observed", num_generations=4, num_iterations=2, beta=0.1),
        reward_fns=lambda completions, **_: np.array([len(x) for x in completions], float),
    )
    start = jax.tree.map(jnp.copy, nnx.state(cluster.actor_trainer.model, trained))
    prompts = grain.MapDataset.source(["input string", "hello world"] * 2)
    learner.train(prompts.batch(2).map(lambda x: {"prompts": x}))
    jax.effects_barrier()

    found = {name: np.array([x[name] for x in metrics]) for name in metrics[0]}
    assert len(metrics) == 4 and np.isfinite(found["loss"]).all() and np.isfinite(found["entropy"]).all()
    for ratio in (found["is_ratio/min"], found["is_ratio/max"]):
        assert (ratio[::2] == 1).all() and (ratio[1::2] != 1).all()
    assert found["kl"][0] == 0  # The reference has the bits of the policy, too.
    for moved in jax.tree.leaves(jax.tree.map(jnp.subtract, nnx.state(cluster.actor_trainer.model, trained), start)):
        assert moved.dtype == jnp.float32 and jnp.abs(moved).max() > 0


SAMPLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "low rank": (with_low_rank, {"top_k": 5, "top_p": 0.9}),
    "greedy": (decoder, {"temperature": 0.0}),
}


# In `make test`, the case with low-rank terms catches what differs between the two ways of computing log-probs.
@pytest.mark.parametrize("name", ["low rank", pytest.param("greedy", marks=pytest.mark.full)])
def test_recorded_logps_are_those_of_training(installed, name):
    """They are those of the whole vocabulary, whatever is drawn from; a packed row has them, too."""
    make, options = SAMPLED[name]
    config = dataclasses.replace(ROLLOUT, **options)
    engine = rollout(make(), config=config)
    found = engine.generate(["input string", "hello"], config)
    prompts, completions = jnp.array(found.left_padded_prompt_tokens), padded(found.tokens)
    drawn = completions != 0
    logps = jnp.where(drawn, engine.get_per_token_logps(prompts, completions), 0)
    helpers.assert_same_bits(logps, jnp.where(drawn, padded(found.logprobs), 0))
    assert jnp.abs(logps).max() > 0

    rows = [np.concatenate(x) for x in zip([[1, 3, 4], [1, 5]], found.tokens, strict=True)]
    segments = np.repeat([1, 2], [len(x) for x in rows])[None]
    positions = np.concatenate([np.arange(len(x)) for x in rows])[None]
    packed = common.compute_per_token_logps(
        *nnx.split(engine.model()), jnp.zeros((1, 0), int), np.concatenate(rows)[None], pad_id=0, eos_id=2,
        segment_ids=segments, segment_positions=positions, temperature=config.temperature,
    )  # fmt: skip
    of_first, of_second = packed[0, 3 : len(rows[0])], packed[0, len(rows[0]) + 2 :]
    helpers.assert_same_bits([of_first, of_second], [jnp.array(x) for x in found.logprobs])


def test_stock_layers_have_other_bits(installed):
    """What the tests above find is no matter of course."""
    engine = rollout(decoder("stock", jnp.float32))
    found = engine.generate(["input string", "hello"], ROLLOUT)
    completions = padded(found.tokens)
    logps = engine.get_per_token_logps(jnp.array(found.left_padded_prompt_tokens), completions)
    assert (jnp.where(completions != 0, logps, 0) != jnp.where(completions != 0, padded(found.logprobs), 0)).any()


def test_what_a_rollout_gives(installed):
    engine = rollout(decoder())
    config = dataclasses.replace(ROLLOUT, eos_tokens=list(range(2, 12)), max_prompt_length=2)
    first = engine.generate(["input string hello", "!"], config)
    np.testing.assert_array_equal(first.left_padded_prompt_tokens, [[1, 3, 4, 5], [0, 0, 1, 9]])
    for text, tokens, logps in zip(first.text, first.tokens, first.logprobs, strict=True):
        stops = np.isin(tokens, config.eos_tokens)
        assert len(tokens) == len(logps) and not stops[:-1].any() and (stops[-1] or len(tokens) == 6)
        assert text == TOKENIZER.DecodeIds(tokens[~stops].tolist())
    # Every call draws anew; a seed says from where on.
    again = engine.generate(["input string hello", "!"], config)
    assert [x.tolist() for x in again.tokens] != [x.tolist() for x in first.tokens]
    for seed in (0, jax.random.key(0), jax.random.PRNGKey(0)):
        same = rollout(decoder()).generate(["input string hello", "!"], dataclasses.replace(config, seed=seed))
        assert [x.tolist() for x in same.tokens] == [x.tolist() for x in first.tokens]


def test_trained_parameters_reach_the_devices_of_the_rollout(installed):
    actor = decoder()
    graph, state = nnx.split(actor)
    actor = nnx.merge(graph, jax.device_put(state, jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec())))
    engine = rollout(actor, device=1)
    trained = jax.tree.map(lambda x: x + 1, nnx.state(actor, nnx.Param))
    engine.update_params(trained, (nnx.Param,))
    own = nnx.state(engine.model(), nnx.Param)
    helpers.assert_same_bits(own, trained)
    assert {x.device for x in jax.tree.leaves(own)} == {jax.devices()[1]}
    engine.update_params(jax.tree.map(jnp.zeros_like, own))
    assert not any(x.any() for x in jax.tree.leaves(nnx.state(engine.model(), nnx.Param)))


def test_checkpoints_of_tunix_hold_a_decoder(installed, tmp_path):
    def resumed() -> tunix.RLCluster:
        actor = with_float32(decoder(), nnx.Param)
        return a_cluster(actor, decoder(), client.DecoderRollout, checkpoint_root_directory=str(tmp_path))

    saved = resumed().actor_trainer
    nnx.update(saved.model, jax.tree.map(lambda x: x + 1, nnx.state(saved.model, nnx.Param)))
    saved.checkpoint_manager.save(3, saved.model, saved.optimizer, force=True)
    saved.checkpoint_manager.close()
    found = resumed()
    assert found.actor_trainer.train_steps == 3
    helpers.assert_same_bits(nnx.state(found.rollout.model(), nnx.Param), nnx.state(saved.model, nnx.Param))


def test_bad_rollouts(installed):
    with pytest.raises(ValueError, match=r"samples from a CausalLM of rlk_jax\.models, got tunix\..*ToyTransformer"):
        rollout(toys.ToyTransformer(toys.ModelConfig(vocab_size=22), rngs=nnx.Rngs(0)))
    without_start = rollout(decoder())
    without_start._tokenizer.bos_id = lambda: None
    with pytest.raises(ValueError, match="the prompt 'unknown words' has no token but padding"):
        without_start.generate(["unknown words"], ROLLOUT)
    client.uninstall_logps()
    with pytest.raises(RuntimeError, match=r"call install_logps\(\) before DecoderRollout"):
        rollout(decoder())


@pytest.mark.parametrize(("version", "found"), [("0.1.5", "0.1.5"), (None, "no version of it"), ("0.2.0", "0.2.0")])
def test_other_versions_of_tunix(monkeypatch, version, found):
    needed = "google-tunix>=0.1.7,<0.2"
    message = f'needs {needed}, of rlk-jax\'s extra `tunix`, and {found} is installed: pip install "rlk-jax[tunix]"'
    with monkeypatch.context() as patch:
        patch.setattr(packages, "installed_version", lambda name: version)
        with pytest.raises(ImportError, match=re.escape(message)):
            importlib.reload(client)
    importlib.reload(client)
    assert needed in tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["tunix"]
