"""What a model is, read from the `config.json` of a Hugging Face checkpoint.

Every field of the file is honoured, known to change nothing, or an error that names it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlk_jax.models.rope import Rope, rope_of


class UnsupportedModel(ValueError):
    """A checkpoint that `rlk_jax.models` does not compute as its authors do; the text names the field."""


@dataclass(frozen=True)
class LayerConfig:
    """What one decoder layer has of its own."""

    window: int | None
    """Slots that a query sees, itself among them; None for all before it."""
    rope: Rope


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the families that `FAMILIES` lists."""

    vocab_size: int
    width: int
    inner: int
    heads: int
    groups: int
    head_size: int
    layers: tuple[LayerConfig, ...]
    norm_epsilon: float
    activation: str
    """A key of `ACTIVATIONS`: what the gate of the feed-forward layer goes through."""
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    query_key_value_bias: bool
    out_bias: bool
    feed_forward_bias: bool
    has_head_norms: bool
    """Whether queries and keys are normalized, head by head."""
    is_tied: bool
    """Whether the head is the embedding."""
    has_offset_norms: bool
    """Whether norms multiply by 1 + their scale (Gemma)."""
    has_post_norms: bool
    """Whether each branch is normalized before it is added, too (Gemma)."""
    scales_embedding: bool
    """Whether embeddings are multiplied by √width, rounded to their dtype (Gemma)."""
    fields: Mapping[str, Any] = field(compare=False, hash=False, repr=False)
    """The file itself, which `save` writes again."""


@dataclass(frozen=True)
class _Family:
    """What a `model_type` implies: defaults of fields that a file may leave out, and facts that no field says."""

    defaults: Mapping[str, Any]
    windows: Callable[[Mapping[str, Any]], list[bool]]
    """Which layers slide a window, where `layer_types` does not say it."""
    query_key_value_bias: bool | None = None
    """None where `attention_bias` says it."""
    has_head_norms: bool = False
    is_gemma: bool = False


def _no_layer(fields: Mapping[str, Any]) -> list[bool]:
    return [False] * fields["num_hidden_layers"]


def _every_layer(fields: Mapping[str, Any]) -> list[bool]:
    return [fields["sliding_window"] is not None] * fields["num_hidden_layers"]


def _late_layers(fields: Mapping[str, Any]) -> list[bool]:
    """Qwen's, where windows are switched on at all."""
    first = fields["max_window_layers"] if fields["use_sliding_window"] else fields["num_hidden_layers"]
    return [i >= first for i in range(fields["num_hidden_layers"])]


def _alternate_layers(fields: Mapping[str, Any]) -> list[bool]:
    return [i % 2 == 0 for i in range(fields["num_hidden_layers"])]


def _all_but_each_sixth(fields: Mapping[str, Any]) -> list[bool]:
    every = fields["sliding_window_pattern"] or fields["_sliding_window_pattern"]
    return [(i + 1) % every != 0 for i in range(fields["num_hidden_layers"])]


_COMMON = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "sliding_window": None,
    "layer_types": None,
}
_QWEN = {**_COMMON, "use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
_GEMMA = {
    **{name: x for name, x in _COMMON.items() if name not in ("hidden_act", "mlp_bias")},
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": None,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
FAMILIES = {
    "llama": _Family({**_COMMON, "max_position_embeddings": 2048}, _no_layer),
    "mistral": _Family(
        {**_COMMON, "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}, _every_layer
    ),
    "qwen2": _Family({**_QWEN, "max_position_embeddings": 32768}, _late_layers, query_key_value_bias=True),
    "qwen3": _Family({**_QWEN, "head_dim": 128, "max_position_embeddings": 32768}, _late_layers, has_head_norms=True),
    "gemma2": _Family(
        {
            **_GEMMA,
            "head_dim": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
        _alternate_layers,
        is_gemma=True,
    ),
    "gemma3_text": _Family(
        {
            **_GEMMA,
            "head_dim": 256,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": None,
            "_sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
        },
        _all_but_each_sixth,
        has_head_norms=True,
        is_gemma=True,
    ),
}
"""The families, by the `model_type` of their config.json."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_WITHOUT_EFFECT = {
    "_model_name_or_path",
    "_name_or_path",
    "_attn_implementation_autoset",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "sep_token_id",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}
"""Fields that change no log-prob."""
_ONLY = {
    "attention_dropout": (0, 0.0, None),
    "partial_rotary_factor": (1, 1.0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False, None),
}
"""Fields that are taken with these values alone."""
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Activations by the names that files have for them."""


def read_config(directory: Path | str) -> ModelConfig:
    """The model of a checkpoint's directory. Raises UnsupportedModel for what would be computed otherwise here."""
    path = Path(directory) / "config.json"
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnsupportedModel(f"{path} does not exist: a checkpoint is a directory with config.json.") from None
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"{path} is no JSON: {error}") from None
    return config_of(fields)


def config_of(given: Mapping[str, Any]) -> ModelConfig:
    """The model that the fields of a config.json describe. Raises UnsupportedModel as `read_config` does."""
    name = given.get("model_type")
    if name not in FAMILIES:
        raise UnsupportedModel(f"model_type {name!r} is not among {', '.join(FAMILIES)}.")
    family = FAMILIES[name]
    _check_fields(given, family)
    fields = {**family.defaults, **given}
    size = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
    activation = fields.get("hidden_activation") or fields["hidden_act"]
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {activation!r} is not among {', '.join(ACTIVATIONS)}.")
    attention_bias = bool(fields["attention_bias"])
    return ModelConfig(
        vocab_size=fields["vocab_size"],
        width=fields["hidden_size"],
        inner=fields["intermediate_size"],
        heads=fields["num_attention_heads"],
        groups=fields["num_key_value_heads"] or fields["num_attention_heads"],
        head_size=size,
        layers=_layers(fields, family, size),
        norm_epsilon=float(fields["rms_norm_eps"]),
        activation=ACTIVATIONS[activation],
        attention_scale=(fields["query_pre_attn_scalar"] if family.is_gemma else size) ** -0.5,
        attention_softcap=fields.get("attn_logit_softcapping"),
        final_softcap=fields.get("final_logit_softcapping"),
        query_key_value_bias=attention_bias if family.query_key_value_bias is None else family.query_key_value_bias,
        out_bias=attention_bias,
        feed_forward_bias=bool(fields.get("mlp_bias")),
        has_head_norms=family.has_head_norms,
        is_tied=bool(fields["tie_word_embeddings"]),
        has_offset_norms=family.is_gemma,
        has_post_norms=family.is_gemma,
        scales_embedding=family.is_gemma,
        fields=dict(given),
    )


def _check_fields(given: Mapping[str, Any], family: _Family) -> None:
    """Every field is known, and those that are not honoured have a value that changes nothing."""
    for name in _REQUIRED:
        if name not in given:
            raise UnsupportedModel(f"config.json has no {name}.")
    for name, value in given.items():
        if name in _ONLY:
            if value not in _ONLY[name]:
                raise UnsupportedModel(f"{name} = {value!r} is not supported, only {_ONLY[name][0]!r}.")
        elif name not in family.defaults and name not in _REQUIRED and name not in _WITHOUT_EFFECT:
            raise UnsupportedModel(
                f"{name} = {value!r} is a field of {given['model_type']} that is not known here: it may change results."
            )


_WINDOWED = {"sliding_attention": True, "full_attention": False}


def _layers(fields: Mapping[str, Any], family: _Family, size: int) -> tuple[LayerConfig, ...]:
    """The layers: those that slide a window, and the rotary embedding of each."""
    types = fields["layer_types"]
    if types is None:
        windowed = family.windows(fields)
    else:
        if unknown := sorted(set(types) - set(_WINDOWED)):
            raise UnsupportedModel(f"layer_types {', '.join(unknown)} are not supported, only {', '.join(_WINDOWED)}.")
        windowed = [_WINDOWED[x] for x in types]
    if len(windowed) != fields["num_hidden_layers"]:
        raise UnsupportedModel(f"layer_types has {len(windowed)} entries for {fields['num_hidden_layers']} layers.")
    if any(windowed) and fields["sliding_window"] is None:
        raise UnsupportedModel("layer_types has sliding_attention, and sliding_window is null.")

    def layer(slides: bool) -> LayerConfig:
        try:
            rope = rope_of(fields, size, "sliding_attention" if slides else "full_attention")
        except ValueError as error:
            raise UnsupportedModel(str(error)) from None
        return LayerConfig(fields["sliding_window"] if slides else None, rope)

    return tuple(map(layer, windowed))
