"""How processes agree on a call before any of them goes on: each gives a text to all, and all raise the same error.

A mistake that one process alone can see must not leave the others waiting in a collective.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlk_jax.core.checks import as_array, is_concrete
from rlk_jax.core.dispatch import choose
from rlk_jax.core.head import HeadConfig
from rlk_jax.ops.linear_logp.call import facts_of_call, tokens_of
from rlk_jax.ops.linear_logp.checks import check_call
from rlk_jax.ops.linear_logp.options import HeadInputs, HeadOptions

_ALLOWED = ("allowed_ids", "allowed_mask")
TEXT_BYTES = 1024
"""Bytes that a process' text takes in a collective. The end of a longer text is a hash, so that it differs where texts
do.
"""


def encoded(text: str) -> bytes:
    """The text in `TEXT_BYTES` bytes, however long it is: in a collective all processes give equally many."""
    data = text.encode()
    if len(data) > TEXT_BYTES:
        end = f" ... {hashlib.sha256(data).hexdigest()[:16]}".encode()
        data = data[: TEXT_BYTES - len(end)] + end
    return data.ljust(TEXT_BYTES, b"\0")


def decoded(data: bytes) -> str:
    """The text that `encoded` was given."""
    return data.rstrip(b"\0").decode(errors="ignore")


def agreed[T](check: Callable[[], tuple[T, str]], everyone: Callable[[str], Sequence[str]]) -> tuple[T, Sequence[str]]:
    """What `check` found, and what each process said of it. `everyone` gives a process' text to all, in their order.

    Where checks failed, every process raises a ValueError with the first one's message. Errors of other types are sent
    on as well, so that no process waits for one that has raised.
    """
    found: list[T] = []
    problem: Exception | None = None
    try:
        own, text = check()
        found.append(own)
    except Exception as error:
        problem = error
        text = f"!{error}" if isinstance(error, ValueError) else f"!{type(error).__name__}: {error}"
    texts = everyone(text)
    failed = next((text[1:] for text in texts if text.startswith("!")), None)
    if isinstance(problem, ValueError) and str(problem) == failed:
        raise problem
    if failed is not None:
        raise ValueError(failed) from problem
    return found[0], texts


def require_same(texts: Sequence[str], op: str = "linear_logp") -> None:
    """Raises ValueError where the processes' descriptions of their calls of an op differ."""
    if len(set(texts)) > 1:
        raise ValueError(f"the processes call {op} differently: " + " | ".join(sorted(set(texts))))


def agree(mesh: Mesh | AbstractMesh, inputs: HeadInputs, options: HeadOptions) -> None:
    """The checks of bare linear_logp on arrays over a mesh; where several processes share it, all of them agree."""

    def chosen(inputs: HeadInputs, config: HeadConfig) -> str:
        return choose(facts_of_call(inputs, config), options.implementation).name

    agreed_on_mesh(mesh, inputs, options, chosen)


def agreed_on_mesh[T](
    mesh: Mesh | AbstractMesh,
    inputs: HeadInputs,
    options: HeadOptions,
    layout: Callable[[HeadInputs, HeadConfig], T],
) -> tuple[T, HeadInputs]:
    """What `layout(inputs, config)` gives for a call that passes its checks, and the checked inputs.

    Where processes share the mesh and call outside jit, one collective lets all of them raise the error that any of
    them found, and compares their calls.
    """
    # Under grad outside jit the operands are tracers; under jit even a constant is one.
    is_outside_jit = all(map(is_concrete, (inputs.target_ids, inputs.temperature, jnp.zeros(()))))
    is_read = options.validate is not False and is_outside_jit

    def checked() -> tuple[T, HeadInputs]:
        """What this process can say alone: static facts, and the values in its own memory."""
        arrays, config, _ = check_call(inputs, replace(options, axis_name=None, reduction="sum"))
        if options.validate or is_read:
            pieces = _own_pieces(arrays.target_ids, arrays.temperature, must_read=bool(options.validate))
            allowed = _own_allowed(arrays, must_read=bool(options.validate))
            for ids, temperature in pieces:
                part = arrays._replace(target_ids=ids, temperature=temperature, **allowed)
                tokens_of(part, config.real_vocab_size, options)
        return layout(arrays, config), arrays

    if not isinstance(mesh, Mesh) or not mesh.is_multi_process or not is_outside_jit:
        return checked()

    def said() -> tuple[tuple[T, HeadInputs], str]:
        found = checked()
        return found, _call_text(inputs, options, str(found[0]))

    found, texts = agreed(said, functools.partial(_everyone, mesh))
    require_same(texts)
    return found


def _own_pieces(ids: Any, temperature: Any, *, must_read: bool) -> list[tuple[Any, Any]]:
    """What this process holds of ids and temperatures, piece by piece, where they may lie over several processes.

    A temperature whose pieces are not those of the ids is refused where it must be read. Elsewhere it is not looked at;
    a bad one still gives NaN.
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


def _own_allowed(inputs: HeadInputs, *, must_read: bool) -> dict[str, Any]:
    """What tokens may take, where this process holds all of it. Elsewhere it is refused where it must be read, and not
    looked at otherwise; a bad row still gives NaN.
    """
    given = {name: getattr(inputs, name) for name in _ALLOWED}
    if not any(map(_is_cut, (inputs.target_ids, inputs.temperature, *given.values()))):
        return {name: _whole(x) for name, x in given.items()}
    if must_read and any(x is not None for x in given.values()):
        raise ValueError("validate=True reads allowed_ids and allowed_mask in arrays of one process alone.")
    return dict.fromkeys(given)


def _pieces(x: Any) -> dict[Any, np.ndarray] | None:
    """The pieces of x that this process holds, by their index in the whole; None where it holds all of x."""
    return {shard.index: np.asarray(shard.data) for shard in x.addressable_shards} if _is_cut(x) else None


def _is_cut(x: Any) -> bool:
    """Whether this process holds a part of x only."""
    return _is_concrete_array(x) and not x.is_fully_addressable and not x.is_fully_replicated


def _whole(x: Any) -> Any:
    """The value of an x that this process holds all of, on the host where it lies over a mesh: under `jax.set_mesh`
    JAX refuses to mix arrays that lie over Explicit axes with others.
    """
    if not _is_concrete_array(x) or len(x.sharding.device_set) == 1:
        return x
    return np.asarray(x if x.is_fully_addressable else x.addressable_shards[0].data)


def _is_concrete_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and is_concrete(x)


def mesh_of_array(x: Any) -> Any:
    """The mesh that an array lies over."""
    x = as_array("input", x)
    return x.sharding.mesh if is_concrete(x) else jax.typeof(x).sharding.mesh


def _call_text(inputs: HeadInputs, options: HeadOptions, runs: str) -> str:
    """A text of everything that must be the same in every process; `runs` says what will run."""

    def text_of(name: str, x: Any) -> str:
        if not np.ndim(x):
            return repr(x)
        text = f"{x.dtype}{list(x.shape)}"
        if _is_concrete_array(x) and not x.is_fully_addressable:
            return f"{text} as {getattr(x.sharding, 'spec', x.sharding)} of {dict(mesh_of_array(x).shape)}"
        # An array that each process holds for itself must have the same values in all of them.
        is_value = options.validate is not False and name in ("target_ids", "temperature", *_ALLOWED)
        return f"{text} {hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:16]}" if is_value else text

    given = {name: text_of(name, x) for name, x in inputs._asdict().items()}
    given |= {name: repr(x) for name, x in asdict(options).items()} | {"runs": runs}
    return ", ".join(f"{name}={text}" for name, text in given.items())


def is_same_everywhere(text: str) -> bool:
    """Whether all processes say this text."""
    texts = _everyone(Mesh(np.asarray(jax.devices()), ("device",)), hashlib.sha256(text.encode()).hexdigest())
    return len(set(texts)) == 1


def _everyone(mesh: Mesh, text: str) -> list[str]:
    """The text of each device's process, in every process."""
    own = np.frombuffer(encoded(text), np.uint8)
    line = Mesh(mesh.devices.reshape(-1), ("device",))
    mine = jax.make_array_from_callback(
        (mesh.size, own.size), NamedSharding(line, PartitionSpec("device")), lambda _: own[None]
    )
    return [decoded(bytes(row)) for row in np.asarray(_on_every_device(line)(mine))]


@functools.cache
def _on_every_device(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """The gather, compiled once: a new function would be compiled at every call."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
