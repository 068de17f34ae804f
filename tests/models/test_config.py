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
    "no family": ({"model_type": None}, "model_type must be a string, got None."),
    "families": ({"model_type": ["llama"]}, "model_type must be a string, got ['llama']."),
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
    "windows of llama": ({"sliding_window": 4}, "sliding_window = 4 is not supported, only None."),
    "types of llama": (
        {"layer_types": ["sliding_attention"] * 3},
        "layer_types may not differ from sliding_window = None",
    ),
    "ropes of llama": (
        {"rope_parameters": {"full_attention": {}}},
        "rope_type 'default' does not take full_attention.",
    ),
    "types of rope": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn"}},
        "rope_type 'yarn' is not type 'linear'",
    ),
    "rope": ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'."),
    "rope type list": ({"rope_scaling": {"type": ["linear"]}}, "type must be a string, got ['linear']."),
    "rope factor": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number, got 0."),
    "rope base": ({"rope_theta": -1.0}, "rope_theta must be a positive number, got -1.0."),
    "no base": ({"rope_theta": None}, "rope_theta must be a positive number, got None."),
    "llama3's ends": (
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
        "high_freq_factor = 4.0 must be above low_freq_factor = 4.0.",
    ),
    "infinite": ({"rope_theta": float("inf")}, "rope_theta must be a positive number, got inf."),
    "yarn's base": ({"rope_theta": 1, "rope_scaling": {"type": "yarn"}}, "'yarn' needs a rope_theta above 1, got 1.0."),
    "dynamic pair": (
        {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic' needs heads of at least 4 numbers, got 2.",
    ),
    "text for a size": ({"vocab_size": "131"}, "vocab_size must be a positive integer, got '131'."),
    "no width": ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0."),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0."),
    "too large": ({"intermediate_size": 2**31}, "intermediate_size must be a positive integer, got 2147483648."),
    "groups": ({"num_key_value_heads": 3}, "num_attention_heads = 4 is no multiple of num_key_value_heads = 3."),
    "odd heads": ({"head_dim": 7}, "head_dim must be even, got 7: rotary embeddings turn pairs."),
    "no epsilon": ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number, got None."),
    "text for a switch": ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'."),
    "activations": ({"hidden_act": ["silu"]}, "hidden_act must be a string, got ['silu']."),
    "numbers for types": ({"layer_types": [1, 2, 3]}, "layer_types must be a list of strings, got [1, 2, 3]."),
}
BAD_ELSEWHERE = {
    "mistral's types": (
        "mistral",
        {"sliding_window": 7, "layer_types": ["full_attention"] * 3},
        "layer_types may not differ from sliding_window = 7, which holds for every layer of mistral.",
    ),
    "mistral's biases": ("mistral", {"attention_bias": True}, "attention_bias = True is not supported, only False."),
    "qwen's switch": (
        "qwen3",
        {"layer_types": ["sliding_attention"] * 3},
        "layer_types has sliding_attention, and use_sliding_window is false.",
    ),
    "qwen's count": (
        "qwen2",
        {"max_window_layers": -1, "use_sliding_window": True},
        "must be an integer of at least 0",
    ),
    "no window": ("gemma2", {"sliding_window": None}, "layer_types has sliding_attention, and sliding_window is null."),
    "gemma 2's ropes": (
        "gemma2",
        {"rope_parameters": {"full_attention": {}}},
        "'default' does not take full_attention.",
    ),
    "gemma 3's softcap": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not"),
    "gemma 3's rope": (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "default"}},
        "rope_parameters takes full_attention and sliding_attention here, got rope_type.",
    ),
    "gemma 3's old type": (
        "gemma3_text",
        {"num_hidden_layers": 6, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_type 'default' is not type 'linear', which stands beside it.",
    ),
    "gemma 3's yarn": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "truncate": False}}},
        "truncate = False is not supported in the rope_parameters of one type of layer.",
    ),
    "gemma's activation": ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not among silu"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_would_change_results_is_refused(what):
    changes, message = BAD[what]
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        config_of({**LLAMA, **changes})


@pytest.mark.parametrize("what", BAD_ELSEWHERE)
def test_what_other_families_compute_otherwise_is_refused(what):
    family, changes, message = BAD_ELSEWHERE[what]
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        config_of({**LLAMA, "model_type": family, **changes})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_required_fields(name):
    with pytest.raises(UnsupportedModel, match=f"config.json has no {name}."):
        config_of({field: x for field, x in LLAMA.items() if field != name})


def test_directories_without_a_config(tmp_path):
    with pytest.raises(UnsupportedModel, match="does not exist: a checkpoint is a directory"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == config_of(LLAMA)


DAMAGED = {
    "cut off": (b"{", " is no JSON: "),
    "latin-1": (b'{"model_type": "\xff"}', " is no UTF-8: "),
    "a long number": (b'{"vocab_size": ' + b"9" * 5000 + b"}", " is no JSON: "),
    "deep": (b"[" * 200_000, " is no JSON: "),
    "a list": (b"[1]", " must hold an object, got a list."),
    "a field": (json.dumps({**LLAMA, "vocab_size": 0}).encode(), ": vocab_size must be a positive integer, got 0."),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files_are_one_line_that_names_them(tmp_path, what):
    text, message = DAMAGED[what]
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(UnsupportedModel, match=f"^{re.escape(f'{path}{message}')}") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


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


def test_invariant_says_what_would_break_its_promise():
    dynamic = config_of({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    with pytest.raises(ValueError, match="kind 'invariant' refuses rope_type 'dynamic'"):
        models.CausalLM(dynamic, kind="invariant", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16, got"):
        models.CausalLM(config_of(LLAMA), kind="invariant", dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="kind must be 'stock' or 'invariant', got 'fast'"):
        models.CausalLM(config_of(LLAMA), kind="fast", rngs=nnx.Rngs(0))
    assert config_of({**LLAMA, "rope_parameters": LLAMA3}).layers[0].rope.type == "llama3"
