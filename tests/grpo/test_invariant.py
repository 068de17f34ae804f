"""With invariant layers, the log-probs recorded while decoding have the bits of those of the training pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.layers import INVARIANT, STOCK
from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.rollout import Rollout, sample_completions, sample_in_length_buckets
from rlk_jax.grpo.sequences import join_completions
from rlk_jax.grpo.steps import build_steps, make_mesh, target_logps
from rlk_jax.grpo.tasks import Examples, completion_mask, load_task
from rlk_jax.grpo.vocabulary import EOS, PAD, VOCAB_SIZE
from tests.grpo import prompts, tiny
from tests.support import helpers

PROMPT_WIDTH, LENGTH, BATCH = 6, 7, 12
PADDING = np.arange(BATCH, dtype=np.int32) % PROMPT_WIDTH
HEAD = MeshHead(make_mesh(tiny.config()), VOCAB_SIZE, "deterministic", jnp.bfloat16)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Random weights, changed so that completions end soon."""
    model = tiny.decoder(INVARIANT)
    kernel = model.lm_head.kernel[...]
    model.lm_head.kernel[...] = kernel.at[:, EOS].add(kernel[:, 10:40].sum(axis=1))
    return model


@pytest.fixture(scope="module")
def prompt_ids() -> np.ndarray:
    """Prompts of every length from 1 on."""
    ids = np.random.default_rng(0).integers(EOS + 1, VOCAB_SIZE, (BATCH, PROMPT_WIDTH), np.int32)
    return np.where(np.arange(PROMPT_WIDTH) < PADDING[:, None], PAD, ids)


KEYS = jax.random.split(jax.random.key(0), BATCH)


def roll_out(
    model: Decoder,
    prompt_ids: np.ndarray,
    padding: np.ndarray,
    *,
    keys: jax.Array = KEYS,
    buckets=1,
) -> Rollout:
    sharding = NamedSharding(HEAD.mesh, PartitionSpec(None, "data"))

    @nnx.jit
    def sample(model: Decoder) -> Rollout:
        kernel = model.lm_head.kernel[...]

        def score(hidden: jax.Array, logits: jax.Array, token_ids: jax.Array) -> jax.Array:
            return HEAD.logps(hidden, kernel, token_ids)

        def of(examples: Examples, keys: jax.Array) -> Rollout:
            return sample_completions(model, examples.prompt_ids, examples.padding, keys, score, length=LENGTH)

        examples = Examples(jnp.asarray(prompt_ids), jnp.asarray(padding), jnp.zeros_like(prompt_ids))
        return sample_in_length_buckets(of, examples, keys, buckets=buckets, sharding=sharding)

    return sample(model)


def trained_on(model: Decoder, prompt_ids: np.ndarray, padding: np.ndarray, ids: jax.Array) -> jax.Array:
    """The log-probs of a training pass, with forward and backward in one program."""
    graph, params = nnx.split(model)

    def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        logps = target_logps(
            nnx.merge(graph, params), join_completions(prompt_ids, padding, ids, completion_mask(ids)), HEAD
        )
        return logps.sum(), logps

    return jax.jit(jax.grad(loss, has_aux=True))(params)[1]


@pytest.fixture(scope="module")
def rollout(model, prompt_ids) -> Rollout:
    return roll_out(model, prompt_ids, PADDING)


@pytest.mark.full
def test_rollouts_of_mixed_lengths_record_the_bits_of_training(model, prompt_ids, rollout):
    """Rollout and training are two programs. In `make test`, test_steps_start_at_ratio_one catches other bits: its
    rollouts have mixed lengths, and its steps both in one program.
    """
    mask = np.asarray(completion_mask(rollout.completion_ids))
    assert len(set(mask.sum(axis=1).tolist())) > 2
    assert np.all(np.asarray(rollout.logps)[mask] < 0) and not np.any(np.asarray(rollout.logps)[~mask])
    helpers.assert_same_bits(rollout.logps, trained_on(model, prompt_ids, PADDING, rollout.completion_ids))


@pytest.mark.full
@pytest.mark.parametrize("rows", [slice(3, 4), slice(2, 9)])
def test_training_in_another_batch_has_the_bits_of_the_rollout(model, prompt_ids, rollout, rows):
    """In `make test`, test_sequences.py trains on the same sequences in other rows, and compares their bits."""
    ids = rollout.completion_ids[rows]
    helpers.assert_same_bits(rollout.logps[rows], trained_on(model, prompt_ids[rows], PADDING[rows], ids))


@pytest.mark.full
@pytest.mark.parametrize("padding", [0, 5])
def test_a_rollout_of_another_batch_and_padding_is_the_same(model, prompt_ids, rollout, padding):
    """A prompt stands alone in its batch. In `make test`, test_sequences.py trains on sequences in other rows."""
    row = 4
    prompt = np.pad(prompt_ids[row : row + 1, PADDING[row] :], ((0, 0), (padding, 0)))
    alone = roll_out(model, prompt, np.array([padding], np.int32), keys=KEYS[row : row + 1])
    np.testing.assert_array_equal(alone.completion_ids[0], rollout.completion_ids[row])
    helpers.assert_same_bits(alone.logps[0], rollout.logps[row])


@pytest.mark.full
def test_a_rollout_by_length_is_the_same(model, prompt_ids, rollout):
    """In `make test`, the run with buckets in test_steps.py earns the same rewards as the one without."""
    helpers.assert_same_bits(roll_out(model, prompt_ids, PADDING, buckets=4), rollout)


@pytest.fixture
def warm_programs():
    """The warm start of stock layers has the same parameters, and is faster. test_steps.py shares its program."""
    config = tiny.config(**tiny.MIXED)
    return tiny.shared_steps(config, load_task(config), make_mesh(config))


RICH = {"mesh": "data=2,tensor=2", "micro_batches": 2, "packing": True, "rollout_buckets": 2}


@pytest.mark.parametrize(
    ("updates", "changes"),
    [
        (3, {}),
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(3, RICH, marks=pytest.mark.full, id="packed and sharded"),
    ],
)
def test_steps_start_at_ratio_one(updates, changes, tmp_path, warm_programs):
    """Ratios are exactly 1 at the first update on a rollout, on weights that move, and at later updates no longer.

    Prompts have mixed lengths. `make test` has rows of one sequence on one device. There,
    `test_packed_sequences_have_the_bits_of_their_own_rows` in test_sequences.py has packed rows and two layers, and
    test_sharded.py a sharded head.
    """
    if "packing" in changes:
        changes = {**changes, "prompts": prompts.write(tmp_path / "mixed.jsonl", longest=150)}
    config = tiny.config(
        **{**tiny.MIXED, "learning_rate": 5e-3, **changes},
        invariant=True,
        compute_dtype="bfloat16",
        updates_per_rollout=updates,
    )
    steps = build_steps(config, load_task(config), make_mesh(config))
    warm, rows = steps if changes else warm_programs, []
    state = warm.initial_state()
    for step in range(70):
        state, _ = warm.warmup_step(state, step)
    state = steps.start_grpo(state)
    for step in range(70, 73):
        state, metrics = steps.grpo_step(state, step)
        rows.append(metrics)
    measured = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    assert 0 < measured["reward"].mean() < 1
    assert np.all(measured["mismatch"] == 0)
    assert np.all(measured["first_ratio_min"] == 1) and np.all(measured["first_ratio_max"] == 1)
    assert np.all(measured["first_clip_fraction"] == 0)
    if updates > 1:
        assert np.all(measured["ratio_min"] < 1) and np.all(measured["ratio_max"] > 1)
        assert measured["clip_fraction"].max() > 0


@pytest.mark.parametrize("kind", [STOCK, INVARIANT], ids=["stock", "invariant"])
def test_layers_are_lowered_once(kind):
    """A gradient step of 7 layers has the loops, products and functions of one of 2 layers: its kernels, on a GPU."""
    tokens, padding = jnp.zeros((2, 8), jnp.int32), jnp.zeros(2, jnp.int32)

    def lowered(layers: int) -> list[int]:
        graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(32, 32, layers, 2, kind=kind, rngs=nnx.Rngs(0))))

        def loss(params: nnx.State) -> jax.Array:
            return nnx.merge(graph, params)(tokens, padding).astype(jnp.float32).sum()

        text = jax.jit(jax.grad(loss)).lower(params).as_text()
        return [text.count(x) for x in ("stablehlo.while", "stablehlo.dot_general", "func.func")]

    assert lowered(2) == lowered(7)
