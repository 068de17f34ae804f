"""The compiled programs of the ops: few, for rows are padded to buckets, in a bounded cache that can be seen."""

import collections
import functools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.core import Literal as Constant
from jax.interpreters import ad

from torch_bridge import _exchange

Arrays = tuple[jax.Array | None, ...]
Options = tuple[tuple[str, Hashable], ...]
"""A call's static options, sorted into a key."""

_MAX_SIZE = 256


@dataclass(frozen=True)
class Op:
    """An op of `rlk_jax` as a function of arrays and static options that returns a tuple of arrays."""

    name: str
    function: Callable[..., tuple[jax.Array, ...]]
    differentiable: int
    """How many arrays, from the first on, may need a gradient: the backward is given these again."""


class CacheInfo(NamedTuple):
    """What `cache_info` returns."""

    hits: int
    misses: int
    size: int
    """Programs that are kept, each with its backward where one has run."""
    max_size: int
    forward: int
    """Forward programs compiled so far."""
    backward: int


def bucket(n: int) -> int:
    """The least 2^k or 3·2^k that is no less than n >= 1: a third of a program's rows are padding at most."""
    power = 1 << (n - 1).bit_length()
    between = power // 4 * 3
    return between if n <= between else power


class Program:
    """One op on arrays of given shapes: compiled forward, and a backward for each set of upstream gradients.

    What the backward needs of the forward are the leaves of `jax.vjp`'s function. Those that are differentiable inputs,
    reshaped at most, as the program's own jaxpr shows, are not kept but given again: their memory may be freed and
    filled anew in between, as FSDP and ZeRO do. The others are arrays of JAX's own.
    """

    def __init__(self, op: Op, arrays: Arrays, options: Options, needs: tuple[int, ...]) -> None:
        self._arrays = tuple(map(_spec, arrays))
        self._backwards: dict[tuple[bool, ...], Any] = {}

        def call(*arrays: jax.Array | None) -> Any:
            def function(*needed: jax.Array) -> tuple[jax.Array, ...]:
                given = list(arrays)
                for i, x in zip(needs, needed, strict=True):
                    given[i] = x
                return op.function(*given, **dict(options))

            if not needs:
                return function(), ()
            outputs, pull_back = jax.vjp(function, *(arrays[i] for i in needs))
            leaves, self._tree = jax.tree.flatten(pull_back)
            return outputs, leaves

        with jax.default_device(_device_of(arrays)):
            traced = jax.jit(call).trace(*self._arrays)
        outputs, _ = traced.out_info
        jaxpr = traced.jaxpr.jaxpr
        inputs = [i for i, x in enumerate(arrays) if x is not None]
        of_input = dict(zip(jaxpr.invars, inputs, strict=True))
        for x in jaxpr.eqns:
            if x.primitive.name == "reshape" and not isinstance(x.invars[0], Constant) and x.invars[0] in of_input:
                of_input[x.outvars[0]] = of_input[x.invars[0]]
        leaves = jaxpr.outvars[len(outputs) :]
        self._leaf_shapes = [x.aval.shape for x in leaves]
        sources = [None if isinstance(x, Constant) else of_input.get(x) for x in leaves]
        self._outputs = outputs
        self._borrowed = [i if i is not None and i < op.differentiable else None for i in sources]
        self.borrows = frozenset(i for i in self._borrowed if i is not None)
        kept = [*range(len(outputs)), *(len(outputs) + i for i, x in enumerate(self._borrowed) if x is None)]
        run = jaxpr_as_fun(_without_checks(traced.jaxpr))

        def forward(*arrays: jax.Array) -> list[jax.Array]:
            found = run(*arrays)
            return [found[i] for i in kept]

        self._device = _device_of(arrays)
        self._forward = _compiled(forward, self._device, *(x for x in self._arrays if x is not None))
        _count["forward"] += 1

    def forward(self, arrays: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
        """Outputs, and residuals for `backward`."""
        _exchange.follow(self._device)
        found = self._forward(*[x for x in arrays if x is not None])
        return found[: len(self._outputs)], found[len(self._outputs) :]

    def backward(
        self, residuals: list[jax.Array], arrays: Arrays, upstream: tuple[jax.Array | None, ...]
    ) -> tuple[jax.Array, ...]:
        """Gradients of the inputs that need one. `arrays` are the forward's, of which only those must be there that are
        differentiable; an output that was not used has no upstream gradient and costs nothing.
        """
        given = tuple([g is not None for g in upstream])
        with _lock:
            if given not in self._backwards:
                self._backwards[given] = self._compile_backward(residuals, arrays, upstream)
        borrowed = [arrays[i] for i in self._borrowed if i is not None]
        _exchange.follow(self._device)
        return self._backwards[given](residuals, borrowed, [g for g in upstream if g is not None])

    def _compile_backward(self, residuals: list[jax.Array], arrays: Arrays, upstream: Arrays) -> Any:
        is_given = [g is not None for g in upstream]

        def backward(residuals: Any, borrowed: Any, upstream: Any) -> tuple[jax.Array, ...]:
            own, lent, given = iter(residuals), iter(borrowed), iter(upstream)
            leaves = [
                next(own) if i is None else next(lent).reshape(shape)
                for i, shape in zip(self._borrowed, self._leaf_shapes, strict=True)
            ]
            pull_back = jax.tree.unflatten(self._tree, leaves)
            zeros = [ad.Zero(jax.core.ShapedArray(x.shape, x.dtype)) for x in self._outputs]
            return pull_back(tuple(next(given) if g else zero for g, zero in zip(is_given, zeros, strict=True)))

        borrowed = [arrays[i] for i in self._borrowed if i is not None]
        specs = jax.tree.map(_spec, (residuals, borrowed, [g for g in upstream if g is not None]))
        compiled = _compiled(backward, self._device, *specs)
        _count["backward"] += 1
        return compiled


def _compiled(program: Callable[..., Any], device: jax.Device, *specs: Any) -> Any:
    """For this device even where no argument is used."""
    with jax.default_device(device):
        return jax.jit(program).lower(*specs).compile()


def _without_checks(program: ClosedJaxpr) -> ClosedJaxpr:
    """Without debug checks, which report to checkify alone: their effect keeps a program off JAX's fast path."""
    jaxpr = program.jaxpr
    equations = [x for x in jaxpr.eqns if x.primitive.name != "check"]
    effects = frozenset().union(*(x.effects for x in equations))
    return ClosedJaxpr(jaxpr.replace(eqns=equations, effects=effects), program.consts)


def _spec(x: jax.Array | None) -> Any:
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _device_of(arrays: Any) -> jax.Device:
    """Where a program of these arrays runs, for `dispatch`, which does not see the devices of traced arrays."""
    return next(x for x in arrays if x is not None).device


_lock = threading.RLock()
_programs: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
_count = collections.Counter[str]()


def program(op: Op, arrays: Arrays, options: Options, needs: tuple[int, ...]) -> Program:
    """The program for such a call, compiled if it is not in the cache."""
    key = (op.name, _device_of(arrays), tuple([None if x is None else x.aval for x in arrays]), options, needs)
    return _cached(key, lambda: Program(op, arrays, options, needs))


def _cached[T](key: Hashable, make: Callable[[], T]) -> T:
    with _lock:
        if key in _programs:
            _programs.move_to_end(key)
            _count["hits"] += 1
            return _programs[key]
        _count["misses"] += 1
        _programs[key] = found = make()
        if len(_programs) > _MAX_SIZE:
            _programs.popitem(last=False)
        return found


def run(kind: Literal["forward", "backward"], function: Callable[..., Any], arguments: Any, **static: Hashable) -> Any:
    """`function(*arguments, **static)`, trees of arrays in and out, by a program of the cache; no gradients."""
    leaves, tree = jax.tree.flatten(arguments)
    key = (function, tree, _device_of(leaves), tuple((x.shape, x.dtype) for x in leaves), tuple(static.items()))
    compiled, result = _cached(key, lambda: _compile(kind, functools.partial(function, **static), arguments))
    _exchange.follow(_device_of(leaves))
    return jax.tree.unflatten(result, compiled(*leaves))


def _compile(kind: str, function: Callable[..., Any], arguments: Any) -> tuple[Callable[..., Any], Any]:
    """The program on flat arrays, and the tree of its results."""
    specs, device = jax.tree.map(_spec, arguments), _device_of(jax.tree.leaves(arguments))
    with jax.default_device(device):
        traced = jax.jit(function).trace(*specs)
    _count[kind] += 1
    compiled = _compiled(jaxpr_as_fun(_without_checks(traced.jaxpr)), device, *jax.tree.leaves(specs))
    return compiled, jax.tree.structure(traced.out_info)


def cache_info() -> CacheInfo:
    """How often calls found their program, and how many programs there are.

    Programs differ by op, device, dtypes, static options, which inputs need gradients, and shapes, in which rows count
    by buckets. The least recently used of more than `max_size` are dropped.
    """
    with _lock:
        return CacheInfo(
            _count["hits"], _count["misses"], len(_programs), _MAX_SIZE, _count["forward"], _count["backward"]
        )
