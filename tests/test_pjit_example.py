"""A MaxText-style pjit run: parameters with logical axes, one jitted step over a mesh data × fsdp × tensor."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlk_jax import linear_grpo_loss
from rlk_jax.grpo import LossOptions, policy_loss
from tests.support import helpers
from tests.support.helpers import assert_within_contract

VOCAB, DIM, HIDDEN, SEQUENCES, LENGTH = 1024, 32, 64, 8, 12
RULES = {"batch": ("data", "fsdp"), "embed": "fsdp", "mlp": "tensor", "vocab": "tensor", None: None}
"""Where each logical axis lies on the mesh."""
LOGICAL_AXES = {"embedding": ("vocab", "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
"""The logical axes of each parameter. The head is the embedding."""
OPTIONS = LossOptions(clip_eps_high=0.28)


class Batch(NamedTuple):
    tokens: Any
    old_logps: Any
    advantages: Any
    mask: Any


def sharding(mesh: Mesh, *logical: str | None) -> NamedSharding:
    return NamedSharding(mesh, P(*(RULES[name] for name in logical)))


def hidden_states(params: dict[str, Any], tokens: Any) -> Any:
    """Hidden states of all tokens but the last: each predicts the next token."""
    x = params["embedding"][tokens[:, :-1]]
    return x + jax.nn.silu(x @ params["up"]) @ params["down"]


def fused(params: dict[str, Any], batch: Batch) -> Any:
    hidden = hidden_states(params, batch.tokens)
    ids = batch.tokens[:, 1:]
    return linear_grpo_loss(
        hidden, params["embedding"], ids, batch.old_logps, None, batch.advantages, batch.mask, options=OPTIONS
    ).loss


def naive(params: dict[str, Any], batch: Batch) -> Any:
    logits = hidden_states(params, batch.tokens) @ params["embedding"].T
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.tokens[:, 1:, None], axis=-1)[..., 0]
    return policy_loss(logp, batch.old_logps, batch.advantages, batch.mask, options=OPTIONS).loss


def train_step(loss: Any, optimizer: optax.GradientTransformation) -> Any:
    def step(params: dict[str, Any], state: Any, batch: Batch) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    return step


def start() -> tuple[dict[str, Any], Batch]:
    rng = np.random.default_rng(0)
    shapes = {"embedding": (VOCAB, DIM), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
    params = {name: jnp.float32(rng.normal(size=shape) / shape[-1] ** 0.5) for name, shape in shapes.items()}
    tokens = jnp.asarray(rng.integers(0, VOCAB, (SEQUENCES, LENGTH)), jnp.int32)
    mask = jnp.asarray(rng.random((SEQUENCES, LENGTH - 1)) < 0.8)
    old_logps = jnp.float32(-np.log(VOCAB) + 0.3 * rng.normal(size=mask.shape))
    return params, Batch(tokens, old_logps, jnp.float32(rng.normal(size=SEQUENCES)), mask)


def placed(mesh: Mesh, params: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], Batch]:
    params = {name: jax.device_put(x, sharding(mesh, *LOGICAL_AXES[name])) for name, x in params.items()}
    return params, jax.device_put(batch, sharding(mesh, "batch"))


@helpers.cover("shape", [((2, 2, 2),), ((1, 1, 8),), ((4, 2, 1),)], lambda shape: min(shape) > 1)  # every axis is cut
def test_three_steps_on_a_mesh_are_those_of_one_device(shape):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp", "tensor"))
    optimizer = optax.sgd(1.0)  # Adam would divide differences in the last bit by gradients near 0.
    (first, expected_batch), (params, batch) = start(), placed(mesh, *start())
    expected = first
    state, expected_state = optimizer.init(params), optimizer.init(expected)
    step = jax.jit(train_step(fused, optimizer), donate_argnums=(0, 1))
    expected_step = jax.jit(train_step(naive, optimizer))
    for _ in range(3):
        params, state, value = step(params, state, batch)
        expected, expected_state, expected_value = expected_step(expected, expected_state, expected_batch)
        assert_within_contract(value, expected_value, "grpo_loss", jnp.float32, "forward")
    for name, x in params.items():
        assert x.sharding.is_equivalent_to(sharding(mesh, *LOGICAL_AXES[name]), x.ndim)
        moved, expected_move = x - first[name], expected[name] - first[name]
        assert_within_contract(moved, expected_move, "linear_logp", jnp.float32, "gradient")


def test_no_device_holds_the_head_or_logits_of_the_whole_vocabulary():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 4), ("data", "fsdp", "tensor"))
    text = {}
    for loss in (fused, naive):
        compiled = jax.jit(jax.grad(loss)).lower(*placed(mesh, *start())).compile()
        text[loss] = compiled.as_text()
    assert f"{VOCAB // 4},{DIM}]" in text[fused]
    assert f"[{VOCAB},{DIM}]" not in text[fused] and f",{VOCAB}]" not in text[fused]
    # The naive loss has logits of all its tokens on a device.
    assert f"[{SEQUENCES // 2},{LENGTH - 1},{VOCAB // 4}]" in text[naive]
