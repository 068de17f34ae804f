"""Bare linear_logp on a sharded head: how it is cut, so that no device ever gathers the weight.

Every mesh axis that the head is spread over becomes one of the vocabulary, and tokens stay spread over the others. A
head that is spread along D (FSDP) is exchanged for one spread along V, part by part, and its gradient back. In pjit
programs over Auto axes XLA asks for the cut (`partitioned`); over Explicit ones the types tell it.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlk_jax import _shard
from rlk_jax._problem import (
    Array,
    Gather,
    Gradients,
    HeadFunctions,
    LinearLogp,
    LinearLogpFunctions,
    Needs,
    Operands,
    Options,
    Tokens,
    WeightLayout,
)
from rlk_jax._shard import axis_names


@dataclass(frozen=True)
class Spread:
    """How a head lies on a mesh, and which columns of it each device computes."""

    mesh: Mesh | AbstractMesh
    of_vocab: tuple[str, ...]
    """The axes over which it is spread along V, evenly."""
    of_dim: tuple[str, ...]
    """The axes over which it is spread along D, evenly."""
    vocab_size: int
    real_vocab_size: int
    layout: WeightLayout

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the vocabulary, most significant first."""
        return self.of_vocab + self.of_dim

    @property
    def count(self) -> int:
        return self.ranks(self.axes)

    def ranks(self, axes: Any) -> int:
        return math.prod(self.mesh.shape[name] for name in axis_names(axes))

    @property
    def columns(self) -> int:
        """Of one device; exchanged parts end where groups of the softmax's tree do."""
        if self.of_dim and not self.of_vocab:
            return _shard.shard_width(self.real_vocab_size, self.count)
        return self.vocab_size // self.count

    @property
    def weight_spec(self) -> PartitionSpec:
        spec = (self.of_vocab or None, self.of_dim or None)
        return PartitionSpec(*(spec if self.layout == "vd" else spec[::-1]))

    @property
    def bias_spec(self) -> PartitionSpec:
        """A bias beside an exchanged head is whole everywhere: it is small."""
        return PartitionSpec(None if self.of_dim else self.of_vocab or None)

    def weight_here(self, weight: Array) -> Array:
        """This device's columns of all of D, from what it holds."""
        if not self.of_dim:
            return weight
        v, d = (0, 1) if self.layout == "vd" else (1, 0)
        return lax.all_to_all(self._resized(weight, v), self.of_dim, split_axis=v, concat_axis=d, tiled=True)

    def weight_gradient(self, columns: Array) -> Array:
        """The transpose of `weight_here`."""
        if not self.of_dim:
            return columns
        v, d = (0, 1) if self.layout == "vd" else (1, 0)
        return self._resized(
            lax.all_to_all(columns, self.of_dim, split_axis=d, concat_axis=v, tiled=True), v, back=True
        )

    def bias_here(self, bias: Array) -> Array:
        """This device's columns, from what it holds."""
        if not self.of_dim:
            return bias
        start = lax.axis_index(self.axes) * self.columns
        return lax.dynamic_slice_in_dim(self._resized(bias, 0), start, self.columns)

    def bias_gradient(self, columns: Array) -> Array:
        """The transpose of `bias_here`, the same on every device."""
        if not self.of_dim:
            return columns
        return self._resized(lax.all_gather(columns, self.axes, tiled=True), 0, back=True)

    def _resized(self, x: Array, axis: int, *, back: bool = False) -> Array:
        """`[V, ...]` as whole shards `[count · columns, ...]`, or back; what is cut off or added is padding."""
        if self.of_vocab:
            return x
        size = self.vocab_size if back else self.count * self.columns
        x = lax.slice_in_dim(x, 0, min(size, self.real_vocab_size), axis=axis)
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, padding)


def spread(mesh: Mesh | AbstractMesh, spec: Any, shape: tuple[int, ...], real: int, layout: WeightLayout) -> Spread:
    """The cut of a weight of this shape that lies as `spec` says."""
    entries = [axis_names(axes) for axes in (*spec, *[None] * (2 - len(spec)))]
    of_vocab, of_dim = entries if layout == "vd" else entries[::-1]
    vocab_size, dim = shape if layout == "vd" else shape[::-1]
    found = Spread(mesh, of_vocab, of_dim, vocab_size, real, layout)
    fits = dim % found.ranks(of_dim) == 0 and vocab_size % found.ranks(found.axes if of_vocab else ()) == 0
    if not fits:
        raise ValueError(
            f"a head of {vocab_size} x {dim} that lies as {spec} over {dict(mesh.shape)} cannot be cut into equal "
            "shards of the vocabulary: rlk_jax.vocab_parallel.pad_lm_head pads it."
        )
    return found


def partitioned(
    functions: LinearLogpFunctions, check: Callable[[_shard.Shard], None] = lambda shard: None
) -> HeadFunctions:
    """`functions` for a whole head, which XLA cuts over the devices of a program as the head and the tokens lie.

    `check` sees the shards that come of it.
    """
    return HeadFunctions(
        functools.partial(_forward, functions, check), functools.partial(_gradients, functions), functions
    )


def _forward(
    functions: LinearLogpFunctions,
    check: Callable[[_shard.Shard], None],
    options: Options,
    operands: Operands,
    tokens: Tokens,
    gather: Gather,
) -> tuple[LinearLogp, Any, Any]:
    if _is_on_device(options):
        return functions.forward(options, operands, tokens, gather)
    keeps_nothing = replace(options, keeps=False)

    def alone(operands: Operands, tokens: Tokens) -> tuple[LinearLogp, Any, _Alone]:
        values, residual, kept = functions.forward(options, operands, tokens, gather)
        return values, residual, _Alone(kept)

    def whole(operands: Operands, tokens: Tokens) -> tuple[LinearLogp, Any]:
        return functions.forward(keeps_nothing, operands, tokens, gather)[:2]

    def on_device(cut: Spread, operands: Operands, tokens: Tokens) -> tuple[LinearLogp, Any]:
        shard, own, operands, tokens = _here(cut, keeps_nothing, operands, tokens)
        check(shard)
        return functions.forward(own, operands, tokens, functools.partial(shard.gather, order=None))[:2]

    values, residual, kept = _cut_by_xla(options, _Forms(alone, whole, on_device), operands, tokens)
    return values, residual, kept.tree


def _gradients(
    functions: LinearLogpFunctions,
    options: Options,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    residual: Any,
    kept: Any,
    upstream: LinearLogp,
) -> Gradients:
    if _is_on_device(options):
        return functions.gradients(options, needs, operands, tokens, residual, kept, upstream)

    def alone(operands: Operands, tokens: Tokens, residual: Any, upstream: LinearLogp, kept: _Alone) -> Gradients:
        return functions.gradients(options, needs, operands, tokens, residual, kept.tree, upstream)

    def whole(operands: Operands, tokens: Tokens, residual: Any, upstream: LinearLogp, _: Any) -> Gradients:
        return alone(operands, tokens, residual, upstream, _Alone(None))

    def on_device(cut: Spread, operands: Operands, tokens: Tokens, residual: Any, upstream: LinearLogp, _: Any) -> Any:
        dtype = operands.hidden.dtype
        shard, own, operands, tokens = _here(cut, options, operands, tokens)
        d_hidden, d_weight, d_bias = functions.gradients(own, needs, operands, tokens, residual, None, upstream)
        return Gradients(
            None if d_hidden is None else _shard.reduced(shard, d_hidden, None, dtype),
            None if d_weight is None else cut.weight_gradient(d_weight),
            None if d_bias is None else cut.bias_gradient(d_bias),
        )

    forms = _Forms(alone, whole, on_device)
    return _cut_by_xla(options, forms, operands, tokens, residual, upstream, _Alone(kept))


def _is_on_device(options: Options) -> bool:
    """Inside shard_map there is nothing left to cut."""
    return options.hidden_gradient != "rounded" or bool(jax.sharding.get_abstract_mesh().manual_axes)


def _here(
    cut: Spread, options: Options, operands: Operands, tokens: Tokens
) -> tuple[_shard.Shard, Options, Operands, Tokens]:
    """One device's part of the problem."""
    shard = _shard.Shard(cut.axes, cut.count, cut.columns, cut.real_vocab_size, "sum", reduce_hidden_grad=True)
    place = _shard.place(shard, None)
    bias = None if operands.bias is None else cut.bias_here(operands.bias)
    here = Operands(operands.hidden, cut.weight_here(operands.weight), bias, _shard.real_columns(shard, place.start))
    return shard, _shard.options_of(shard, options), here, _shard.local(tokens, place)


_LABELS = ("i h", "v k", "b")
"""Dimensions of operands and their gradients, for Shardy: i, the tokens, is all that arguments and results share."""


class _Alone(NamedTuple):
    """What a program of one device hands from the forward to the backward; in others it holds nothing of use."""

    tree: Any


class _Forms(NamedTuple):
    """What one device runs where it is the only one, where it has the whole head, and where it has a part of it."""

    alone: Callable[..., Any]
    whole: Callable[..., Any]
    on_device: Callable[..., Any]


def _cut_by_xla(options: Options, forms: _Forms, *arguments: Any) -> Any:
    """`alone(operands, rows…)`; where XLA finds it spread over devices, `whole` or `on_device(cut, …)` on each.

    Each result is Gradients, a tree of rows `[N]`, as all arguments but the operands are, or _Alone, which only `alone`
    returns.
    """
    results = jax.eval_shape(forms.alone, *arguments)

    def partition(mesh: Mesh, shapes: tuple[Any, ...], _: Any) -> Any:
        operands = shapes[0]
        cut = spread(
            mesh, operands.weight.sharding.spec, operands.weight.shape, options.real_vocab_size, options.weight_layout
        )
        rows = tuple(name for name in axis_names(operands.hidden.sharding.spec[0]) if name not in cut.axes)
        rows = rows if operands.hidden.shape[0] % cut.ranks(rows) == 0 else ()

        def shardings(tree: Any) -> Any:
            specs = {
                "i h": PartitionSpec(rows, None),
                "v k": cut.weight_spec,
                "b": cut.bias_spec,
                "i": PartitionSpec(rows),
            }
            return jax.tree.map(lambda label: NamedSharding(mesh, specs.get(label, PartitionSpec())), tree)

        def lower(*own: Any) -> Any:
            done = forms.on_device(cut, *own) if cut.axes else forms.whole(*own)
            if not isinstance(done, Gradients):
                return *done, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results[-1])
            # Every device saw its own tokens.
            return Gradients(done.hidden, *lax.psum(done[1:], rows)) if rows else done

        return mesh, _inline(lower), shardings(labels[1]), shardings(labels[0])

    labels = _labels(arguments), _labels(results)
    rule = " -> ".join(", ".join(jax.tree.leaves(tree)) for tree in labels)
    call = custom_partitioning(forms.alone)
    call.def_partition(partition, sharding_rule=rule)
    return call(*arguments)


def _labels(tree: Any) -> Any:
    """The dimensions of every array of arguments or results."""
    if isinstance(tree, Operands | Gradients):
        kind: Any = type(tree)
        return kind(*(None if x is None else label for x, label in zip(tree, _LABELS, strict=False)))
    if type(tree) is tuple:
        return tuple(map(_labels, tree))
    if isinstance(tree, _Alone):
        leaves, structure = jax.tree.flatten(tree)
        names = [" ".join(f"a{i}d{axis}" for axis in range(x.ndim)) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, names)
    return jax.tree.map(lambda _: "i", tree)


def _inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with the references inside hidden: XLA's callback takes no program with effects."""
    call = custom_partitioning(function)
    call.def_partition(None)
    return call
