"""Every static check of linear_kl and its message, and the check of the values of temperatures.

The docstring of a check says what must hold. Where it does not, the check raises ValueError before anything runs.
"""

import functools
from dataclasses import asdict
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from rlk_jax.core.checks import (
    BAD_TEMPERATURE,
    INT32,
    SMALLEST,
    as_array,
    check_devices,
    check_dtypes,
    check_flags,
    check_mask_dtype,
    check_memory_budget,
    check_vocabulary_options,
    checked_temperature,
    checked_vocab_size,
    is_number,
    no_explicit_axes,
    require,
    require_one_of,
)
from rlk_jax.core.fixed_order import column_groups
from rlk_jax.core.gemm import WeightLayout
from rlk_jax.core.shard import Shard
from rlk_jax.core.shard_checks import checked_shard
from rlk_jax.core.tokens import PADDED_IDS_OUT_OF_RANGE, active_mask, as_int32, checked, fit
from rlk_jax.ops.linear_kl.options import (
    DivergenceKind,
    KlConfig,
    KlInputs,
    KlOptions,
    KlTokens,
    OneHeadConfig,
    TeacherTopK,
)

Array = jax.Array
_MOST_PROBABILITY = 1.02
_LISTED_OUT_OF_RANGE = PADDED_IDS_OUT_OF_RANGE.replace("{name}", "teacher_ids")
_TWICE = "teacher_ids must be distinct: rows {low} to {high} of the flat tokens name one twice."
_NO_PROBABILITIES = (
    "teacher_logps must be log-probabilities, of 1.02 together at most: those of rows {low} to {high} of the flat "
    "tokens are not."
)


def check_call(
    inputs: KlInputs, options: KlOptions, vocab_start_index: Any = None
) -> tuple[KlInputs, KlConfig, Shard | None]:
    """All static checks of a call: its inputs as arrays, what an implementation is compiled for, and the shard."""
    require_one_of("kind", options.kind, get_args(DivergenceKind))
    require(
        is_number(options.beta) and 0 <= options.beta <= 1, f"beta must be a number in [0, 1], got {options.beta!r}."
    )
    require_one_of("weight_layout", options.weight_layout, get_args(WeightLayout))
    require_one_of("teacher_weight_layout", options.teacher_weight_layout, get_args(WeightLayout))
    check_flags(options)
    check_memory_budget(options.memory_budget)
    inputs = _as_arrays(inputs, _names_of_teacher(inputs, options))
    columns = _checked_columns(
        ("hidden", "lm_head_weight", "bias"),
        (inputs.hidden, inputs.lm_head_weight, inputs.bias),
        options.weight_layout,
    )
    shard = checked_shard(options, columns, options.global_vocab_size, vocab_start_index)
    ranks = 1 if shard is None else shard.count
    student = _head_config(columns, ranks, options.weight_layout, (options.logit_softcap, options.global_vocab_size))
    teacher = _checked_teacher(inputs, options, student, shard)
    _check_lead(inputs)
    check_dtypes(inputs, integers=("teacher_ids",), unchecked=("completion_mask",))
    no_explicit_axes("linear_kl", inputs)
    check_devices(inputs)
    budget = None if options.memory_budget is None else int(options.memory_budget)
    vocabulary = student.real_vocab_size
    config = KlConfig(*_kind_and_share(options), student, teacher, budget, column_groups(vocabulary), vocabulary)
    return inputs, config if shard is None else config.of_shard(shard), shard


def _names_of_teacher(inputs: KlInputs, options: KlOptions) -> tuple[str, str]:
    """The arrays that say what the teacher is: of its head, or of the tokens that it lists, and then nothing of a head
    is given.
    """
    if inputs.teacher_ids is None and inputs.teacher_logps is None:
        require(
            inputs.teacher_hidden is not None or inputs.teacher_weight is not None,
            "linear_kl needs a teacher: teacher_hidden and teacher_weight, or teacher_ids and teacher_logps.",
        )
        return _both(inputs, "teacher_hidden", "teacher_weight")
    listed, unset = ("teacher_ids", "teacher_logps"), asdict(KlOptions())
    given = [name for name, x in inputs._asdict().items() if x is not None and name not in listed]
    # A value of another type than the default is given; it may be an array, which must not be compared.
    given += [name for name, x in asdict(options).items() if not isinstance(x, type(unset[name])) or x != unset[name]]
    of_head = [name for name in given if name.startswith("teacher_")]
    require(not of_head, f"teacher_ids and teacher_logps replace a teacher's head: leave out {', '.join(of_head)}.")
    return _both(inputs, *listed)


def _both(inputs: KlInputs, *names: str) -> tuple[str, str]:
    """Both names of arrays that make a teacher together."""
    missing = [name for name in names if getattr(inputs, name) is None]
    require(not missing, f"{' and '.join(names)} go together: {', '.join(missing)} is None.")
    return names[0], names[1]


def _as_arrays(inputs: KlInputs, names_of_teacher: tuple[str, str]) -> KlInputs:
    """Every input as an array; a teacher without a temperature has the student's."""
    needed = ("hidden", "lm_head_weight", *names_of_teacher)
    temperature = checked_temperature(inputs.temperature)
    teacher_temperature = temperature
    if inputs.teacher_temperature is not None:
        teacher_temperature = checked_temperature(inputs.teacher_temperature, "teacher_")
    given = {
        name: as_array(name, x) if x is not None or name in needed else None
        for name, x in inputs._asdict().items()
        if not name.endswith("temperature")
    }
    return KlInputs(**given, temperature=temperature, teacher_temperature=teacher_temperature)


def _checked_columns(
    names: tuple[str, str, str], arrays: tuple[Any, Any, Any], layout: WeightLayout, whose: str = ""
) -> int:
    """The shapes of hidden states, head and bias fit each other. The columns of the head are returned."""
    hidden, weight, bias = arrays
    vocab_size = checked_vocab_size(names[:2], hidden, weight, layout, f"{whose}weight_layout")
    require(
        bias is None or bias.shape == (vocab_size,),
        f"{names[2]} must have V={vocab_size} elements, got shape {getattr(bias, 'shape', None)}.",
    )
    return vocab_size


def _head_config(columns: int, ranks: int, layout: WeightLayout, options: Any, whose: str = "") -> OneHeadConfig:
    """The softcap and the true vocabulary fit the columns that so many ranks hold each."""
    softcap, real = options
    check_vocabulary_options(columns * ranks, softcap, None, real, whose)
    return OneHeadConfig(
        vocab_size=columns,
        real_vocab_size=columns * ranks if real is None else int(real),
        logit_softcap=None if softcap is None else float(softcap),
        return_lse=False,
        return_entropy=False,
        weight_layout=layout,
    )


def _checked_teacher(
    inputs: KlInputs, options: KlOptions, student: OneHeadConfig, shard: Shard | None
) -> OneHeadConfig | None:
    """A teacher's head fits its hidden states, has the student's vocabulary and is cut as the student's head is. None
    is for one that lists tokens.
    """
    if inputs.teacher_ids is not None:
        ids, logps = inputs.teacher_ids.shape, inputs.teacher_logps.shape
        require(
            ids == logps and len(ids) >= 1 and ids[-1] >= 1,
            f"teacher_ids and teacher_logps must both be [*lead, k], k >= 1, got shapes {ids} and {logps}.",
        )
        return None
    layout = options.teacher_weight_layout
    columns = _checked_columns(
        ("teacher_hidden", "teacher_weight", "teacher_bias"),
        (inputs.teacher_hidden, inputs.teacher_weight, inputs.teacher_bias),
        layout,
        whose="teacher_",
    )
    require(
        shard is None or columns == shard.columns,
        f"student and teacher must be cut alike, got shards of {student.vocab_size} and {columns} tokens: "
        "rlk_jax.vocab_parallel.pad_lm_head pads both heads.",
    )
    sizes = options.teacher_logit_softcap, options.teacher_global_vocab_size
    teacher = _head_config(columns, 1 if shard is None else shard.count, layout, sizes, whose="teacher_")
    real = student.real_vocab_size
    require(
        real == teacher.real_vocab_size,
        f"student and teacher must share one vocabulary, got {real} and {teacher.real_vocab_size} "
        "tokens: where a head is padded, global_vocab_size and teacher_global_vocab_size say how many are real.",
    )
    return teacher


def _check_lead(inputs: KlInputs) -> None:
    """What has a row or a number for each token has the same lead shape."""
    lead = inputs.hidden.shape[:-1]
    for name in ("teacher_hidden", "teacher_ids"):
        shape = getattr(getattr(inputs, name), "shape", (*lead, 0))[:-1]
        require(shape == lead, f"{name} leading shape {shape} must match hidden leading shape {lead}.")
    for name in ("temperature", "teacher_temperature"):
        shape = getattr(inputs, name).shape
        require(shape in ((), lead), f"{name} must be a scalar or have hidden leading shape {lead}, got {shape}.")
    mask = inputs.completion_mask
    if mask is not None:
        check_mask_dtype(mask)
        require(mask.shape == lead, f"completion_mask must have hidden leading shape {lead}, got {mask.shape}.")


def _kind_and_share(options: KlOptions) -> tuple[DivergenceKind, float]:
    """The kind and the teacher's share of its mixture. The ends of "jsd" are the other two kinds, as in TRL."""
    if options.kind != "jsd":
        return options.kind, 0.5
    ends: dict[float, DivergenceKind] = {0.0: "forward", 1.0: "reverse"}
    return (ends[options.beta], 0.5) if options.beta in ends else ("jsd", float(options.beta))


class _FoundTokens(NamedTuple):
    """What one pass over the tokens finds: tokens with bad ones marked, and what `fit` gives for both temperatures."""

    tokens: KlTokens
    fits: tuple[Array, Array]


@functools.partial(jax.jit, static_argnames="count")
def _find_tokens(active: Array, temperatures: tuple[Array, Array], *, count: int) -> _FoundTokens:
    def marked(temperature: Array) -> tuple[Array, Array]:
        temperature = jnp.broadcast_to(jnp.asarray(temperature).astype(jnp.float32).reshape(-1), count)
        # The barrier makes constants behave as arguments: XLA itself would divide by a constant, and round otherwise.
        temperature = jax.lax.optimization_barrier(temperature)
        is_good = (temperature >= SMALLEST) & (temperature < jnp.inf)
        # A token that does not count poisons nothing: its NaN would stop a program under jax_debug_nans.
        poison = jnp.where(active, jnp.nan, 1.0)
        return jnp.where(is_good, temperature, poison), fit(temperature, is_good, active, (-jnp.inf, jnp.inf))

    (student, student_fit), (teacher, teacher_fit) = map(marked, temperatures)
    return _FoundTokens(KlTokens(student, teacher, active), (student_fit, teacher_fit))


class _FoundList(NamedTuple):
    """What a teacher lists, which rows of it are good, and what `fit` gives for ids, for rows that name one twice, and
    for rows of log-probs.
    """

    top_k: TeacherTopK
    is_good: Array
    fits: tuple[Array, Array, Array]


@functools.partial(jax.jit, static_argnames="vocab_size")
def _find_list(active: Array, ids: Array, logps: Array, *, vocab_size: int) -> _FoundList:
    ids, logps = (jax.lax.optimization_barrier(x.reshape(active.size, x.shape[-1])) for x in (ids, logps))
    is_in_range, is_listed = (ids >= -1) & (ids < vocab_size), ids >= 0
    ordered = jnp.sort(ids, axis=1)
    is_distinct = ~jnp.any((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0), axis=1)
    logps = jnp.where(is_listed, logps.astype(jnp.float32), -jnp.inf)
    is_probability = jnp.exp(logps).sum(axis=1) <= _MOST_PROBABILITY
    rows, limits = jnp.arange(active.size, dtype=jnp.int32), (INT32.min, INT32.max)
    is_good = jnp.all(is_in_range, axis=1) & is_distinct & is_probability
    keeps = (active & is_good)[:, None]
    return _FoundList(
        TeacherTopK(jnp.where(keeps, ids, -1), jnp.where(keeps, logps, -jnp.inf), keeps & is_listed),
        is_good,
        (
            fit(ids, is_in_range, active[:, None], limits),
            fit(rows, is_distinct, active & ~is_distinct, limits),
            fit(rows, is_probability, active & ~is_probability, limits),
        ),
    )


def tokens_of_call(inputs: KlInputs, config: KlConfig, validate: bool | None) -> KlTokens:
    """Flat tokens; those that the mask leaves out are not active. A bad temperature is NaN, and poisons its row; so is
    that of a row of which the teacher lists bad values.

    Values are checked as those of other tokens are: they raise where they can be read, else they are reported to
    checkify.
    """
    lead = inputs.hidden.shape[:-1]
    mask = jnp.ones(lead, bool) if inputs.completion_mask is None else active_mask(inputs.completion_mask)
    active = mask.reshape(-1)
    temperatures = jax.lax.stop_gradient((inputs.temperature, inputs.teacher_temperature))
    found = _find_tokens(active, temperatures, count=active.size)
    checks = [(found.fits[0], BAD_TEMPERATURE), (found.fits[1], f"teacher_{BAD_TEMPERATURE}")]
    if inputs.teacher_ids is None:
        temperature = checked(found.tokens.temperature, checks, validate, "temperature and teacher_temperature")
        return found.tokens._replace(temperature=temperature)
    ids, logps = as_int32(inputs.teacher_ids), jax.lax.stop_gradient(inputs.teacher_logps)
    listed = _find_list(active, ids, logps, vocab_size=config.vocabulary)
    messages = (_LISTED_OUT_OF_RANGE.replace("{last}", str(config.vocabulary - 1)), _TWICE, _NO_PROBABILITIES)
    checks = [checks[0], *zip(listed.fits, messages, strict=True)]
    temperature = checked(found.tokens.temperature, checks, validate, "temperature, teacher_ids and teacher_logps")
    poisoned = jnp.where(active & ~listed.is_good, jnp.nan, temperature)
    return found.tokens._replace(temperature=poisoned, top_k=listed.top_k)
