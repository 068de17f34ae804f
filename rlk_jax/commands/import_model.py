"""`rlk import-model`: a model in llama.cpp's GGUF becomes a checkpoint's directory, through transformers.

transformers does not take all over that a GGUF says, and does not say so; what would change the model is refused here.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlk_jax.core.named_functions import first_line
from rlk_jax.core.packages import MODEL_PACKAGES
from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.extras import require_packages
from rlk_jax.grpo.usage import size_text

if TYPE_CHECKING:
    from rlk_jax.models import ModelConfig

_DTYPES = ("bfloat16", "float16", "float32")
_MAGIC = b"GGUF"
_STRING_TYPE = 8
"""How GGUF numbers the type of texts."""
_SPLITS = {"gpt-2", "llama3", "llama-v3", "llama-bpe", "smaug-bpe", "tekken", "qwen2", "deepseek-r1-qwen"}
"""How a text is cut before tokens are merged, by GGUF's names, where transformers does it as the authors did. It cuts
others as GPT-2 does, without a word.
"""
_DIGITS_APART = "smollm"
"""The one of the others that is mended here: each digit stands alone, then as GPT-2 does."""
_ENDS = ("eos", "eot", "eom")
"""The tokens by which GGUF says that a text, a turn or a message ends. transformers takes over the first alone."""
_DESCRIPTION = "Convert a GGUF to a directory that rlk_jax.models and transformers load."


@dataclass(frozen=True)
class Gguf:
    """What a GGUF says about its model."""

    path: Path
    says: Mapping[str, Any]
    """Its metadata that are one number or one text, by their keys without the name of the architecture."""
    tensors: tuple[str, ...]

    @property
    def source(self) -> dict[str, Any]:
        """The file as transformers' classes want it named. The folder is here, so nothing is looked up elsewhere."""
        name = {"pretrained_model_name_or_path": str(self.path.absolute().parent), "gguf_file": self.path.name}
        return {**name, "local_files_only": True}


IMPORT_PACKAGES = ("gguf", "transformers", "torch", *MODEL_PACKAGES)
"""All of the extra `import` that the command imports."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `import-model`."""
    parser = subparsers.add_parser("import-model", help=_DESCRIPTION, description=_DESCRIPTION)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf", help="the file to convert")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write: a new or an empty directory")
    help_text = "what the weights are rounded to (default: %(default)s)"
    parser.add_argument("--dtype", choices=_DTYPES, default=_DTYPES[0], help=help_text)
    parser.set_defaults(run=lambda options: run(options.model, options.directory, options.dtype))


def run(model: Path, directory: Path, dtype: str) -> int:
    """Convert a file and print what was written. Raises BadInput or OSError for what cannot be converted."""
    try:
        print(import_model(model, directory, dtype))
        return 0
    except ValueError as error:
        raise BadInput(str(error)) from error


def import_model(path: Path, directory: Path, dtype: str) -> str:
    """Convert a GGUF, and say in words what was written. Raises ValueError or OSError, in one line, for what cannot be
    converted; the directory is then as it was.
    """
    require_packages(IMPORT_PACKAGES, extra="import")
    _check_paths(path, directory)
    from rlk_jax.models import config_of

    try:
        gguf = _read_gguf(path)
        fields = _fields(gguf)
    except Exception as error:  # Two packages read a file that may be damaged in any way.
        raise BadInput(f"{path} cannot be read: {first_line(error)}") from error
    check_taken_over(gguf, config_of(fields))
    try:
        model, found = _model(gguf)
        tokenizer = _tokenizer_of(gguf)
    except Exception as error:
        raise BadInput(f"{path} cannot be converted: {first_line(error)}") from error
    lost = {name: sorted(found[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if found[name]}
    if lost:
        raise BadInput(f"{path} does not hold the tensors of its model: {lost}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as folder:
        written = Path(folder) / "model"
        said = write_checkpoint(written, model, tokenizer, dtype, _ends_of(gguf))
        os.replace(written, directory)
    return f"{directory}: {said}"


def write_checkpoint(directory: Path, model: Any, tokenizer: Any, dtype: str, stop_ids: Iterable[int]) -> str:
    """Write a model and a tokenizer of transformers, which itself saves no model of a GGUF, and say what was written.

    Completions end at `stop_ids` and at the tokens that the model names.
    """
    import jax.numpy as jnp

    from rlk_jax.models import load_tokenizer, read_config
    from rlk_jax.models.checkpoint import converted, write_tensors

    tokenizer.save_pretrained(directory)
    fields = {**_fields_of(model.config), "architectures": [type(model).__name__], "dtype": dtype}
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    generation = model.generation_config.to_diff_dict()
    generation.pop("_from_model_config", None)
    given = generation.get("eos_token_id")
    stops = {*stop_ids, *(given if isinstance(given, list) else [] if given is None else [given])}
    if stops:
        generation["eos_token_id"] = sorted(stops)
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {
        name: converted(name, np.ascontiguousarray(tensor.numpy()), jnp.dtype(dtype))
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    write_tensors(tensors, directory)
    config = read_config(directory)
    load_tokenizer(directory)
    count, size = (sum(getattr(x, name) for x in tensors.values()) for name in ("size", "nbytes"))
    return (
        f"{fields['model_type']}, {count / 1e6:.1f} million parameters in {dtype}, {len(config.layers)} layers, "
        f"{config.vocab_size} tokens, {size_text(size)}"
    )


def _check_paths(path: Path, directory: Path) -> None:
    """The file is a GGUF, and the directory is new or empty."""
    if not path.is_file():
        raise BadInput(f"{path} is no file")
    with path.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise BadInput(f"{path} is no GGUF: it does not begin with {_MAGIC.decode()}")
    if directory.exists() and not directory.is_dir():
        raise BadInput(f"{directory} is no directory")
    if directory.exists() and any(directory.iterdir()):
        raise BadInput(f"{directory} is not empty: name a new directory")


def _read_gguf(path: Path) -> Gguf:
    """The metadata of a GGUF."""
    from gguf import GGUFReader

    reader, says = GGUFReader(path), dict[str, Any]()
    for key, field in reader.fields.items():
        if len(field.types) == 1:  # Arrays are vocabularies.
            part = field.parts[field.data[0]]
            says[key] = bytes(part).decode() if field.types[0] == _STRING_TYPE else part[0].item()
    prefix = f"{says['general.architecture']}."
    return Gguf(path, {key.removeprefix(prefix): x for key, x in says.items()}, tuple(x.name for x in reader.tensors))


def _fields(gguf: Gguf) -> dict[str, Any]:
    """The fields of config.json, as transformers makes them from a GGUF."""
    from transformers import AutoConfig

    return _fields_of(AutoConfig.from_pretrained(**gguf.source))


def _fields_of(config: Any) -> dict[str, Any]:
    """The fields of config.json of a configuration of transformers, less what it says of the file it is from."""
    fields = config.to_diff_dict()
    return {name: x for name, x in fields.items() if name not in ("quantization_config", "_model_name_or_path")}


def _model(gguf: Gguf) -> tuple[Any, dict[str, Any]]:
    """The model in float32, and what transformers says about its tensors."""
    from transformers import AutoModelForCausalLM

    pair: Any = AutoModelForCausalLM.from_pretrained(**gguf.source, dtype="float32", output_loading_info=True)
    return pair


def _tokenizer_of(gguf: Gguf) -> Any:
    """The tokenizer, with its digits apart where the authors had them so."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(**gguf.source)
    if gguf.says.get("tokenizer.ggml.pre") == _DIGITS_APART:
        digits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(digits)
    return tokenizer


def _ends_of(gguf: Gguf) -> list[int]:
    """The tokens that end a text, a turn or a message."""
    found = [gguf.says.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    return [x for x in found if x is not None]


def check_taken_over(gguf: Gguf, config: "ModelConfig") -> None:
    """The configuration says all that the GGUF says about the model, and no more."""
    windows = {layer.window for layer in config.layers if layer.window is not None}
    bases = {layer.rope.base for layer in config.layers}
    wanted: dict[str, set[Any]] = {
        "block_count": {len(config.layers)},
        "embedding_length": {config.width},
        "feed_forward_length": {config.inner},
        "vocab_size": {config.vocab_size},
        "attention.head_count": {config.heads},
        "attention.head_count_kv": {config.groups},
        "attention.key_length": {config.head_size},
        "attention.value_length": {config.head_size},
        "attention.layer_norm_rms_epsilon": {config.norm_epsilon},
        "attention.sliding_window": windows,
        "attn_logit_softcapping": {config.attention_softcap},
        "final_logit_softcapping": {config.final_softcap},
        "rope.dimension_count": {config.head_size},
        "rope.freq_base": bases,
        "rope.scaling.type": {"none"},
    }
    for key, value in gguf.says.items():
        if key.partition(".")[0] in ("GGUF", "general", "tokenizer") or key == "context_length":
            continue
        if key not in wanted or value not in wanted[key]:
            raise BadInput(f"{key} = {value!r} of {gguf.path} would be lost: transformers does not take it over")
    if windows and "attention.sliding_window" not in gguf.says:
        raise BadInput(f"transformers gives {gguf.path} a sliding window of {max(windows)}, which it does not have")
    if config.attention_scale != config.head_size**-0.5:
        raise BadInput(f"transformers does not know the scale of attention in {gguf.path}, which no GGUF says")
    if scaled := [name for name in gguf.tensors if name.startswith("rope_")]:
        raise BadInput(
            f"{scaled[0]} of {gguf.path} would be lost: transformers does not take over how Llama 3.1 scales positions"
        )
    split = gguf.says.get("tokenizer.ggml.pre")
    if gguf.says.get("tokenizer.ggml.model") == "gpt2" and split not in {*_SPLITS, _DIGITS_APART}:
        raise BadInput(f"tokenizer.ggml.pre = {split!r} of {gguf.path} is not known: texts would have other tokens")
