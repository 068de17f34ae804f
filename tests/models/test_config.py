"""config.json: what is read of it, and one message for everything that would be computed otherwise."""

import json
import re

import jax.numpy as jnp
import pytest
from flax import nnx

from rlk_jax import models
from rlk_jax.models import UnsupportedModel, config_of, read_config
from tests.models.tiny import LLAMA3, SIZES

PLAIN = {name: x for name, x in SIZES.items() if not name.endswith("token_id")}
LLAMA = {"model_type": "llama", **PLAIN}
GEMMA3 = {"model_type": "gemma3_text", **PLAIN}
BAD = {
    "family": ({"model_type": "bert"}, "model_type 'bert' is not among llama, mistral, qwen2"),
    "no family": ({"model_type": None}, "model_type None is not among"),
    "unknown field": ({"attn_gate": 2}, "attn_gate = 2 is a field of llama that is not known here: it may change"),
    "another family's field": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is a field of llama"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported, only 0."),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved = True is not supported, only False."),
    "several axes": ({"use_mrope": True}, "use_mrope = True is not supported, only False."),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu' is not among silu"),
    "rope type": ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not among default"),
    "rope number": ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs factor."),
    "rope field": ({"rope_scaling": {"type": "linear", "factor": 2.0, "turn": 1}}, "'linear' does not take turn."),
    "part of a head": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not"),
    "layer types": ({"layer_types": ["chunked_attention"] * 3}, "layer_types chunked_attention are not supported"),
    "count of layers": ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers."),
    "no window": ({"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention, and sliding_window"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_would_change_results_is_refused(what):
    changes, message = BAD[what]
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        config_of({**LLAMA, **changes})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_required_fields(name):
    with pytest.raises(UnsupportedModel, match=f"config.json has no {name}."):
        config_of({field: x for field, x in LLAMA.items() if field != name})


def test_directories_without_a_config(tmp_path):
    with pytest.raises(UnsupportedModel, match="does not exist: a checkpoint is a directory"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="is no JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == config_of(LLAMA)


def test_fields_of_smollm2_that_change_nothing():
    harmless = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}, "pretraining_tp": 1}
    assert config_of({**LLAMA, **harmless}) == config_of(LLAMA)


def windows(fields):
    return [layer.window for layer in config_of(fields).layers]


def test_which_layers_slide_a_window():
    assert windows({**LLAMA, "model_type": "mistral", "sliding_window": 7}) == [7, 7, 7]
    assert windows({**LLAMA, "model_type": "mistral", "sliding_window": None}) == [None] * 3
    qwen = {**LLAMA, "model_type": "qwen3", "sliding_window": 6, "max_window_layers": 2}
    assert windows(qwen) == [None] * 3 and windows({**qwen, "use_sliding_window": True}) == [None, None, 6]
    assert windows({**GEMMA3, "model_type": "gemma2", "sliding_window": 5}) == [5, None, 5]
    assert windows({**GEMMA3, "num_hidden_layers": 7}) == [4096] * 5 + [None, 4096]
    assert windows({**GEMMA3, "sliding_window_pattern": 3}) == [4096, 4096, None]


def test_ropes_by_the_type_of_layer():
    """Old fields and new ones say the same."""
    old = {**GEMMA3, "sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = {**GEMMA3, "sliding_window_pattern": 3, "rope_parameters": by_type}
    assert config_of(old).layers == config_of(new).layers
    assert [layer.rope.type for layer in config_of(new).layers] == ["default", "default", "linear"]
    with pytest.raises(UnsupportedModel, match="rope_parameters has no full_attention"):
        config_of({**new, "rope_parameters": {"sliding_attention": by_type["sliding_attention"]}})


def test_dynamic_ropes_end_where_their_frequencies_change():
    dynamic = config_of({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    model = models.CausalLM(dynamic, rngs=nnx.Rngs(0))
    model(jnp.zeros((1, 64), int))
    with pytest.raises(ValueError, match="other frequencies beyond 64 positions, got 65 slots"):
        model(jnp.zeros((1, 65), int))


def test_invariant_says_what_would_break_its_promise():
    dynamic = config_of({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    with pytest.raises(ValueError, match="kind 'invariant' refuses rope_type 'dynamic'"):
        models.CausalLM(dynamic, kind="invariant", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16, got"):
        models.CausalLM(config_of(LLAMA), kind="invariant", dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="kind must be 'stock' or 'invariant', got 'fast'"):
        models.CausalLM(config_of(LLAMA), kind="fast", rngs=nnx.Rngs(0))
    assert config_of({**LLAMA, "rope_parameters": LLAMA3}).layers[0].rope.type == "llama3"
