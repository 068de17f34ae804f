"""A checkpoint of a tiny random model with a tokenizer of bytes, and prompts for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from rlk_jax import models

SPECIALS = ("<pad>", "<s>", "<end>")
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "eos_token_id": [2, *range(40, 100)],
    "pad_token_id": 0,
}
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<end>{% endfor %}<s>assistant:"


def write_model(directory: Path, seed: int = 0, **fields: Any) -> Path:
    """Write the checkpoint. Many of its tokens stop a completion, so that lengths differ."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<end>", "bos_token": "<s>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    described = models.config_of({"vocab_size": len(vocab) + 4, **FIELDS, **fields})
    model = models.CausalLM(described, dtype="float32", rngs=nnx.Rngs(seed))
    models.save(model, directory)
    return directory


def write_prompts(path: Path, count: int = 10) -> Path:
    """Write prompts whose answer is one of two letters."""
    contents = [f"{'ab' * (i % 3)}{i}" for i in range(count)]
    rows = [{"prompt": [{"role": "user", "content": x}], "answer": "ab"[i % 2]} for i, x in enumerate(contents)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def letters(prompts: Any, completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The share of a completion's characters whose code is even where the answer is "b", and odd where it is "a"."""
    shares = [np.mean([ord(x) % 2 for x in text] or [0]) for text in completions]
    return [float(share if own == "a" else 1 - share) for share, own in zip(shares, answer, strict=True)]
