"""Tensors as JAX arrays and arrays as tensors, over the DLPack protocol: the same memory, in stream order.

Copied on the way in: what is not contiguous (DLPack has no strides that XLA reads), integers other than int32 (JAX's
ids are int32; see `as_int32`), and what stands at an address that XLA does not read from. Nothing is copied on the way
out, and no borrowed memory is ever donated.

Order and lifetimes on a GPU. `jax.dlpack.from_dlpack` makes JAX's stream wait for torch's current one, and
`torch.from_dlpack` makes torch's current stream wait for the array, both without stopping the host. So
  - a caller holds the arrays it imported until it has exported a result of the program that read them: whatever torch
    then does with that memory on this stream, comes after the read;
  - memory of JAX's that torch has let go of goes back to JAX once the program of a later import is launched: JAX's
    stream stands behind all that torch may still do with it then (`_after_last_uses`).
"""

import collections
import contextlib
import ctypes
import functools
import threading
import types
import weakref

import jax
import numpy as np
import torch
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
    return jax.dlpack.from_dlpack(torch.zeros(1, device=device)).device


def to_jax(tensor: Tensor) -> jax.Array:
    """The tensor's memory as an array, or that of a copy where it must be."""
    # A tensor may stand for minus its memory, which DLPack does not say.
    tensor = tensor.detach().resolve_neg().contiguous()
    if tensor.is_cuda and tensor.data_ptr() % _XLA_ALIGNMENT:
        tensor = tensor.clone()
    if tensor.is_cuda:
        _after_last_uses(tensor.device)
    return jax.dlpack.from_dlpack(tensor)


@functools.lru_cache(maxsize=64)
def _borrow(address: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> jax.Array | None:
    """Memory at an address as an array that owns nothing; None where JAX would copy it, once and for all."""
    count = shape.numel() * dtype.itemsize
    if device.type == "cpu":
        flat = torch.frombuffer((ctypes.c_byte * count).from_address(address), dtype=torch.uint8)
    else:
        interface = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}
        flat = torch.as_tensor(types.SimpleNamespace(__cuda_array_interface__=interface), device=device)
    array = jax.dlpack.from_dlpack(flat.view(dtype).view(shape))
    return array if array.unsafe_buffer_pointer() == address else None


def parameter_to_jax(tensor: Tensor) -> jax.Array:
    """`to_jax` of a weight or bias, which comes again and again at the same address: imported once.

    What is kept owns no memory, so that ZeRO and FSDP may free it, and is used only beside a tensor that is there. It
    orders no streams: a caller imports some other tensor beside it by `to_jax`.
    """
    is_aligned = not tensor.is_cuda or tensor.data_ptr() % _XLA_ALIGNMENT == 0
    if tensor.is_contiguous() and not tensor.is_neg() and tensor.numel() and is_aligned:
        borrowed = _borrow(tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device)
        if borrowed is not None:
            return borrowed
    return to_jax(tensor)


def to_torch(array: jax.Array) -> Tensor:
    """The array's memory as a tensor."""
    tensor = torch.from_dlpack(array)
    if tensor.is_cuda:
        _behind.arrays.clear()
        # A storage dies with the last tensor on it, in Python or not.
        stream = torch.cuda.current_stream(tensor.device)
        weakref.finalize(tensor.untyped_storage(), _let_go, array, tensor.device, stream).atexit = False
    return tensor


_let_go_of: dict[torch.device, collections.deque[tuple[jax.Array, list[torch.cuda.Event]]]]
_let_go_of = collections.defaultdict(collections.deque)


def _let_go(array: jax.Array, device: torch.device, given_to: torch.cuda.Stream) -> None:
    """Torch has freed a tensor on the array: keep it until JAX waits for what torch has yet to do on the stream that it
    was given to, and on the one of now: others wait for one of these, as for memory of torch's own.
    """
    streams = {given_to, torch.cuda.current_stream(device)}
    _let_go_of[device].append((array, [stream.record_event() for stream in streams]))


class _Behind(threading.local):
    """What torch has let go of and the imports of this thread wait for: JAX's again when one of them has been read."""

    def __init__(self) -> None:
        self.arrays: list[jax.Array] = []


_behind = _Behind()


def _after_last_uses(device: torch.device) -> None:
    """Torch's current stream, for which an import is about to wait, waits for the uses of what torch has let go of."""
    with contextlib.suppress(IndexError):  # Other threads take from it, too.
        while True:
            array, last_uses = _let_go_of[device].popleft()
            for last_use in last_uses:
                torch.cuda.current_stream(device).wait_event(last_use)
            _behind.arrays.append(array)


def as_int32(ids: Tensor, low: int = INT32.min) -> Tensor:
    """Integers as int32 of at least `low`. Those beyond saturate: one out of range must stay so, not wrap."""
    if ids.dtype == torch.int32 and low == INT32.min:
        return ids
    if ids.dtype != torch.int32:
        ids = ids.to(torch.int64)
    return ids.clamp(low, INT32.max).to(torch.int32)


@functools.lru_cache(maxsize=64)
def scalar(value: float, device: torch.device) -> jax.Array:
    """A float32 number on a device; a schedule may change it at every step without a new program."""
    return jax.device_put(np.float32(value), jax_device(device))
