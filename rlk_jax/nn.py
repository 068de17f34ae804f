"""Flax NNX layers on the ops: a model built from them gives a token the same bits alone, in a batch, padded, or decoded
one token at a time through a KV cache. Forward bits are promised; gradients are JAX's own of the same programs.

Three things move bits in an ordinary model, and what stands against each here: a library GEMM picks its algorithm by
shape (`det_gemm` does not), a reduction's order follows its length (`ordered_sum` has one order), and XLA computes an
expression differently in one fusion than in another (`isolated`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from rlk_jax import dispatch, validation
from rlk_jax._problem import rounded_product
from rlk_jax._transforms import equally_varying, varying_like
from rlk_jax.det_gemm import det_gemm
from rlk_jax.linear_logp import linear_logp

BLOCK = 64
"""Places that `ordered_sum` adds up before others: what starts at a multiple of it is summed as if it came first."""


def isolated[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled apart from what surrounds it, and its results rounded to their own dtypes; outside jit too.

    XLA otherwise joins it with its neighbours, where it may skip a rounding to bfloat16 or divide by a reciprocal.
    Wrap elementwise functions in it, `isolated(jax.nn.silu)`, to use them in an invariant model. It must compute from
    its arguments alone; those that are no arrays are static and have to be hashable.
    """

    @functools.wraps(function)
    def apart(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten((args, kwargs))
        static = tuple(None if _is_array(x) else x for x in leaves)
        return _compiled_apart(function, tree, static, [x for x in leaves if _is_array(x)])

    return apart


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled_apart(function: Callable[..., Any], tree: Any, static: tuple[Any, ...], arrays: list[Array]) -> Any:
    following = iter(lax.optimization_barrier(arrays))
    # No leaf is None: such arguments are part of the tree.
    args, kwargs = jax.tree.unflatten(tree, [next(following) if x is None else x for x in static])
    return lax.optimization_barrier(function(*args, **kwargs))


@isolated
def ordered_sum(x: Float[Array, "*lead S"]) -> Float32[Array, "*lead"]:
    """Σ along the last axis in float32, in an order of its own: halves within blocks of 64, blocks ascending.

    Zeros behind the last value change no bits, so a sum does not depend on how long a sequence was padded.
    """
    validation.floats_of_a_row("ordered_sum", x)
    length = x.shape[-1]
    if 0 in x.shape:
        return jnp.zeros(x.shape[:-1], jnp.float32)
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, -length % BLOCK)])
    blocks = padded.reshape(*x.shape[:-1], -1, BLOCK)
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
    """x / √(mean(x²) + ε) · scale, computed in float32, in x's dtype.

    Same bits for a row whatever the lead shape. Source: RMSNorm, arXiv 1910.07467.
    """
    validation.rms_norm(x, scale)
    wide = x.astype(jnp.float32)
    total = ordered_sum(rounded_product(wide, wide))
    mean = rounded_product(total, jnp.float32(1 / max(1, x.shape[-1])))
    inverse = lax.optimization_barrier(lax.rsqrt(mean + epsilon))[..., None]
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


@isolated
def softmax(x: Float[Array, "*lead S"], where: Bool[Array, "*lead S"] | None = None) -> Float32[Array, "*lead S"]:
    """exp(x − max) / Σ exp(x − max) over the places where `where` holds; 0 elsewhere, and in rows without any.

    Same bits for a row whatever the lead shape, and however many masked places follow the last one that counts.
    """
    validation.softmax(x, where)
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

    Same bits for a token at a position, whatever its slot. Source: RoFormer, arXiv 2104.09864.
    """
    validation.rotary(x, positions)
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
    implementation: str | None = None,
) -> Float[Array, "B T H F"]:
    """Causal softmax attention over the slots of a KV cache: softmax(query·keyᵀ / √E)·value.

    Args:
      query: of the tokens in slots start … start + T − 1. H is a multiple of G; heads share keys in order (GQA).
      key, value: of S slots, at least start + T; those behind the last query are unused, whatever they hold.
      padding: how many first slots of each sequence are padding, or None for none. Of every query `[B, T]`, how many
        slots stand before its own sequence, where a row holds several, each behind the one before.
      implementation: of det_gemm.

    Returns query's dtype; 0 for a query that is padding itself, NaN for one that sees a value that is not finite, and
    for all where a traced `start` leaves them no slots.
    Raises ValueError for shapes and dtypes that do not fit.

    Same bits for a token whatever the batch, padding on either side, S, and whether its sequence came at once or token
    by token: keys are moved so that a sequence's first one comes first, scores and values go through `det_gemm`, and
    masked places count as exact zeros behind the last key. With others in its row, too, if it starts at a multiple of
    64 slots: those before it are whole blocks of zeros.
    """
    validation.attention(query, key, value, start, padding)
    batch, length, heads, size = query.shape
    if 0 in query.shape:
        return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
    slots, groups = key.shape[1], key.shape[2]
    padding = jnp.zeros(batch, jnp.int32) if padding is None else padding
    # Keys of one sequence move to the front; those of several in a row stay, and a query sees none before its own.
    move, before = (padding, jnp.zeros((), int)) if padding.ndim == 1 else (jnp.zeros(batch, int), padding)
    place = jnp.arange(slots)
    own = start + jnp.arange(length) - move[:, None]
    is_key = place <= own[:, -1:]

    def aligned(x: Array) -> Array:
        moved = jnp.take_along_axis(x, ((place + move[:, None]) % slots)[..., None, None], axis=1)
        return jnp.where(is_key[..., None, None], moved, 0)

    def by_head(x: Array) -> Array:
        return jnp.moveaxis(x, 2, 1)

    def products(a: Array, b: Array, **options: Any) -> Array:
        def one(a: Array, b: Array) -> Array:
            return det_gemm(a, b, implementation=implementation, **options)

        return jax.vmap(jax.vmap(one))(a, b)

    # Heads that share keys are rows of one product.
    rows = by_head(query.reshape(batch, length, groups, -1)).reshape(batch, groups, -1, size)
    scores = products(rows, by_head(aligned(key)), transpose_b=True, out_dtype=jnp.float32)
    scores = isolated(jnp.multiply)(scores.reshape(batch, groups, length, -1, slots), size**-0.5)
    visible = (place <= own[..., None]) & (place >= before[..., None])
    visible = visible[:, None, :, None]
    weights = softmax(scores, jnp.broadcast_to(visible, scores.shape)).astype(value.dtype)
    values = by_head(aligned(value))
    # Where a weight is 0, a value must count for nothing: 0·NaN would be NaN.
    is_finite = jnp.isfinite(values).all(axis=-1)
    attended = products(weights.reshape(batch, groups, -1, slots), jnp.where(is_finite[..., None], values, 0))
    attended = attended.reshape(batch, groups, length, heads // groups, -1)
    sees_others = (visible & ~is_finite[:, :, None, None]).any(axis=-1)
    is_outside = (start < 0) | (start + length > slots)
    attended = jnp.where(sees_others[..., None] | is_outside, jnp.nan, attended)
    return lax.optimization_barrier(jnp.moveaxis(attended, 1, 2).reshape(batch, length, heads, -1).astype(query.dtype))


def det_dot_general(
    lhs: Float[Array, "*lead K"],
    rhs: Float[Array, "K N"],
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Float[Array, "*lead N"]:
    """`jax.lax.dot_general` through `det_gemm`, for `nnx.Linear(dot_general=det_dot_general)`.

    Raises ValueError unless it contracts lhs' last dimension with rhs' first one, and without batch dimensions.
    `precision` has nothing to choose: sums run in float32. The layer's dtype must be bfloat16 or float16.
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

    A row's gradient is added up in float32 and in one order: the same bits run to run, where XLA's scatter has none on
    GPUs. Reverse mode only. Ids beyond the table give NaN, and no gradient. Raises ValueError for a table that is not
    `[V, D]` of a float dtype with D at least 1, and for ids that are not integers.
    """
    validation.embedding(table, ids)
    return _embed(*equally_varying((jnp.asarray(table), validation.as_int32(ids))))


@jax.custom_vjp
def _embed(table: Array, ids: Array) -> Array:
    return jnp.take(table, ids, axis=0)


def _embed_fwd(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return _embed(table, ids), (table[:, :0], ids)  # of the table, the backward asks for length and dtype


def _embed_bwd(residuals: tuple[Array, Array], upstream: Array) -> tuple[Array, None]:
    table, ids = residuals
    rows = upstream.reshape(-1, upstream.shape[-1])
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))

    def scattered(ids: Array, rows: Array) -> Array:
        """What CPUs and TPUs add up in order."""
        zeros = varying_like(jnp.zeros((len(table), rows.shape[1]), rows.dtype), rows)
        return jax.linear_transpose(lambda table: jnp.take(table, ids, axis=0), zeros)(rows)[0]

    def ordered(ids: Array, rows: Array) -> Array:
        return rows_added_up(ids, rows, len(table))

    sums = lax.platform_dependent(ids.reshape(-1), wide, cpu=scattered, tpu=scattered, default=ordered)
    return sums.astype(table.dtype), None


_embed.defvjp(_embed_fwd, _embed_bwd)


def rows_added_up(ids: Int32[Array, " N"], rows: Float[Array, "N D"], size: int) -> Float[Array, "{size} D"]:
    """Row i is the sum of those rows whose id is i, each sum in an order of its own: in pairs, then pairs of these, ….

    Sorted by id; then k doublings leave in every place the sum of the last 2^k rows up to it that have its id.
    """
    count = len(ids)
    places, ids = jnp.arange(count), jnp.where(ids < 0, ids + size, ids)
    order = jnp.argsort(ids, stable=True)
    ids, rows = ids[order], rows[order]

    def double(k: Array, sums: Array) -> Array:
        before = places - (1 << k)
        joins = (before >= 0) & (ids[before] == ids)
        return sums + jnp.where(joins[:, None], sums[before], 0)

    sums = lax.fori_loop(0, max(0, count - 1).bit_length(), double, rows)
    is_last = jnp.append(ids[1:], -1) != ids
    # All others go where there is no row, each to a place of its own.
    targets = jnp.where(is_last & (ids >= 0) & (ids < size), ids, size + places)
    zeros = varying_like(jnp.zeros((size, rows.shape[1]), rows.dtype), sums)
    return zeros.at[targets].set(sums, mode="drop", unique_indices=True)


class DetDense(nnx.Linear):
    """`nnx.Linear` through `det_gemm`: `[*lead, in] → [*lead, out]`, kernel `[in, out]`, computed in bfloat16.

    Takes nnx.Linear's options but dot_general. Same bits for a row whatever the lead shape.
    """

    def __init__(
        self, in_features: int, out_features: int, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs, **options: Any
    ) -> None:
        validation.gemm_dtype(dtype)
        super().__init__(in_features, out_features, dtype=dtype, dot_general=det_dot_general, rngs=rngs, **options)

    def __call__(self, inputs: Float[Array, "*lead in"], out_sharding: Any = None) -> Float[Array, "*lead out"]:
        # Not `isolated`: it computes from its parameters, too.
        return lax.optimization_barrier(super().__call__(lax.optimization_barrier(inputs), out_sharding))


class LMHead(nnx.Module):
    """The last layer of a policy: hidden states to log-probs of target tokens, without holding logits.

    `kernel` is `[V, D]`, as an embedding's, so that tying is `head.kernel = embed.embedding`.
    """

    def __init__(self, features: int, vocab_size: int, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.kernel = nnx.Param(init(rngs.params(), (vocab_size, features), jnp.float32))
        self.dtype = dtype

    def __call__(
        self, hidden: Float[Array, "*lead D"], target_ids: Int[Array, "*lead"], **options: Any
    ) -> Float32[Array, "*lead"]:
        """float32 log-probs, by the fastest implementation that promises bits; options are `linear_logp`'s."""
        arguments = hidden.astype(self.dtype), self.kernel[...].astype(self.dtype), target_ids
        options.setdefault("implementation", dispatch.promising("linear_logp", *arguments, **options))
        return linear_logp(*arguments, **options)

    def logits(self, hidden: Float[Array, "*lead D"]) -> Float32[Array, "*lead V"]:
        """float32 logits, for sampling; through `det_gemm`. ValueError where the layer computes in float32."""
        validation.gemm_dtype(self.dtype)
        kernel = self.kernel[...].astype(self.dtype)
        return det_gemm(hidden.astype(self.dtype), kernel, transpose_b=True, out_dtype=jnp.float32)
