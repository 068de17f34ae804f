"""Dataclasses of options as arguments of torch's custom ops, which take no dataclass."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, get_origin, get_type_hints

from rlk_jax.core.shard import ShardOptions
from torch_bridge._programs import Options

OF_A_MESH = tuple(x.name for x in fields(ShardOptions))
"""Options of a head inside shard_map, which tensors have none of."""


class OptionFields:
    """The fields of a dataclass of options that a custom op has, each as an argument of its own.

    Everything is derived from the dataclass, so that a new option is a new field and nothing else.
    """

    def __init__(self, kind: type[Any], without: Sequence[str] = ()) -> None:
        self._kind = kind
        hints = get_type_hints(kind)
        self._types = {x.name: _schema_type(hints[x.name]) for x in fields(kind) if x.name not in without}

    def static(self, options: Any) -> Options:
        """The options that a program is compiled for: all but `validate`, because values are checked before it runs."""
        return tuple([(name, getattr(options, name)) for name in self._types if name != "validate"])

    def spread(self, arguments: Sequence[Any]) -> list[Any]:
        """A kernel's arguments with its options, the last argument but one, replaced by their fields."""
        *tensors, options, needs = arguments
        return [*tensors, *[getattr(options, name) for name in self._types], needs]

    def flattened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with a parameter for each field instead of `options`, its last parameter but one."""
        count = len(self._types)

        @functools.wraps(function)
        def flat_function(*arguments: Any) -> Any:
            *others, needs = arguments
            values = dict(zip(self._types, others[-count:], strict=True))
            return function(*others[:-count], self._kind(**values), needs)

        signature = inspect.signature(function)
        *tensors, _, needs = signature.parameters.values()
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        options = [inspect.Parameter(name, kind, annotation=hint) for name, hint in self._types.items()]
        flat_function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*tensors, *options, needs]
        )
        return flat_function


def _schema_type(hint: Any) -> Any:
    """A field's type as torch's schemas know it: a Literal of strings is a string."""
    return str if get_origin(hint) is Literal else hint
