"""The decoder against a float64 definition, its KV cache, and rollouts."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlk_jax.checker import relative_norm, tolerance
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.layers import INVARIANT, ROTARY_BASE, STOCK
from rlk_jax.grpo.model import Decoder
from rlk_jax.grpo.rollout import no_score, sample_completions
from rlk_jax.grpo.sequences import join_completions
from rlk_jax.grpo.steps import target_logps
from rlk_jax.grpo.tasks import completion_mask
from rlk_jax.grpo.vocabulary import EOS, PAD, VOCAB_SIZE
from tests.grpo import tiny
from tests.grpo.tiny import HEADS, WIDTH
from tests.support import helpers

PROMPT_WIDTH, LENGTH = 6, 5
PADDING = np.array([0, 3, 5, 1], np.int32)
MESH = jax.make_mesh((1, 1), ("data", "tensor"))
target_logps_once = nnx.jit(target_logps, static_argnames="head")


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny.decoder(STOCK)


@pytest.fixture(scope="module")
def prompt_ids() -> np.ndarray:
    ids = np.random.default_rng(0).integers(EOS + 1, VOCAB_SIZE, (len(PADDING), PROMPT_WIDTH), np.int32)
    return np.where(np.arange(PROMPT_WIDTH) < PADDING[:, None], PAD, ids)


@pytest.fixture(scope="module")
def completion_ids() -> np.ndarray:
    return np.random.default_rng(1).integers(EOS + 1, VOCAB_SIZE, (len(PADDING), LENGTH), np.int32)


@pytest.fixture(scope="module")
def tokens(prompt_ids, completion_ids) -> np.ndarray:
    """What a training pass reads; in this shape, tests share a program."""
    return np.concatenate([prompt_ids, completion_ids[:, :-1]], axis=1)


@nnx.jit
def hidden_of(model: Decoder, tokens: np.ndarray, padding: np.ndarray) -> jax.Array:
    return model(tokens, padding)


def gold_logps(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Log-prob of each next token of one unpadded sequence: the architecture written out in float64 NumPy."""

    def array(parameter):
        return np.asarray(parameter[...], np.float64)

    def norm(x, layer):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * array(layer.scale)

    def turned(x):  # Pairs (i, i + half) are complex numbers, turned by position · base^(−i/half).
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] * ROTARY_BASE ** (-np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], axis=-1)

    x = array(model.embed.embedding)[tokens]
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for block in model.blocks:
        projected = norm(x, block.attention_norm) @ array(block.attention.query_key_value.kernel)
        heads = []
        for head in range(HEADS):
            columns = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            q, k, v = (part[:, columns] for part in np.split(projected, 3, axis=1))
            scores = np.where(causal, turned(q) @ turned(k).T / np.sqrt(WIDTH // HEADS), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v)
        x = x + np.concatenate(heads, axis=1) @ array(block.attention.out.kernel)
        gate, up = np.split(norm(x, block.feed_forward_norm) @ array(block.feed_forward.gate_up.kernel), 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ array(block.feed_forward.down.kernel)
    logits = norm(x, model.norm) @ array(model.lm_head.kernel)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logp[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize("implementation", helpers.IMPLEMENTATIONS)
def test_target_logps_equal_the_definition_whatever_the_padding(model, prompt_ids, completion_ids, implementation):
    assert_is_the_definition(model, prompt_ids, completion_ids, MeshHead(MESH, VOCAB_SIZE, implementation))


@pytest.mark.parametrize(
    ("kind", "implementation"), [(INVARIANT, "deterministic"), (replace(STOCK, dtype=jnp.bfloat16), "xla")]
)
def test_bfloat16_is_near_the_definition_and_its_gradients_are_float32(
    prompt_ids, completion_ids, kind, implementation
):
    model, head = tiny.decoder(kind), MeshHead(MESH, VOCAB_SIZE, implementation, kind.dtype)
    error = assert_is_the_definition(model, prompt_ids, completion_ids, head)
    assert error > tolerance("grpo_decoder", jnp.float32, "forward"), "computed in float32"

    def loss(model: Decoder) -> jax.Array:
        mask = np.ones(completion_ids.shape, bool)
        return target_logps(model, join_completions(prompt_ids, PADDING, completion_ids, mask), head).sum()

    gradients = nnx.state(jax.eval_shape(nnx.grad(loss), model))
    assert {leaf.dtype for leaf in jax.tree.leaves((gradients, nnx.state(model)))} == {jnp.dtype("float32")}


def assert_is_the_definition(
    model: Decoder, prompt_ids: np.ndarray, completion_ids: np.ndarray, head: MeshHead
) -> float:
    """The error."""
    mask = np.arange(LENGTH) < np.array([[5], [1], [3], [0]])
    actual = target_logps_once(model, join_completions(prompt_ids, PADDING, completion_ids, mask), head=head)
    gold = np.zeros(mask.shape)
    for row, padding in enumerate(PADDING):
        sequence = np.concatenate([prompt_ids[row, padding:], completion_ids[row]])
        gold[row] = gold_logps(model, sequence)[-LENGTH:] * mask[row]
    assert not np.any(np.asarray(actual)[~mask])
    helpers.assert_within_contract(actual, gold, "grpo_decoder", head.dtype, "forward")
    return relative_norm(actual, gold)


@functools.partial(nnx.jit, static_argnames=("length", "greedy"))
def rolled_out(
    model: Decoder, prompt_ids: np.ndarray, padding: np.ndarray, seed: int, *, length=LENGTH, greedy=False
) -> jax.Array:
    """The tokens of completions."""
    keys = jax.random.split(jax.random.key(seed), len(prompt_ids))
    return sample_completions(model, prompt_ids, padding, keys, no_score, length=length, greedy=greedy).completion_ids


@pytest.mark.parametrize("cut", [pytest.param(1, marks=pytest.mark.full), 4, pytest.param(8, marks=pytest.mark.full)])
def test_decoding_with_the_cache_equals_the_full_forward(model, tokens, cut):
    """`make test` has one of three lengths of the prompt."""
    extend = nnx.jit(Decoder.extend)
    hidden, cache = extend(model, tokens[:, :cut], PADDING, model.empty_cache(*tokens.shape), 0)
    pieces = [hidden]
    for slot in range(cut, tokens.shape[1]):
        hidden, cache = extend(model, tokens[:, slot : slot + 1], PADDING, cache, slot)
        pieces.append(hidden)
    real = np.arange(tokens.shape[1]) >= PADDING[:, None]
    cached, full = np.concatenate(pieces, axis=1)[real], np.asarray(hidden_of(model, tokens, PADDING))[real]
    helpers.assert_within_contract(cached, full, "decoder_cache", jnp.float32, "forward")


def test_slots_that_the_cache_does_not_have(model, tokens):
    """What is known to be outside raises; what is not, is NaN."""
    cache, slots = model.empty_cache(*tokens.shape), tokens.shape[1]
    with pytest.raises(ValueError, match=f"extend got 1 tokens from slot {slots} on, and a cache of {slots} slots."):
        model.extend(tokens[:, :1], PADDING, cache, slots)
    assert np.isnan(nnx.jit(Decoder.extend)(model, tokens[:, :1], PADDING, cache, slots)[0]).all()


def test_padding_slots_hold_nothing(model, tokens):
    real = np.arange(tokens.shape[1]) >= PADDING[:, None]
    hidden, same = (np.asarray(hidden_of(model, x, PADDING))[real] for x in (tokens, np.where(real, tokens, 7)))
    chex.assert_trees_all_equal(hidden, same)


def test_greedy_rollout_takes_the_most_likely_token_of_the_full_forward(model, prompt_ids):
    ids = rolled_out(model, prompt_ids, PADDING, 0, greedy=True)
    tokens = jnp.concatenate([prompt_ids, ids], axis=1)
    likely = jnp.argmax(model.lm_head(hidden_of(model, tokens[:, :-1], PADDING)[:, PROMPT_WIDTH - 1 :]), axis=-1)
    mask = completion_mask(ids)
    chex.assert_trees_all_equal(jnp.where(mask, ids, PAD), jnp.where(mask, likely, PAD))


def test_rollout_samples_from_the_policy(model, prompt_ids, tokens):
    """Token frequencies lie within Hoeffding's bound of the probabilities, for all tokens together, at odds of 1e-9."""
    count = 4096
    prompts = np.repeat(prompt_ids[1:2], count, axis=0), np.repeat(PADDING[1:2], count)
    ids = np.asarray(rolled_out(model, *prompts, 0, length=1))
    frequencies = np.bincount(ids[:, 0], minlength=VOCAB_SIZE) / count
    probabilities = jax.nn.softmax(model.lm_head(hidden_of(model, tokens, PADDING)[:, PROMPT_WIDTH - 1 :]))[1, 0]
    assert np.abs(frequencies - probabilities).max() <= np.sqrt(np.log(2 * VOCAB_SIZE / 1e-9) / (2 * count))


COUNT = 64
"""Rows of the rollouts that share a program."""


def test_rollout_stops_at_eos_and_pads_the_rest(prompt_ids):
    model = tiny.decoder(STOCK)
    kernel = model.lm_head.kernel[...]
    model.lm_head.kernel[...] = kernel.at[:, EOS].add(kernel[:, 10:40].sum(axis=1))  # EOS comes early and often.
    ids = np.asarray(rolled_out(model, np.resize(prompt_ids, (COUNT, PROMPT_WIDTH)), np.resize(PADDING, COUNT), 0))
    ends = np.where((ids == EOS).any(axis=1), (ids == EOS).argmax(axis=1), ids.shape[1])
    assert len(set(ends.tolist())) > 2
    assert np.all(ids[np.arange(ids.shape[1]) > ends[:, None]] == PAD)


def test_rollout_depends_on_key_and_nothing_else(model, prompt_ids):
    prompts = np.resize(prompt_ids, (COUNT, PROMPT_WIDTH)), np.resize(PADDING, COUNT)
    ids, again, other = (np.asarray(rolled_out(model, *prompts, seed)) for seed in (0, 0, 1))
    chex.assert_trees_all_equal(ids, again)
    assert np.any(ids != other)


def test_rows_draw_from_keys_of_their_own(model, prompt_ids):
    ids = rolled_out(model, np.repeat(prompt_ids[:1], COUNT, axis=0), np.repeat(PADDING[:1], COUNT), 0)
    assert len({tuple(row) for row in np.asarray(ids).tolist()}) > COUNT // 2
