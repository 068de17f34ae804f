"""A given model on a mesh: its states are cut over "data", and its bits are those of micro-batches on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import Mesh, PartitionSpec

from rlk_jax import models
from rlk_jax.grpo.config import BadInput, GrpoConfig
from rlk_jax.grpo.policy import make_policy
from rlk_jax.grpo.sequences import Sequences
from rlk_jax.grpo.steps import TrainingSteps, make_mesh
from rlk_jax.grpo.text_steps import build_text_steps
from rlk_jax.grpo.text_task import load_text_task
from rlk_jax.models.placement import Fetch
from tests.grpo import tiny_text
from tests.support import helpers

OPTIONS = {
    "reward": "tests.grpo.tiny_text:letters",
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "updates_per_rollout": 2,
    "max_new_tokens": 6,
    "learning_rate": 1e-2,
    "max_gradient_norm": 0.1,
    "invariant": True,
    "compute_dtype": "bfloat16",
    "implementation": "deterministic",
}


@pytest.fixture(
    scope="module", params=[pytest.param(False, id="untied", marks=pytest.mark.full), pytest.param(True, id="tied")]
)
def given(request, tmp_path_factory) -> dict[str, str]:
    """A checkpoint and prompts. `make test` has a tied head, whose gradient has two parts, and one layer."""
    folder = tmp_path_factory.mktemp("given")
    fields = {"tie_word_embeddings": request.param, "num_hidden_layers": 1 if request.param else 2}
    model = tiny_text.write_model(folder / "model", **fields)
    return {"model": str(model), "prompts": str(tiny_text.write_prompts(folder / "prompts.jsonl"))}


def built(given: dict[str, str], **changes) -> TrainingSteps:
    config = GrpoConfig(**{**OPTIONS, **given, **changes})
    return build_text_steps(config, load_text_task(config), make_mesh(config))


def trained(steps: TrainingSteps, count: int) -> tuple[list[np.ndarray], list[dict]]:
    """All states after so many steps, and what each measured."""
    state, measured = steps.initial_state(), []
    for step in range(count):
        state, metrics = steps.grpo_step(state, step)
        measured.append({name: float(x) for name, x in metrics.items()})
    return [np.asarray(x) for x in jax.tree.leaves(state)], measured


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("how", [{}, pytest.param({"remat": True, "beta": 0.0}, marks=pytest.mark.full)], ids=str)
def test_devices_have_the_bits_of_micro_batches(given, devices, how):
    """Parameters, moments and the reference, after steps whose gradients are clipped. `make test` has two devices, and
    all that is kept: the order of four is in test_gradients_of_fetched_parameters, remat in test_families.py.
    """
    one, measured = trained(built(given, micro_batches=devices, **how), 3)
    many, also = trained(built(given, mesh=f"data={devices},tensor=1", **how), 3)
    helpers.assert_same_bits(one, many)
    assert [line["mismatch"] for line in (*measured, *also)] == [0] * 6
    assert measured[0]["reward"] == also[0]["reward"]


def test_a_device_holds_its_part_of_the_states(given):
    """All parameters, moments and references are cut."""
    steps = built(given, mesh="data=4,tensor=1")
    state = steps.initial_state()
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.ndim:
            assert x.addressable_shards[0].data.size * 4 == x.size, jax.tree_util.keystr(path)


def test_a_backward_with_remat_fetches_layers_once_more(given, capsys):
    """It keeps the float32 parts of weights, not what was fetched, which is a whole model."""
    config = GrpoConfig(**{**OPTIONS, **given, "remat": True})
    policy = make_policy(config, make_mesh(config), load_text_task(config).tokenizer)
    ids = jnp.zeros((3, 7), jnp.int32)
    sequences = Sequences(ids, jnp.zeros(3, jnp.int32), ids)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), policy.shapes)
    print_saved_residuals(lambda params: policy.values(params, sequences).logp.sum(), params)
    kept, query_key_value = capsys.readouterr().out, "[64,32]"
    assert f"f32{query_key_value}" in kept and f"bf16{query_key_value}" not in kept


def test_a_parameter_that_cannot_be_cut(tmp_path):
    model = tiny_text.write_model(tmp_path / "model", intermediate_size=50, hidden_size=34, head_dim=16)
    given = {"model": str(model), "prompts": str(tiny_text.write_prompts(tmp_path / "prompts.jsonl"))}
    with pytest.raises(BadInput, match=r"mesh: .* cannot be cut into data=4 equal parts"):
        built(given, mesh="data=4,tensor=1")


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_of_fetched_parameters(axis):
    """They are the sum, in float32 and in ascending order of the devices, of what each found for both uses."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rng = np.random.default_rng(0)
    part, upstream = rng.normal(size=(8, 12)).astype("f"), rng.normal(size=(2, 4, 8, 12)).astype(jnp.bfloat16)
    fetch, cut = Fetch(jnp.dtype(jnp.bfloat16), 4), PartitionSpec(*(None,) * axis, "data")

    def used(part, upstream):
        both = fetch.copies(part, axis, 2)
        return sum((x * own[0]).astype(jnp.float32).sum() for x, own in zip(both, upstream, strict=True))[None]

    specs = (cut, PartitionSpec(None, "data"))
    over = jax.shard_map(used, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"))
    found = jax.jit(jax.grad(lambda part: over(part, upstream).sum()))(part)
    own = upstream[0].astype("f") + upstream[1].astype("f")
    np.testing.assert_array_equal(found, ((own[0] + own[1]) + own[2]) + own[3])


def test_a_model_is_read_onto_a_mesh(given):
    """It computes what one on a device does; what does not divide evenly stays whole."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    one, cut = (models.load(given["model"], dtype=jnp.float32, mesh=mesh) for mesh in (None, mesh))
    assert cut.blocks[0].attention.out.weight[...].sharding.spec == PartitionSpec("data")
    assert cut.embedding[...].sharding.spec == PartitionSpec(None, "data")
    tokens = jnp.array([[3, 4, 5, 6]])
    helpers.assert_within_contract(
        jax.jit(lambda: cut.lm_head(cut(tokens)))(), one.lm_head(one(tokens)), "models", jnp.float32, "forward"
    )
