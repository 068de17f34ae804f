"""The compiled programs of the ops, in a bounded cache that `cache_info` shows.

There are few programs, because the rows of calls are padded to buckets.
"""

import collections
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax._src.core import Literal as Constant
from jax._src.core import jaxpr_as_fun
from jax.interpreters import ad

from rlk_jax.core import overwriting, program_cache
from torch_bridge import _exchange

Arrays = tuple[jax.Array | None, ...]
Options = tuple[tuple[str, Hashable], ...]
"""A call's static options as pairs of name and value, which can be part of a key."""

_MAX_SIZE = 256


@dataclass(frozen=True)
class Op:
    """An op of `rlk_jax` as a function of arrays and static options that returns a tuple of arrays."""

    name: str
    function: Callable[..., tuple[jax.Array, ...]]
    differentiable: int
    """How many arrays, from the first on, may need a gradient. The caller gives these to the backward again."""


class CacheInfo(NamedTuple):
    """What `cache_info` returns."""

    hits: int
    misses: int
    size: int
    """How many programs are kept, each with its backward where one has run."""
    max_size: int
    forward: int
    """How many forward programs have been compiled so far."""
    backward: int
    """How many backward programs have been compiled so far."""


_FEW_BUCKETS = (16, 64, 128, 512, 1024, 2048)
"""Those up to 2048 rows for an implementation that skips padding. Tiles are chosen alike within each."""


def bucket(n: int, *, skips_padding: bool = False) -> int:
    """The rows of the program for n >= 1 rows: the least 2^k or 3·2^k that holds them, a third padding at most.

    Where rows of padding take memory and no work, there are fewer of few rows. With more rows the memory counts: what
    linear_logp keeps is planned for all rows of a program.
    """
    if skips_padding and n <= _FEW_BUCKETS[-1]:
        return next(x for x in _FEW_BUCKETS if n <= x)
    power = 1 << (n - 1).bit_length()
    between = power // 4 * 3
    return between if n <= between else power


class Program:
    """One op on arrays of given shapes: a compiled forward, and a compiled backward for each set of upstream gradients.

    The residuals of the forward are the leaves of the function that `jax.vjp` returns. The program's jaxpr shows which
    leaves are differentiable inputs, unchanged or reshaped. These are not kept: the caller lends them to the backward
    again, because their memory may be freed and filled anew in between, as FSDP and ZeRO do. The other residuals are
    JAX's own arrays, and are kept; the backward overwrites the large ones.
    """

    def __init__(self, op: Op, arrays: Arrays, options: Options, needs: tuple[int, ...]) -> None:
        self._call, self._device = (op, options, needs), _device_of(arrays)
        self._arrays = tuple(map(_spec, arrays))
        # A backward has other arguments, which do not tell all that its forward was made for.
        shapes = tuple([None if x is None else (x.shape, str(x.dtype)) for x in arrays])
        self._key = (op.name, shapes, options, needs)
        self._backwards: dict[tuple[bool, ...], Any] = {}
        specs = [x for x in self._arrays if x is not None]
        self._forward, facts = program_cache.compiled(("forward", self._key), specs, self._device, self._made_forward)
        self._layout = _Layout(**facts)
        self.borrows = frozenset(i for i in self._layout.borrowed if i is not None)
        _count["forward"] += 1

    def _made_forward(self) -> program_cache.Made:
        return program_cache.Made(self._traced.forward, self._traced.layout._asdict())

    @functools.cached_property
    def _traced(self) -> "_Traced":
        """The trace of the call, for what the disk does not have."""
        return _trace(*self._call, self._arrays)

    def forward(self, arrays: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
        """The outputs, and the residuals for `backward`."""
        _exchange.follow(self._device)
        found = self._forward(*[x for x in arrays if x is not None])
        count = len(self._layout.outputs)
        return found[:count], found[count:]

    def backward(
        self, residuals: list[jax.Array], arrays: Arrays, upstream: tuple[jax.Array | None, ...]
    ) -> tuple[jax.Array, ...]:
        """Gradients of the inputs that need one. The residuals are donated: no other backward can take them.

        `arrays` are the differentiable inputs of the forward; only those in `self.borrows` are read. The upstream
        gradient of an output that was not used is None, and costs nothing.
        """
        has_upstream = tuple([g is not None for g in upstream])
        borrowed = [arrays[i] for i in self._layout.borrowed if i is not None]
        given = borrowed, [g for g in upstream if g is not None], *residuals
        with _lock:
            if has_upstream not in self._backwards:
                self._backwards[has_upstream] = self._compile_backward(has_upstream, given)
        _exchange.follow(self._device)
        _, gradients = self._backwards[has_upstream](*given)
        return gradients

    def _compile_backward(self, has_upstream: tuple[bool, ...], given: Any) -> Any:
        key, specs = ("backward", self._key, has_upstream), jax.tree.map(_spec, given)
        made = functools.partial(self._made_backward, has_upstream)
        _, _, *residuals = given
        donated = [2 + i for i in overwriting.large(residuals)]
        compiled, _ = program_cache.compiled(key, specs, self._device, made, donated)
        _count["backward"] += 1
        return compiled

    def _made_backward(self, has_upstream: tuple[bool, ...]) -> program_cache.Made:
        layout, tree = self._layout, self._traced.tree

        def backward(borrowed: Any, upstream: Any, *residuals: Any) -> tuple[Any, tuple[jax.Array, ...]]:
            kept, lent, gradients = iter(residuals), iter(borrowed), iter(upstream)
            leaves = [
                next(kept) if i is None else next(lent).reshape(shape)
                for i, shape in zip(layout.borrowed, layout.leaf_shapes, strict=True)
            ]
            pull_back = jax.tree.unflatten(tree, leaves)
            zeros = [ad.Zero(jax.core.ShapedArray(*output).to_tangent_aval()) for output in layout.outputs]
            pairs = zip(has_upstream, zeros, strict=True)
            found = pull_back(tuple(next(gradients) if is_used else zero for is_used, zero in pairs))
            return overwriting.room(residuals), found

        return program_cache.Made(backward, None)


class _Layout(NamedTuple):
    """What a caller must know of a forward, as JSON has it."""

    outputs: Sequence[tuple[Sequence[int], str]]
    """Shapes and dtypes."""
    leaf_shapes: Sequence[Sequence[int]]
    """Shapes of all residuals."""
    borrowed: Sequence[int | None]
    """Which of the differentiable inputs each residual is; None where it is kept."""


class _Traced(NamedTuple):
    """A call that was traced: its forward, and how a backward finds what the forward kept."""

    forward: Callable[..., list[jax.Array]]
    """The outputs, and then the residuals that are kept."""
    layout: _Layout
    tree: Any
    """The structure of the function that `jax.vjp` returned, whose leaves the residuals are."""


def _trace(op: Op, options: Options, needs: tuple[int, ...], arrays: Sequence[Any]) -> _Traced:
    """Trace a call of `op` with arrays of these shapes."""
    trees = []

    def call(*arrays: jax.Array | None) -> Any:
        def function(*needed: jax.Array) -> tuple[jax.Array, ...]:
            arguments = list(arrays)
            for i, x in zip(needs, needed, strict=True):
                arguments[i] = x
            return op.function(*arguments, **dict(options))

        if not needs:
            return function(), ()
        outputs, pull_back = jax.vjp(function, *(arrays[i] for i in needs))
        leaves, tree = jax.tree.flatten(pull_back)
        trees.append(tree)
        return outputs, leaves

    traced = jax.jit(call).trace(*arrays)
    outputs, _ = traced.out_info
    jaxpr = traced.jaxpr.jaxpr
    inputs = [i for i, x in enumerate(arrays) if x is not None]
    # The input that a variable of the jaxpr holds, unchanged or reshaped.
    input_of = dict(zip(jaxpr.invars, inputs, strict=True))
    for x in jaxpr.eqns:
        if x.primitive.name == "reshape" and not isinstance(x.invars[0], Constant) and x.invars[0] in input_of:
            input_of[x.outvars[0]] = input_of[x.invars[0]]
    leaves = jaxpr.outvars[len(outputs) :]
    sources = [None if isinstance(x, Constant) else input_of.get(x) for x in leaves]
    borrowed = [i if i is not None and i < op.differentiable else None for i in sources]
    kept = [*range(len(outputs)), *(len(outputs) + i for i, x in enumerate(borrowed) if x is None)]
    run = jaxpr_as_fun(traced.jaxpr)

    def forward(*arrays: jax.Array) -> list[jax.Array]:
        found = run(*arrays)
        return [found[i] for i in kept]

    shapes = [(x.shape, str(x.dtype)) for x in outputs]
    return _Traced(forward, _Layout(shapes, [x.aval.shape for x in leaves], borrowed), trees[-1] if trees else None)


def _spec(x: jax.Array | None) -> Any:
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _device_of(arrays: Any) -> jax.Device:
    """The device that a program of these arrays runs on; `dispatch` cannot tell it from traced arrays."""
    return next(x for x in arrays if x is not None).device


_lock = threading.RLock()
_programs: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
_count = collections.Counter[str]()


def program(op: Op, arrays: Arrays, options: Options, needs: tuple[int, ...]) -> Program:
    """The program for calls of `op` with such arrays, options and needs, compiled unless it is in the cache."""
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


def run(
    kind: Literal["forward", "backward"],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    donated: tuple[Any, ...] = (),
    **static: Hashable,
) -> Any:
    """`function(*arguments, *donated, **static)` by a program of the cache; arguments and results are trees of arrays.

    It gives no gradients. The large arrays of `donated` are gone afterwards.
    """
    leaves, tree = jax.tree.flatten((arguments, donated))
    key = (function, tree, _device_of(leaves), tuple((x.shape, x.dtype) for x in leaves), tuple(static.items()))
    compiled, result = _cached(key, lambda: _compile(kind, functools.partial(function, **static), arguments, donated))
    _exchange.follow(_device_of(leaves))
    return jax.tree.unflatten(result, compiled(*leaves))


def _compile(
    kind: str, function: Callable[..., Any], arguments: tuple[Any, ...], donated: tuple[Any, ...]
) -> tuple[Callable[..., Any], Any]:
    """The compiled program, which takes and returns the leaves of the trees, and the structure of its results."""
    leaves = jax.tree.leaves(arguments)
    places = [len(leaves) + i for i in overwriting.large(jax.tree.leaves(donated))]
    specs = jax.tree.map(_spec, (*arguments, *donated))
    # The program must be of this device even where it uses no argument.
    with jax.default_device(_device_of(leaves)):
        traced = jax.jit(function).trace(*specs)
        compiled = overwriting.lowered(jaxpr_as_fun(traced.jaxpr), places, jax.tree.leaves(specs)).compile()
    _count[kind] += 1
    return compiled, jax.tree.structure(traced.out_info)


def cache_info() -> CacheInfo:
    """How often calls found their program, and how many programs there are.

    Each op, device, set of dtypes and static options, choice of inputs that need gradients, and set of shapes has a
    program of its own; in these shapes the numbers of rows are buckets. Where there are more than `max_size` programs,
    the least recently used is dropped.
    """
    with _lock:
        return CacheInfo(
            _count["hits"], _count["misses"], len(_programs), _MAX_SIZE, _count["forward"], _count["backward"]
        )
