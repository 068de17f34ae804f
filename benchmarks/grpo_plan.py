"""The memory that `rlk grpo --model` needs by model and option: python -m benchmarks.grpo_plan --help.

It is what `rlk grpo --plan` finds in the compiled programs of a run. No model and no GPU are needed: a model is
described by its config.json, and the GPU is named. The tokens of the texts are bytes.
"""

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.table import Table
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks import common
from rlk_jax.core.absent_gpus import GPUS
from rlk_jax.grpo import GrpoConfig
from rlk_jax.grpo.plan import make_plan
from rlk_jax.grpo.stopping import StopRequest
from rlk_jax.grpo.usage import GIB

JOB: dict[str, Any] = {
    "reward": "last_number",
    "prompts_per_step": 8,
    "samples_per_prompt": 8,
    "max_new_tokens": 512,
    "updates_per_rollout": 1,
    "compute_dtype": "bfloat16",
}
PROMPT_TOKENS = 64
SMOKE: dict[str, Any] = {"prompts_per_step": 8, "samples_per_prompt": 2, "max_new_tokens": 4}
_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {**_LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
"""The fields of config.json that decide shapes; "tiny" is for --smoke."""
_SMALL: dict[str, Any] = {"remat": True, "micro_batches": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "stock": {},
    "remat": {"remat": True},
    "8 micro-batches": {"micro_batches": 8},
    "remat, 8 micro-batches": _SMALL,
    "remat, 8 micro-batches, beta 0": {**_SMALL, "beta": 0.0},
    "invariant": {"invariant": True},
    "invariant, remat": {"remat": True, "invariant": True},
    "invariant, remat, 8 micro-batches": {**_SMALL, "invariant": True},
    "invariant, remat, low rank 16": {"remat": True, "invariant": True, "lora_rank": 16},
    "invariant, remat, 8 devices": {"remat": True, "invariant": True, "mesh": "data=8,tensor=1"},
}


@dataclass(frozen=True)
class Row:
    """One run. Sizes are bytes on each device; the program is the one that needs most."""

    model: str
    options: str
    status: str
    states: int | None = None
    program: str | None = None
    peak: int | None = None


def write_files(folder: Path, name: str) -> dict[str, Any]:
    """Write a model's directory without weights and a file of prompts; they are options of a run."""
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({text: i for i, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **MODELS[name]}))
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": f"{i}".rjust(PROMPT_TOKENS), "answer": "1"} for i in range(64)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": str(folder), "prompts": str(prompts)}


def measure(name: str, options: str, device: str | None, sizes: dict[str, Any]) -> Row:
    """The row of one run."""
    print(f"compiling {name}, {options} …", file=sys.stderr)
    jax.clear_caches()
    row = common.attempt(functools.partial(_planned, name, options, device, sizes))
    return Row(name, options, row.status) if isinstance(row, common.Failure) else row


def _planned(name: str, options: str, device: str | None, sizes: dict[str, Any]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        config = GrpoConfig(**write_files(Path(folder), name), **{**JOB, **sizes, **OPTIONS[options]})
        _, plan = make_plan(config, device, StopRequest())
    return Row(name, options, "pass", sum(plan.states.values()), plan.largest.name, plan.largest.peak)


def _show(rows: Sequence[Row], device: str) -> None:
    table = Table("model", "options", "states, GiB", "peak, GiB", "of")
    for row in rows:
        if row.peak is None or row.states is None:
            table.add_row(row.model, row.options, row.status)
        else:
            table.add_row(row.model, row.options, GIB.number(row.states), GIB.number(row.peak), row.program)
    common.show(f"memory of rlk grpo --model, {device}", table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpo_plan", description=__doc__)
    parser.add_argument("--device", choices=GPUS, help="GPU to compile for (default: what is here)")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="(default: all but tiny)")
    parser.add_argument(
        "--options",
        nargs="+",
        choices=OPTIONS,
        metavar="NAME",
        default=list(OPTIONS),
        help=f"of {list(OPTIONS)} (default: all)",
    )
    common.add_outputs(parser)
    options = parser.parse_args(argv)
    if not (options.smoke or options.models or options.device):
        common.require_gpu("--device names one to compile for, and --smoke has a small model")
    models, sizes = (["tiny"], SMOKE) if options.smoke else (options.models or list(MODELS)[1:], {})
    rows = [measure(name, how, options.device, sizes) for name in models for how in options.options]
    _show(rows, options.device or jax.devices()[0].device_kind)
    if options.json:
        common.write(options.json, "grpo_plan", argv, rows, timing="not timed")
    common.plot(options.plot, ((r.model, r.options, r.peak) for r in rows), "peak memory, bytes")
    return common.exit_status(r.status for r in rows)


if __name__ == "__main__":
    sys.exit(main())
