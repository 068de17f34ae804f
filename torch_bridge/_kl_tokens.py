"""What linear_kl is told of each token, as padded arrays, and the checks of its values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import torch
from torch import Tensor

from rlk_jax.ops.linear_kl.checks import check_call, tokens_of_call
from rlk_jax.ops.linear_kl.options import KlInputs, KlOptions
from torch_bridge import _exchange, _inputs
from torch_bridge._padding import RowPadding
from torch_bridge._programs import Arrays

Scale = tuple[Tensor | None, float | None]
"""A temperature as a tensor, or else as a number; neither for a teacher that has the student's."""


_FROZEN = frozenset(
    ("teacher_hidden", "teacher_weight", "teacher_bias", "teacher_logps", "temperature", "teacher_temperature")
)


class TokenTensors(NamedTuple):
    """What a call is told of each token; None for what was not given."""

    completion_mask: Tensor | None
    teacher_ids: Tensor | None
    teacher_logps: Tensor | None
    temperature: Scale
    teacher_temperature: Scale


def scales(temperature: Any, teacher_temperature: Any) -> tuple[Scale, Scale]:
    """Both temperatures, as a tensor or a number each."""
    own = _inputs.temperature(temperature)
    return own, (None, None) if teacher_temperature is None else _inputs.temperature(teacher_temperature, "teacher_")


def check_kl(
    tensors: dict[str, Any], temperature: Any, teacher_temperature: Any, options: KlOptions
) -> tuple[Scale, Scale]:
    """Run all checks of a call that read no values; both temperatures as a tensor or a number."""
    scale, teacher_scale = scales(temperature, teacher_temperature)
    tensors = {**tensors, "temperature": scale[0], "teacher_temperature": teacher_scale[0]}
    needed = ("hidden", "lm_head_weight")
    _inputs.check_tensors(**{name: x for name, x in tensors.items() if x is not None or name in needed})
    _inputs.check_constants("linear_kl", **{name: x for name, x in tensors.items() if name in _FROZEN})
    numbers: dict[str, Any] = {"temperature": scale[1], "teacher_temperature": teacher_scale[1]}
    _inputs.check_options("linear_kl", tensors, options, **numbers)
    return scale, teacher_scale


def lent_tokens(
    padding: RowPadding, heads: Sequence[Tensor | None], told: TokenTensors, options: KlOptions, *, validate: bool
) -> Arrays:
    """The mask, the ids and log-probs that a teacher lists, and both temperatures as padded arrays; of the mask rows of
    padding hold False.

    `heads` are hidden, weight and bias of the student and then of the teacher, which the checks of values need.
    """
    mask, ids, logps, scale, teacher_scale = told
    hidden = heads[0]
    assert hidden is not None
    lead, device = hidden.shape[:-1], hidden.device
    counts = torch.ones(lead, dtype=torch.bool, device=device) if mask is None else mask != 0
    temperature = padding.temperature(scale[0], scale[1] or 0.0, device)
    teacher_temperature = None
    if teacher_scale != (None, None):
        teacher_temperature = padding.temperature(teacher_scale[0], teacher_scale[1] or 0.0, device)
    found = padding.rows(counts, False), *padding.listed(ids, logps), temperature, teacher_temperature
    if validate:
        _exchange.wait(temperature.device)
        _check_values(heads, found, options)
    return found


def _check_values(heads: Sequence[Tensor | None], tokens: Arrays, options: KlOptions) -> None:
    """Raise for bad temperatures, and for bad values that a teacher lists, in the arrays of a program."""
    mask, ids, logps, temperature, teacher_temperature = tokens
    rows = () if mask is None else mask.shape

    def of_rows(x: Tensor | None) -> Any:
        return None if x is None else jax.ShapeDtypeStruct((*rows, x.shape[-1]), _exchange.DTYPES[x.dtype])

    def whole(x: Tensor | None) -> Any:
        return None if x is None else jax.ShapeDtypeStruct(*_inputs.spec(x))

    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias = heads
    arrays = of_rows(hidden), whole(weight), of_rows(teacher_hidden), whole(teacher_weight)
    ids = None if ids is None or logps is None else _exchange.ids_of(ids, logps.shape)
    told = mask, temperature, teacher_temperature, ids, logps
    given = KlInputs(*arrays, whole(bias), whole(teacher_bias), *told)
    tokens_of_call(*check_call(given, options)[:2], validate=True)
