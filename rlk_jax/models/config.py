"""What a model is, read from the `config.json` of a Hugging Face checkpoint.

Every field of the file is honoured, known to change nothing, or an error that names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlk_jax.models.fields import (
    Fields,
    UnsupportedModel,
    boolean,
    natural_number,
    optional,
    positive_integer,
    positive_number,
    string,
    strings,
)
from rlk_jax.models.rope import Rope, rope_of
from rlk_jax.models.text_files import read_object


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

    @property
    def positions(self) -> int | None:
        """How many tokens the model was made for, where its config.json says it."""
        found = self.fields.get("max_position_embeddings")
        return found if isinstance(found, int) else None


@dataclass(frozen=True)
class _Family:
    """What a `model_type` implies: defaults of fields that a file may leave out, and facts that no field says."""

    defaults: Fields
    windows: Callable[[Fields, int], list[bool]]
    """Which of so many layers slide a window, where `layer_types` does not say it."""
    only: Fields = field(default_factory=dict)
    """The values of fields that are taken with these alone, as `_ONLY` has them for all families."""
    has_layer_types: bool = True
    """Whether `layer_types` decides; else all layers are alike, and it may say the same."""
    has_layer_ropes: bool = False
    """Whether each type of layers has a rope of its own."""
    biases: tuple[bool, bool] | None = None
    """Whether query, key and value have biases, and what joins the heads; None where `attention_bias` says both."""
    has_head_norms: bool = False
    is_gemma: bool = False


def _no_layer(fields: Fields, count: int) -> list[bool]:
    return [False] * count


def _every_layer(fields: Fields, count: int) -> list[bool]:
    return [fields["sliding_window"] is not None] * count


def _late_layers(fields: Fields, count: int) -> list[bool]:
    """Qwen's, where windows are switched on at all."""
    first = count if _window(fields) is None else natural_number(fields, "max_window_layers")
    return [i >= first for i in range(count)]


def _alternate_layers(fields: Fields, count: int) -> list[bool]:
    return [i % 2 == 0 for i in range(count)]


def _all_but_each_nth(fields: Fields, count: int) -> list[bool]:
    every = positive_integer(fields, "sliding_window_pattern")
    return [(i + 1) % every != 0 for i in range(count)]


_COMMON = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "sliding_window": None,
    "layer_types": None,
}
_QWEN = {
    **_COMMON,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}
_GEMMA = {
    **_COMMON,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_WITHOUT_BIAS = (False, None)
FAMILIES = {
    "llama": _Family(
        {**_COMMON, "max_position_embeddings": 2048},
        _no_layer,
        only={"sliding_window": (None,)},
        has_layer_types=False,
    ),
    "mistral": _Family(
        {**_COMMON, "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        _every_layer,
        only={"attention_bias": _WITHOUT_BIAS, "mlp_bias": _WITHOUT_BIAS},
        has_layer_types=False,
        biases=(False, False),
    ),
    "qwen2": _Family(_QWEN, _late_layers, only={"mlp_bias": _WITHOUT_BIAS}, biases=(True, False)),
    "qwen3": _Family({**_QWEN, "head_dim": 128}, _late_layers, only={"mlp_bias": _WITHOUT_BIAS}, has_head_norms=True),
    "gemma2": _Family(
        {
            **_GEMMA,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
        _alternate_layers,
        only={"mlp_bias": _WITHOUT_BIAS},
        is_gemma=True,
    ),
    "gemma3_text": _Family(
        {
            **_GEMMA,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": None,  # transformers writes it beside layer_types, and does not read it
            "max_position_embeddings": 131072,
        },
        _all_but_each_nth,
        only={"mlp_bias": _WITHOUT_BIAS, "attn_logit_softcapping": (None,)},
        has_layer_ropes=True,
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
    if not path.is_file():
        raise UnsupportedModel(f"{path} does not exist: a checkpoint is a directory with config.json.")
    fields = read_object(path)
    try:
        return config_of(fields)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None


def config_of(given: Fields) -> ModelConfig:
    """The model that the fields of a config.json describe. Raises UnsupportedModel as `read_config` does."""
    name = string(given, "model_type")
    if name not in FAMILIES:
        raise UnsupportedModel(f"model_type {name!r} is not among {', '.join(FAMILIES)}.")
    family = FAMILIES[name]
    _check_fields(given, family)
    fields = {**family.defaults, **given}
    width, heads, groups, size = _shape_of_heads(fields)
    has_bias = bool(optional(boolean, fields, "attention_bias"))
    query_key_value_bias, out_bias = family.biases or (has_bias, has_bias)
    return ModelConfig(
        vocab_size=positive_integer(fields, "vocab_size"),
        width=width,
        inner=positive_integer(fields, "intermediate_size"),
        heads=heads,
        groups=groups,
        head_size=size,
        layers=_layers(fields, family, size),
        norm_epsilon=positive_number(fields, "rms_norm_eps"),
        activation=_activation(fields, "hidden_activation" if family.is_gemma else "hidden_act"),
        attention_scale=(positive_number(fields, "query_pre_attn_scalar") if family.is_gemma else size) ** -0.5,
        attention_softcap=optional(positive_number, fields, "attn_logit_softcapping"),
        final_softcap=optional(positive_number, fields, "final_logit_softcapping"),
        query_key_value_bias=query_key_value_bias,
        out_bias=out_bias,
        feed_forward_bias=bool(optional(boolean, fields, "mlp_bias")),
        has_head_norms=family.has_head_norms,
        is_tied=boolean(fields, "tie_word_embeddings"),
        has_offset_norms=family.is_gemma,
        has_post_norms=family.is_gemma,
        scales_embedding=family.is_gemma,
        fields=dict(given),
    )


def _check_fields(given: Fields, family: _Family) -> None:
    """Every field is known, and those that are not honoured have a value that changes nothing."""
    for name in _REQUIRED:
        if name not in given:
            raise UnsupportedModel(f"config.json has no {name}.")
    only = {**_ONLY, **family.only}
    for name, value in given.items():
        if name in only:
            if value not in only[name]:
                raise UnsupportedModel(f"{name} = {value!r} is not supported, only {only[name][0]!r}.")
        elif name not in family.defaults and name not in _REQUIRED and name not in _WITHOUT_EFFECT:
            raise UnsupportedModel(
                f"{name} = {value!r} is a field of {given['model_type']} that is not known here: it may change results."
            )


def _shape_of_heads(fields: Fields) -> tuple[int, int, int, int]:
    """The model's width, its heads, its groups of heads, and the size of a head."""
    width, heads = positive_integer(fields, "hidden_size"), positive_integer(fields, "num_attention_heads")
    groups = optional(positive_integer, fields, "num_key_value_heads") or heads
    size = optional(positive_integer, fields, "head_dim") or width // heads
    if heads % groups:
        raise UnsupportedModel(f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {groups}.")
    if size % 2 or size == 0:
        raise UnsupportedModel(f"head_dim must be even, got {size}: rotary embeddings turn pairs.")
    return width, heads, groups, size


def _activation(fields: Fields, name: str) -> str:
    """The key of `ACTIVATIONS` that a field means."""
    given = string(fields, name)
    if given not in ACTIVATIONS:
        raise UnsupportedModel(f"{name} {given!r} is not among {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[given]


_WINDOWED = {"sliding_attention": True, "full_attention": False}


def _layers(fields: Fields, family: _Family, size: int) -> tuple[LayerConfig, ...]:
    """The layers: those that slide a window, and the rotary embedding of each."""
    windowed, window = _which_slide(fields, family), _window(fields)
    if any(windowed) and window is None:
        switch = "use_sliding_window is false" if fields["sliding_window"] is not None else "sliding_window is null"
        raise UnsupportedModel(f"layer_types has sliding_attention, and {switch}.")

    def layer(slides: bool) -> LayerConfig:
        layer_type = ("sliding_attention" if slides else "full_attention") if family.has_layer_ropes else None
        return LayerConfig(window if slides else None, rope_of(fields, size, layer_type))

    by_type = {slides: layer(slides) for slides in dict.fromkeys(windowed)}
    return tuple(by_type[slides] for slides in windowed)


def _which_slide(fields: Fields, family: _Family) -> list[bool]:
    """For each layer, whether it slides a window."""
    count = positive_integer(fields, "num_hidden_layers")
    types = optional(strings, fields, "layer_types")
    if types is None:
        return family.windows(fields, count)
    if unknown := sorted(set(types) - set(_WINDOWED)):
        raise UnsupportedModel(f"layer_types {', '.join(unknown)} are not supported, only {', '.join(_WINDOWED)}.")
    if len(types) != count:
        raise UnsupportedModel(f"layer_types has {len(types)} entries for {count} layers.")
    windowed = [_WINDOWED[x] for x in types]
    if not family.has_layer_types and windowed != family.windows(fields, count):
        raise UnsupportedModel(
            f"layer_types may not differ from sliding_window = {fields['sliding_window']!r}, which holds for every "
            f"layer of {fields['model_type']}."
        )
    return windowed


def _window(fields: Fields) -> int | None:
    """The slots of a window, where there are windows. Qwen has a switch for them."""
    is_on = boolean({"use_sliding_window": True, **fields}, "use_sliding_window")
    return optional(positive_integer, fields, "sliding_window") if is_on else None
