"""The frequencies of rotary embeddings beside those of transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlk_jax.models.config import config_of
from tests.support.helpers import assert_same_bits, assert_within_contract

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, its numbers": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
}


@pytest.mark.parametrize("is_new", [False, True], ids=["old fields", "new fields"])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name, is_new):
    scaling = SCALINGS[name]
    fields = {**SIZES, "model_type": "llama", "max_position_embeddings": 256}
    fields |= (
        {"rope_parameters": {**scaling, "rope_theta": 5e4}} if is_new else {"rope_theta": 5e4, "rope_scaling": scaling}
    )
    rope = config_of(fields).layers[0].rope
    theirs = LlamaConfig(**SIZES, max_position_embeddings=256, rope_parameters={**scaling, "rope_theta": 5e4})
    expected, attention = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu", seq_len=1000)
    frequencies = rope.frequencies()
    if rope.type == "dynamic":
        frequencies = rope.stretched(jnp.asarray(frequencies), jnp.int32(1000))
    assert_within_contract(frequencies, expected.numpy(), "models", jnp.float32, "forward")
    assert rope.frequencies().dtype == np.float32 and rope.attention == pytest.approx(attention)


def test_a_dynamic_rope_keeps_its_bits_up_to_its_original_length():
    fields = {**SIZES, "model_type": "llama", "max_position_embeddings": 256, "rope_scaling": SCALINGS["dynamic"]}
    rope = config_of(fields).layers[0].rope
    for length in (1, 255, 256):
        assert_same_bits(rope.stretched(jnp.asarray(rope.frequencies()), jnp.int32(length)), rope.frequencies())
