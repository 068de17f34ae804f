"""Real models in Flax NNX: decoders that a Hugging Face checkpoint describes, read and written as directories.

`load` gives a `CausalLM` of Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 (text), of stock layers or of invariant
ones.
"""

from rlk_jax.models.checkpoint import load, save
from rlk_jax.models.config import ModelConfig, UnsupportedModel, config_of, read_config
from rlk_jax.models.decoder import CausalLM, LogitsHead

__all__ = ["CausalLM", "LogitsHead", "ModelConfig", "UnsupportedModel", "config_of", "load", "read_config", "save"]
