"""Every static check of linear_logp and its message.

The docstring of a check says what must hold. Where it does not, the check raises ValueError before anything runs.
"""

import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from rlk_jax.core.allowed import allowed_arrays, check_allowed, has_allowed
from rlk_jax.core.checks import (
    as_array,
    check_devices,
    check_dtypes,
    check_flags,
    check_memory_budget,
    check_temperature_shape,
    check_vocabulary_options,
    checked_temperature,
    checked_vocab_size,
    is_integer,
    is_number,
    require,
    require_one_of,
    type_name,
)
from rlk_jax.core.fixed_order import column_groups
from rlk_jax.core.head import HeadConfig, RankingConfig
from rlk_jax.core.mesh import AxisName, axis_names
from rlk_jax.core.shard import Shard
from rlk_jax.core.shard_checks import check_axis_names, checked_shard
from rlk_jax.core.softmax import Smoothing
from rlk_jax.ops.linear_logp.options import HeadInputs, HeadOptions, LowRank, WeightLayout

_MOST_TOP_K = 128


def head_inputs(
    hidden: Any,
    lm_head_weight: Any,
    target_ids: Any,
    bias: Any,
    temperature: Any,
    low_rank: Any,
    allowed_ids: Any,
    allowed_mask: Any,
) -> HeadInputs:
    """The inputs of a call. A low-rank term is None, a LowRank, or a tuple of its first two to four fields."""
    inputs = HeadInputs(hidden, lm_head_weight, target_ids, bias, temperature)
    inputs = inputs._replace(allowed_ids=allowed_ids, allowed_mask=allowed_mask)
    if low_rank is None:
        return inputs
    require(
        isinstance(low_rank, tuple) and 2 <= len(low_rank) <= 4,
        f"low_rank must be (A, B, scale) or a rlk_jax.LowRank, got {type_name(low_rank)}.",
    )
    a, b, scale, own_inputs = LowRank(*low_rank)
    require(a is not None and b is not None, "low_rank needs both A and B, got None.")
    return inputs._replace(low_rank_a=a, low_rank_b=b, low_rank_scale=scale, low_rank_inputs=own_inputs)


def check_call(
    inputs: HeadInputs, options: HeadOptions, vocab_start_index: Any = None
) -> tuple[HeadInputs, HeadConfig, Shard | None]:
    """All static checks of a call: its inputs as arrays, what an implementation is compiled for, and the shard."""
    _check_layout(options.weight_layout)
    check_flags(options)
    inputs = HeadInputs(
        hidden=as_array("hidden", inputs.hidden),
        lm_head_weight=as_array("lm_head_weight", inputs.lm_head_weight),
        target_ids=as_array("target_ids", inputs.target_ids),
        bias=None if inputs.bias is None else as_array("bias", inputs.bias),
        temperature=checked_temperature(inputs.temperature),
        **allowed_arrays(inputs),
        **_checked_low_rank(inputs),
    )
    _check_shapes(inputs, options.weight_layout)
    rank = _checked_rank(inputs, options.weight_layout)
    check_dtypes(inputs, integers=("target_ids", "allowed_ids", "allowed_mask"))
    vocab_size = inputs.lm_head_weight.shape[0 if options.weight_layout == "vd" else 1]
    shard = checked_shard(options, vocab_size, options.global_vocab_size, vocab_start_index)
    covered = vocab_size if shard is None else vocab_size * shard.count
    check_vocabulary_options(covered, options.logit_softcap, options.ignore_index, options.global_vocab_size)
    check_memory_budget(options.memory_budget)
    check_label_smoothing(options.label_smoothing)
    require(
        not (options.label_smoothing and has_allowed(inputs)),
        "label_smoothing cannot be given beside allowed_ids or allowed_mask: it gives every token a share of the "
        "target.",
    )
    check_devices(inputs)
    real = covered if options.global_vocab_size is None else int(options.global_vocab_size)
    check_allowed(inputs, "target_ids", inputs.target_ids.shape, (real, covered))
    dtypes = inputs.hidden.dtype, inputs.lm_head_weight.dtype
    hidden_parts, weight_parts = (1 if x == jnp.bfloat16 or jnp.float32 not in dtypes else 2 for x in dtypes)
    config = HeadConfig(
        vocab_size=vocab_size,
        real_vocab_size=real,
        groups=column_groups(real),
        weight_layout=options.weight_layout,
        logit_softcap=None if options.logit_softcap is None else float(options.logit_softcap),
        return_lse=options.return_lse,
        return_entropy=options.return_entropy,
        smoothing=Smoothing(float(options.label_smoothing), real) if options.label_smoothing else None,
        may_ignore=options.ignore_index is not None,
        memory_budget=None if options.memory_budget is None else int(options.memory_budget),
        rank=rank,
        hidden_parts=hidden_parts,
        weight_parts=weight_parts,
        has_mask=has_allowed(inputs),
        ranking=_checked_ranking(options, real),
    )
    return inputs, config if shard is None else shard.config(config), shard


def check_label_smoothing(label_smoothing: Any) -> None:
    """label_smoothing is a number from 0 to 1."""
    require(
        is_number(label_smoothing) and 0 <= label_smoothing <= 1,
        f"label_smoothing must be a number in [0, 1], got {label_smoothing!r}.",
    )


def _check_layout(weight_layout: WeightLayout) -> None:
    require_one_of("weight_layout", weight_layout, get_args(WeightLayout))


def _check_shapes(inputs: HeadInputs, layout: WeightLayout) -> None:
    hidden, weight, target_ids, bias, temperature = inputs[:5]
    vocab_size = checked_vocab_size(("hidden", "lm_head_weight"), hidden, weight, layout)
    require(
        hidden.shape[:-1] == target_ids.shape,
        f"hidden leading shape {hidden.shape[:-1]} must match target_ids shape {target_ids.shape}.",
    )
    if bias is not None:
        require(bias.shape == (vocab_size,), f"bias must have V={vocab_size} elements, got shape {bias.shape}.")
    check_temperature_shape(temperature, "target_ids", target_ids)


def _checked_ranking(options: HeadOptions, vocab_size: int) -> RankingConfig | None:
    """What is wanted of a ranking: no more tokens than there are."""
    top_k = options.return_top_k
    require(
        top_k is None or (is_integer(top_k) and 1 <= top_k <= _MOST_TOP_K),
        f"return_top_k must be an integer from 1 to {_MOST_TOP_K} or None, got {top_k!r}.",
    )
    require(
        top_k is None or top_k <= vocab_size,
        f"return_top_k must be at most the vocabulary size {vocab_size}, got {top_k}.",
    )
    if top_k is None and not options.return_target_rank:
        return None
    return RankingConfig(None if top_k is None else int(top_k), options.return_target_rank)


def _checked_low_rank(inputs: HeadInputs) -> dict[str, Any]:
    """The fields of a low-rank term as arrays. Its scale is a finite number, or a scalar array."""
    if inputs.low_rank_a is None:
        return {}
    scale = inputs.low_rank_scale
    if is_number(scale):
        limit = float(np.finfo(np.float32).max)
        require(abs(scale) <= limit, f"low_rank's scale must be finite as float32, got {scale}.")
        scale = np.float32(scale)
    own = inputs.low_rank_inputs
    return {
        "low_rank_a": as_array("low_rank's A", inputs.low_rank_a),
        "low_rank_b": as_array("low_rank's B", inputs.low_rank_b),
        "low_rank_scale": as_array("low_rank's scale", scale),
        "low_rank_inputs": None if own is None else as_array("low_rank's inputs", own),
    }


def _checked_rank(inputs: HeadInputs, layout: WeightLayout) -> int:
    """The rank of the low-rank term, whose shapes fit the head; 0 without one."""
    a, b, scale, own = inputs.low_rank_a, inputs.low_rank_b, inputs.low_rank_scale, inputs.low_rank_inputs
    if a is None:
        return 0
    vocab_size, dim = inputs.lm_head_weight.shape if layout == "vd" else inputs.lm_head_weight.shape[::-1]
    rank = a.shape[0 if layout == "vd" else -1] if a.ndim == 2 else 0
    shapes = ((rank, dim), (vocab_size, rank)) if layout == "vd" else ((dim, rank), (rank, vocab_size))
    require(
        rank > 0 and (a.shape, b.shape) == shapes,
        f"low_rank's A and B must be {'[r, D] and [V, r]' if layout == 'vd' else '[D, r] and [r, V]'} with r >= 1 for "
        f"lm_head_weight shape {inputs.lm_head_weight.shape}, got shapes {a.shape} and {b.shape}.",
    )
    require(scale.shape == (), f"low_rank's scale must be a number or a scalar, got shape {scale.shape}.")
    require(
        own is None or own.shape == inputs.hidden.shape,
        f"low_rank's inputs must have hidden's shape {inputs.hidden.shape}, got {getattr(own, 'shape', None)}.",
    )
    return rank


def check_mesh_axes(
    mesh: dict[str, int], vocab: AxisName, lead: PartitionSpec, vocab_size: int, tokens: tuple[int, ...]
) -> None:
    """A head of vocab_size rows and tokens of this lead shape can be sharded over a mesh of these axes."""
    check_axis_names("vocab_axis", vocab)
    for entry in lead:
        if entry is not None:
            check_axis_names("token_axes", entry)
    require(len(lead) <= len(tokens), f"token_axes {lead} has more entries than target_ids has dimensions ({tokens}).")
    named = [*axis_names(vocab), *(name for entry in lead for name in axis_names(entry))]
    for name in named:
        require(name in mesh, f"{name!r} is no axis of the mesh, whose axes are {tuple(mesh)}.")
        require(named.count(name) == 1, f"mesh axis {name!r} is named twice among vocab_axis and token_axes.")
    n = math.prod(mesh[name] for name in axis_names(vocab))
    require(
        vocab_size % n == 0,
        f"a vocabulary of {vocab_size} cannot be spread evenly over the {n} devices of {vocab!r}: "
        "rlk_jax.vocab_parallel.pad_lm_head pads the head.",
    )
    for size, entry in zip(tokens, lead, strict=False):
        n = math.prod(mesh[name] for name in axis_names(entry))
        require(size % n == 0, f"{size} tokens cannot be spread evenly over the {n} devices of {entry!r}.")


def check_outside_shard_map(what: str, mesh: Any) -> None:
    """`mesh` is a mesh, and the call stands outside shard_map."""
    require(isinstance(mesh, Mesh | AbstractMesh), f"mesh must be a jax.sharding.Mesh, got {type_name(mesh)}.")
    require(
        not jax.sharding.get_abstract_mesh().manual_axes,
        f"{what} is for whole arrays: inside jax.shard_map call rlk_jax.linear_logp(..., axis_name=...).",
    )


def check_head_or_bias(weight: Any, weight_layout: WeightLayout) -> None:
    """`weight` has the shape of a head or of a bias, and the layout exists."""
    _check_layout(weight_layout)
    shape = as_array("weight", weight).shape
    require(len(shape) in (1, 2), f"weight must be a head [V, D] or [D, V], or a bias [V], got shape {shape}.")
