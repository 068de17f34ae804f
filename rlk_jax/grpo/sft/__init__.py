"""`rlk sft`: supervised fine-tuning of a given model, by the trainer of `rlk grpo`."""
