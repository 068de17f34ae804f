"""Bare linear_logp on a sharded head: how it is cut, so that no device ever gathers the weight.

Every mesh axis that the head is spread over becomes one of the vocabulary, and tokens stay spread over the others. A
head that is spread along D (FSDP) is exchanged for one spread along V, part by part, and its gradient back. In pjit
programs over Auto axes XLA asks for the cut (`partitioned`); over Explicit axes the types of the arrays tell it.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlk_jax.core.dispatch import log_once
from rlk_jax.core.head import Gradients, HeadConfig, Needs, Operands
from rlk_jax.core.mesh import axis_names, evenly_spread
from rlk_jax.core.partitioning import named_dimensions, partitioned_by_xla, without_effects
from rlk_jax.core.shard import (
    Gather,
    Shard,
    local_tokens,
    real_columns_of_shard,
    reduce_hidden_gradient,
    shard_position,
    shard_width,
)
from rlk_jax.core.tokens import LinearLogp, Tokens
from rlk_jax.ops.linear_logp.options import Forward, HeadFunctions, LinearLogpFunctions, WeightLayout
from rlk_jax.ops.linear_logp.ranking import Ranking

Array = jax.Array


@dataclass(frozen=True)
class HeadLayout:
    """How a head lies on a mesh, and which of its columns each device computes."""

    mesh: Mesh | AbstractMesh
    of_vocab: tuple[str, ...]
    """The axes over which the head is spread along V, evenly."""
    of_dim: tuple[str, ...]
    """The axes over which the head is spread along D, evenly."""
    vocab_size: int
    real_vocab_size: int
    weight_layout: WeightLayout

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the vocabulary, most significant first."""
        return self.of_vocab + self.of_dim

    @property
    def count(self) -> int:
        """How many devices share the vocabulary."""
        return self.devices_along(self.axes)

    def devices_along(self, axes: Any) -> int:
        """How many devices there are along some axes."""
        return math.prod(self.mesh.shape[name] for name in axis_names(axes))

    @property
    def columns(self) -> int:
        """Columns that one device computes; exchanged parts end where groups of the softmax's tree do."""
        if self.of_dim and not self.of_vocab:
            return shard_width(self.real_vocab_size, self.count)
        return self.vocab_size // self.count

    @property
    def weight_spec(self) -> PartitionSpec:
        """How the weight lies."""
        spec = (self.of_vocab or None, self.of_dim or None)
        return PartitionSpec(*(spec if self.weight_layout == "vd" else spec[::-1]))

    @property
    def bias_spec(self) -> PartitionSpec:
        """How the bias lies: beside an exchanged head it is whole everywhere, for it is small."""
        return PartitionSpec(None if self.of_dim else self.of_vocab or None)

    def own_weight(self, weight: Array) -> Array:
        """This device's columns of all of D, from the part of the weight that it holds."""
        if not self.of_dim:
            return weight
        v, d = (0, 1) if self.weight_layout == "vd" else (1, 0)
        return lax.all_to_all(self._resized(weight, v), self.of_dim, split_axis=v, concat_axis=d, tiled=True)

    def weight_gradient(self, columns: Array) -> Array:
        """The transpose of `own_weight`: the gradient of the held part, from that of this device's columns."""
        if not self.of_dim:
            return columns
        v, d = (0, 1) if self.weight_layout == "vd" else (1, 0)
        return self._resized(
            lax.all_to_all(columns, self.of_dim, split_axis=d, concat_axis=v, tiled=True), v, back=True
        )

    @property
    def low_rank_spec(self) -> PartitionSpec:
        """How B of a low-rank term lies: its columns lie as the bias does."""
        columns = self.bias_spec[0]
        return PartitionSpec(columns, None) if self.weight_layout == "vd" else PartitionSpec(None, columns)

    def own_columns(self, x: Array) -> Array:
        """This device's columns of a bias, or of B of a low-rank term, from the part that it holds."""
        if not self.of_dim:
            return x
        start, axis = lax.axis_index(self.axes) * self.columns, self._columns_of(x)
        return lax.dynamic_slice_in_dim(self._resized(x, axis), start, self.columns, axis=axis)

    def columns_gradient(self, columns: Array) -> Array:
        """The transpose of `own_columns`, the same on every device."""
        if not self.of_dim:
            return columns
        axis = self._columns_of(columns)
        return self._resized(lax.all_gather(columns, self.axes, axis=axis, tiled=True), axis, back=True)

    def _columns_of(self, x: Array) -> int:
        """The axis of the vocabulary in a bias or in B of a low-rank term."""
        return x.ndim - 1 if self.weight_layout == "dv" else 0

    def _resized(self, x: Array, axis: int, *, back: bool = False) -> Array:
        """`[V, ...]` as whole shards `[count · columns, ...]`, or back; what is cut off or added is padding."""
        if self.of_vocab:
            return x
        size = self.vocab_size if back else self.count * self.columns
        x = lax.slice_in_dim(x, 0, min(size, self.real_vocab_size), axis=axis)
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, padding)


def head_layout(
    mesh: Mesh | AbstractMesh, spec: Any, shape: tuple[int, ...], real: int, weight_layout: WeightLayout
) -> HeadLayout:
    """The layout of a weight of this shape that lies as `spec` says; `real` is the true vocabulary.

    Raises ValueError where it cannot be cut into equal shards of the vocabulary.
    """
    entries = [axis_names(axes) for axes in (*spec, *[None] * (2 - len(spec)))]
    of_vocab, of_dim = entries if weight_layout == "vd" else entries[::-1]
    vocab_size, dim = shape if weight_layout == "vd" else shape[::-1]
    layout = HeadLayout(mesh, of_vocab, of_dim, vocab_size, real, weight_layout)
    ways = layout.devices_along(layout.axes if of_vocab else ())
    if dim % layout.devices_along(of_dim) or vocab_size % ways:
        raise ValueError(
            f"a head of {vocab_size} x {dim} that lies as {spec} over {dict(mesh.shape)} cannot be cut into equal "
            "shards of the vocabulary: rlk_jax.vocab_parallel.pad_lm_head pads it."
        )
    return layout


def partitioned(functions: LinearLogpFunctions, check: Callable[[Shard], None] = lambda shard: None) -> HeadFunctions:
    """`functions` for a whole head, which XLA cuts over the devices of a program as the head and the tokens lie.

    `check` is called with the shards, where the head is cut into some.
    """
    return HeadFunctions(
        functools.partial(_forward, functions, check),
        functools.partial(_gradients, functions),
        functions,
    )


class _KeptOnOneDevice(NamedTuple):
    """What the forward keeps for the backward in a program of one device; in other programs, zeros."""

    tree: Any


class _Programs(NamedTuple):
    """What a device runs where it is the only one, where it has the whole head, and where it has a part of the head."""

    on_one_device: Callable[..., Any]
    with_whole_head: Callable[..., Any]
    with_shard: Callable[..., Any]


def _forward(
    functions: LinearLogpFunctions,
    check: Callable[[Shard], None],
    config: HeadConfig,
    operands: Operands,
    tokens: Tokens,
    gather: Gather,
) -> Forward:
    """The forward of `partitioned`."""
    if _is_cut_already(config):
        return functions.forward(config, operands, tokens, gather)
    keeps_nothing = replace(config, keeps=False)

    def on_one_device(operands: Operands, tokens: Tokens) -> tuple[Any, ...]:
        *found, kept = functions.forward(config, operands, tokens, gather)
        return *found, _KeptOnOneDevice(kept)

    def with_whole_head(operands: Operands, tokens: Tokens) -> tuple[Any, ...]:
        return functions.forward(keeps_nothing, operands, tokens, gather)[:-1]

    def with_shard(layout: HeadLayout, operands: Operands, tokens: Tokens) -> tuple[Any, ...]:
        shard, own, operands, tokens = _own_part(layout, keeps_nothing, operands, tokens)
        check(shard)
        return functions.forward(own, operands, tokens, functools.partial(shard.gather, order=None))[:-1]

    programs = _Programs(on_one_device, with_whole_head, with_shard)
    depends_on = ("forward", functions, check, gather, config)
    *found, kept = _cut_by_xla(depends_on, config, programs, operands, tokens)
    values, ranking, residual = found
    return Forward(values, ranking, residual, kept.tree)


def _gradients(
    functions: LinearLogpFunctions,
    config: HeadConfig,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    residual: Any,
    kept: Any,
    upstream: LinearLogp,
) -> Gradients:
    """The gradients of `partitioned`."""
    if _is_cut_already(config):
        return functions.gradients(config, needs, operands, tokens, residual, kept, upstream)

    def on_one_device(
        operands: Operands, tokens: Tokens, residual: Any, upstream: LinearLogp, kept: _KeptOnOneDevice
    ) -> Gradients:
        return functions.gradients(config, needs, operands, tokens, residual, kept.tree, upstream)

    def with_whole_head(operands: Operands, tokens: Tokens, residual: Any, upstream: LinearLogp, _: Any) -> Gradients:
        return functions.gradients(config, needs, operands, tokens, residual, None, upstream)

    def with_shard(
        layout: HeadLayout, operands: Operands, tokens: Tokens, residual: Any, upstream: LinearLogp, _: Any
    ) -> Gradients:
        dtype = operands.hidden.dtype
        shard, own, operands, tokens = _own_part(layout, config, operands, tokens)
        found = functions.gradients(own, needs, operands, tokens, residual, None, upstream)
        d_hidden, d_weight, d_bias, d_low_rank = found
        return Gradients(
            None if d_hidden is None else reduce_hidden_gradient(shard, d_hidden, None, dtype),
            None if d_weight is None else layout.weight_gradient(d_weight),
            None if d_bias is None else layout.columns_gradient(d_bias),
            None if d_low_rank is None else layout.columns_gradient(d_low_rank),
        )

    programs = _Programs(on_one_device, with_whole_head, with_shard)
    depends_on = ("gradients", functions, needs, config)
    return _cut_by_xla(depends_on, config, programs, operands, tokens, residual, upstream, _KeptOnOneDevice(kept))


def _is_cut_already(config: HeadConfig) -> bool:
    """Whether nothing is left for XLA to cut: the weight is a shard, or the call is inside shard_map."""
    return config.is_shard or bool(jax.sharding.get_abstract_mesh().manual_axes)


def _own_part(
    layout: HeadLayout, config: HeadConfig, operands: Operands, tokens: Tokens
) -> tuple[Shard, HeadConfig, Operands, Tokens]:
    """One device's part of the call: its shard, and config, operands and tokens for it."""
    shard = Shard(layout.axes, layout.count, layout.columns, layout.real_vocab_size, "sum", reduce_hidden_grad=True)
    position = shard_position(shard, None)
    bias, low_rank = (None if x is None else layout.own_columns(x) for x in (operands.bias, operands.low_rank))
    real = real_columns_of_shard(shard, position.start)
    own = Operands(operands.hidden, layout.own_weight(operands.weight), bias, low_rank, real)
    return shard, shard.config(config), own, local_tokens(shard, tokens, position)


_LABELS = ("i h", "v k", "b", "c r")
"""Names of the dimensions of operands and of their gradients, for Shardy. Only `i`, the tokens, is shared between
arguments and results.
"""


def _cut_by_xla(depends_on: Any, config: HeadConfig, programs: _Programs, *arguments: Any) -> Any:
    """`on_one_device(*arguments)`; where XLA finds the call spread over devices, each of them runs
    `with_whole_head(*arguments)` or `with_shard(layout, *arguments)`.

    The first argument is the Operands. Each other argument, and each result, is a tree of rows `[N, ...]`, Gradients,
    or _KeptOnOneDevice; among results only `on_one_device` gives the last. `depends_on` holds all that the programs
    depend on.
    """

    def rule(results: Any) -> str:
        return " -> ".join(", ".join(jax.tree.leaves(_labels(tree))) for tree in (arguments, results))

    def partition(mesh: Mesh, shapes: tuple[Any, ...], results: Any) -> Any:
        operands = shapes[0]
        layout = head_layout(
            mesh, operands.weight.sharding.spec, operands.weight.shape, config.real_vocab_size, config.weight_layout
        )
        rows = _axes_of_rows(layout, operands.hidden)

        def shardings(tree: Any) -> Any:
            """How the arrays of arguments or results lie."""
            specs = {
                "i h": PartitionSpec(rows, None),
                "v k": layout.weight_spec,
                "b": layout.bias_spec,
                "c r": layout.low_rank_spec,
                "i": PartitionSpec(rows),
                "i w": PartitionSpec(rows, None),
                "i t": PartitionSpec(rows, None),
            }
            return jax.tree.map(lambda label: NamedSharding(mesh, specs.get(label, PartitionSpec())), _labels(tree))

        def lower(*own: Any) -> Any:
            done = programs.with_shard(layout, *own) if layout.axes else programs.with_whole_head(*own)
            if not isinstance(done, Gradients):
                return *done, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results[-1])
            # Every device saw its own tokens, so dW and db are summed over the devices.
            return Gradients(done.hidden, *lax.psum(done[1:], rows)) if rows else done

        return mesh, without_effects(lower), shardings(results), shardings(shapes)

    return partitioned_by_xla(programs.on_one_device, rule, partition, depends_on, *arguments)


def _axes_of_rows(layout: HeadLayout, hidden: Any) -> tuple[str, ...]:
    """The axes over which tokens stay spread: those that they lie over, without the head's own and evenly."""
    spec = hidden.sharding.spec
    given = tuple(name for name in (axis_names(spec[0]) if spec else ()) if name not in layout.axes)
    rows = evenly_spread(layout.mesh, given, hidden.shape[0])
    if rows != given:
        log_once(
            f"{hidden.shape[0]} tokens of a bare linear_logp do not divide by the {layout.devices_along(given)} devices"
            f" that they are spread over: {layout.devices_along(rows)} share them, and the others compute the same."
        )
    return rows


def _labels(tree: Any) -> Any:
    """The names of the dimensions of every array of arguments or results."""
    if isinstance(tree, Operands | Gradients):
        kind: Any = type(tree)
        return kind(*(None if x is None else label for x, label in zip(tree, _LABELS, strict=False)))
    if type(tree) is tuple:
        return tuple(map(_labels, tree))
    if isinstance(tree, Ranking):
        return jax.tree.map(lambda x: "i t" if x.ndim == 2 else "i", tree)
    if isinstance(tree, _KeptOnOneDevice):
        leaves, structure = jax.tree.flatten(tree)
        names = [named_dimensions(f"a{i}", x.ndim) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, names)
    return jax.tree.map(lambda x: "i w" if x.ndim == 2 else "i", tree)
