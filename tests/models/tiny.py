"""Tiny random checkpoints of every family, and a tiny tokenizer, made by transformers."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama 3.1, tied, biases": {
        "model_type": "llama",
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen2, yarn": {
        "model_type": "qwen2",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
    },
}
"""The fields of each case beside the sizes."""

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<|im_start|>assistant\n' }}
{% endif %}"""
"""A chat template in the shape of SmolLM2's."""
SPECIAL_TOKENS = ["<unk>", "<s>", "<|im_end|>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"]


def make(directory: Path, case: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Write a checkpoint, and return transformers' own model of it."""
    fields = {**SIZES, **FAMILIES[case], **changes}
    if fields["model_type"] == "qwen2":
        fields["hidden_size"] = 64  # its heads are as wide as the model in all
        del fields["head_dim"]
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Scales and biases are ones and zeros in a new model, where a mistake in them would not show.
            spread = 0.3 if parameter.ndim == 1 else 0.15
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(directory)
    return model


def make_tokenizer(adds_bos: bool = True, **named: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and a few merges, whose post-processor puts <s> in front."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    backend.train_from_iterator(["the user is an assistant", "system 17 + 26 = 43"] * 4, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", **named}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)
