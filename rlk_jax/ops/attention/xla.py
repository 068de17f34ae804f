"""attention as XLA compiles it, with weights in the operands' dtype. It promises no bits."""

import jax

from rlk_jax.ops.attention.options import AttentionConfig, Operands
from rlk_jax.ops.attention.reference import differentiated_by_jax, plain_attention


def _in_dtype(config: AttentionConfig, operands: Operands) -> jax.Array:
    return plain_attention(config, operands, operands.query.dtype)


XLA = differentiated_by_jax(_in_dtype)
