"""Flax NNX layers on the ops: a model built from them gives a token the same bits alone, in a batch, padded, or decoded
one token at a time through a KV cache. Forward bits are promised. Gradients are JAX's own of the same programs, but for
those of `attention` and `embed`, which keep their bits too, and that of `rms_norm`, which is the definition's.

Three things move bits in an ordinary model, and each has an answer here. A library GEMM picks the order of its sums by
shape; `det_gemm` has one order for all shapes. The order of a reduction follows its length; `ordered_sum` has one order
for all lengths. XLA computes an expression differently in one fusion than in another; `isolated` keeps it out of
fusions.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.hopper.rms_norm import takes_rows
from rlk_jax.core.checks import FLOAT_DTYPES, require
from rlk_jax.core.devices import default_machine, is_hopper
from rlk_jax.core.dispatch import device_of
from rlk_jax.core.fixed_order import rounded_product, sum_rows_by_id, zeros_behind
from rlk_jax.core.tokens import as_int32
from rlk_jax.core.transforms import as_replicated, equally_varying, isolated, varying_like, vmap_folds_rows
from rlk_jax.ops import promising
from rlk_jax.ops.attention import api as attention_api
from rlk_jax.ops.det_gemm.api import det_gemm
from rlk_jax.ops.det_gemm.checks import check_gemm_dtype
from rlk_jax.ops.linear_logp.api import linear_logp

__all__ = [
    "BLOCK",
    "DetDense",
    "LMHead",
    "attention",
    "det_dot_general",
    "embed",
    "isolated",
    "ordered_sum",
    "rms_norm",
    "rotary",
    "softmax",
]

BLOCK = 64
"""Places of a block of `ordered_sum`."""


@isolated
def ordered_sum(x: Float[Array, "*lead S"]) -> Float32[Array, "*lead"]:
    """Σ along the last axis in float32, in one order: by halves within blocks of 64, then blocks in ascending order.

    Zeros behind the last value change no bits, so a sum does not depend on how long a sequence was padded. Raises
    ValueError for an x that is no array of floats, or a scalar.
    """
    _check_floats_of_a_row("ordered_sum", x)
    if 0 in x.shape:
        return jnp.zeros(x.shape[:-1], jnp.float32)
    blocks = zeros_behind(x.astype(jnp.float32), -1, BLOCK).reshape(*x.shape[:-1], -1, BLOCK)
    while blocks.shape[-1] > 1:
        half = blocks.shape[-1] // 2
        blocks = blocks[..., :half] + blocks[..., half:]
    sums = jnp.moveaxis(blocks[..., 0], -1, 0)
    start = varying_like(jnp.zeros(x.shape[:-1], jnp.float32), x)
    return lax.scan(lambda total, block: (total + block, None), start, sums)[0]


@isolated
def rms_norm(
    x: Float[Array, "*lead D"], scale: Float[Array, " D"], *, epsilon: float = 1e-6
) -> Float[Array, "*lead D"]:
    """x / √(mean(x²) + ε) · scale, computed in float32 and returned in x's dtype; in reverse mode only.

    A row has the same bits whatever the lead shape. On a Hopper GPU a kernel gives it, for rows of at most 8192 numbers
    and of a multiple of 16 bytes. Raises ValueError for an x that is no array of floats, and a scale of another size.
    Source: RMSNorm, arXiv 1910.07467.
    """
    _check_rms_norm(x, scale)
    if x.size == 0:
        return x
    rows, scale = x.reshape(-1, x.shape[-1]), scale.astype(jnp.float32)
    normalized = _normalized_by_kernel if _norm_has_kernel(x) else _normalized_in_order
    return _rms_norm(normalized, epsilon, *equally_varying((rows, scale))).reshape(x.shape)


_NormalizeRows = Callable[[Array, Array, float], Array]
"""From rows `[N, D]`, their scale and epsilon, the normalized rows."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(normalized: _NormalizeRows, epsilon: float, x: Array, scale: Array) -> Array:
    """Rows `[N, D]` by a function of rows, scale and epsilon. Under vmap, the batch is folded into the rows."""

    def of_rows(scale: Array, rows: Array) -> Array:
        return varying_like(normalized(rows, scale, epsilon), rows)

    return vmap_folds_rows(of_rows, outputs_are_rows=True)(scale, x)


def _rms_norm_fwd(
    normalized: _NormalizeRows, epsilon: float, x: Array, scale: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _rms_norm(normalized, epsilon, x, scale), (x, scale)


def _rms_norm_bwd(
    normalized: _NormalizeRows, epsilon: float, saved: tuple[Array, Array], upstream: Array
) -> tuple[Array, Array]:
    """The gradient of the definition, whose sums XLA orders: no bits are promised for it."""

    def definition(x: Array, scale: Array) -> Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * lax.rsqrt(mean + epsilon) * scale).astype(x.dtype)

    return jax.vjp(definition, *saved)[1](upstream)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


def _norm_has_kernel(x: Array) -> bool:
    """Whether the kernel for Hopper normalises rows of x, which no number of rows decides."""
    return x.dtype in FLOAT_DTYPES and takes_rows(x.shape[-1], x.dtype.itemsize) and is_hopper(device_of([x]))


def _normalized_by_kernel(x: Array, scale: Array, epsilon: float) -> Array:
    from pallas_kernels.mosaic.rms_norm import rms_norm as normalized

    return normalized(*as_replicated((x, scale)), epsilon, default_machine())


def _normalized_in_order(x: Array, scale: Array, epsilon: float) -> Array:
    """The sums of squares are those of `ordered_sum`."""
    wide = x.astype(jnp.float32)
    total = ordered_sum(rounded_product(wide, wide))
    mean = rounded_product(total, jnp.float32(1 / x.shape[-1]))
    inverse = lax.optimization_barrier(lax.rsqrt(mean + epsilon))[..., None]
    return (wide * inverse * scale).astype(x.dtype)


@isolated
def softmax(x: Float[Array, "*lead S"], where: Bool[Array, "*lead S"] | None = None) -> Float32[Array, "*lead S"]:
    """exp(x − max) / Σ exp(x − max) over the places where `where` holds; 0 elsewhere, and in rows without any.

    A row has the same bits whatever the lead shape, and however many masked places follow the last one that counts.
    Raises ValueError for an x that is no array of floats, and a `where` that is not bool of its shape.
    """
    _check_softmax(x, where)
    visible = jnp.ones(x.shape, bool) if where is None else where
    logits = jnp.where(visible, x.astype(jnp.float32), -jnp.inf)
    largest = logits.max(axis=-1, keepdims=True, initial=-jnp.inf)
    shifted = logits - lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    exponentials = lax.optimization_barrier(jnp.exp(shifted))
    total = ordered_sum(exponentials)[..., None]
    return exponentials * lax.optimization_barrier(1 / jnp.where(total > 0, total, 1))


@isolated
def rotary(
    x: Float[Array, "B T H E"], positions: Int[Array, "B T"], *, base: float = 10_000.0
) -> Float[Array, "B T H E"]:
    """Rotary position embedding: each pair (x_i, x_{i+E/2}) turned by position · base^(−2i/E).

    A token at a position has the same bits whatever its slot. Raises ValueError for an odd E, and shapes that do not
    fit. Source: RoFormer, arXiv 2104.09864.
    """
    _check_rotary(x, positions)
    half = x.shape[-1] // 2
    frequencies = lax.optimization_barrier(jnp.float32(base) ** (-jnp.arange(half, dtype=jnp.float32) / half))
    angles = (positions[..., None].astype(jnp.float32) * frequencies)[:, :, None, :]
    cos, sin = lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = (
        rounded_product(first, cos) - rounded_product(second, sin),
        rounded_product(second, cos) + rounded_product(first, sin),
    )
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


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


def embed(table: Float[Array, "V D"], ids: Int[Array, "*lead"]) -> Float[Array, "*lead D"]:
    """Rows of an embedding table, `jnp.take(table, ids, axis=0)`.

    A row's gradient is added up in float32 and in one order, with the same bits run to run; XLA's scatter has no fixed
    order on GPUs. Reverse mode only. Ids beyond the table give NaN, and no gradient. Raises ValueError for a table that
    is not `[V, D]` of a float dtype with D at least 1, and for ids that are not integers.
    """
    _check_embedding(table, ids)
    return _embed(*equally_varying((jnp.asarray(table), as_int32(ids))))


@jax.custom_vjp
def _embed(table: Array, ids: Array) -> Array:
    return jnp.take(table, ids, axis=0)


def _embed_fwd(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return _embed(table, ids), (table[:, :0], ids)  # the backward only needs the table's length and dtype


def _embed_bwd(residuals: tuple[Array, Array], upstream: Array) -> tuple[Array, None]:
    table, ids = residuals
    rows = upstream.reshape(-1, upstream.shape[-1])
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))

    def scattered(ids: Array, rows: Array) -> Array:
        """XLA's own scatter, which adds up in order on CPUs and TPUs."""
        zeros = varying_like(jnp.zeros((len(table), rows.shape[1]), rows.dtype), rows)
        return jax.linear_transpose(lambda table: jnp.take(table, ids, axis=0), zeros)(rows)[0]

    def ordered(ids: Array, rows: Array) -> Array:
        return sum_rows_by_id(ids, rows, len(table))

    sums = lax.platform_dependent(ids.reshape(-1), wide, cpu=scattered, tpu=scattered, default=ordered)
    return sums.astype(table.dtype), None


_embed.defvjp(_embed_fwd, _embed_bwd)


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


def _check_floats_of_a_row(op: str, x: Any) -> None:
    """x is an array of floats with a last dimension to reduce."""
    require(
        jnp.ndim(x) >= 1 and jnp.issubdtype(jnp.result_type(x), jnp.floating),
        f"{op} needs floats [*lead, size], got {jnp.result_type(x)} of shape {jnp.shape(x)}.",
    )


def _check_rms_norm(x: Any, scale: Any) -> None:
    """The static checks of `rms_norm`."""
    _check_floats_of_a_row("rms_norm", x)
    require(scale.shape == x.shape[-1:], f"rms_norm needs a scale of shape {x.shape[-1:]}, got {scale.shape}.")


def _check_softmax(x: Any, where: Any) -> None:
    """The static checks of `softmax`."""
    _check_floats_of_a_row("softmax", x)
    if where is not None:
        require(
            where.shape == x.shape and where.dtype == jnp.bool,
            f"softmax needs bool where of shape {x.shape}, got {where.dtype} of shape {where.shape}.",
        )


def _check_rotary(x: Any, positions: Any) -> None:
    """The static checks of `rotary`."""
    _check_floats_of_a_row("rotary", x)
    require(
        x.ndim == 4 and x.shape[3] % 2 == 0 and positions.shape == x.shape[:2],
        f"rotary needs x [B, T, H, E] of an even E and positions [B, T], got shapes {x.shape} and {positions.shape}.",
    )


def _check_embedding(table: Any, ids: Any) -> None:
    """The static checks of `embed`."""
    require(
        jnp.ndim(table) == 2 and table.shape[1] >= 1 and jnp.issubdtype(table.dtype, jnp.floating),
        f"embed needs a float table [V, D], D at least 1, got {jnp.result_type(table)} of shape {jnp.shape(table)}.",
    )
    require(jnp.issubdtype(jnp.result_type(ids), jnp.integer), f"embed needs integer ids, got {jnp.result_type(ids)}.")
