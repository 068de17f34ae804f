"""Real models in Flax NNX: decoders that a Hugging Face checkpoint describes, read and written as directories.

`load` gives a `CausalLM` of Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 (text), of stock layers or of invariant
ones; `load_tokenizer` gives the `Tokenizer` of its text and chats.
"""

from rlk_jax.core.packages import MODEL_PACKAGES as _MODEL_PACKAGES
from rlk_jax.core.packages import require_extra as _require_extra

_require_extra(__name__, _MODEL_PACKAGES, extra="grpo")

from rlk_jax.models.checkpoint import load, save  # noqa: E402
from rlk_jax.models.config import ModelConfig, UnsupportedModel, config_of, read_config  # noqa: E402
from rlk_jax.models.decoder import CausalLM, LogitsHead  # noqa: E402
from rlk_jax.models.drawing import Sampling  # noqa: E402
from rlk_jax.models.sampling import Completions, RecordedToken, sample, stream, stream_recorded  # noqa: E402
from rlk_jax.models.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

__all__ = [
    "CausalLM",
    "Completions",
    "LogitsHead",
    "ModelConfig",
    "RecordedToken",
    "Sampling",
    "Tokenizer",
    "UnsupportedModel",
    "config_of",
    "load",
    "load_tokenizer",
    "read_config",
    "sample",
    "save",
    "stream",
    "stream_recorded",
]
