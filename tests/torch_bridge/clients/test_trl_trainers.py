"""TRL's other trainers with a fused head: all that they log is what they log without the bridge."""

from typing import Any

import numpy as np
import pytest

import torch_bridge
from tests.support import helpers, tiny_trl
from tests.support.tiny_trl import torch

trl = pytest.importorskip("trl")

PAIRS = [{"prompt": "a", "chosen": " bc", "rejected": " xyz"}, {"prompt": "q", "chosen": " rst", "rejected": " z"}]
LABELLED = [{"prompt": "a", "completion": " bc", "label": True}, {"prompt": "q", "completion": " rst", "label": False}]
TRAINERS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "SFT": ([{"text": "hello world"}, {"text": "good day"}], {"max_length": 32, "loss_type": "nll"}),
    "DPO": (PAIRS, {"max_length": 32}),
    "KTO": (LABELLED, {"max_length": 32}),
    "RLOO": ([{"prompt": "one"}, {"prompt": "two"}], {"num_generations": 2, "max_completion_length": 5}),
}
MEASURED_BY_CLOCKS = ("runtime", "per_second", "step_time", "flos", "epoch")


def logged(name: str, folder: str) -> dict[str, float]:
    """Every number that two steps log."""
    rows, config = TRAINERS[name]
    torch.manual_seed(0)
    tokenizer = tiny_trl.byte_tokenizer()
    tiny_trl.model(len(tokenizer)).save_pretrained(folder)
    arguments = getattr(trl, f"{name}Config")(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=2,
        logging_steps=1,
        learning_rate=2e-3,
        per_device_train_batch_size=2,
        **config,
    )
    rewards = {"reward_funcs": lambda completion_ids, **_: [tiny_trl.reward_of(x) for x in completion_ids]}
    trainer = getattr(trl, f"{name}Trainer")(
        model=folder,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=tiny_trl.Dataset.from_list(rows * 4),
        **(rewards if name == "RLOO" else {}),
    )
    trainer.train()
    return {
        f"{step}: {key}": value
        for step, log in enumerate(trainer.state.log_history)
        for key, value in log.items()
        if isinstance(value, float) and not any(x in key for x in MEASURED_BY_CLOCKS)
    }


@pytest.mark.parametrize("name", ["DPO", *(pytest.param(x, marks=pytest.mark.full) for x in TRAINERS if x != "DPO")])
def test_logs_are_those_of_stock(name, tmp_path):
    """`make test` has one of these trainers: all call the same fused head, whose outputs test_trl.py compares."""
    expected = logged(name, str(tmp_path / "stock"))
    torch_bridge.install("trl")
    before = torch_bridge.cache_info()
    try:
        found = logged(name, str(tmp_path / "bridge"))
    finally:
        torch_bridge.uninstall("trl")
    after = torch_bridge.cache_info()
    assert after.hits + after.misses >= before.hits + before.misses + 2
    assert found.keys() == expected.keys() and any("loss" in key for key in found)
    actual, gold = (np.array([x[key] for key in expected]) for x in (found, expected))
    helpers.assert_error(np.max(np.abs(actual - gold) / (1 + np.abs(gold))), "trl_training", "float32", "forward")
