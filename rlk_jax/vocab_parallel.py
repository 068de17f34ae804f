"""linear_logp on a head whose vocabulary is spread over a mesh axis, for whole arrays in pjit programs.

Inside shard_map, `rlk_jax.linear_logp(..., axis_name=...)` is the same op on one rank's shard.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from rlk_jax import _agreement, dispatch, validation
from rlk_jax._partition import Spread, spread
from rlk_jax._problem import Inputs, LinearLogp, Options, WeightLayout
from rlk_jax._shard import AxisName, axis_names, explicit_spec, shard_width
from rlk_jax.linear_logp import HeadOptions, check, problem, tokens_of
from rlk_jax.linear_logp import linear_logp as _linear_logp


def shard_bounds(vocab_size: int, n: int) -> list[tuple[int, int]]:
    """The columns `[start, end)` of each of `n` shards, cut where the softmax's groups end.

    With 1, 2, 4 or 8 shards every one owns whole groups, and results keep their bits from one number to another. With
    any other number they are equally wide, a multiple of 64, and no bits are promised. The last ones may be short or
    empty. ValueError unless both arguments are positive integers.
    """
    validation.require_positive_integer("vocab_size", vocab_size)
    validation.require_positive_integer("n", n)
    width = shard_width(vocab_size, n)
    return [(min(i * width, vocab_size), min((i + 1) * width, vocab_size)) for i in range(n)]


def pad_lm_head(
    weight: Float[Array, "V D"] | Float[Array, "D V"] | Float[Array, " V"],
    n: int,
    *,
    weight_layout: WeightLayout = "vd",
) -> Array:
    """A head, or its bias `[V]`, with zeros behind it, so that `n` equal shards end at `shard_bounds(V, n)`.

    Pass `global_vocab_size=V` along with it: the zeros then count as logits of −inf. ValueError as `shard_bounds`.
    """
    validation.head_or_bias(weight, weight_layout)
    axis = 1 if weight_layout == "dv" and weight.ndim == 2 else 0
    vocab_size = weight.shape[axis]
    shard_bounds(vocab_size, n)
    padding = [(0, 0)] * weight.ndim
    padding[axis] = (0, shard_width(vocab_size, n) * n - vocab_size)
    return jnp.pad(weight, padding)


@dataclass(frozen=True)
class _Layout:
    """How the arrays of one call lie on a mesh."""

    head: Spread
    lead: PartitionSpec

    def __str__(self) -> str:
        head = self.head
        return f"V over {head.axes}, D over {head.of_dim}, tokens over {self.lead} of {dict(head.mesh.shape)}"

    def specs(self, inputs: Inputs) -> Inputs:
        """A PartitionSpec for each array."""
        temperature = self.lead if np.ndim(inputs.temperature) else PartitionSpec()
        return Inputs(
            PartitionSpec(*self.lead, None), self.head.weight_spec, self.lead, self.head.bias_spec, temperature
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
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[HeadOptions],
) -> Float[Array, "*lead"] | LinearLogp:
    """`rlk_jax.linear_logp` with the head sharded along the vocabulary: each device computes its own columns.

    Args:
      hidden, target_ids, temperature: whole arrays, spread over `token_axes`.
      lm_head_weight, bias: whole arrays, spread over `vocab_axis` along V, which must divide evenly (`pad_lm_head`).
      mesh: the mesh; its axes may be Auto or Explicit.
      vocab_axis: the axis, or axes, over which V is spread.
      token_axes: the axis or axes over which the first lead dimension is spread, or a PartitionSpec for all of them.
      options: as of `rlk_jax.linear_logp`.

    Returns what `rlk_jax.linear_logp` does, spread over `token_axes`; gradients come back as their inputs lie, where
    these lie as the arguments say or over Explicit axes. Works under jit, grad, scan and remat; the traffic is in
    docs/vocab_parallel.md.

    Raises ValueError for what does not fit, on every process together where several share the mesh and call it
    outside jit, and for calls that differ from one process to another. Values are checked outside jit only; ids that
    differ from one rank to another give NaN.

    Same bits: as `rlk_jax.linear_logp` with `axis_name`.
    """
    validation.mesh_outside("vocab_parallel.linear_logp", mesh)
    temperature, validate = options.pop("temperature", 1.0), options.pop("validate", None)
    arrays = Inputs(hidden, lm_head_weight, target_ids, bias, temperature)

    def layout(inputs: Inputs, static: Options) -> _Layout:
        lead = token_axes
        if not isinstance(lead, PartitionSpec):
            lead = PartitionSpec() if lead is None else PartitionSpec(lead)
        validation.mesh_axes(dict(mesh.shape), vocab_axis, lead, static.vocab_size, inputs.target_ids.shape)
        entries = (static.vocab_size, static.real_vocab_size, static.weight_layout)
        return _Layout(Spread(mesh, axis_names(vocab_axis), (), *entries), lead)

    return _run(mesh, layout, arrays, validate, {"return_lse": return_lse, "return_entropy": return_entropy, **options})


def over_explicit_axes(arrays: Inputs, validate: bool | None, options: dict[str, Any]) -> Array | LinearLogp:
    """Bare linear_logp on arrays that lie over Explicit mesh axes, as their types say."""
    mesh = next(_mesh(x) for x in arrays if explicit_spec(x) is not None)
    validation.mesh_outside("linear_logp over Explicit mesh axes", mesh)
    validation.no_auto_axes(mesh)
    given = explicit_spec(arrays.target_ids) or PartitionSpec(*(explicit_spec(arrays.hidden) or ())[:-1])

    def layout(inputs: Inputs, static: Options) -> _Layout:
        spec = explicit_spec(inputs.lm_head_weight) or PartitionSpec()
        head = spread(mesh, spec, inputs.lm_head_weight.shape, static.real_vocab_size, static.weight_layout)
        lead = (tuple(name for name in axis_names(axes) if name not in head.axes) for axes in given)
        return _Layout(head, PartitionSpec(*(axes or None for axes in lead)))

    values = _run(mesh, layout, arrays, validate, options)
    return jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, given)), values)


def _mesh(x: Any) -> Any:
    x = validation.as_array("input", x)
    return x.sharding.mesh if validation.is_concrete(x) else jax.typeof(x).sharding.mesh


def _run(
    mesh: Mesh | AbstractMesh,
    layout: Callable[[Inputs, Options], _Layout],
    arrays: Inputs,
    validate: bool | None,
    options: dict[str, Any],
) -> Array | LinearLogp:
    """linear_logp on whole arrays, laid out as `layout` says of arrays that fit."""
    static_options = tuple(options.items())

    def laid(inputs: Inputs, static: Options) -> _Layout:
        found = layout(inputs, static)
        if isinstance(mesh, Mesh) and mesh.is_multi_process:
            # What tracing raises on one process, others must not wait for.
            jax.eval_shape(functools.partial(_on_mesh, found, static_options), inputs)
        return found

    found, inputs = _agreed(mesh, arrays, validate, options, laid)
    return _on_mesh(found, static_options, inputs)


def agree(mesh: Mesh, arrays: Inputs, validate: bool | None, options: dict[str, Any]) -> None:
    """Bare linear_logp on arrays that several processes share: its checks, agreed on by all of them."""

    def chosen(inputs: Inputs, static: Options) -> str:
        return dispatch.choose(problem(inputs, static), options["implementation"]).name

    _agreed(mesh, arrays, validate, options, chosen)


def _agreed[T](
    mesh: Mesh | AbstractMesh,
    arrays: Inputs,
    validate: bool | None,
    options: dict[str, Any],
    layout: Callable[[Inputs, Options], T],
) -> tuple[T, Inputs]:
    """`layout` of arrays that fit, and those arrays.

    Where processes share the mesh and call outside jit, one collective lets all of them raise what any of them has to
    say, and compares what they call.
    """
    # Under grad outside jit the operands are tracers; under jit even a constant is.
    is_outside_jit = all(map(validation.is_concrete, (arrays.target_ids, arrays.temperature, jnp.zeros(()))))
    is_read = validate is not False and is_outside_jit

    def checked() -> tuple[T, Inputs]:
        """What this process can say alone: static facts, and the values in its own memory."""
        own = {k: v for k, v in options.items() if k != "reduction"}
        (inputs, static, _), _ = check(*arrays[:4], temperature=arrays.temperature, validate=validate, **own)
        if validate or is_read:
            for ids, temperature in _own_pieces(inputs.target_ids, inputs.temperature, must_read=bool(validate)):
                part = inputs._replace(target_ids=ids, temperature=temperature)
                tokens_of(part, static.real_vocab_size, options.get("ignore_index"), validate)
        return layout(inputs, static), inputs

    if not isinstance(mesh, Mesh) or not mesh.is_multi_process or not is_outside_jit:
        return checked()

    def said() -> tuple[tuple[T, Inputs], str]:
        found = checked()
        return found, _call_text(arrays, {**options, "validate": validate, "runs": str(found[0])})

    found, texts = _agreement.agreed(said, functools.partial(_everyone, mesh))
    _agreement.require_same(texts)
    return found


def _own_pieces(ids: Any, temperature: Any, *, must_read: bool) -> list[tuple[Any, Any]]:
    """What this process holds of ids and temperatures, where they may lie over several processes, piece by piece.

    A temperature that is cut otherwise than ids is not looked at, or refused: a bad one still gives NaN.
    """
    pieces_of_ids, pieces = _pieces(ids), _pieces(temperature)
    if pieces_of_ids is None and pieces is None:
        return [(_whole(ids), _whole(temperature))]
    if pieces_of_ids is None:
        return [(_whole(ids)[index], piece) for index, piece in (pieces or {}).items()]
    if pieces is None:
        value = _whole(temperature)
        return [(piece, value[index] if np.ndim(value) else value) for index, piece in pieces_of_ids.items()]
    if must_read and pieces_of_ids.keys() != pieces.keys():
        raise ValueError("validate=True needs a temperature that lies as target_ids do, or a whole one.")
    return [(piece, pieces.get(index, 1.0)) for index, piece in pieces_of_ids.items()]


def _pieces(x: Any) -> dict[Any, np.ndarray] | None:
    """By where they are in the whole; None of what this process holds all of."""
    return {shard.index: np.asarray(shard.data) for shard in x.addressable_shards} if _is_cut(x) else None


def _is_cut(x: Any) -> bool:
    """Whether this process holds a part of it only."""
    return _is_array(x) and not x.is_fully_addressable and not x.is_fully_replicated


def _whole(x: Any) -> Any:
    """A value that this process holds all of."""
    return np.asarray(x.addressable_shards[0].data) if _is_array(x) and not x.is_fully_addressable else x


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and validation.is_concrete(x)


def _call_text(arrays: Inputs, options: dict[str, Any]) -> str:
    """What must be the same in every process."""

    def of(name: str, x: Any) -> str:
        if not np.ndim(x):
            return repr(x)
        text = f"{x.dtype}{list(x.shape)}"
        if _is_array(x) and not x.is_fully_addressable:
            return f"{text} as {getattr(x.sharding, 'spec', x.sharding)} of {dict(_mesh(x).shape)}"
        # What each process holds for itself must be one and the same.
        is_value = options["validate"] is not False and name in ("target_ids", "temperature")
        return f"{text} {hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:16]}" if is_value else text

    given = {name: of(name, x) for name, x in arrays._asdict().items()} | {k: repr(v) for k, v in options.items()}
    return ", ".join(f"{name}={text}" for name, text in given.items())


def is_same_everywhere(text: str) -> bool:
    """Whether all processes say it."""
    texts = _everyone(Mesh(np.asarray(jax.devices()), ("device",)), hashlib.sha256(text.encode()).hexdigest())
    return len(set(texts)) == 1


def _everyone(mesh: Mesh, text: str) -> list[str]:
    """The text of each device's process, in every process."""
    encoded = np.frombuffer(_agreement.encoded(text), np.uint8)
    line = Mesh(mesh.devices.reshape(-1), ("device",))
    mine = jax.make_array_from_callback(
        (mesh.size, encoded.size), NamedSharding(line, PartitionSpec("device")), lambda _: encoded[None]
    )
    return [_agreement.decoded(bytes(row)) for row in np.asarray(_on_every_device(line)(mine))]


@functools.cache
def _on_every_device(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Compiled once: a new function would be compiled at every call."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _laid(x: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Any:
    """Over Explicit axes an array must lie as shard_map wants it; JAX lays its gradient back. Auto ones are XLA's."""
    if x is None:
        return None
    is_explicit = dict(zip(mesh.axis_names, (kind == AxisType.Explicit for kind in mesh.axis_types), strict=True))
    entries = (tuple(name for name in axis_names(entry) if is_explicit[name]) for entry in spec)
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(layout: _Layout, options: tuple[tuple[str, Any], ...], inputs: Inputs) -> Array | LinearLogp:
    head = layout.head

    def on_device(own: Inputs) -> Array | LinearLogp:
        hidden, weight, target_ids, bias, temperature = own
        static = dict(options)
        if head.axes:
            static |= {"axis_name": head.axes, "global_vocab_size": head.real_vocab_size}
        return _linear_logp(
            hidden,
            head.weight_here(weight),
            target_ids,
            None if bias is None else head.bias_here(bias),
            temperature=temperature,
            **static,
        )

    specs = layout.specs(inputs)
    if AxisType.Explicit in head.mesh.axis_types:
        inputs = Inputs(*(_laid(x, head.mesh, spec) for x, spec in zip(inputs, specs, strict=True)))
    return jax.shard_map(on_device, mesh=head.mesh, in_specs=(specs,), out_specs=layout.lead)(inputs)
