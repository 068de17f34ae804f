"""Causal attention by this library and by others, as functions of query, key and value.

A peer is imported only where it is asked for. Whatever cannot run raises an error that says why.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from rlk_jax import attention

CUDNN, JAX_XLA, JAX_PALLAS = "cudnn", "jax xla", "jax pallas (float16)"
FLASH_3, FLASH_4 = "flash attention 3", "flash attention 4"


class Sizes(NamedTuple):
    """The numbers of a shape "B,T,S,H,G,E": the T queries of a sequence are the last of its S tokens."""

    batch: int
    length: int
    slots: int
    heads: int
    groups: int
    size: int

    @property
    def is_decoding(self) -> bool:
        return self.length == 1

    def flops(self, window: int | None) -> float:
        """The operations of a forward: those of the scores, and as many of the weighted values."""
        hidden = self.slots - self.length
        seen = self.length * (hidden + self.length / 2)
        if window is not None and window < self.slots:
            seen = self.length * window - max(0, window - hidden) ** 2 / 2
        return 4 * self.batch * self.heads * self.size * seen

    @property
    def cache_bytes(self) -> int:
        """The bytes of all keys and values, in 16 bits."""
        return 4 * self.batch * self.slots * self.groups * self.size


type Attend = Callable[..., Any]
"""Takes query `[B, T, H, E]`, key and value `[B, S, G, E]`; returns `[B, T, H, E]`."""


def attend_by(name: str, sizes: Sizes, window: int | None) -> Attend:
    """attention of JAX arrays by an implementation of this library, or by a peer in JAX."""
    if name not in IN_JAX:
        start = sizes.slots - sizes.length
        return functools.partial(attention, start=start, sliding_window=window, implementation=name)
    if sizes.length not in (1, sizes.slots):
        raise ValueError("its causal mask is for as many queries as keys")
    return IN_JAX[name](sizes, window)


def _jax_nn(implementation: str, sizes: Sizes, window: int | None) -> Attend:
    return functools.partial(
        jax.nn.dot_product_attention,
        is_causal=not sizes.is_decoding,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def _jax_pallas(sizes: Sizes, window: int | None) -> Attend:
    """The example kernels of JAX itself. That of training leaves the scale to its caller, and takes float16 only."""
    if jax.default_backend() != "gpu":
        raise RuntimeError("measured on GPUs only")
    if window is not None:
        raise ValueError("takes no sliding window")
    if sizes.is_decoding:
        gqa: Any = importlib.import_module("jax.experimental.pallas.ops.gpu.decode_attention").gqa
        return lambda query, key, value: gqa(query[:, 0], key, value)[:, None].astype(query.dtype)
    mgpu: Any = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    # As many keys as have room in shared memory.
    block = 256 if sizes.size <= 64 else 128 if sizes.size <= 128 else 64
    config = mgpu.TuningConfig(block_q=64, block_kv=block, max_concurrent_steps=2, causal=True)
    return lambda query, key, value: mgpu.attention(query, key, value, config)


IN_JAX: dict[str, Callable[[Sizes, int | None], Attend]] = {
    CUDNN: functools.partial(_jax_nn, "cudnn"),
    JAX_XLA: functools.partial(_jax_nn, "xla"),
    JAX_PALLAS: _jax_pallas,
}


def flash_attention(name: str, sizes: Sizes, window: int | None) -> Attend:
    """attention of torch tensors by FlashAttention 3 or 4."""
    if jax.default_backend() != "gpu":
        raise RuntimeError("measured on GPUs only")
    module: Any = importlib.import_module(_FLASH_MODULES[name])
    if name == FLASH_3 and sizes.is_decoding:
        return module.flash_attn_with_kvcache
    options: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}

    def attend(query: Any, key: Any, value: Any) -> Any:
        found = module.flash_attn_func(query, key, value, causal=True, **options)
        return found[0] if isinstance(found, tuple) else found

    return attend


_FLASH_MODULES = {FLASH_3: "flash_attn_interface", FLASH_4: "flash_attn.cute"}
IN_TORCH = tuple(_FLASH_MODULES)
PEERS = (*IN_JAX, *IN_TORCH)
