"""`rlk sft`: the command line."""

import argparse

from rlk_jax.grpo.command import add_trainer
from rlk_jax.grpo.sft.config import SftConfig

_DESCRIPTION = (
    "Train a Hugging Face checkpoint (--model) on prompts and their completions (--data), by the trainer of rlk grpo."
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `sft`."""
    add_trainer(subparsers, SftConfig, _DESCRIPTION)
