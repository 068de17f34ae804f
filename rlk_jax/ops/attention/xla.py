"""attention as XLA compiles it, with weights in the operands' dtype, or as cuDNN has it. It promises no bits."""

from typing import Any

import jax
from jax import lax

from rlk_jax.core.devices import is_ampere_or_later, is_hopper
from rlk_jax.core.dispatch import device_of
from rlk_jax.ops.attention.options import AttentionConfig, Operands
from rlk_jax.ops.attention.reference import differentiated_by_jax, plain_attention

Array = jax.Array


def _best_of_xla(config: AttentionConfig, operands: Operands) -> Array:
    if not _is_for_cudnn(config, operands):
        return _in_dtype(config, operands)
    # Arrays may lie on the CPU of a machine that has a GPU too.
    return lax.platform_dependent(operands, cuda=lambda x: _by_cudnn(config, x), default=lambda x: _in_dtype(config, x))


def _in_dtype(config: AttentionConfig, operands: Operands) -> Array:
    return plain_attention(config, operands, operands.query.dtype)


def _is_for_cudnn(config: AttentionConfig, operands: Operands) -> bool:
    """Whether cuDNN, which never holds all scores, takes these heads of whole sequences on the GPU that JAX sees."""
    device, (_, length, _, size) = device_of(()), operands.query.shape
    has_size = size == config.value_size and size % 8 == 0 and size <= (256 if is_hopper(device) else 128)
    # JAX (0.11.2) refuses its gradient for odd lengths.
    has_sizes = has_size and length % 2 == 0
    return is_ampere_or_later(device) and config.is_whole and config.logit_softcap is None and has_sizes


def _by_cudnn(config: AttentionConfig, operands: Operands) -> Array:
    window = None if config.sliding_window is None else (config.sliding_window - 1, 0)
    query, key, value = operands[:3]
    options: Any = {"scale": config.scale, "is_causal": True, "local_window_size": window}
    return jax.nn.dot_product_attention(query, key, value, **options, implementation="cudnn")


XLA = differentiated_by_jax(_best_of_xla)
