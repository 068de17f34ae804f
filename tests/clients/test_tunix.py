"""Tunix with `linear_logp` in its policy losses against Tunix as it is. `make test-tunix` has Tunix.

`make test` trains with GRPO on a mesh, and calls packed sequences and models whose heads are read in different ways: an
`nnx.Linear`, an einsum, and an embedder with a softcap. `make test-full` has every model and loss.
"""

import dataclasses
import functools
import inspect
import itertools
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

tunix = pytest.importorskip("tunix", reason="Tunix has an environment of its own: make test-tunix")

import optax  # noqa: E402
from flax import nnx  # noqa: E402
from grain import python as grain  # noqa: E402
from tunix.models.gemma import model as gemma  # noqa: E402
from tunix.models.gemma3 import model as gemma3  # noqa: E402
from tunix.models.gemma4 import model as gemma4  # noqa: E402
from tunix.models.llama3 import model as llama3  # noqa: E402
from tunix.models.qwen2 import model as qwen2  # noqa: E402
from tunix.models.qwen3 import model as qwen3  # noqa: E402
from tunix.rl import common, function_registry, reshard  # noqa: E402
from tunix.tests import test_common as toys  # noqa: E402

from rlk_jax.clients import tunix as client  # noqa: E402
from rlk_jax.clients.tunix import Head, logps  # noqa: E402
from tests.support import helpers  # noqa: E402

# Tunix and qwix still read variables as flax would rather not have them read.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
VOCAB = 96
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "jax_clients.md").read_text()


def toy(vocab: int = VOCAB) -> Any:
    return toys.ToyTransformer(toys.ModelConfig(vocab_size=vocab, num_layers=1), rngs=nnx.Rngs(0))


def mesh(fsdp: int, tp: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))


# Training has a rollout for each step on four devices, or three steps on one rollout.
TRAININGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_agg_mode": "token-mean", "beta": 0.2, "devices": (2, 2)},
    "gspo": {"loss_agg_mode": "token-mean", "beta": 0.2, "loss_algo": "gspo-token", "num_iterations": 3},
}


def train(policy_loss_fn: str, devices: tuple[int, int] = (1, 1), **config: Any) -> tuple[np.ndarray, jax.Array]:
    """The losses of three steps of GRPOLearner, and how far they moved the parameters."""
    vocab = toys.MockVocab()
    roles = tunix.Role.ACTOR, tunix.Role.REFERENCE, tunix.Role.ROLLOUT
    cluster = tunix.RLCluster(
        actor=toy(vocab.GetPieceSize()),
        reference=toy(vocab.GetPieceSize()),
        tokenizer=vocab,
        cluster_config=tunix.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh(*devices)),
            training_config=tunix.RLTrainingConfig(actor_optimizer=optax.sgd(0.1), eval_every_n_steps=100, max_steps=3),
            rollout_config=tunix.RolloutConfig(
                max_tokens_to_generate=8, max_prompt_length=4, kv_cache_size=16, temperature=0.9
            ),
        ),
    )
    learner = tunix.GRPOLearner(
        rl_cluster=cluster,
        algo_config=tunix.GRPOConfig(policy_loss_fn=policy_loss_fn, num_generations=4, **config),
        reward_fns=lambda completions, **_: np.array([len(x) for x in completions], float),
    )
    start = jax.tree.map(jnp.copy, nnx.state(cluster.actor_trainer.model, nnx.Param))
    prompts = grain.MapDataset.source(["input string", "hello world", "My name"] * 2)
    learner.train(prompts.batch(2).map(lambda x: {"prompts": x}))
    losses = cluster.actor_trainer.metrics_logger.get_metric_history("actor", "loss", "train")
    assert len(losses) == 3
    moved = jax.tree.map(jnp.subtract, nnx.state(cluster.actor_trainer.model, nnx.Param), start)
    return np.array(losses), ravel_pytree(moved)[0]


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the targets of every linear_logp that the client traces."""
    shapes: list[tuple[int, ...]] = []

    def counted(hidden: Any, weight: Any, target_ids: Any, *args: Any, **kwargs: Any) -> Any:
        shapes.append(target_ids.shape)
        return linear_logp(hidden, weight, target_ids, *args, **kwargs)

    linear_logp = logps.linear_logp
    monkeypatch.setattr(logps, "linear_logp", counted)
    return shapes


# Tunix computes the loss of gspo itself. In `make test`, the case of grpo catches log-probabilities that are wrong in
# training, and test_every_model_of_tunix what is wrong where ratios are not 1, as in later steps on one rollout.
@pytest.mark.parametrize("config", ["grpo", pytest.param("gspo", marks=pytest.mark.full)])
def test_three_steps(calls, config):
    losses, moved = train("grpo", **TRAININGS[config])
    assert not calls
    client.register_policy_loss("rlk_grpo")
    our_losses, our_moved = train("rlk_grpo", **TRAININGS[config])
    assert calls and set(calls) == {(8, 8)}
    helpers.assert_within_contract(our_losses, losses, "tunix_training", "float32", "forward")
    helpers.assert_within_contract(our_moved, moved, "tunix_training", "float32", "gradient")


# The tests below compare one call of a loss: its value, metrics and gradients.
SIZES = {"num_layers": 1, "embed_dim": 32, "hidden_dim": 32, "num_heads": 2, "head_dim": 16, "num_kv_heads": 2}
QWEN: Any = {"vocab_size": VOCAB, "rope_theta": 10000, "norm_eps": 1e-6, **SIZES}
GEMMA: Any = {"num_embed": VOCAB, **SIZES}
GEMMA2: Any = {
    "final_logit_softcap": 3.0,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "attention_types": (gemma.AttentionType.GLOBAL,),
}
GEMMA4: Any = {"final_logit_softcap": 3.0, "sliding_window_size": 4, "num_global_kv_heads": 2, "global_key_size": 16}
MODELS = {
    "toy": toy,
    "llama3": lambda: llama3.Llama3(llama3.ModelConfig(**QWEN), rngs=nnx.Rngs(0)),
    "llama3 tied": lambda: llama3.Llama3(llama3.ModelConfig(weight_tying=True, **QWEN), rngs=nnx.Rngs(0)),
    "qwen2": lambda: qwen2.Qwen2(qwen2.ModelConfig(**QWEN), rngs=nnx.Rngs(0)),
    "qwen3": lambda: qwen3.Qwen3(qwen3.ModelConfig(**QWEN), rngs=nnx.Rngs(0)),
    "qwen3 bfloat16": lambda: qwen3.Qwen3(qwen3.ModelConfig(dtype=jnp.bfloat16, **QWEN), rngs=nnx.Rngs(0)),
    "gemma2": lambda: gemma.Gemma(gemma.ModelConfig(**GEMMA2, **GEMMA), rngs=nnx.Rngs(0)),
    "gemma3": lambda: gemma3.Gemma3(
        gemma3.ModelConfig(param_dtype=jnp.float32, sliding_window_size=4, **GEMMA), rngs=nnx.Rngs(0)
    ),
    "gemma4": lambda: gemma4.Gemma4(gemma4.ModelConfig(**GEMMA4, **GEMMA), rngs=nnx.Rngs(0)),
}
CONFIGS = {
    "grpo": tunix.GRPOConfig(beta=0.1, kl_loss_mode="low_var_kl"),
    "ppo": tunix.PPOConfig(entropy_coef=0.3, epsilon_c=3.0),
}
CONFIGS["grpo"].temperature = 0.7  # as GRPOLearner does


def example(is_packed: bool = False) -> Any:
    """Left-padded prompts and right-padded completions; packed, prompts stand in the completions' rows."""
    rng = np.random.default_rng(0)
    prompt = jnp.asarray(rng.integers(3, VOCAB, (4, 0 if is_packed else 4)), jnp.int32)
    completion = jnp.asarray(rng.integers(3, VOCAB, (4, 6)), jnp.int32)
    if not is_packed:
        prompt, completion = prompt.at[0, :2].set(0), completion.at[1, 4:].set(0)
    values = [jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) - 4 for _ in range(2)]
    found = common.TrainExample(
        prompt_ids=prompt,
        prompt_mask=prompt != 0,
        completion_ids=completion,
        completion_mask=completion != 0,
        advantages=jnp.asarray(rng.normal(size=(4, 6)), jnp.float32),
        ref_per_token_logps=values[0],
        old_per_token_logps=values[1],
    )
    if not is_packed:
        return found
    # Each row holds two prompts with their completions.
    segments, positions = jnp.asarray([[1, 1, 1, 2, 2, 2]] * 4), jnp.asarray([[0, 1, 2, 0, 1, 2]] * 4)
    return dataclasses.replace(found, completion_mask=positions > 0, segment_ids=segments, segment_positions=positions)


def called(loss: str, model: Any, config: Any, given: Any, wrt: Any = nnx.Param) -> tuple[jax.Array, jax.Array]:
    """The value of a registered loss with its metrics, and its gradients."""

    def loss_fn(model: Any) -> Any:
        return function_registry.get_policy_loss_fn(loss)(model, given, config, pad_id=0, eos_id=2)

    (value, metrics), gradients = nnx.jit(nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=True))(
        model
    )
    return ravel_pytree((value, metrics))[0], ravel_pytree(gradients)[0]


def assert_same(
    model: Any,
    loss: str = "grpo",
    dtype: str = "float32",
    wrt: Any = nnx.Param,
    head: Any = client.head_of,
    **given: Any,
) -> None:
    config, data = CONFIGS[loss], example(**given)
    client.register_policy_loss("ours", loss=loss, head=head)
    ours, stock = (called(name, model, config, data, wrt) for name in ("ours", loss))
    helpers.assert_within_contract(ours[0], stock[0], "tunix_calls", dtype, "forward")
    helpers.assert_within_contract(ours[1], stock[1], "tunix_calls", dtype, "gradient")
    assert np.linalg.norm(stock[1]) > 0


# In `make test`, test_losses_and_packed_sequences has llama3, and test_three_steps the toy.
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x == "gemma2" else pytest.mark.full) for x in MODELS])
def test_every_model_of_tunix(calls, name):
    assert_same(MODELS[name](), dtype="bfloat16" if name.endswith("bfloat16") else "float32")
    assert calls == [(4, 6)]


IN_FULL = [("toy", *x) for x in itertools.product(("ppo", "grpo"), (True, False))]


# In `make test`, packed sequences with the loss "ppo" catch what is wrong with either, test_every_model_of_tunix has
# "grpo" without them, and test_three_steps has the toy.
@pytest.mark.parametrize(
    ("name", "loss", "is_packed"),
    [("llama3", "ppo", True), *(pytest.param(*x, marks=pytest.mark.full) for x in IN_FULL)],
)
def test_losses_and_packed_sequences(calls, name, loss, is_packed):
    assert_same(MODELS[name](), loss, is_packed=is_packed)
    assert len(calls) == 1


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_a_head_over_the_mesh(name):
    """The head is sharded along both axes, as Tunix lays heads; the stock loss runs on one device.

    In `make test`, test_bare_calls_on_sharded_heads (test_vocab_parallel.py) catches wrong results of linear_logp on
    such a head, and test_three_steps trains over a mesh with a whole head. What Tunix's own layout of a model breaks in
    the client is left to `make test-full` alone.
    """
    model, given = MODELS[name](), example()
    stock = called("grpo", model, CONFIGS["grpo"], given)
    client.register_policy_loss("ours")
    with mesh(2, 2):
        spread = reshard.reshard_model_to_mesh(model, mesh(2, 2))
        assert not client.head_of(spread).weight.sharding.is_fully_replicated
        ours = called("ours", spread, CONFIGS["grpo"], given)
    helpers.assert_within_contract(ours[0], stock[0], "tunix_calls", "float32", "forward")
    helpers.assert_within_contract(ours[1], stock[1], "tunix_calls", "float32", "gradient")


@pytest.mark.full
def test_lora_beside_the_head():
    """In `make test`, test_every_model_of_tunix catches wrong gradients of what lies before the head. That the client
    refuses a model because LoRA adapts other layers is left to `make test-full` alone.
    """
    assert_same(toys.get_lora_model(toy()), wrt=nnx.LoRAParam)


def test_lora_on_the_head():
    """B is not 0, so that the adapter acts; its alpha / rank is what toys.get_lora_model asks for."""
    model = lora_head()
    kernel_lora_b = model.lm_head.kernel_lora_b
    kernel_lora_b.set_value(jax.random.normal(jax.random.key(5), kernel_lora_b.get_value().shape))
    assert_same(model, wrt=nnx.LoRAParam, head=functools.partial(client.head_of, lora_scale=2.0 / 4))


def test_no_logits_of_the_whole_batch():
    """An implementation that cuts the head has neither stock Tunix's logits `[B, T, V]` nor those of kept tokens."""
    vocab, given, config = 600, example(), CONFIGS["grpo"]
    model, tokens = toy(vocab), given.completion_ids.size
    client.register_policy_loss("ours", implementation="deterministic")
    graphdef, state = nnx.split(model)

    def has_logits(loss: str) -> bool:
        def loss_fn(state: Any) -> Any:
            policy_loss = function_registry.get_policy_loss_fn(loss)
            return policy_loss(nnx.merge(graphdef, state), given, config, pad_id=0, eos_id=2)[0]

        shapes = re.findall(r"\[([\d,]+)\]", str(jax.make_jaxpr(jax.grad(loss_fn))(state)))
        sizes = (list(map(int, shape.split(","))) for shape in shapes)
        return any(columns == vocab and math.prod(rows) >= tokens for *rows, columns in sizes)

    assert has_logits("grpo") and not has_logits("ours")
    client.install_logps(implementation="deterministic")
    client.install_logps(implementation="deterministic", memory_budget=2**20)
    assert not has_logits("grpo")
    client.uninstall_logps()
    assert has_logits("grpo")


@pytest.mark.full
def test_registering_again_and_in_the_place_of_the_stock_loss(calls):
    """In `make test`, test_every_model_of_tunix and test_losses_and_packed_sequences register one name again and catch
    a loss that stays the first one. A copy that takes the name of its stock loss is left to `make test-full` alone.
    """
    stock = function_registry.get_policy_loss_fn("grpo")
    expected = called("grpo", toy(), CONFIGS["grpo"], example())
    try:
        for count in (1, 2):
            client.register_policy_loss("grpo")
            found = called("grpo", toy(), CONFIGS["grpo"], example())
            assert calls == [(4, 6)] * count
            helpers.assert_within_contract(found[1], expected[1], "tunix_calls", "float32", "gradient")
    finally:
        function_registry.register_policy_loss_fn("grpo")(stock)


class Foreign(nnx.Module):
    """A model that Tunix does not know."""

    def __init__(self) -> None:
        self.body = nnx.Embed(VOCAB, 16, rngs=nnx.Rngs(1))
        self.unembed = nnx.Param(jax.random.normal(jax.random.key(2), (VOCAB, 16)))

    def __call__(self, tokens: Any, positions: Any, cache: Any, attention_mask: Any) -> Any:
        return self.body(tokens) @ self.unembed.get_value().T, cache


def test_a_head_that_the_user_names():
    client.register_policy_loss(
        "named",
        head=lambda model: Head(model.unembed.get_value()),
        hidden=lambda model, tokens, **_: model.body(tokens),
        implementation="deterministic",
    )
    ours, stock = (called(name, Foreign(), CONFIGS["grpo"], example()) for name in ("named", "grpo"))
    helpers.assert_within_contract(ours[0], stock[0], "tunix_calls", "float32", "forward")
    helpers.assert_within_contract(ours[1], stock[1], "tunix_calls", "float32", "gradient")


# The tests below are for versions of Tunix that have compute_chunked_logps.
def chunked(model: Any, hidden_states: Any, target_ids: Any, temperature: Any, chunk_size: int, return_entropy: bool):
    """A stand-in for the function of Tunix's development head, written by its definition."""
    z = jax.nn.log_softmax(model.lm_head(hidden_states) / temperature)
    logp = jnp.take_along_axis(z, target_ids[..., None], axis=-1)[..., 0]
    return (logp, -jnp.sum(jnp.exp(z) * z, axis=-1)) if return_entropy else logp


@pytest.fixture
def has_chunked(monkeypatch):
    monkeypatch.setattr(common, "compute_chunked_logps", chunked, raising=False)
    yield
    client.uninstall_chunked_logps()
    assert common.compute_chunked_logps is chunked


def three_chunked_steps() -> tuple[jax.Array, jax.Array]:
    """The losses of three steps of a loss on `compute_chunked_logps`, and how far they moved the parameters."""
    model, given = toy(), example()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    start = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))

    def loss_fn(model: Any) -> Any:
        hidden = client.hidden_of(model, given.completion_ids, positions=None)
        logp, entropy = common.compute_chunked_logps(model, hidden, given.completion_ids, 0.7, 2, True)
        alone = common.compute_chunked_logps(model, hidden, given.completion_ids, 0.7, 2, False)
        return -jnp.mean(logp * given.advantages) - 0.3 * jnp.mean(entropy) + jnp.mean(alone)

    losses, step = [], nnx.jit(nnx.value_and_grad(loss_fn))
    for _ in range(3):
        loss, gradients = step(model)
        optimizer.update(model, gradients)
        losses.append(loss)
    return jnp.stack(losses), ravel_pytree(jax.tree.map(jnp.subtract, nnx.state(model, nnx.Param), start))[0]


@pytest.mark.full
def test_chunked_logps(has_chunked, calls):
    """In `make test`, test_three_steps catches wrong gradients of a loss, and the page's snippets install and uninstall
    what is tested here. Wrong values of chunks are left to `make test-full` alone.
    """
    losses, moved = three_chunked_steps()
    client.install_chunked_logps(memory_budget=2**20)
    client.install_chunked_logps()
    our_losses, our_moved = three_chunked_steps()
    assert calls == [(4, 6)] * 2
    helpers.assert_within_contract(our_losses, losses, "tunix_training", "float32", "forward")
    helpers.assert_within_contract(our_moved, moved, "tunix_training", "float32", "gradient")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"implementation": "fast"}, "implementation must be "),
        ({"implementation": "mosaic"}, "linear_logp cannot run 'mosaic' here: "),
        ({"memory_budget": 0}, "memory_budget must be a positive number of bytes, such as 2**30, got 0."),
    ],
)
@pytest.mark.parametrize("install", [client.register_policy_loss, client.install_logps, client.install_chunked_logps])
def test_wrong_options_are_refused_before_anything_is_changed(install, wrong, message):
    stock = common.compute_per_token_logps
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        install(**({"name": "wrong"} if install is client.register_policy_loss else {}), **wrong)
    assert common.compute_per_token_logps is stock
    with pytest.raises(LookupError):
        function_registry.get_policy_loss_fn("wrong")


def test_logps_of_another_version(monkeypatch):
    monkeypatch.setattr(common, "compute_per_token_logps", lambda model, return_entropy: None)
    with pytest.raises(RuntimeError, match="logps is with parameters model, return_entropy: nothing was changed"):
        client.install_logps()
    client.uninstall_logps()
    assert len(inspect.signature(common.compute_per_token_logps).parameters) == 2


def test_chunked_logps_of_another_version(monkeypatch):
    if not hasattr(common, "compute_chunked_logps"):
        with pytest.raises(RuntimeError, match="compute_chunked_logps is missing: nothing was changed"):
            client.install_chunked_logps()
    monkeypatch.setattr(common, "compute_chunked_logps", lambda model, logits: None, raising=False)
    with pytest.raises(RuntimeError, match="is with parameters model, logits: nothing was changed"):
        client.install_chunked_logps()


def lora_head() -> Any:
    return toys.get_lora_model(toy(), ".*lm_head")


def other_head() -> Any:
    model = toy()
    model.lm_head = nnx.LinearGeneral(16, VOCAB, rngs=nnx.Rngs(0))
    return model


def quantized_head() -> Any:
    model = toy()
    model.lm_head.kernel = nnx.Param({"codes": model.lm_head.kernel.get_value()})
    return model


def no_head() -> Any:
    model = toy()
    del model.lm_head
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Foreign, "the head of Foreign is not understood: it is no model of Tunix's"),
        (lora_head, "LoRA adapts it, and its lora_scale is not given"),
        (other_head, r"its lm_head is flax\.[\w.]*LinearGeneral"),
        (quantized_head, "it holds a dict where an array was expected"),
        (no_head, "it has neither an lm_head nor an embedder that decodes"),
    ],
)
def test_heads_that_are_not_understood(model, reason):
    with pytest.raises(ValueError, match=rf"{reason}\. Say with head="):
        client.head_of(model())


def test_a_model_that_does_not_call_its_head():
    class Headless(toys.ToyTransformer):
        def __call__(self, tokens: Any, **_: Any) -> Any:
            return self.emb(tokens), None

    model = Headless(toys.ModelConfig(vocab_size=VOCAB), rngs=nnx.Rngs(0))
    head = model.lm_head
    with pytest.raises(ValueError, match="one call of the model calls its head 0 times"):
        client.hidden_of(model, jnp.zeros((1, 2), jnp.int32))
    assert model.lm_head is head


def test_losses_that_cannot_be_served(monkeypatch):
    with pytest.raises(LookupError, match="'absent'"):
        client.register_policy_loss(loss="absent")

    @function_registry.register_policy_loss_fn("another")
    def another(model, train_example, algo_config, pad_id, eos_id):
        return jnp.zeros(()), {}

    with pytest.raises(RuntimeError, match="the policy loss 'another' does not call common"):
        client.register_policy_loss(loss="another")

    @function_registry.register_policy_loss_fn("of logits")
    def of_logits(model, train_example, algo_config, pad_id, eos_id):
        tokens = {"prompt_tokens": train_example.prompt_ids, "completion_tokens": train_example.completion_ids}
        options = {"stop_gradient": False, "return_logits": True}
        logp, logits = common.compute_per_token_logps(*nnx.split(model), **tokens, pad_id=0, eos_id=2, **options)
        return jnp.mean(logp) + jnp.max(logits), {}

    client.register_policy_loss("ours", loss="of logits")
    with pytest.raises(TypeError, match="EntropyInsteadOfLogits"):
        called("ours", toy(), CONFIGS["grpo"], example())

    monkeypatch.setattr(common, "compute_per_token_logps", lambda model, return_entropy: None)
    with pytest.raises(RuntimeError, match="install_chunked_logps serves it"):
        client.register_policy_loss()


def test_public_names_are_documented():
    for name in client.__all__:
        assert f"`{name}" in PAGE and getattr(client, name) is not None, name


@pytest.mark.parametrize("code", re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
def test_snippet_runs(has_chunked, code):
    """tests/test_docs.py runs the snippets of other pages; this one needs Tunix."""
    exec(code, {})
    client.uninstall_logps()
