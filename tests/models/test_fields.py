"""Checkpoints whose config.json says things in its own way, beside transformers, which reads the same file."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlk_jax import models
from tests.models import tiny
from tests.support.helpers import assert_within_contract

LINEAR = {"rope_type": "linear", "factor": 4.0}
OLD_GEMMA3 = {"rope_theta": 5000.0, "rope_local_base_freq": 100.0}
BOTH_TYPES = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
MIXED = ["sliding_attention", "full_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", {}, {"rope_parameters": None, "rope_theta": 1e3, "rope_scaling": LINEAR}),
    "the old name of a type": (
        "llama",
        {},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "old and new ropes": ("llama", {}, {"rope_scaling": LINEAR, "rope_theta": 100.0}),
    "old and new ropes, both with a base": ("qwen3", {}, {"rope_scaling": {**LINEAR, "rope_theta": 50.0}}),
    "no base": ("mistral", {}, {"rope_parameters": {"rope_type": "default"}}),
    "gemma3, old ropes": ("gemma3_text", {}, {"rope_parameters": None, "rope_scaling": LINEAR, **OLD_GEMMA3}),
    "gemma3, old and new ropes": ("gemma3_text", {}, {"rope_scaling": LINEAR, **OLD_GEMMA3}),
    "gemma3, no bases": ("gemma3_text", {}, {"rope_parameters": BOTH_TYPES, **OLD_GEMMA3}),
    "gemma3, one type": ("gemma3_text", {}, {"rope_parameters": {"full_attention": LINEAR}, **OLD_GEMMA3}),
    "gemma3, a pattern": ("gemma3_text", {}, {"layer_types": None, "sliding_window_pattern": 2}),
    "gemma3, another pattern": ("gemma3_text", {}, {"layer_types": None, "_sliding_window_pattern": 2}),
    "gemma3, softcap": ("gemma3_text", {}, {"final_logit_softcapping": 2.0}),
    "gelu": ("llama", {}, {"hidden_act": "gelu"}),
    "gemma2, gelu": ("gemma2", {}, {"hidden_activation": "gelu", "hidden_act": "silu"}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}, {}),
    "qwen3, types": ("qwen3", {}, {"layer_types": MIXED, "use_sliding_window": True, "sliding_window": 5}),
}
"""The case of tiny.make, the fields it is made with, and those that its config.json says then; None is left out."""


def written(directory, case):
    """The checkpoint of a case, and transformers' model of it."""
    family, made, said = CASES[case]
    tiny.make(directory, family, **made)
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), **said}
    path.write_text(json.dumps({name: x for name, x in fields.items() if x is not None}))
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_that_transformers_reads_from_the_file(tmp_path, case):
    theirs = written(tmp_path, case)
    tokens = np.random.default_rng(0).integers(3, tiny.SIZES["vocab_size"], (2, 24))
    expected = theirs(torch.tensor(tokens)).logits.detach()
    ours = models.load(tmp_path, dtype=jnp.float32)
    assert_within_contract(ours.lm_head(ours(jnp.asarray(tokens))), expected, "models", jnp.float32, "forward")
