"""Tensors as JAX arrays and arrays as tensors, over the DLPack protocol: the same memory, in stream order.

Copied on the way in: what is not contiguous (DLPack has no strides that XLA reads), and what stands at an address that
XLA does not read from. JAX has no int64: a program is lent such ids as pairs of int32 (`ids_of`). Nothing is copied on
the way out, and no borrowed memory is ever donated.

Order and lifetimes. An array that is lent owns no memory and waits for nothing. So
  - a program that reads lent arrays is launched behind `follow`: JAX's stream, of which a GPU has one, waits for what
    torch's current stream has been given;
  - what is lent is held until a result of that program is exported, for which torch's current stream waits: whatever
    torch then does with that memory on this stream, comes after the read;
  - memory of JAX's that torch has let go of goes back to JAX with the next `follow`: JAX's stream stands behind all
    that torch may still do with it then (`_wait_for_last_uses`).
The host waits for neither.
"""

import collections
import contextlib
import ctypes
import functools
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

import jax
import numpy as np
import torch
from jax.experimental import buffer_callback
from torch import Tensor

INT32 = np.iinfo(np.int32)
_XLA_ALIGNMENT = 16
"""Bytes: XLA on a GPU refuses parameters elsewhere. (On a CPU it wants 64, and JAX copies by itself.)"""

DTYPES: dict[torch.dtype, np.dtype] = {
    getattr(torch, name): jax.numpy.dtype(name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("bfloat16", "float16", "float32", "float64"),
    )
}
"""The dtypes that JAX's checks have a word for."""


@functools.cache
def jax_device(device: torch.device) -> jax.Device:
    """JAX's name for the device of a tensor."""
    if device.type == "cpu":
        return to_jax(torch.zeros(1, device=device)).device
    # JAX may start here, which leaves another GPU the current one.
    with torch.cuda.device(device):
        try:
            return to_jax(torch.zeros(1, device=device)).device
        except RuntimeError as problem:
            raise ValueError(f"JAX does not see {device}: {problem}") from problem


@contextlib.contextmanager
def launching(tensors: Iterable[Tensor | None]) -> Iterator[None]:
    """Behind it, nothing is lent; and torch's current GPU is what it was, for JAX leaves another one when it starts, or
    runs on that.
    """
    device = next(x for x in tensors if x is not None).device
    is_gpu = device.type == "cuda"
    if is_gpu:
        check_not_captured()
        jax_device(device)
    with torch.cuda.device(device) if is_gpu else contextlib.nullcontext():
        try:
            yield
        except BaseException:
            if is_gpu:  # Something may be reading still.
                torch.cuda.synchronize(device)
            _launch.let_go_of.clear()
            raise
        finally:
            _launch.lent.clear()


def check_not_captured() -> None:
    """Raises where torch's current stream is being captured, before JAX's work becomes a part of that."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("torch_bridge: a CUDA graph cannot capture what JAX runs: call the op outside of it.")


def to_jax(tensor: Tensor) -> jax.Array:
    """The tensor's memory, or that of a copy where it must be, as an array that owns it and is in stream order."""
    tensor = _readable(tensor).detach()
    return jax.dlpack.from_dlpack(_Exported(tensor) if tensor.is_cuda else tensor)


def in_memory(tensor: Tensor) -> Tensor:
    """Itself, or the result of the collective that it stands for; ValueError where its elements are nowhere."""
    if not tensor.numel():
        return tensor
    offset = tensor.storage_offset() * tensor.itemsize
    # The elements of a view may lie apart, or upon each other.
    least = tensor.numel() if tensor.is_contiguous() else 1
    if tensor.untyped_storage().nbytes() < offset + least * tensor.itemsize:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage has been freed.")
    # An address counts from 0 where there is no memory.
    if tensor.data_ptr() != offset:
        return tensor
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor.trigger_wait()
    raise ValueError(
        f"a {type(tensor).__qualname__} of shape {tuple(tensor.shape)} has no memory: pass a tensor that holds data."
    )


def _readable(tensor: Tensor) -> Tensor:
    """Itself, or a copy that JAX can read in place."""
    tensor = in_memory(tensor)
    # A tensor may stand for minus its memory, which DLPack does not say.
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_neg().contiguous()
    return tensor.detach().clone() if tensor.is_cuda and tensor.data_ptr() % _XLA_ALIGNMENT else tensor


class _Exported:
    """A tensor on a GPU as JAX asks for it. Torch's own export is from the current device alone, which JAX changes."""

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
    """The address of torch's; `torch.cuda.current_stream` takes ten times as long."""
    return torch._C._cuda_getCurrentRawStream(index)


@functools.cache
def _stream(index: int, address: int) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(address, index) if address else torch.cuda.default_stream(index)


class _Launch(threading.local):
    """Of a thread, between what it lends to a program and the first result it exports."""

    def __init__(self) -> None:
        self.events = collections.defaultdict[int, torch.cuda.Event](torch.cuda.Event)
        self.lent: list[Tensor] = []
        self.let_go_of: list[jax.Array] = []
        """What JAX's stream has been put behind the last uses of."""


_launch = _Launch()


@functools.lru_cache(maxsize=256)
def _borrow(address: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> jax.Array | None:
    """Memory at an address as an array that owns nothing; None where JAX would copy it, once and for all."""
    count = shape.numel() * dtype.itemsize
    if device.type == "cpu":
        flat = torch.frombuffer((ctypes.c_byte * count).from_address(address), dtype=torch.uint8)
    else:
        interface = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}
        flat = torch.as_tensor(types.SimpleNamespace(__cuda_array_interface__=interface), device=device)
    array = to_jax(flat.view(dtype).view(shape))
    return array if array.unsafe_buffer_pointer() == address else None


def lend(tensor: Tensor, shape: torch.Size | None = None) -> jax.Array:
    """`to_jax` for a program that is launched behind `follow`: imported once for each address, where weights stay and
    what torch's allocator gives comes again and again. As it owns no memory, ZeRO and FSDP may free theirs after the
    call. In another shape than its own, where there is one; int64 as `[*shape, 2]` words of int32, the lower first.
    """
    tensor = _readable(tensor)
    shape, dtype = tensor.shape if shape is None else shape, tensor.dtype
    if dtype == torch.int64:
        shape, dtype = torch.Size((*shape, 2)), torch.int32
    if not tensor.numel():
        return to_jax(tensor.new_empty(shape, dtype=dtype))
    borrowed = _borrow(tensor.data_ptr(), shape, dtype, tensor.device)
    if borrowed is None:
        # A dimension of one may have any stride, which another dtype does not.
        return to_jax(tensor.detach().as_strided((tensor.numel(),), (1,)).view(dtype).reshape(shape))
    _launch.lent.append(tensor)
    return borrowed


def follow(device: jax.Device) -> None:
    """What JAX launches on the device from here on, runs behind what torch's current stream has been given."""
    index = _gpu_index(device)
    if index is None:  # A CPU has done it.
        return
    current = _stream(index, _current_stream(index))
    _wait_for_last_uses(index, current)
    event = _launch.events[index]
    event.record(current)
    _stream(index, _compute_stream(device)).wait_event(event)
    _launch.let_go_of.clear()


@functools.cache
def _compute_stream(device: jax.Device) -> int:
    """The address of the stream that JAX's programs run on, of which a GPU has one, as a program is told it."""
    found: list[int] = []
    ask = buffer_callback.buffer_callback(
        lambda context, *_: found.append(context.stream),
        jax.ShapeDtypeStruct((), np.float32),
        has_side_effect=True,
    )
    jax.block_until_ready(jax.jit(ask)(jax.device_put(np.float32(0), device)))
    return found[0]


def wait(device: jax.Device) -> None:
    """Until torch's current stream has done what it has been given: then JAX may read what is lent without `follow`."""
    index = _gpu_index(device)
    if index is not None:
        _stream(index, _current_stream(index)).synchronize()


@functools.cache
def _gpu_index(device: jax.Device) -> int | None:
    return device.local_hardware_id if device.platform == "gpu" else None


def to_torch(array: jax.Array) -> Tensor:
    """The array's memory as a tensor."""
    index = _gpu_index(array.device)
    if index is None:
        tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__())
    else:
        stream, exporter = _current_stream(index), cast(Any, array)
        tensor = torch.utils.dlpack.from_dlpack(exporter.__dlpack__(stream=stream or _DEFAULT_STREAM))
        # A storage dies with the last tensor on it, in Python or not.
        weakref.finalize(tensor.untyped_storage(), _let_go, array, index, stream).atexit = False
    _launch.lent.clear()
    return tensor


_DEFAULT_STREAM = 1
"""DLPack's name for the one whose address is 0."""

_let_go_of: dict[int, collections.deque[tuple[jax.Array, int, int]]] = collections.defaultdict(collections.deque)


def _let_go(array: jax.Array, index: int, given_to: int) -> None:
    """Torch has freed a tensor on the array: keep it until JAX waits for what torch has yet to do on the stream that it
    was given to, and on the one of now. Others wait for one of these: `Tensor.record_stream` knows nothing of it.
    """
    _let_go_of[index].append((array, given_to, _current_stream(index)))


def _wait_for_last_uses(index: int, current: torch.cuda.Stream) -> None:
    """Torch's current stream, for which JAX is about to wait, waits for the uses of what torch has let go of."""
    streams = set[int]()
    with contextlib.suppress(IndexError):  # Other threads take from it, too.
        while True:
            array, *of_array = _let_go_of[index].popleft()
            streams.update(of_array)
            _launch.let_go_of.append(array)
    for address in streams - {current.cuda_stream}:
        current.wait_stream(_stream(index, address))


def ids_of(lent: jax.Array, shape: tuple[int, ...], least: int = INT32.min, most: int = INT32.max) -> jax.Array:
    """int32 ids `[*shape]` of what `lend` has made of int32 or int64 ones. Those beyond int32 become `least` or `most`:
    one out of range must stay so, not wrap.
    """
    if lent.shape == shape:
        return lent
    low, high = lent[..., 0], lent[..., 1]
    beyond = jax.numpy.where(high < 0, least, most)
    return jax.numpy.where(high == low >> 31, low, beyond)


def as_int64(integers: Tensor) -> Tensor:
    """Integers as int64, of which uint64 saturates."""
    wide = integers.to(torch.int64)
    return wide.where(wide >= 0, torch.iinfo(torch.int64).max) if integers.dtype == torch.uint64 else wide


def as_int32(integers: Tensor) -> Tensor:
    """Integers as int32, which saturate likewise."""
    if integers.dtype == torch.int32:
        return integers
    return as_int64(integers).clamp(INT32.min, INT32.max).to(torch.int32)


@functools.lru_cache(maxsize=256, typed=True)
def scalar(value: float, device: torch.device) -> jax.Array:
    """An int32 or float32 number on a device, which may change at every step without a new program."""
    return jax.device_put((np.int32 if isinstance(value, int) else np.float32)(value), jax_device(device))
