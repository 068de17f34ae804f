"""What can be checked: implementations of rlk_jax, ops of torch_bridge, and any function in JAX or torch."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

import rlk_jax
from rlk_jax.checker import plugins
from rlk_jax.checker.op_spec import OpSpec, Problem
from rlk_jax.checker.options import Unusable
from rlk_jax.core.named_functions import named_function
from rlk_jax.core.terminal import did_you_mean
from rlk_jax.dispatch import IMPLEMENTATIONS

ALIASES = {"pytorch": "reference", "native": "reference", "cuda-sm90": "cuda", "torch_bridge": "bridge"}
"""Other names of candidates, for users who know them from RL-Kernel or by their package."""
NAMES = ("registry", *IMPLEMENTATIONS, "bridge", *ALIASES)
"""The names of all candidates that are no function of the user's."""


@dataclass(frozen=True)
class ArrayLibrary:
    """How a candidate gets its arguments and gives its results."""

    send: Callable[[np.ndarray], Any]
    """Makes an array of the candidate's kind, with memory of its own."""
    fetch: Callable[[Any], np.ndarray]
    """Gives the array's values on the host. Raises RuntimeError where the candidate gave its memory away."""
    forward: Callable[[Callable[..., Any], Sequence[Any], Sequence[int]], tuple[list[Any], Callable[..., Any]]]
    """Calls the function. Gives its outputs, and a function from their upstream gradients to the gradients of the
    arguments at these places.
    """


def _jax_forward(fn: Callable[..., Any], inputs: Sequence[Any], places: Sequence[int]) -> tuple[list[Any], Any]:
    """`ArrayLibrary.forward` for JAX arrays."""

    def outputs_for(differentiated: Sequence[Any]) -> list[Any]:
        arguments = list(inputs)
        for place, x in zip(places, differentiated, strict=True):
            arguments[place] = x
        return jax.tree.leaves(fn(*arguments), is_leaf=lambda x: x is None)

    if not places:
        return outputs_for([]), None
    outputs, pull_back = jax.vjp(outputs_for, [inputs[place] for place in places])

    def gradients(upstream: Sequence[Any]) -> list[Any]:
        # The upstream gradients of integers have a type of their own.
        integers = [jnp.issubdtype(g.dtype, jnp.integer) for g in upstream]
        given = (np.zeros(g.shape, float0) if x else g for x, g in zip(integers, upstream, strict=True))
        return pull_back(list(given))[0]

    return outputs, gradients


JAX = ArrayLibrary(jnp.array, np.asarray, _jax_forward)
"""Candidates that take and give JAX arrays."""


@dataclass(frozen=True)
class Candidate:
    """A function under check. It takes an op's arrays by position, in the op's order, and its options by keyword."""

    name: str
    fn: Callable[..., Any]
    backend: str = "unknown"
    arrays: ArrayLibrary = JAX
    kwargs: Mapping[str, str | None] = field(default_factory=dict)
    """The function's own names of the op's options, where they differ; None for an option that it does not take."""
    no_bits: str | None = None
    """Why the candidate promises no bits, or None where it promises them."""

    def bound(self, options: Mapping[str, Any]) -> Callable[..., Any]:
        """The function of arrays alone, with these options of the op bound to the function's names of them."""
        names = {name: self.kwargs.get(name, name) for name in options}
        return functools.partial(self.fn, **{new: options[old] for old, new in names.items() if new is not None})


def torch_arrays() -> ArrayLibrary:
    """Torch tensors, as torch_bridge handles them. Raises `Unusable` where PyTorch is not installed."""
    return plugins.bridge("check").TORCH


def resolve(name: str, spec: OpSpec, problem: Problem, arrays: str | None = None) -> Candidate:
    """The candidate of this name for this problem on JAX's default device; raises `Unusable`."""
    known = ALIASES.get(name, name)
    if arrays is not None and ":" not in name:
        raise Unusable(f"--arrays is for a module:function, not {name}")
    if known in IMPLEMENTATIONS or known == "registry":
        choice = _choice(spec, problem, None if known == "registry" else known)
        fn = functools.partial(getattr(rlk_jax, spec.function), implementation=choice, **spec.unchecked)
        return Candidate(name, fn, choice, no_bits=_no_bits(spec, choice))
    if known == "bridge":
        choice, library = _choice(spec, problem, None), torch_arrays()
        op = getattr(plugins.bridge(), spec.function, None)
        if op is None:
            raise Unusable(f"torch_bridge has no {spec.function}")
        fn = functools.partial(op, **spec.unchecked)
        return Candidate(name, fn, f"torch_bridge:{choice}", library, no_bits=_no_bits(spec, choice))
    if ":" in name:
        return of_function(_function_named(name), name, arrays)
    hint = did_you_mean(name, NAMES)
    raise Unusable(f"unknown candidate {name!r}{hint}; the candidates are {', '.join(NAMES)} and module:function")


def runnable(spec: OpSpec, problem: Problem) -> list[str]:
    """The names of candidates that can run this problem here: implementations, and the bridge where it has the op."""
    if not spec.implementations:
        return []
    decision = rlk_jax.explain(spec.function, *abstract(problem), **problem.options)
    names = [x for x in IMPLEMENTATIONS if x == decision.choice or x in decision.by_name]
    return names + (["bridge"] if plugins.bridge_has(spec.function) else [])


def without_implementation(spec: OpSpec) -> Unusable:
    """What is raised where an op has no rows in the dispatch table, and no function is given in their place."""
    return Unusable(f"{spec.function} has no implementation here: give --candidate module:function")


def abstract(problem: Problem) -> list[Any]:
    """The shapes and dtypes of a problem's arrays, which is all that dispatch asks for."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in problem.inputs.values()]


def _choice(spec: OpSpec, problem: Problem, implementation: str | None) -> str:
    """The implementation that dispatch chooses. Raises `Unusable` where the named one cannot run, with its reasons."""
    if not spec.implementations:
        raise without_implementation(spec)
    try:
        return rlk_jax.explain(
            spec.function, *abstract(problem), implementation=implementation, **problem.options
        ).choice
    except ValueError as error:
        raise Unusable(str(error)) from None


def _no_bits(spec: OpSpec, implementation: str) -> str | None:
    """Why this implementation promises no bits, or None where it promises them."""
    promises = next(x.promises_bits for x in spec.implementations if x.name == implementation)
    return None if promises else f"{implementation} promises no bits"


def _function_named(name: str) -> Callable[..., Any]:
    """`named_function`, for which a name that stands for none is Unusable."""
    try:
        return named_function(name).function
    except ValueError as error:
        raise Unusable(str(error)) from None


def of_function(fn: Callable[..., Any], name: str, arrays: str | None = None, **options: Any) -> Candidate:
    """The candidate that checks any function. It gets torch tensors where `arrays` is "torch" or, without `arrays`,
    where the function is torch's own or its module imports from torch and nothing from jax.
    """
    library = torch_arrays() if (arrays or _arrays_of(fn)) == "torch" else JAX
    return Candidate(name, fn, getattr(fn, "__module__", None) or "unknown", library, **options)


def _arrays_of(fn: Callable[..., Any]) -> str:
    """The library that the function's module imports from, "torch" or "jax"."""
    fn = inspect.unwrap(fn)
    module = inspect.getmodule(fn) or inspect.getmodule(type(fn))
    owners = [_owner(x) for x in (fn, *vars(module).values())]
    return "torch" if "torch" in owners and "jax" not in owners else "jax"


def _owner(x: Any) -> str:
    """The package that a module, function or class belongs to."""
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None)
    return name.split(".")[0] if isinstance(name, str) else ""
