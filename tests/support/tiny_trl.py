"""A GRPOTrainer of TRL's that runs on a CPU without a download: two layers, a byte tokenizer, a reward of the ids."""

import os
from typing import Any

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
torch = pytest.importorskip("torch", reason="the extra `clients` is not installed")
pytest.importorskip("trl", reason="the extra `clients` is not installed")

from datasets import Dataset  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.trl_steps import byte_tokenizer  # noqa: E402


def model(vocab_size: int) -> Qwen2ForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": vocab_size}
    return Qwen2ForCausalLM(Qwen2Config(num_attention_heads=2, num_key_value_heads=2, **sizes))


def reward_of(ids: Any) -> float:
    return float(sum(ids) % 11)


def trainer(kind: type[GRPOTrainer], folder: str, policy: Any = None, **config: Any) -> GRPOTrainer:
    """A trainer of four sequences a step, with the same weights and seed in every call, or with a saved `policy`."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    defaults = {"per_device_train_batch_size": 4, "num_generations": 4, "bf16": False, "gradient_checkpointing": False}
    return kind(
        model=policy or model(len(tokenizer)),
        reward_funcs=lambda completion_ids, **_: [reward_of(ids) for ids in completion_ids],
        args=GRPOConfig(
            output_dir=folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **defaults | config
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}]),
    )
