"""Dynamic rotary embeddings beyond their original length, beside transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import DynamicCache

from rlk_jax import models
from tests.models import tiny
from tests.support.helpers import assert_within_contract

ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ORIGINAL = 24


@pytest.fixture(params=["llama", "gemma2"])
def both(tmp_path, request):
    theirs = tiny.make(tmp_path, request.param, rope_parameters=dict(ROPE), max_position_embeddings=ORIGINAL)
    return theirs, models.load(tmp_path, dtype=jnp.float32)


def drawn(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, tiny.SIZES["vocab_size"], (rows, length))


@pytest.mark.parametrize("length", [ORIGINAL, 60])
def test_logits(both, length):
    theirs, ours = both
    tokens = drawn(2, length)
    expected = theirs(torch.tensor(tokens)).logits.detach()
    logits = nnx.jit(lambda model, tokens: model.lm_head(model(tokens)))(ours, jnp.asarray(tokens))
    assert_within_contract(logits, expected, "models", jnp.float32, "forward")


def test_greedy_decoding_behind_left_padding(both):
    """Keys stay in both caches as they were turned, and the longest row says how long a call is."""
    theirs, ours = both
    padding, width, steps = np.array([0, 6]), 20, 24
    tokens = drawn(2, width)
    seen = torch.tensor(np.arange(width + steps) >= padding[:, None]).long()
    their_cache, their_new, expected = DynamicCache(config=theirs.config), torch.tensor(tokens), []
    for end in range(width, width + steps):
        begin = end - their_new.shape[1]
        places = torch.tensor(np.maximum(np.arange(begin, end) - padding[:, None], 0))
        out = theirs(their_new, attention_mask=seen[:, :end], position_ids=places, cache=their_cache)
        their_new = out.logits[:, -1:].argmax(-1)
        expected.append(their_new[:, 0].tolist())

    @nnx.jit
    def extend(model, new, cache, start):
        hidden, cache = model.extend(new, jnp.asarray(padding), cache, start)
        return jnp.argmax(model.lm_head(hidden[:, -1]), axis=-1), cache

    new, cache = extend(ours, jnp.asarray(tokens), ours.empty_cache(2, width + steps), 0)
    found = [new.tolist()]
    for start in range(width, width + steps - 1):
        new, cache = extend(ours, new[:, None], cache, jnp.int32(start))
        found.append(new.tolist())
    assert found == expected
