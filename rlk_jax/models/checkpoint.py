"""Checkpoints as Hugging Face has them: a directory with config.json and safetensors, in and out."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rlk_jax.core.checks import require
from rlk_jax.models.config import ModelConfig, UnsupportedModel, read_config
from rlk_jax.models.decoder import CausalLM, DecoderLayer
from rlk_jax.models.fields import string, table
from rlk_jax.models.placement import spec_of
from rlk_jax.models.text_files import read_object

_INDEX, _SINGLE, _UNFINISHED = "model.safetensors.index.json", "model.safetensors", "model.unfinished"
_BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)
"""Files of a tokenizer and of generation that `save` takes along."""
_EMBEDDING_TENSOR, _HEAD_TENSOR = "model.embed_tokens.weight", "lm_head.weight"
_TENSOR_DTYPES = ("BF16", "F16", "F32")
"""The dtypes of tensors that are read, by the names that safetensors has for them."""


@dataclass(frozen=True)
class _Part:
    """A parameter of the decoder, and the tensors that lie in it one behind the other along its first axis."""

    parameter: Any
    names: list[str]
    sizes: list[int]


def _linear(linear: Any, names: list[str], sizes: list[int]) -> Iterator[_Part]:
    yield _Part(linear.weight, [f"{name}.weight" for name in names], sizes)
    if linear.bias is not None:
        yield _Part(linear.bias, [f"{name}.bias" for name in names], sizes)


def _parts_of_block(config: ModelConfig, block: DecoderLayer, prefix: str) -> Iterator[_Part]:
    """The parameters of one layer by the names of a checkpoint."""
    attention, feed_forward, size = block.attention, block.feed_forward, config.head_size
    own, sizes = f"{prefix}self_attn.", [config.heads * size, config.groups * size, config.groups * size]
    yield from _linear(attention.query_key_value, [f"{own}{x}_proj" for x in "qkv"], sizes)
    yield from _linear(attention.out, [f"{own}o_proj"], [config.width])
    yield from _linear(
        feed_forward.gate_up, [f"{prefix}mlp.{x}_proj" for x in ("gate", "up")], [config.inner, config.inner]
    )
    yield from _linear(feed_forward.down, [f"{prefix}mlp.down_proj"], [config.width])
    norms: dict[str, Any] = {"input_layernorm": block.attention_norm}
    if config.has_post_norms:
        norms["post_attention_layernorm"] = block.attention_post_norm
        norms["pre_feedforward_layernorm"] = block.feed_forward_norm
        norms["post_feedforward_layernorm"] = block.feed_forward_post_norm
    else:
        norms["post_attention_layernorm"] = block.feed_forward_norm
    if config.has_head_norms:
        norms |= {"self_attn.q_norm": attention.query_norm, "self_attn.k_norm": attention.key_norm}
    for name, norm in norms.items():
        yield _Part(norm.scale, [f"{prefix}{name}.weight"], [norm.scale.shape[0]])


def _parts(model: CausalLM) -> Iterator[_Part]:
    """All parameters of a decoder by the names of a checkpoint."""
    config = model.config
    yield _Part(model.embedding, [_EMBEDDING_TENSOR], [config.vocab_size])
    for i, block in enumerate(model.blocks):
        yield from _parts_of_block(config, block, f"model.layers.{i}.")
    yield _Part(model.norm.scale, ["model.norm.weight"], [config.width])
    if not config.is_tied:
        yield _Part(model.lm_head.weight, [_HEAD_TENSOR], [config.vocab_size])


def load(
    directory: Path | str, *, dtype: DTypeLike = jnp.bfloat16, kind: str = "stock", mesh: Mesh | None = None
) -> CausalLM:
    """The decoder of a checkpoint, its tensors read one by one, rounded to `dtype` and put on the default device, or on
    a mesh ("data", "tensor"): cut along their first axis over "data"; embedding and head along D, and V over "tensor".

    Raises UnsupportedModel for a config.json that is not supported, for tensors that are missing, unknown, or of
    another shape or dtype, all by name, for numbers that are infinite in `dtype` alone, and for files that are damaged.
    """
    directory = Path(directory)
    config = read_config(directory)
    model = nnx.eval_shape(lambda: CausalLM(config, dtype=dtype, kind=kind, rngs=nnx.Rngs(0)))
    with ExitStack() as opened:
        files = _fitting_files(directory, model, opened)
        for part in _parts(model):
            tensors = [converted(name, files[name].get_tensor(name), jnp.dtype(dtype)) for name in part.names]
            joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
            is_vocab = part.parameter is model.embedding or part.parameter is model.lm_head.weight
            spec = None if mesh is None else NamedSharding(mesh, spec_of(joined.shape, mesh, over_vocab=is_vocab))
            part.parameter.set_value(jax.device_put(joined, spec))
    model.set_frequencies()
    return model


def check(directory: Path | str) -> None:
    """Raise UnsupportedModel for what `load` raises it for, but for numbers that its dtype does not hold."""
    config = read_config(directory)
    model = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))
    with ExitStack() as opened:
        _fitting_files(Path(directory), model, opened)


def weight_files(directory: Path) -> list[Path]:
    """The files that `load` reads weights from, as far as they exist, with the index of them."""
    index = directory / _INDEX
    if index.exists():
        named = (directory / name for name in sorted(set(_files_by_tensor(index).values())))
        return [index, *(path for path in named if path.exists())]
    single = directory / _SINGLE
    return [single] if single.exists() else []


def converted(name: str, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A tensor in another dtype. Raises UnsupportedModel where a number is too large for it."""
    if float(jnp.finfo(dtype).max) >= float(jnp.finfo(tensor.dtype).max):
        return tensor.astype(dtype, copy=False)
    with np.errstate(over="ignore"):
        rounded = tensor.astype(dtype)
    if np.isinf(rounded).sum() != np.isinf(tensor).sum():
        raise UnsupportedModel(f"{name} has numbers that are infinite in {dtype.name}: another dtype holds them.")
    return rounded


def save(model: CausalLM, directory: Path | str, *, like: Path | str | None = None) -> None:
    """Write a directory that transformers and vLLM load: config.json, the weights in their dtype, and the files of the
    checkpoint `like` that say how text is cut and generated, where one is given.

    A single file of weights that is there is replaced. Where a save is cut off, the directory holds what it held, or no
    weights. Raises ValueError for a directory with other weights, and for a `like` that is no directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    others = sorted(x.name for x in directory.glob("*.safetensors*") if x.name != _SINGLE)
    require(not others, f"{directory} holds the weights of another checkpoint: {', '.join(others)}.")
    require(like is None or Path(like).is_dir(), f"like must be the directory of a checkpoint, got {like}.")
    fields = {**model.config.fields, "dtype": model.dtype.name}
    fields.pop("torch_dtype", None)
    _write_unfinished(tensors_of(model), directory)
    (directory / _SINGLE).unlink(missing_ok=True)  # they are not those of the config.json that comes
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    if like is not None:
        _copy_beside_weights(Path(like), directory)
    _finish(directory)


def write_tensors(tensors: dict[str, np.ndarray], directory: Path) -> None:
    """Write the weights of a checkpoint beside its config.json, for those to read who can read that: safetensors itself
    writes for the owner alone.
    """
    _write_unfinished(tensors, directory)
    _finish(directory)


def _write_unfinished(tensors: dict[str, np.ndarray], directory: Path) -> None:
    save_file(tensors, str(directory / _UNFINISHED), metadata={"format": "pt"})


def _finish(directory: Path) -> None:
    """Let weights that are whole be those of the checkpoint."""
    shutil.copymode(directory / "config.json", directory / _UNFINISHED)
    os.replace(directory / _UNFINISHED, directory / _SINGLE)


def _copy_beside_weights(source: Path, directory: Path) -> None:
    for name in _BESIDE_WEIGHTS:
        there, here = source / name, directory / name
        if there.exists() and not (here.exists() and here.samefile(there)):
            shutil.copy(there, here)


def tensors_of(model: CausalLM) -> dict[str, np.ndarray]:
    """The parameters of a model by their names in a checkpoint, in their own dtype."""
    tensors: dict[str, np.ndarray] = {}
    for part in _parts(model):
        joined, edges = np.asarray(part.parameter[...]), np.cumsum(part.sizes)[:-1]
        tensors |= dict(zip(part.names, map(np.ascontiguousarray, np.split(joined, edges)), strict=True))
    return tensors


def _fitting_files(directory: Path, model: CausalLM, opened: ExitStack) -> dict[str, Any]:
    """The file of each tensor of a checkpoint that fits a model."""
    files = _files(directory, opened)
    _check_tensors(files, list(_parts(model)), model.config)
    return files


def _files(directory: Path, opened: ExitStack) -> dict[str, Any]:
    """The file of each tensor of a checkpoint; `opened` closes them."""

    def file(name: str) -> Any:
        try:
            return opened.enter_context(safe_open(str(directory / name), framework="numpy"))
        except SafetensorError as error:
            raise UnsupportedModel(f"{directory / name} is damaged: {error}.") from error

    index = directory / _INDEX
    if not index.exists():
        if not (directory / _SINGLE).is_file():
            raise UnsupportedModel(f"{directory} has neither {_SINGLE} nor {_INDEX}.")
        single = file(_SINGLE)
        return dict.fromkeys(single.keys(), single)
    places = _files_by_tensor(index)
    for name in sorted(set(places.values())):
        if not (directory / name).is_file():
            raise UnsupportedModel(f"{index} names {name}, which does not exist.")
    files = {name: file(name) for name in sorted(set(places.values()))}
    held = {name: set(x.keys()) for name, x in files.items()}
    for tensor, name in places.items():
        if tensor not in held[name]:
            raise UnsupportedModel(f"{index} names {name} for {tensor}, which is not in it.")
    return {tensor: files[name] for tensor, name in places.items()}


def _files_by_tensor(index: Path) -> dict[str, str]:
    """The name of the file of each tensor, from an index."""
    read = read_object(index)
    try:
        found = table(read, "weight_map")
        places = {tensor: string(found, tensor) for tensor in found}
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{index}: {error}") from None
    for name in sorted(set(places.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnsupportedModel(f"{index} names a file that is no file of weights in its directory: {name!r}.")
    return places


_BUFFERS = "rotary_emb.inv_freq"
"""The end of the names of tensors that old checkpoints have and that config.json says as well."""


def _check_tensors(files: dict[str, Any], parts: list[_Part], config: ModelConfig) -> None:
    """The checkpoint has the tensors of the decoder in their shapes, of a dtype that is read, and no others."""
    wanted = {
        name: (size, *part.parameter.shape[1:])
        for part in parts
        for name, size in zip(part.names, part.sizes, strict=True)
    }
    given = {name for name in files if not name.endswith(_BUFFERS)}
    if config.is_tied and _HEAD_TENSOR in given:
        wanted[_HEAD_TENSOR] = wanted[_EMBEDDING_TENSOR]
    problems = [f"missing {name}" for name in sorted(wanted.keys() - given)]
    problems += [f"unknown {name}" for name in sorted(given - wanted.keys())]
    for name in sorted(wanted.keys() & given):
        lying = files[name].get_slice(name)
        if (shape := tuple(lying.get_shape())) != wanted[name]:
            problems.append(f"{name} is {shape}, not {wanted[name]}")
        if lying.get_dtype() not in _TENSOR_DTYPES:
            problems.append(
                f"{name} is {lying.get_dtype()}, not {', '.join(_TENSOR_DTYPES[:-1])} or {_TENSOR_DTYPES[-1]}"
            )
    if problems:
        raise UnsupportedModel(f"the checkpoint does not fit its config.json: {'; '.join(problems)}.")
    if config.is_tied and _HEAD_TENSOR in given:
        head, embedding = (files[name].get_tensor(name) for name in (_HEAD_TENSOR, _EMBEDDING_TENSOR))
        if not np.array_equal(head, embedding):
            raise UnsupportedModel(f"tie_word_embeddings = True, and {_HEAD_TENSOR} is not {_EMBEDDING_TENSOR}.")
