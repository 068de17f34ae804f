"""A MaxText-style pjit run of a decoder: parameters with logical axes, one jitted step over data × fsdp × tensor."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlk_jax import linear_grpo_loss, models
from rlk_jax.grpo import LossOptions, policy_loss
from tests.support import helpers
from tests.support.helpers import assert_within_contract

VOCAB, WIDTH, SEQUENCES, LENGTH = 1024, 32, 8, 12
CONFIG = models.config_of(
    {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }
)
RULES = {"batch": ("data", "fsdp"), "embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
"""Where each logical axis lies on the mesh."""
LOGICAL_AXES = {
    "embedding": ("vocab", "embed"),
    "query_key_value": ("heads", "embed"),
    "out": ("embed", "heads"),
    "gate_up": ("mlp", "embed"),
    "down": ("embed", "mlp"),
}
"""The logical axes of each matrix, by a name on its path. The head is the embedding; scales of norms have none."""
OPTIONS = LossOptions(clip_eps_high=0.28)


class Batch(NamedTuple):
    tokens: Any
    old_logps: Any
    advantages: Any
    mask: Any


def sharding(mesh: Mesh, *logical: str) -> NamedSharding:
    return NamedSharding(mesh, P(*(RULES[name] for name in logical)))


def new_model() -> models.CausalLM:
    return models.CausalLM(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))


def new_params() -> nnx.State:
    """What training moves."""
    return nnx.state(new_model(), nnx.Param)


SHAPES = nnx.eval_shape(new_model)
SHAPES.set_frequencies()
GRAPH, PARAMS, REST = nnx.split(SHAPES, nnx.Param, ...)
"""The model, shapes of its parameters, and the frequencies of its rope."""


def shardings(mesh: Mesh) -> nnx.State:
    """How the parameters lie: by the rules for their logical axes."""

    def of(path: Any, _: Any) -> NamedSharding:
        names = {key.key for key in path if hasattr(key, "key")}
        return sharding(mesh, *next((axes for name, axes in LOGICAL_AXES.items() if name in names), ()))

    return jax.tree.map_with_path(of, PARAMS)


def hidden_and_head(params: nnx.State, batch: Batch) -> tuple[Any, models.LogitsHead]:
    """Hidden states of all tokens but the last: each predicts the next token."""
    model = nnx.merge(GRAPH, params, REST)
    return model(batch.tokens[:, :-1]), model.lm_head


def fused(params: nnx.State, batch: Batch) -> Any:
    hidden, head = hidden_and_head(params, batch)
    ids = batch.tokens[:, 1:]
    return linear_grpo_loss(
        hidden, head.weight[...], ids, batch.old_logps, None, batch.advantages, batch.mask, options=OPTIONS
    ).loss


def naive(params: nnx.State, batch: Batch) -> Any:
    hidden, head = hidden_and_head(params, batch)
    logp = jnp.take_along_axis(jax.nn.log_softmax(head(hidden)), batch.tokens[:, 1:, None], axis=-1)[..., 0]
    return policy_loss(logp, batch.old_logps, batch.advantages, batch.mask, options=OPTIONS).loss


def train_step(loss: Any, optimizer: optax.GradientTransformation) -> Any:
    def step(params: nnx.State, state: Any, batch: Batch) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    return step


def new_batch() -> Batch:
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (SEQUENCES, LENGTH)), jnp.int32)
    mask = jnp.asarray(rng.random((SEQUENCES, LENGTH - 1)) < 0.8)
    old_logps = jnp.float32(-np.log(VOCAB) + 0.3 * rng.normal(size=mask.shape))
    return Batch(tokens, old_logps, jnp.float32(1 + rng.normal(size=SEQUENCES)), mask)


def placed(mesh: Mesh) -> tuple[nnx.State, Batch]:
    """Parameters that are made where they lie, and the batch."""
    return jax.jit(new_params, out_shardings=shardings(mesh))(), jax.device_put(new_batch(), sharding(mesh, "batch"))


@helpers.cover("shape", [((2, 2, 2),), ((1, 1, 8),), ((4, 2, 1),)], lambda shape: min(shape) > 1)  # every axis is cut
def test_three_steps_on_a_mesh_are_those_of_one_device(shape):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp", "tensor"))
    optimizer = optax.sgd(2.0)  # Adam would divide differences in the last bit by gradients near 0.
    (params, batch), first, whole_batch = placed(mesh), new_params(), new_batch()
    state, expected, expected_state = optimizer.init(params), first, optimizer.init(first)
    step = jax.jit(
        train_step(fused, optimizer),
        in_shardings=(shardings(mesh), None, sharding(mesh, "batch")),
        out_shardings=(shardings(mesh), None, None),
        donate_argnums=(0, 1),
    )
    expected_step = jax.jit(train_step(naive, optimizer))
    for _ in range(3):
        params, state, value = step(params, state, batch)
        expected, expected_state, expected_value = expected_step(expected, expected_state, whole_batch)
        assert_within_contract(value, expected_value, "grpo_loss", jnp.float32, "forward")
    for x, lies in zip(jax.tree.leaves(params), jax.tree.leaves(shardings(mesh)), strict=True):
        assert x.sharding.is_equivalent_to(lies, x.ndim)
    moved, expected_move = (
        ravel_pytree(jax.tree.map(lambda x, x0: np.asarray(x) - np.asarray(x0), found, first))[0]
        for found in (params, expected)
    )
    assert_within_contract(moved, expected_move, "linear_logp", jnp.float32, "gradient")


def test_no_device_holds_the_head_or_logits_of_the_whole_vocabulary():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 4), ("data", "fsdp", "tensor"))
    text = {}
    for loss in (fused, naive):
        compiled = jax.jit(jax.grad(loss)).lower(*placed(mesh)).compile()
        text[loss] = compiled.as_text()
    assert f"{VOCAB // 4},{WIDTH}]" in text[fused]
    assert f"[{VOCAB},{WIDTH}]" not in text[fused] and f",{VOCAB}]" not in text[fused]
    # The naive loss has logits of all its tokens on a device.
    assert f"[{SEQUENCES // 2},{LENGTH - 1},{VOCAB // 4}]" in text[naive]
