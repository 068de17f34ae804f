"""linear_logp on a head whose vocabulary is spread over a mesh axis, for whole arrays in pjit programs.

Inside shard_map, `rlk_jax.linear_logp(..., axis_name=...)` is the same op on one rank's shard.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Float, Int

from rlk_jax.core.checks import require_positive_integer
from rlk_jax.core.head import HeadConfig
from rlk_jax.core.mesh import AxisName, axis_names, explicit_spec
from rlk_jax.core.shard import shard_width
from rlk_jax.core.tokens import LinearLogp, RankedLogp, as_int32_on_host
from rlk_jax.ops.linear_logp.call import on_device
from rlk_jax.ops.linear_logp.checks import (
    check_head_or_bias,
    check_mesh_axes,
    check_outside_shard_map,
    head_inputs,
)
from rlk_jax.ops.linear_logp.options import HeadInputs, HeadOptions, LowRank, WeightLayout
from rlk_jax.ops.linear_logp.sharding.agreement import agree, agreed_on_mesh, mesh_of_array
from rlk_jax.ops.linear_logp.sharding.partition import HeadLayout, head_layout

_OPTIONS = {field.name for field in fields(HeadOptions)} - {"axis_name", "reduce_hidden_grad", "label_smoothing"}
"""The options that a call of whole arrays has: the mesh says the rest, and linear_cross_entropy smooths labels."""


def shard_bounds(vocab_size: int, n: int) -> list[tuple[int, int]]:
    """The columns `[start, end)` of each of `n` shards, cut where the softmax's groups end.

    With 1, 2, 4 or 8 shards every one owns whole groups, and results keep their bits from one number to another. With
    any other number, shards are equally wide, a multiple of 64, and no bits are promised. The last shards may be short
    or empty. Raises ValueError unless both arguments are positive integers.
    """
    require_positive_integer("vocab_size", vocab_size)
    require_positive_integer("n", n)
    width = shard_width(vocab_size, n)
    return [(min(i * width, vocab_size), min((i + 1) * width, vocab_size)) for i in range(n)]


def pad_lm_head(
    weight: Float[Array, "V D"] | Float[Array, "D V"] | Float[Array, " V"],
    n: int,
    *,
    weight_layout: WeightLayout = "vd",
) -> Array:
    """A head, or its bias `[V]`, with zeros behind it, so that `n` equal shards end at `shard_bounds(V, n)`.

    Pass `global_vocab_size=V` along with it: the zeros then count as logits of −inf. Raises ValueError for what
    `shard_bounds` refuses, and for an array that is neither a head nor a bias.
    """
    check_head_or_bias(weight, weight_layout)
    axis = 1 if weight_layout == "dv" and weight.ndim == 2 else 0
    vocab_size = weight.shape[axis]
    shard_bounds(vocab_size, n)
    padding = [(0, 0)] * weight.ndim
    padding[axis] = (0, shard_width(vocab_size, n) * n - vocab_size)
    return jnp.pad(weight, padding)


@dataclass(frozen=True)
class _CallLayout:
    """How the arrays of one call lie on a mesh."""

    head: HeadLayout
    lead: PartitionSpec

    def __str__(self) -> str:
        head = self.head
        return f"V over {head.axes}, D over {head.of_dim}, tokens over {self.lead} of {dict(head.mesh.shape)}"

    def specs(self, inputs: HeadInputs) -> HeadInputs:
        """A PartitionSpec for each array."""
        hidden, whole = PartitionSpec(*self.lead, None), PartitionSpec()
        return HeadInputs(
            hidden=hidden,
            lm_head_weight=self.head.weight_spec,
            target_ids=self.lead,
            bias=self.head.bias_spec,
            temperature=self.lead if np.ndim(inputs.temperature) else whole,
            low_rank_a=whole,
            low_rank_b=self.head.low_rank_spec,
            low_rank_scale=whole,
            low_rank_inputs=hidden,
            allowed_ids=hidden,
            allowed_mask=hidden,
        )


def linear_logp(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    mesh: Mesh | AbstractMesh,
    vocab_axis: AxisName,
    token_axes: AxisName | PartitionSpec | None = None,
    temperature: float | Float[ArrayLike, "*lead"] = 1.0,
    low_rank: LowRank | tuple[Any, ...] | None = None,
    allowed_ids: Int[Array, "*lead K"] | None = None,
    allowed_mask: Int[Array, "*lead words"] | None = None,
    **options: Any,
) -> Float[Array, "*lead"] | LinearLogp | RankedLogp:
    """`rlk_jax.linear_logp` with the head sharded along the vocabulary: each device computes its own columns.

    Args:
      hidden, target_ids, temperature, allowed_ids, allowed_mask: whole arrays, spread over `token_axes`.
      lm_head_weight, bias: whole arrays, spread over `vocab_axis` along V, which must divide evenly (`pad_lm_head`).
      mesh: the mesh; its axes may be Auto or Explicit.
      low_rank: as in `rlk_jax.linear_logp`; A is whole on every device, and B is spread over `vocab_axis` as V is.
      vocab_axis: the axis, or axes, over which V is spread.
      token_axes: the axis or axes over which the first lead dimension is spread, or a PartitionSpec for all of them.
      options: the other options of `rlk_jax.linear_logp`, but axis_name, vocab_start_index and reduce_hidden_grad.

    Returns what `rlk_jax.linear_logp` does, spread over `token_axes`; gradients come back as their inputs lie, where
    these lie as the arguments say or over Explicit axes. Works under jit, grad, scan and remat; the traffic is in
    docs/vocab_parallel.md.

    Raises ValueError for what does not fit, on every process together where several share the mesh and call it
    outside jit, and for calls that differ from one process to another; TypeError for an option that does not exist,
    or ValueError with its text where several processes share the mesh.
    Values are checked outside jit only; ids that differ from one rank to another give NaN.

    Same bits: what `rlk_jax.linear_logp` with `axis_name` promises.
    """
    check_outside_shard_map("vocab_parallel.linear_logp", mesh)
    inputs = head_inputs(hidden, lm_head_weight, target_ids, bias, temperature, low_rank, allowed_ids, allowed_mask)
    known = {name: x for name, x in options.items() if name in _OPTIONS}

    def layout(inputs: HeadInputs, config: HeadConfig) -> _CallLayout:
        # The processes agree on what this raises, so that none waits for one that has raised alone.
        if unknown := sorted(options.keys() - known.keys()):
            raise TypeError(f"vocab_parallel.linear_logp() got an unexpected keyword argument {unknown[0]!r}")
        lead = token_axes
        if not isinstance(lead, PartitionSpec):
            lead = PartitionSpec() if lead is None else PartitionSpec(lead)
        check_mesh_axes(dict(mesh.shape), vocab_axis, lead, config.vocab_size, inputs.target_ids.shape)
        sizes = (config.vocab_size, config.real_vocab_size, config.weight_layout)
        return _CallLayout(HeadLayout(mesh, axis_names(vocab_axis), (), *sizes), lead)

    return _logp_of_mesh(mesh, layout, inputs, HeadOptions(**known))


def over_explicit_axes(inputs: HeadInputs, options: HeadOptions) -> Array | LinearLogp | RankedLogp:
    """Bare linear_logp on arrays that lie over Explicit mesh axes, as their types say."""
    mesh = next(mesh_of_array(x) for x in inputs if explicit_spec(x) is not None)
    check_outside_shard_map("linear_logp over Explicit mesh axes", mesh)
    given = explicit_spec(inputs.target_ids) or PartitionSpec(*(explicit_spec(inputs.hidden) or ())[:-1])
    if AxisType.Auto in mesh.axis_types:
        return _over_mixed_axes(mesh, given, inputs, options)

    def layout(inputs: HeadInputs, config: HeadConfig) -> _CallLayout:
        spec = explicit_spec(inputs.lm_head_weight) or PartitionSpec()
        head = head_layout(mesh, spec, inputs.lm_head_weight.shape, config.real_vocab_size, config.weight_layout)
        lead = (tuple(name for name in axis_names(axes) if name not in head.axes) for axes in given)
        return _CallLayout(head, PartitionSpec(*(axes or None for axes in lead)))

    values = _logp_of_mesh(mesh, layout, inputs, options)
    return jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, given)), values)


def _over_mixed_axes(
    mesh: Mesh | AbstractMesh, given: PartitionSpec, inputs: HeadInputs, options: HeadOptions
) -> Array | LinearLogp | RankedLogp:
    """Bare linear_logp on a mesh of Explicit and Auto axes: XLA partitions, which alone knows how arrays lie over Auto
    ones. The result lies over Explicit axes as `given` says.
    """
    # This reads the values, or hands them to checkify, as far as `validate` asks for it.
    agree(mesh, inputs, options)
    static = replace(options, validate=False)
    explicit = [x for x, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]

    def bare(inputs: HeadInputs) -> Array | LinearLogp | RankedLogp:
        return on_device(inputs, static)

    return jax.sharding.auto_axes(bare, axes=tuple(explicit), out_sharding=NamedSharding(mesh, given))(
        _with_ids_in_32_bits(inputs, options)
    )


def _logp_of_mesh(
    mesh: Mesh | AbstractMesh,
    layout: Callable[[HeadInputs, HeadConfig], _CallLayout],
    inputs: HeadInputs,
    options: HeadOptions,
) -> Array | LinearLogp | RankedLogp:
    """linear_logp on whole arrays, laid out as `layout` says once they are known to fit."""
    # Values are read before the program runs, or not at all: inside it they are tracers.
    static = replace(options, validate=None)

    def traced_layout(inputs: HeadInputs, config: HeadConfig) -> _CallLayout:
        found = layout(inputs, config)
        if isinstance(mesh, Mesh) and mesh.is_multi_process:
            # Other processes must not wait for one on which tracing raises: so it is traced before they agree.
            jax.eval_shape(functools.partial(_on_mesh, found, static), inputs)
        return found

    found, inputs = agreed_on_mesh(mesh, inputs, options, traced_layout)
    return _on_mesh(found, static, _with_ids_in_32_bits(inputs, options))


def _with_ids_in_32_bits(inputs: HeadInputs, options: HeadOptions) -> HeadInputs:
    """The inputs for a program, which would wrap ids of NumPy that 32 bits do not hold."""
    ids = as_int32_on_host(inputs.target_ids, options.ignore_index)
    return inputs._replace(target_ids=ids, allowed_ids=as_int32_on_host(inputs.allowed_ids))


def _laid_out(x: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Any:
    """An array as shard_map wants it over Explicit axes; JAX lays its gradient back. Auto axes are left to XLA."""
    if x is None:
        return None
    is_explicit = dict(zip(mesh.axis_names, (kind == AxisType.Explicit for kind in mesh.axis_types), strict=True))
    entries = (tuple(name for name in axis_names(entry) if is_explicit[name]) for entry in spec)
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(layout: _CallLayout, options: HeadOptions, inputs: HeadInputs) -> Array | LinearLogp | RankedLogp:
    """linear_logp inside a shard_map over the layout's mesh."""
    head = layout.head
    if head.axes:
        options = replace(options, axis_name=head.axes, global_vocab_size=head.real_vocab_size)

    def with_shard(own: HeadInputs) -> Array | LinearLogp | RankedLogp:
        bias, low_rank_b = (None if x is None else head.own_columns(x) for x in (own.bias, own.low_rank_b))
        weight = head.own_weight(own.lm_head_weight)
        return on_device(own._replace(lm_head_weight=weight, bias=bias, low_rank_b=low_rank_b), options)

    specs = layout.specs(inputs)
    if AxisType.Explicit in head.mesh.axis_types:
        inputs = HeadInputs(*(_laid_out(x, head.mesh, spec) for x, spec in zip(inputs, specs, strict=True)))
    return jax.shard_map(with_shard, mesh=head.mesh, in_specs=(specs,), out_specs=layout.lead)(inputs)
