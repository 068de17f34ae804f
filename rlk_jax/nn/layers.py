"""Layers made of the ops: dense layers, attention and the LM head."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from rlk_jax.ops import promising
from rlk_jax.ops.attention import api as attention_api
from rlk_jax.ops.det_gemm.api import det_gemm
from rlk_jax.ops.det_gemm.checks import check_gemm_dtype
from rlk_jax.ops.linear_logp.api import linear_logp


def attention(
    query: Float[Array, "B T H E"],
    key: Float[Array, "B S G E"],
    value: Float[Array, "B S G F"],
    *,
    start: int | Int[Array, ""] = 0,
    padding: Int[Array, "B"] | Int[Array, "B T"] | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H F"]:
    """`rlk_jax.attention`, which documents the arguments, by the fastest implementation that promises bits.

    `padding [B]` is how many first slots of each row stand before its sequence. Where a row holds several sequences,
    `padding [B, T]` says it for each query: it is the op's `segment_starts`. `implementation` is a name of
    `rlk_jax.dispatch.IMPLEMENTATIONS`; None stands for the fastest that promises bits here.

    A token has the same bits whatever the batch, the padding on either side and S, whatever sequences share its row,
    from any slot on, and whether its sequence came at once or token by token. Raises ValueError as the op does, and for
    an implementation that promises no bits.
    """
    is_packed = getattr(padding, "ndim", 1) == 2
    options: dict[str, Any] = {
        "start": start,
        "segment_starts" if is_packed else "padding": padding,
        "scale": scale,
        "sliding_window": sliding_window,
        "logit_softcap": logit_softcap,
    }
    chosen = promising("attention", query, key, value, implementation=implementation, **options)
    return attention_api.attention(query, key, value, implementation=chosen, **options)


def det_dot_general(
    lhs: Float[Array, "*lead K"],
    rhs: Float[Array, "K N"],
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Float[Array, "*lead N"]:
    """`jax.lax.dot_general` through `det_gemm`, for `nnx.Linear(dot_general=det_dot_general)`.

    Raises ValueError unless it contracts lhs' last dimension with rhs' first one, without batch dimensions, and for an
    out_sharding. `precision` changes nothing: sums run in float32. The layer's dtype must be bfloat16 or float16.
    """
    (contract_lhs, contract_rhs), batch = dimension_numbers
    is_dense = tuple(contract_lhs) == (lhs.ndim - 1,) and tuple(contract_rhs) == (0,) and not any(map(tuple, batch))
    if not is_dense or rhs.ndim != 2:
        raise ValueError(
            f"det_dot_general contracts the last dimension with a kernel's first, got {dimension_numbers}."
        )
    if out_sharding is not None:
        raise ValueError(f"det_dot_general takes no out_sharding, got {out_sharding}.")
    return det_gemm(lhs.reshape(-1, lhs.shape[-1]), rhs, out_dtype=preferred_element_type).reshape(
        *lhs.shape[:-1], rhs.shape[1]
    )


class DetDense(nnx.Linear):
    """`nnx.Linear` through `det_gemm`: `[*lead, in] → [*lead, out]`, kernel `[in, out]`, computed in bfloat16.

    It takes nnx.Linear's options but dot_general. A row has the same bits whatever the lead shape. Raises ValueError
    for a dtype that is neither bfloat16 nor float16.
    """

    def __init__(
        self, in_features: int, out_features: int, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs, **options: Any
    ) -> None:
        check_gemm_dtype(dtype)
        super().__init__(in_features, out_features, dtype=dtype, dot_general=det_dot_general, rngs=rngs, **options)

    def __call__(self, inputs: Float[Array, "*lead in"], out_sharding: Any = None) -> Float[Array, "*lead out"]:
        # `isolated` cannot be used here, because the layer computes from its parameters too.
        return lax.optimization_barrier(super().__call__(lax.optimization_barrier(inputs), out_sharding))


class LMHead(nnx.Module):
    """The last layer of a policy: hidden states to log-probs of target tokens, without holding logits.

    `kernel` is `[V, D]`, as an embedding's, so that `head.kernel = embed.embedding` ties both.
    """

    def __init__(self, features: int, vocab_size: int, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.kernel = nnx.Param(init(rngs.params(), (vocab_size, features), jnp.float32))
        self.dtype = dtype

    def __call__(
        self, hidden: Float[Array, "*lead D"], target_ids: Int[Array, "*lead"], **options: Any
    ) -> Float32[Array, "*lead"]:
        """float32 log-probs, by the fastest implementation that promises bits; `linear_logp` takes the options."""
        arguments = hidden.astype(self.dtype), self.kernel[...].astype(self.dtype), target_ids
        options.setdefault("implementation", promising("linear_logp", *arguments, **options))
        return linear_logp(*arguments, **options)

    def logits(self, hidden: Float[Array, "*lead D"]) -> Float32[Array, "*lead V"]:
        """float32 logits by `det_gemm`, for sampling. Raises ValueError where the layer computes in float32."""
        check_gemm_dtype(self.dtype)
        kernel = self.kernel[...].astype(self.dtype)
        return det_gemm(hidden.astype(self.dtype), kernel, transpose_b=True, out_dtype=jnp.float32)
