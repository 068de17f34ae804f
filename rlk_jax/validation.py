"""Every check of an input and its message, once: static facts by a function per op, then values (`tokens`, `rows`)."""

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from rlk_jax._cut import Cut
from rlk_jax._gemm import Form, GemmInputs
from rlk_jax._problem import (
    Array,
    Inputs,
    LogpInputs,
    Options,
    RatioKlInputs,
    SoftmaxOptions,
    Tokens,
    WeightLayout,
)
from rlk_jax._shard import AxisName, Reduction, Shard, axis_names, explicit_spec
from rlk_jax._tree import tree

FLOAT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_INT32 = np.iinfo(np.int32)
_SMALLEST = float(np.finfo(np.float32).tiny)
"""The smallest positive number that survives in float32 everywhere; smaller ones may count as 0."""
_IDS_OUT_OF_RANGE = (
    "{name} out of range: expected [0, {last}], got [{low}, {high}]. "
    "Mask or filter padding / ignore-index values (e.g. -100) before this op."
)
_ACTIONS_OUT_OF_RANGE = (
    "action_ids at active (unmasked) positions must be in [0, V); found out-of-range ids. Expected [0, {last}], got "
    "[{low}, {high}]."
)
_ROWS_OUT_OF_RANGE = "row_indices contains an out-of-range row: expected [0, {last}], got [{low}, {high}]."
_BAD_TEMPERATURE = "temperature must be positive and finite, got values in [{low}, {high}]"


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _describe(x: Any) -> str:
    kind = type(x)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_concrete(x: Any) -> bool:
    """Whether the values of `x` can be read now."""
    return not isinstance(x, jax.core.Tracer)


def as_array(name: str, x: Any) -> Any:
    """`x` as a JAX or NumPy array or a ShapeDtypeStruct; nnx variables are unwrapped."""
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    _require(
        isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct),
        f"{name} must be a JAX or NumPy array, got {_describe(x)}.",
    )
    return x


_INTEGERS = ("target_ids", "token_ids", "action_ids", "row_indices")
_ANY_NUMBERS = ("completion_mask",)


def _check_dtypes(inputs: Inputs | LogpInputs | RatioKlInputs) -> None:
    for name, x in inputs._asdict().items():
        if x is None or name in _ANY_NUMBERS:
            continue
        if name in _INTEGERS:
            _require(jnp.issubdtype(x.dtype, jnp.integer), f"{name} must be integers, got {x.dtype}.")
        else:
            _require(x.dtype in FLOAT_DTYPES, f"{name} must be bfloat16, float16 or float32, got {x.dtype}.")


def _committed_devices(x: Any) -> set[str] | None:
    """Devices that hold a concrete array and will not let it go; None for anything that can follow another array."""
    return set(map(str, x.sharding.device_set)) if isinstance(x, jax.Array) and is_concrete(x) and x.committed else None


AnyInputs = Inputs | GemmInputs | LogpInputs | RatioKlInputs


def _check_devices(inputs: AnyInputs) -> None:
    """All where the first input is."""
    first, home = inputs._fields[0], _committed_devices(inputs[0])
    for name, x in inputs._asdict().items():
        here = _committed_devices(x)
        if home is not None and here is not None:
            _require(home == here, f"{name} device {sorted(here)} must match {first} device {sorted(home)}.")


def _check_shapes(inputs: Inputs, layout: WeightLayout) -> None:
    hidden, weight, target_ids, bias, temperature = inputs
    _require(hidden.ndim >= 1, "hidden must be [*lead, D], got a scalar.")
    _require(weight.ndim == 2, f"lm_head_weight must be 2-D, got shape {weight.shape}.")
    vocab_size, dim = weight.shape if layout == "vd" else weight.shape[::-1]
    _require(vocab_size > 0, "lm_head_weight must contain at least one vocab row.")
    _require(hidden.shape[-1] > 0, "hidden dim must be at least 1, got 0.")
    _require(hidden.shape[-1] == dim, f"hidden dim {hidden.shape[-1]} must match lm_head_weight dim {dim}.")
    _require(
        hidden.shape[:-1] == target_ids.shape,
        f"hidden leading shape {hidden.shape[:-1]} must match target_ids shape {target_ids.shape}.",
    )
    if bias is not None:
        _require(bias.shape == (vocab_size,), f"bias must have V={vocab_size} elements, got shape {bias.shape}.")
    _check_temperature_shape(temperature, "target_ids", target_ids)


def _check_temperature_shape(temperature: Any, name: str, ids: Any) -> None:
    _require(
        temperature.shape in ((), ids.shape),
        f"temperature must be a scalar or have {name} shape {ids.shape}, got {temperature.shape}.",
    )


def _is_integer(x: Any) -> bool:
    """Python or NumPy, but no bool."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _fits_float32(x: float) -> bool:
    """Whether x is positive and finite, and still is as a float32."""
    return _SMALLEST <= x <= float(np.finfo(np.float32).max)


def _check_options(
    vocab_size: int, logit_softcap: float | None, ignore_index: int | None, global_vocab_size: int | None
) -> None:
    _require(
        logit_softcap is None or (_is_number(logit_softcap) and _fits_float32(logit_softcap)),
        f"logit_softcap must be a positive finite number, got {logit_softcap}.",
    )
    _require(
        global_vocab_size is None or (_is_integer(global_vocab_size) and 1 <= global_vocab_size <= vocab_size),
        f"global_vocab_size must be in [1, V={vocab_size}], got {global_vocab_size!r}.",
    )
    real = global_vocab_size or vocab_size
    _require(
        ignore_index is None or (_is_integer(ignore_index) and _INT32.min <= ignore_index <= _INT32.max),
        f"ignore_index must be a 32-bit integer, got {ignore_index}.",
    )
    _require(
        ignore_index is None or not 0 <= ignore_index < real,
        f"ignore_index {ignore_index} is a valid token id; it must lie outside [0, {real - 1}].",
    )


def _shard(
    axis_name: AxisName | None,
    columns: int,
    global_vocab_size: int | None,
    vocab_start_index: Any,
    reduction: Reduction,
    reduce_hidden_grad: bool,
) -> Shard | None:
    if axis_name is None:
        no_axis_options(axis_name, vocab_start_index, reduction, reduce_hidden_grad)
        return None
    axes("axis_name", axis_name)
    _require(reduction in get_args(Reduction), f"reduction must be one of {get_args(Reduction)}, got {reduction!r}.")
    _require(
        reduce_hidden_grad or reduction == "sum",
        "reduction='canonical' is of a sum that reduce_hidden_grad=False leaves to the caller.",
    )
    manual = jax.sharding.get_abstract_mesh().manual_axes
    _require(
        all(name in manual for name in axis_names(axis_name)),
        f"axis_name {axis_name!r} is no mesh axis of a surrounding jax.shard_map.",
    )
    count = jax.lax.axis_size(axis_name)
    start = np.asarray(0) if vocab_start_index is None else jnp.asarray(vocab_start_index)
    _require(
        start.shape == () and jnp.issubdtype(start.dtype, jnp.integer),
        f"vocab_start_index must be an integer scalar, got {vocab_start_index!r}.",
    )
    _require(
        vocab_start_index is None or not is_static(vocab_start_index) or (count == 1 and vocab_start_index == 0),
        f"vocab_start_index {vocab_start_index} is the same on all {count} ranks of {axis_name!r}: it must be 0 on one "
        "rank, and on several an array that differs from rank to rank.",
    )
    vocab_size = columns * count if global_vocab_size is None else int(global_vocab_size)
    return Shard(axis_name, count, columns, vocab_size, reduction, bool(reduce_hidden_grad))


def is_static(x: Any) -> bool:
    """Whether `x` is a number that every rank of one program shares."""
    return isinstance(x, numbers.Number | np.generic | np.ndarray)


def no_axis_options(
    axis_name: AxisName | None, vocab_start_index: Any, reduction: Reduction, reduce_hidden_grad: bool
) -> None:
    """Refuses what only a rank's own shard inside shard_map may have."""
    _require(
        axis_name is None,
        f"beside axis_name {axis_name!r} no input may lie over Explicit mesh axes: make them Auto, or manual too.",
    )
    _require(reduction in get_args(Reduction), f"reduction must be one of {get_args(Reduction)}, got {reduction!r}.")
    _require(vocab_start_index is None, "vocab_start_index requires axis_name, the mesh axis of the shards.")
    _require(reduction == "sum", "reduction='canonical' requires axis_name, the mesh axis of the shards.")
    _require(reduce_hidden_grad, "reduce_hidden_grad=False requires axis_name, the mesh axis of the shards.")


def axes(argument: str, names: Any) -> None:
    """Whether `names` is a mesh axis, or a tuple of several."""
    several = names if isinstance(names, tuple) else (names,)
    _require(
        several and all(isinstance(name, str) for name in several) and len(set(several)) == len(several),
        f"{argument} must be the name of a mesh axis, or a tuple of different ones, got {names!r}.",
    )


def _temperature(temperature: Any) -> Any:
    """A number is a static fact and is checked here; the values of an array are checked by `tokens`."""
    if not _is_number(temperature):
        return as_array("temperature", temperature)
    _require(_fits_float32(temperature), _BAD_TEMPERATURE.format(low=temperature, high=temperature))
    return np.float32(temperature)


def check_memory_budget(memory_budget: int | None) -> None:
    """Static check of linear_logp's and of the bridge's in other libraries."""
    _require(
        memory_budget is None or (_is_integer(memory_budget) and memory_budget >= 1),
        f"memory_budget must be a positive number of bytes, got {memory_budget}.",
    )


def _check_validate(validate: bool | None) -> None:
    _require(validate in (None, True, False), f"validate must be None, True or False, got {validate!r}.")


def linear_logp(
    hidden: Any,
    lm_head_weight: Any,
    target_ids: Any,
    bias: Any,
    temperature: Any,
    *,
    logit_softcap: float | None,
    ignore_index: int | None,
    global_vocab_size: int | None,
    weight_layout: WeightLayout,
    return_lse: bool,
    return_entropy: bool,
    axis_name: AxisName | None,
    vocab_start_index: Any,
    reduction: Reduction,
    reduce_hidden_grad: bool,
    memory_budget: int | None,
    validate: bool | None,
) -> tuple[Inputs, Options, Shard | None]:
    """Static checks of linear_logp; raises ValueError before anything runs."""
    layouts = get_args(WeightLayout)
    _require(weight_layout in layouts, f"weight_layout must be one of {layouts}, got {weight_layout!r}.")
    _check_validate(validate)
    inputs = Inputs(
        hidden=as_array("hidden", hidden),
        lm_head_weight=as_array("lm_head_weight", lm_head_weight),
        target_ids=as_array("target_ids", target_ids),
        bias=None if bias is None else as_array("bias", bias),
        temperature=_temperature(temperature),
    )
    _check_shapes(inputs, weight_layout)
    _check_dtypes(inputs)
    vocab_size = inputs.lm_head_weight.shape[0 if weight_layout == "vd" else 1]
    shard = _shard(axis_name, vocab_size, global_vocab_size, vocab_start_index, reduction, reduce_hidden_grad)
    covered = vocab_size if shard is None else vocab_size * shard.count
    _check_options(covered, logit_softcap, ignore_index, global_vocab_size)
    check_memory_budget(memory_budget)
    _check_devices(inputs)
    real = covered if global_vocab_size is None else int(global_vocab_size)
    options = Options(
        vocab_size=vocab_size,
        real_vocab_size=real if shard is None else shard.least_real_columns,
        tree=tree(real) if shard is None else shard.tree,
        weight_layout=weight_layout,
        logit_softcap=None if logit_softcap is None else float(logit_softcap),
        return_lse=return_lse,
        return_entropy=return_entropy,
        may_ignore=ignore_index is not None,
        memory_budget=None if memory_budget is None else int(memory_budget),
        hidden_gradient="rounded" if shard is None else shard.hidden_gradient,
    )
    return inputs, options, shard


def cut(ranges: Sequence[tuple[int, int]], given: Sequence[int | None], ignore_index: int | None) -> Cut:
    """How ranks that hold columns `[start, end)`, in any order, cut a vocabulary; `given` is each one's
    global_vocab_size. The same on every rank, so that all raise together.
    """
    for start, end in ranges:
        _require(0 <= start < end, f"invalid TP vocab shard range [{start}, {end}).")
    covered, in_order = max(end for _, end in ranges), sorted(ranges)
    starts = [0, *(end for _, end in in_order)]
    _require(
        [start for start, _ in in_order] == starts[:-1],
        f"TP vocab shards must form a contiguous [0, {covered}) partition; got ranges={in_order}.",
    )
    sizes = {covered if size is None else size for size in given}
    _require(
        len(sizes) == 1 and max(sizes) <= covered,
        f"global_vocab_size must match the TP vocab partition size: got {', '.join(map(str, sorted(sizes)))}, "
        f"covered {covered}.",
    )
    vocab_size = sizes.pop()
    _check_options(covered, None, ignore_index, vocab_size)
    return Cut(tuple(ranges), vocab_size)


def _check_logits(name: str, logits: Any) -> int:
    """V, of logits whose rows and columns 32 bits can count."""
    _require(logits.ndim >= 1, f"{name} must be [*lead, V], got a scalar.")
    rows, vocab_size = math.prod(logits.shape[:-1]), logits.shape[-1]
    _require(vocab_size > 0, f"{name} must have at least one vocab column.")
    _require(
        max(rows, vocab_size) <= _INT32.max,
        f"{name} rows and columns must fit into 32 bits, got {rows} x {vocab_size}.",
    )
    return vocab_size


def _no_explicit_axes(op: str, inputs: AnyInputs) -> None:
    """Nothing here would keep an array over mesh axes of explicit type where it is."""
    for name, x in inputs._asdict().items():
        _require(
            (spec := explicit_spec(x)) is None,
            f"{name} is sharded as {spec} over Explicit mesh axes, which {op} does not take: call it inside "
            "jax.shard_map.",
        )


def logp(
    logits: Any,
    token_ids: Any,
    temperature: Any,
    row_indices: Any,
    initial: Any,
    *,
    logit_softcap: float | None,
    ignore_index: int | None,
    global_vocab_size: int | None,
    return_lse: bool,
    return_entropy: bool,
    validate: bool | None,
) -> tuple[LogpInputs, SoftmaxOptions]:
    """Static checks of logp; raises ValueError before anything runs."""
    _check_validate(validate)
    inputs = LogpInputs(
        logits=as_array("logits", logits),
        token_ids=as_array("token_ids", token_ids),
        temperature=_temperature(temperature),
        row_indices=None if row_indices is None else as_array("row_indices", row_indices),
        initial=None if initial is None else as_array("initial", initial),
    )
    vocab_size, lead = _check_logits("logits", inputs.logits), inputs.logits.shape[:-1]
    _require(
        lead == inputs.token_ids.shape,
        f"logits leading shape {lead} must match token_ids shape {inputs.token_ids.shape}.",
    )
    _check_temperature_shape(inputs.temperature, "token_ids", inputs.token_ids)
    _check_dtypes(inputs)
    if inputs.row_indices is not None:
        _require(inputs.row_indices.ndim == 1, f"row_indices must be 1-D, got shape {inputs.row_indices.shape}.")
    if inputs.initial is not None:
        _require(inputs.row_indices is not None, "initial requires row_indices, the rows that it does not keep.")
        _require(
            inputs.initial.shape == lead and inputs.initial.dtype == jnp.float32,
            f"initial must be float32 of token_ids shape {lead}, got {inputs.initial.dtype}{inputs.initial.shape}.",
        )
    _check_options(vocab_size, logit_softcap, ignore_index, global_vocab_size)
    _no_explicit_axes("logp", inputs)
    _check_devices(inputs)
    return inputs, _softmax_options(
        vocab_size, logit_softcap, global_vocab_size, return_lse=return_lse, return_entropy=return_entropy
    )


def _softmax_options(
    vocab_size: int,
    logit_softcap: float | None = None,
    global_vocab_size: int | None = None,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
) -> SoftmaxOptions:
    return SoftmaxOptions(
        vocab_size=vocab_size,
        real_vocab_size=vocab_size if global_vocab_size is None else int(global_vocab_size),
        logit_softcap=None if logit_softcap is None else float(logit_softcap),
        return_lse=return_lse,
        return_entropy=return_entropy,
    )


def ratio_kl(
    policy_logits: Any,
    ref_logits: Any,
    action_ids: Any,
    completion_mask: Any,
    old_logps: Any,
    temperature: Any,
    *,
    validate: bool | None,
) -> tuple[RatioKlInputs, SoftmaxOptions]:
    """Static checks of ratio_kl, and of grpo_loss on top of it; raises ValueError before anything runs."""
    _check_validate(validate)
    inputs = RatioKlInputs(
        policy_logits=as_array("policy_logits", policy_logits),
        ref_logits=as_array("ref_logits", ref_logits),
        action_ids=as_array("action_ids", action_ids),
        completion_mask=as_array("completion_mask", completion_mask),
        old_logps=as_array("old_logps", old_logps),
        temperature=_temperature(temperature),
    )
    policy, lead = inputs.policy_logits, inputs.policy_logits.shape[:-1]
    vocab_size = _check_logits("policy_logits", policy)
    _check_logits("ref_logits", inputs.ref_logits)
    _require(
        inputs.ref_logits.shape == policy.shape,
        f"ref_logits shape {inputs.ref_logits.shape} does not match policy_logits shape {policy.shape}.",
    )
    for name in ("action_ids", "completion_mask", "old_logps"):
        shape = getattr(inputs, name).shape
        _require(shape == lead, f"{name} shape {shape} does not match policy_logits.shape[:-1] {lead}.")
    _check_temperature_shape(inputs.temperature, "action_ids", inputs.action_ids)
    _check_dtypes(inputs)
    _check_mask_dtype(inputs.completion_mask)
    _no_explicit_axes("ratio_kl", inputs)
    _check_devices(inputs)
    return inputs, _softmax_options(vocab_size)


def _check_mask_dtype(mask: Any) -> None:
    _require(
        any(jnp.issubdtype(mask.dtype, kind) for kind in (jnp.bool, jnp.integer, jnp.floating)),
        f"completion_mask must be bool, integer or float, got {mask.dtype}.",
    )


def active(mask: Any) -> Array:
    """Where a mask is not 0; of NumPy's before JAX takes 64 bits for 32."""
    mask = mask if isinstance(mask, np.ndarray | np.generic) else jnp.asarray(mask)
    return jnp.asarray(mask.astype(bool))


def _out_dtype(x: Any) -> np.dtype:
    try:
        dtype = np.dtype(x)
    except TypeError:
        dtype = None
    _require(dtype in FLOAT_DTYPES, f"out_dtype must be bfloat16, float16 or float32, got {x!r}.")
    return dtype


def det_gemm(a: Any, b: Any, *, transpose_b: bool, out_dtype: Any, accumulate_into: Any) -> tuple[GemmInputs, Form]:
    """Static checks of det_gemm; raises ValueError before anything runs."""
    _require(isinstance(transpose_b, bool), f"transpose_b must be True or False, got {transpose_b!r}.")
    start = None if accumulate_into is None else as_array("accumulate_into", accumulate_into)
    inputs = GemmInputs(as_array("a", a), as_array("b", b), start)
    a, b, start = inputs
    layout = "[N,K]" if transpose_b else "[K,N]"
    _require(
        a.ndim >= 2 and b.ndim == 2,
        f"det_gemm_fwd: expect 2D [M,K]@{layout} (a may have leading dims), got shapes {a.shape} and {b.shape}.",
    )
    k, n = b.shape[::-1] if transpose_b else b.shape
    _require(a.shape[-1] == k, f"det_gemm_fwd: K mismatch: a has {a.shape[-1]}, b as {layout} has {k}.")
    for name, x in (("a", a), ("b", b)):
        _require(x.dtype in FLOAT_DTYPES[:2], f"{name} must be bfloat16 or float16, got {x.dtype}.")
    _require(a.dtype == b.dtype, f"a dtype {a.dtype} must match b dtype {b.dtype}.")
    if start is not None:
        shape = (*a.shape[:-1], n)
        _require(start.shape == shape, f"accumulate_into must have C's shape {shape}, got {start.shape}.")
        _require(start.dtype == jnp.float32, f"accumulate_into must be float32, got {start.dtype}.")
    if out_dtype is None:
        out_dtype = a.dtype if start is None else jnp.float32
    _no_explicit_axes("det_gemm", inputs)
    _check_devices(inputs)
    return inputs, Form(False, bool(transpose_b), _out_dtype(out_dtype))


def gemm_dtype(dtype: Any) -> None:
    """Whether `det_gemm` multiplies this dtype."""
    _require(dtype in FLOAT_DTYPES[:2], f"dtype must be bfloat16 or float16, got {dtype!r}.")


def attention(query: Any, key: Any, value: Any, start: Any, padding: Any) -> None:
    """Static checks of nn.attention."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        _require(x.ndim == 4, f"{name} must be [batch, slots, heads, size], got shape {x.shape}.")
        _require(x.dtype in FLOAT_DTYPES[:2], f"{name} must be bfloat16 or float16, got {x.dtype}.")
        _require(x.dtype == query.dtype, f"{name} dtype {x.dtype} must match query dtype {query.dtype}.")
    batch, length, heads, size = query.shape
    _require(
        key.shape[0] == batch and key.shape[3] == size and key.shape[:3] == value.shape[:3],
        f"query {query.shape}, key {key.shape} and value {value.shape} must share the batch, query and key their size, "
        "key and value their slots and heads.",
    )
    slots, groups = key.shape[1:3]
    _require(groups >= 1 and heads % groups == 0, f"{heads} query heads cannot share {groups} key heads evenly.")
    first = start if _is_integer(start) else 0
    _require(
        first >= 0 and first + length <= slots, f"{length} queries from slot {start} on do not fit into {slots} slots."
    )
    if padding is not None:
        padding = as_array("padding", padding)
        _require(
            padding.shape in ((batch,), (batch, length)) and jnp.issubdtype(padding.dtype, jnp.integer),
            f"padding must be an integer for each of {batch} sequences or {batch}×{length} queries, "
            f"got {padding.dtype}{list(padding.shape)}.",
        )


def floats_of_a_row(op: str, x: Any) -> None:
    """Static checks of what nn reduces along its last dimension."""
    _require(
        jnp.ndim(x) >= 1 and jnp.issubdtype(jnp.result_type(x), jnp.floating),
        f"{op} needs floats [*lead, size], got {jnp.result_type(x)} of shape {jnp.shape(x)}.",
    )


def rms_norm(x: Any, scale: Any) -> None:
    """Static checks of nn.rms_norm."""
    floats_of_a_row("rms_norm", x)
    _require(scale.shape == x.shape[-1:], f"rms_norm needs a scale of shape {x.shape[-1:]}, got {scale.shape}.")


def softmax(x: Any, where: Any) -> None:
    """Static checks of nn.softmax."""
    floats_of_a_row("softmax", x)
    if where is not None:
        _require(
            where.shape == x.shape and where.dtype == jnp.bool,
            f"softmax needs bool where of shape {x.shape}, got {where.dtype} of shape {where.shape}.",
        )


def rotary(x: Any, positions: Any) -> None:
    """Static checks of nn.rotary."""
    floats_of_a_row("rotary", x)
    _require(
        x.ndim == 4 and x.shape[3] % 2 == 0 and positions.shape == x.shape[:2],
        f"rotary needs x [B, T, H, E] of an even E and positions [B, T], got shapes {x.shape} and {positions.shape}.",
    )


def embedding(table: Any, ids: Any) -> None:
    """Static checks of nn.embed."""
    _require(
        jnp.ndim(table) == 2 and table.shape[1] >= 1 and jnp.issubdtype(table.dtype, jnp.floating),
        f"embed needs a float table [V, D], D at least 1, got {jnp.result_type(table)} of shape {jnp.shape(table)}.",
    )
    _require(jnp.issubdtype(jnp.result_type(ids), jnp.integer), f"embed needs integer ids, got {jnp.result_type(ids)}.")


def require_positive_integer(name: str, x: Any) -> None:
    _require(_is_integer(x) and x >= 1, f"{name} must be a positive integer, got {x!r}.")


def mesh_axes(
    mesh: dict[str, int], vocab: AxisName, lead: PartitionSpec, vocab_size: int, tokens: tuple[int, ...]
) -> None:
    """Whether a head of vocab_size rows and tokens of this lead shape can be spread over a mesh of these axes."""
    axes("vocab_axis", vocab)
    for entry in lead:
        if entry is not None:
            axes("token_axes", entry)
    _require(len(lead) <= len(tokens), f"token_axes {lead} has more entries than target_ids has dimensions ({tokens}).")
    named = [*axis_names(vocab), *(name for entry in lead for name in axis_names(entry))]
    for name in named:
        _require(name in mesh, f"{name!r} is no axis of the mesh, whose axes are {tuple(mesh)}.")
        _require(named.count(name) == 1, f"mesh axis {name!r} is named twice among vocab_axis and token_axes.")
    n = math.prod(mesh[name] for name in axis_names(vocab))
    _require(
        vocab_size % n == 0,
        f"a vocabulary of {vocab_size} cannot be spread evenly over the {n} devices of {vocab!r}: "
        "rlk_jax.vocab_parallel.pad_lm_head pads the head.",
    )
    for size, entry in zip(tokens, lead, strict=False):
        n = math.prod(mesh[name] for name in axis_names(entry))
        _require(size % n == 0, f"{size} tokens cannot be spread evenly over the {n} devices of {entry!r}.")


def mesh_outside(what: str, mesh: Any) -> None:
    """Whether `mesh` is one, and the call stands outside shard_map."""
    _require(isinstance(mesh, Mesh | AbstractMesh), f"mesh must be a jax.sharding.Mesh, got {_describe(mesh)}.")
    _require(
        not jax.sharding.get_abstract_mesh().manual_axes,
        f"{what} is for whole arrays: inside jax.shard_map call rlk_jax.linear_logp(..., axis_name=...).",
    )


def no_auto_axes(mesh: Mesh | AbstractMesh) -> None:
    """Bare calls read how arrays lie from their types, which say nothing about Auto axes."""
    _require(
        AxisType.Auto not in mesh.axis_types,
        f"a bare linear_logp needs mesh axes that are all Explicit or all Auto, got {dict(mesh.shape)} of types "
        f"{mesh.axis_types}: call rlk_jax.vocab_parallel.linear_logp.",
    )


def head_or_bias(weight: Any, weight_layout: WeightLayout) -> None:
    """Whether `weight` is a head or a bias."""
    layouts = get_args(WeightLayout)
    _require(weight_layout in layouts, f"weight_layout must be one of {layouts}, got {weight_layout!r}.")
    shape = as_array("weight", weight).shape
    _require(len(shape) in (1, 2), f"weight must be a head [V, D] or [D, V], or a bias [V], got shape {shape}.")


def require_values(inputs: AnyInputs) -> None:
    """Refuses shapes in the place of arrays; `rlk_jax.explain` alone takes those."""
    for name, x in inputs._asdict().items():
        _require(
            not isinstance(x, jax.ShapeDtypeStruct),
            f"{name} is a ShapeDtypeStruct: use jax.eval_shape, or rlk_jax.explain.",
        )


def as_int32(ids: Any) -> Array:
    """Integer ids as int32. Ids beyond int32 saturate: one out of range must stay so, not wrap."""
    if ids.dtype == np.int32:
        return jnp.asarray(ids)
    info = jnp.iinfo(ids.dtype)
    low, high = max(info.min, _INT32.min), min(info.max, _INT32.max)
    clip = np.clip if isinstance(ids, np.ndarray | np.generic) else jnp.clip
    return jnp.asarray(clip(ids, low, high).astype(np.int32))


class _Findings(NamedTuple):
    """What one fused pass over the tokens finds: these with the bad ones marked, and `_fit` of ids and temperatures."""

    tokens: Tokens
    ids: Array
    temperatures: Array


@functools.partial(jax.jit, static_argnames="vocab_size")
def _inspect(ids: Array, counted: Array, temperature: Any, *, vocab_size: int) -> _Findings:
    temperature = jnp.broadcast_to(jnp.asarray(temperature).astype(jnp.float32), ids.shape).reshape(-1)
    # XLA would divide by a constant of the program itself, and round otherwise than the GPU divides by an argument.
    temperature, ids = jax.lax.optimization_barrier(temperature), ids.reshape(-1)
    id_is_good = (ids >= 0) & (ids < vocab_size)
    temperature_is_good = (temperature >= _SMALLEST) & (temperature < jnp.inf)
    is_good = id_is_good & temperature_is_good
    # An ignored row poisons nothing: its NaN would stop a program under jax_debug_nans.
    poison = jnp.where(counted, jnp.nan, 1.0)
    return _Findings(
        Tokens(jnp.where(is_good, ids, 0), jnp.where(is_good, temperature, poison), counted),
        ids=_fit(ids, id_is_good, counted, (_INT32.min, _INT32.max)),
        temperatures=_fit(temperature, temperature_is_good, counted, (-jnp.inf, jnp.inf)),
    )


def _fit(x: Array, is_good: Array, counted: Any, limits: tuple[float, float]) -> Array:
    """Whether all that counts is good, the least and the greatest of it, `[3]` in the dtype of x: one read-back."""
    least, greatest = limits
    low = jnp.min(x, where=counted, initial=greatest)
    high = jnp.max(x, where=counted, initial=least)
    return jnp.stack([jnp.all(is_good | ~counted).astype(x.dtype), low, high])


def counted(ids: Any, ignore_index: int | None) -> Array:
    """Which tokens `[N]` are not ignored."""
    ids = as_int32(ids).reshape(-1)
    return jnp.ones(ids.shape, bool) if ignore_index is None else ids != ignore_index


def tokens(
    ids: Any,
    temperature: Any,
    counted: Array,
    *,
    vocab_size: int,
    validate: bool | None,
    name: Literal["target_ids", "token_ids", "action_ids"],
) -> Tokens:
    """Flat tokens `[N]`, of which `counted` ones are active. A row with a bad id or temperature gets temperature NaN,
    which poisons everything it reaches.

    validate=True reads the values back once and raises ValueError; None does so where they can be read. Otherwise bad
    rows are only marked, and `checkify.debug_check` reports them to a program under `checkify.checkify`.
    """
    found = _inspect(as_int32(ids), counted, temperature, vocab_size=vocab_size)
    out_of_range = _ACTIONS_OUT_OF_RANGE if name == "action_ids" else _IDS_OUT_OF_RANGE.replace("{name}", name)
    checks = (
        (found.ids, out_of_range.replace("{last}", str(vocab_size - 1))),
        (found.temperatures, _BAD_TEMPERATURE),
    )
    _report(checks, validate, f"{name} and temperature")
    return found.tokens


def rows(row_indices: Any, count: int, validate: bool | None) -> tuple[Array, Array]:
    """Which of `count` rows are listed, `[count]`, and whether every index is in range; checked as `tokens` are."""
    indices, is_good = rows_in_range(row_indices, count, validate)
    listed = jnp.zeros(count, bool).at[jnp.where(is_good, indices, count)].set(True, mode="drop")
    return listed, jnp.all(is_good)


def rows_in_range(row_indices: Any, count: int, validate: bool | None) -> tuple[Array, Array]:
    """int32 indices, and which of them are those of one of `count` rows; checked as `tokens` are."""
    indices = as_int32(row_indices)
    is_good = (indices >= 0) & (indices < count)
    fit = _fit(indices, is_good, jnp.ones((), bool), (_INT32.min, _INT32.max))
    _report(((fit, _ROWS_OUT_OF_RANGE.replace("{last}", str(count - 1))),), validate, "row_indices")
    return indices, is_good


def _report(checks: Sequence[tuple[Array, str]], validate: bool | None, names: str) -> None:
    """Each check is what `_fit` says, and a message; raised here where that can be read, or marked."""
    readable = all(is_concrete(fit) for fit, _ in checks)
    if validate and not readable:
        raise ValueError(f"validate=True needs concrete {names}; under jit use jax.experimental.checkify.")
    must_raise = readable and validate is not False
    for (fits, low, high), message in jax.device_get(checks) if must_raise else checks:
        if must_raise:
            _require(fits, message.format(low=low, high=high))
        else:
            checkify.debug_check(fits != 0, message, low=low, high=high)


# rlk_jax.grpo: groups, losses on log-probs and their options.


def one_of(name: str, x: Any, allowed: tuple[Any, ...]) -> None:
    """Whether an option is one of those that exist."""
    _require(x in allowed, f"{name} must be one of {allowed}, got {x!r}.")


def positive(name: str, x: Any) -> None:
    """Whether x is a number above 0 that is finite as a float32."""
    _require(_is_number(x) and _fits_float32(x), f"{name} must be a positive finite number, got {x!r}.")


def not_negative(name: str, x: Any) -> None:
    """The same, or 0."""
    _require(
        _is_number(x) and (x == 0 or _fits_float32(x)), f"{name} must be 0 or a positive finite number, got {x!r}."
    )


def unused_option(loss_type: str, name: str, x: Any, default: Any) -> None:
    """Of an option that the loss type does not use."""
    _require(x == default, f"{name} has no meaning for loss_type={loss_type!r}.")


def dual_clip(x: float | None, upper: float) -> None:
    """Beside a clip range that ends at `upper`."""
    _require(
        x is None or x > upper,
        f"dual_clip must be above the clip range, which ends at {upper}, got {x}.",
    )


def constant_length(normaliser: str, max_completion_length: Any) -> None:
    """Whether the length that a constant normaliser counts is there, and no other has one."""
    _require(
        (normaliser == "constant") == (max_completion_length is not None),
        "max_completion_length must be given with normaliser='constant' and with no other, got "
        f"{max_completion_length!r} with {normaliser!r}.",
    )
    if max_completion_length is not None:
        require_positive_integer("max_completion_length", max_completion_length)


def _require_real(name: str, x: Any) -> None:
    _require(
        any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.bool, jnp.integer, jnp.floating)),
        f"{name} must be bool or real numbers, got {x.dtype}.",
    )


def _boundaries(num_sequences: int, group_boundaries: Any) -> tuple[int, ...]:
    _require(
        all(map(is_concrete, jax.tree.leaves(group_boundaries))),
        "group_boundaries must be static: a sequence of integers or a concrete array, not a traced one. "
        "Under jit close over it or make it a static argument.",
    )
    edges = np.asarray(group_boundaries)
    _require(edges.ndim == 1 and edges.size >= 2, "group_boundaries must be a 1D tensor of length num_groups + 1.")
    _require(np.issubdtype(edges.dtype, np.integer), f"group_boundaries must be integers, got {edges.dtype}.")
    _require(edges[0] == 0 and edges[-1] == num_sequences, "group_boundaries must start at 0 and end at num_sequences.")
    _require(np.all(edges[1:] > edges[:-1]), "each group must contain at least one sequence.")
    return tuple(edges.tolist())


def groups(rewards: Any, samples_per_prompt: Any, group_boundaries: Any) -> tuple[int, ...]:
    """Where each group of `rewards [B]` begins, and the end: 0, ..., B."""
    rewards = as_array("rewards", rewards)
    _require(rewards.ndim == 1, f"rewards must be 1D [num_sequences], got shape {rewards.shape}.")
    _require_real("rewards", rewards)
    _require(
        (samples_per_prompt is None) != (group_boundaries is None),
        "Provide exactly one of samples_per_prompt or group_boundaries.",
    )
    count = rewards.shape[0]
    if group_boundaries is not None:
        return _boundaries(count, group_boundaries)
    _require(
        _is_integer(samples_per_prompt),
        f"samples_per_prompt must be an integer, got {type(samples_per_prompt).__name__}.",
    )
    _require(samples_per_prompt >= 2, "samples_per_prompt must be at least 2 for group normalization.")
    _require(count % samples_per_prompt == 0, "num_sequences (B) must be divisible by samples_per_prompt (n).")
    return tuple(range(0, count + 1, int(samples_per_prompt)))


def completion_mask(mask: Any) -> tuple[int, int]:
    """The shape [B, T] of a mask."""
    mask = as_array("completion_mask", mask)
    _require(mask.ndim == 2, "completion_mask must be 2D [num_sequences, completion_len].")
    _check_mask_dtype(mask)
    return mask.shape


def advantages(x: Any, mask: Any) -> None:
    """Whether there is one for each sequence of the mask, or one for each token."""
    x, shape = as_array("advantages", x), completion_mask(mask)
    _require(
        x.shape in (shape[:1], shape),
        f"advantages must be [B] or [B, T] of completion_mask shape {shape}, got shape {x.shape}.",
    )
    _require_real("advantages", x)


def policy_loss(
    per_token: dict[str, Any], mask: Any, denominator: Any, *, beta: float, importance_cap: float | None
) -> None:
    """Static checks of grpo.policy_loss; raises ValueError before anything runs."""
    shape = completion_mask(mask)
    for name, x in per_token.items():
        if x is not None or name in ("logp", "old_logps"):
            x = as_array(name, x)
            _require(x.shape == shape, f"{name} shape {x.shape} does not match completion_mask shape {shape}.")
            _require(x.dtype in FLOAT_DTYPES, f"{name} must be bfloat16, float16 or float32, got {x.dtype}.")
    _require(beta == 0 or per_token["ref_logps"] is not None, f"beta={beta} requires ref_logps.")
    _require(
        (per_token["rollout_logps"] is None) == (importance_cap is None),
        "rollout_logps and importance_cap must be given together.",
    )
    if _is_number(denominator):
        not_negative("denominator", denominator)
    elif denominator is not None:
        denominator = as_array("denominator", denominator)
        _require(denominator.ndim == 0, f"denominator must be a scalar, got shape {denominator.shape}.")


def completion_targets(target_ids: Any, mask: Any, ignore_index: int | None) -> None:
    """Whether there is a target for each token of the mask, which alone says what is left out."""
    ids, shape = as_array("target_ids", target_ids), completion_mask(mask)
    _require(ids.shape == shape, f"target_ids shape {ids.shape} does not match completion_mask shape {shape}.")
    _require(jnp.issubdtype(ids.dtype, jnp.integer), f"target_ids must be integers, got {ids.dtype}.")
    _require(ignore_index is None, "completion_mask says which tokens count: ignore_index must be None.")


def reference(logps: Any, hidden: Any, weight: Any, *, bias: Any, mask: Any, head: Any, layout: Any) -> None:
    """Whether a reference model comes as its log-probs, or as hidden states of the mask's tokens and a head of as many
    columns as the policy's, or not at all.
    """
    _require((hidden is None) == (weight is None), "ref_hidden and ref_weight must be given together.")
    if hidden is None:
        return
    _require(logps is None, "Give ref_logps, or ref_hidden and ref_weight, not both.")
    _require(bias is None, "The head of ref_hidden has no bias: beside a bias, give ref_logps instead.")
    hidden, weight, head = (
        as_array("ref_hidden", hidden),
        as_array("ref_weight", weight),
        as_array("lm_head_weight", head),
    )
    shape = completion_mask(mask)
    _require(
        hidden.ndim == 3 and hidden.shape[:2] == shape,
        f"ref_hidden must be [B, T, E] of completion_mask shape {shape}, got shape {hidden.shape}.",
    )
    rows = 1 if layout == "dv" else 0
    _require(
        weight.ndim == head.ndim == 2 and weight.shape[rows] == head.shape[rows],
        f"ref_weight shape {weight.shape} must have the vocabulary of lm_head_weight shape {head.shape}.",
    )
    dim = weight.shape[1 - rows]
    _require(hidden.shape[2] == dim, f"ref_hidden dim {hidden.shape[2]} must match ref_weight dim {dim}.")


def rewards_or_advantages(
    inputs: RatioKlInputs, rewards: Any, given: Any, samples_per_prompt: Any, group_boundaries: Any
) -> None:
    """Whether grpo_loss has the one or the other, for the sequences of its mask."""
    shape = completion_mask(inputs.completion_mask)
    has_groups = samples_per_prompt is not None or group_boundaries is not None
    _require((rewards is None) != (given is None), "Provide exactly one of rewards or advantages.")
    _require(
        given is None or not has_groups, "samples_per_prompt and group_boundaries are for rewards, not advantages."
    )
    if given is not None:
        advantages(given, inputs.completion_mask)
        return
    found = as_array("rewards", rewards).shape
    _require(found == shape[:1], f"rewards must be one number for each of {shape[0]} sequences, got shape {found}.")
    groups(rewards, samples_per_prompt, group_boundaries)
