"""Tensors as JAX arrays and arrays as tensors, by the DLPack protocol: both share memory, in stream order.

On the way in, what JAX cannot read in place is copied: a tensor that is not contiguous (XLA reads no strides of
DLPack), and a tensor at an address that XLA does not read from. JAX has no int64, so int64 ids are lent to a program as
pairs of int32 (`ids_of`). Nothing is copied on the way out, and no borrowed memory is ever donated.

Order and lifetimes. A lent array owns no memory and waits for nothing. Therefore
  - a program that reads lent arrays is launched after `follow`. It makes JAX's stream, of which a GPU has one, wait for
    the work that torch's current stream has been given;
  - lent tensors are held until a result of that program is exported. Torch's current stream waits for that result:
    whatever torch then does with the lent memory on this stream comes after the program's reads;
  - memory of JAX that torch has released goes back to JAX with the next `follow`: JAX's stream then waits for all that
    torch may still do with this memory (`_wait_for_last_uses`).
The host waits for neither stream.
"""

import collections
import contextlib
import ctypes
import functools
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

import jax
import numpy as np
import torch
from jax._src import xla_bridge
from jax.experimental import buffer_callback
from torch import Tensor

INT32 = np.iinfo(np.int32)
_XLA_ALIGNMENT = 16
"""Bytes: XLA on a GPU refuses parameters at other addresses. On a CPU XLA wants 64, and JAX copies by itself."""

DTYPES: dict[torch.dtype, np.dtype] = {
    getattr(torch, name): jax.numpy.dtype(name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("bfloat16", "float16", "float32", "float64"),
    )
}
"""The dtypes of torch that JAX has too, and can so name in its error messages."""


@functools.cache
def jax_device(device: torch.device) -> jax.Device:
    """The JAX device that holds tensors of this torch device."""
    if device.type == "cpu":
        return to_jax(torch.zeros(1, device=device)).device
    # JAX may start here, and then makes another GPU the current one: the context restores it.
    with torch.cuda.device(device):
        try:
            return to_jax(torch.zeros(1, device=device)).device
        except RuntimeError as problem:
            raise ValueError(f"JAX does not see {device}: {problem}") from problem


@contextlib.contextmanager
def launching(tensors: Iterable[Tensor | None]) -> Iterator[None]:
    """A context in which tensors are lent to programs: when it ends, no tensor is lent any more.

    It also restores torch's current GPU, because JAX makes another GPU the current one when it starts or runs there.
    """
    check_not_forked()
    device = next(x for x in tensors if x is not None).device
    is_gpu = device.type == "cuda"
    if is_gpu:
        check_not_captured()
        jax_device(device)
    with torch.cuda.device(device) if is_gpu else contextlib.nullcontext():
        try:
            yield
        except BaseException:
            if is_gpu:  # A program may still be reading lent memory.
                torch.cuda.synchronize(device)
            _launch.released.clear()
            raise
        finally:
            _launch.lent.clear()


_is_forked = False
"""Whether JAX ran in a process of which this one is a fork, which has none of JAX's threads."""


def _note_fork() -> None:
    global _is_forked
    _is_forked = _is_forked or xla_bridge.backends_are_initialized()


os.register_at_fork(after_in_child=_note_fork)


def check_not_forked() -> None:
    """Raise where JAX was running before this process was forked: whatever it is given here never ends."""
    if _is_forked:
        raise RuntimeError(
            "torch_bridge: this process was forked after JAX had started, and JAX cannot run in it: start processes "
            "with multiprocessing's 'spawn' or 'forkserver', for a DataLoader by multiprocessing_context='spawn'."
        )


def check_not_captured() -> None:
    """Raise where torch's current stream is being captured, before JAX's work becomes a part of the CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("torch_bridge: a CUDA graph cannot capture what JAX runs: call the op outside of it.")


def to_jax(tensor: Tensor) -> jax.Array:
    """An array on the tensor's memory, or on a copy where JAX cannot read that in place.

    The array keeps its memory alive, and its reads are in stream order.
    """
    tensor = _readable(tensor).detach()
    return jax.dlpack.from_dlpack(_Exported(tensor) if tensor.is_cuda else tensor)


def materialized(tensor: Tensor) -> Tensor:
    """The tensor, or the result of the collective that it stands for; ValueError where its elements have no memory."""
    if not tensor.numel():
        return tensor
    offset = tensor.storage_offset() * tensor.itemsize
    # The elements of a strided view may overlap, so that only one of them is sure to need memory.
    least = tensor.numel() if tensor.is_contiguous() else 1
    if tensor.untyped_storage().nbytes() < offset + least * tensor.itemsize:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage has been freed.")
    # Without memory, a storage has the address 0, and the tensor's address is its offset.
    if tensor.data_ptr() != offset:
        return tensor
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor.trigger_wait()
    raise ValueError(
        f"a {type(tensor).__qualname__} of shape {tuple(tensor.shape)} has no memory: pass a tensor that holds data."
    )


def _readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that JAX can read in place."""
    tensor = materialized(tensor)
    # A lazily negated tensor stands for minus its memory, which DLPack cannot say.
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_neg().contiguous()
    return tensor.detach().clone() if tensor.is_cuda and tensor.data_ptr() % _XLA_ALIGNMENT else tensor


class _Exported:
    """A GPU tensor for JAX to import. Torch's own export is from the current device only, which JAX changes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._index = tensor.get_device()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self._index

    def __dlpack__(self, *, stream: int, **_: Any) -> Any:
        current = _stream(self._index, _current_stream(self._index))
        _wait_for_last_uses(self._index, current)
        event = _launch.events[self._index]
        event.record(current)
        _stream(self._index, stream).wait_event(event)
        return torch.utils.dlpack.to_dlpack(self._tensor)


_DLPACK_CUDA = 2


def _current_stream(index: int) -> int:
    """The address of torch's current stream; `torch.cuda.current_stream` takes ten times as long."""
    return torch._C._cuda_getCurrentRawStream(index)


@functools.cache
def _stream(index: int, address: int) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(address, index) if address else torch.cuda.default_stream(index)


class _Launch(threading.local):
    """What a thread holds from the moment it lends tensors to a program until it exports the first result."""

    def __init__(self) -> None:
        self.events = collections.defaultdict[int, torch.cuda.Event](torch.cuda.Event)
        self.lent: list[Tensor] = []
        self.released: list[jax.Array] = []
        """Arrays that torch has released; they are held until JAX's stream waits for their last uses."""


_launch = _Launch()


@functools.lru_cache(maxsize=256)
def _borrow(address: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> jax.Array | None:
    """An array on the memory at an address, which it does not own; None where JAX would copy the memory instead.

    Arrays are cached by address, and a cached copy would not follow later writes.
    """
    count = shape.numel() * dtype.itemsize
    if device.type == "cpu":
        flat = torch.frombuffer((ctypes.c_byte * count).from_address(address), dtype=torch.uint8)
    else:
        interface = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}
        flat = torch.as_tensor(types.SimpleNamespace(__cuda_array_interface__=interface), device=device)
    array = to_jax(flat.view(dtype).view(shape))
    return array if array.unsafe_buffer_pointer() == address else None


def lend(tensor: Tensor, shape: torch.Size | None = None) -> jax.Array:
    """An array on the tensor's memory, in `shape` or else the tensor's, for a program that is launched after `follow`.

    Each address is imported once: weights stay at theirs, and torch's allocator gives the same addresses again and
    again. The array owns no memory, so ZeRO and FSDP may free theirs after the call. An int64 tensor becomes int32
    words `[*shape, 2]`, the lower word first.
    """
    tensor = _readable(tensor)
    shape, dtype = tensor.shape if shape is None else shape, tensor.dtype
    if dtype == torch.int64:
        shape, dtype = torch.Size((*shape, 2)), torch.int32
    if not tensor.numel():
        return to_jax(tensor.new_empty(shape, dtype=dtype))
    borrowed = _borrow(tensor.data_ptr(), shape, dtype, tensor.device)
    if borrowed is None:
        # A dimension of size 1 may have any stride, with which torch would refuse to view another dtype.
        return to_jax(tensor.detach().as_strided((tensor.numel(),), (1,)).view(dtype).reshape(shape))
    _launch.lent.append(tensor)
    return borrowed


def follow(device: jax.Device) -> None:
    """Make all that JAX launches on the device from now on wait for what torch's current stream has been given."""
    index = _gpu_index(device)
    if index is None:  # On a CPU, torch has finished already.
        return
    current = _stream(index, _current_stream(index))
    _wait_for_last_uses(index, current)
    event = _launch.events[index]
    event.record(current)
    _stream(index, _compute_stream(device)).wait_event(event)
    _launch.released.clear()


@functools.cache
def _compute_stream(device: jax.Device) -> int:
    """The address of the one stream of a GPU that JAX's programs run on, which a callback in a program is told."""
    found: list[int] = []
    ask = buffer_callback.buffer_callback(
        lambda context, *_: found.append(context.stream),
        jax.ShapeDtypeStruct((), np.float32),
        has_side_effect=True,
    )
    jax.block_until_ready(jax.jit(ask)(jax.device_put(np.float32(0), device)))
    return found[0]


def wait(device: jax.Device) -> None:
    """Wait on the host for torch's current stream to finish: then JAX may read lent arrays without `follow`."""
    index = _gpu_index(device)
    if index is not None:
        _stream(index, _current_stream(index)).synchronize()


@functools.cache
def _gpu_index(device: jax.Device) -> int | None:
    return device.local_hardware_id if device.platform == "gpu" else None


def to_torch(array: jax.Array) -> Tensor:
    """A tensor on the array's memory."""
    index = _gpu_index(array.device)
    if index is None:
        tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__())
    else:
        stream, exporter = _current_stream(index), cast(Any, array)
        tensor = torch.utils.dlpack.from_dlpack(exporter.__dlpack__(stream=stream or _DEFAULT_STREAM))
        # The storage, unlike this tensor, lives as long as any tensor on it, be it held in Python or in C++.
        weakref.finalize(tensor.untyped_storage(), _release, array, index, stream).atexit = False
    _launch.lent.clear()
    return tensor


_DEFAULT_STREAM = 1
"""DLPack's number for CUDA's default stream, whose address is 0."""

_released: dict[int, collections.deque[tuple[jax.Array, int, int]]] = collections.defaultdict(collections.deque)


def _release(array: jax.Array, index: int, given_to: int) -> None:
    """Hold an array whose tensor torch has freed until JAX waits for torch's uses of it.

    JAX waits for the stream that the tensor was given to and for the current one. One of these must wait for any other
    stream that uses the tensor: `Tensor.record_stream` has no effect on it.
    """
    _released[index].append((array, given_to, _current_stream(index)))


def _wait_for_last_uses(index: int, current: torch.cuda.Stream) -> None:
    """Make torch's current stream, for which JAX is about to wait, wait for the last uses of released arrays."""
    streams = set[int]()
    with contextlib.suppress(IndexError):  # Other threads pop from the deque, too.
        while True:
            array, *addresses = _released[index].popleft()
            streams.update(addresses)
            _launch.released.append(array)
    for address in streams - {current.cuda_stream}:
        current.wait_stream(_stream(index, address))


def ids_of(lent: jax.Array, shape: tuple[int, ...], least: int = INT32.min, most: int = INT32.max) -> jax.Array:
    """int32 ids `[*shape]` from the array that `lend` made of int32 or int64 ids.

    Ids beyond int32 become `least` or `most`: an id that is out of range must stay so, not wrap.
    """
    if lent.shape == shape:
        return lent
    low, high = lent[..., 0], lent[..., 1]
    beyond = jax.numpy.where(high < 0, least, most)
    return jax.numpy.where(high == low >> 31, low, beyond)


def as_int64(integers: Tensor) -> Tensor:
    """Integers as int64; uint64 values beyond its range saturate."""
    wide = integers.to(torch.int64)
    return wide.where(wide >= 0, torch.iinfo(torch.int64).max) if integers.dtype == torch.uint64 else wide


def as_int32(integers: Tensor) -> Tensor:
    """Integers as int32; values beyond its range saturate."""
    if integers.dtype == torch.int32:
        return integers
    return as_int64(integers).clamp(INT32.min, INT32.max).to(torch.int32)


@functools.lru_cache(maxsize=256, typed=True)
def scalar(value: float, device: torch.device) -> jax.Array:
    """An int32 or float32 number as an array: as no constant of a program, it may change at every step."""
    return jax.device_put((np.int32 if isinstance(value, int) else np.float32)(value), jax_device(device))
