"""The low-rank term of a head: r more columns of hidden, scale·hidden·Aᵀ, which implementations multiply by B.

They are rounded once to hidden's dtype. A product with the head is then one sum over D and r, and B·A is never made.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlk_jax.core import transforms
from rlk_jax.core.gemm import Gemm, GemmLayout
from rlk_jax.core.mesh import axis_names, evenly_spread
from rlk_jax.core.partitioning import named_dimensions, partitioned_by_xla, without_effects
from rlk_jax.core.rows import compact
from rlk_jax.ops.linear_logp.options import HeadInputs, WeightLayout

Array = jax.Array


@dataclass(frozen=True)
class LowRankProducts:
    """How rows are multiplied by A."""

    gemm: Gemm
    layout: WeightLayout
    is_spread: bool
    """Whether XLA may spread the rows over the devices of a program."""


class _Factor(NamedTuple):
    """A `[r, D]` ("vd") or `[D, r]` ("dv"), and the scale `[1]`."""

    a: Any
    scale: Any


class _Rows(NamedTuple):
    """hidden `[N, D]`, and what A is applied to; None where that is hidden."""

    hidden: Array
    inputs: Array | None


class _Cotangents(NamedTuple):
    """The gradients of hidden, of what A is applied to, and of A; None where there is none."""

    hidden: Array | None
    inputs: Array | None
    a: Array | None


def with_low_rank_columns(how: LowRankProducts, inputs: HeadInputs, hidden: Array) -> Array:
    """hidden `[N, D]` followed by scale·x·Aᵀ, where x is hidden itself or the low-rank term's own inputs.

    Gradients flow to hidden, x and A. Where x is hidden itself, its gradient is the sum of both, rounded again.
    """
    a = jnp.asarray(inputs.low_rank_a).astype(hidden.dtype)
    scale = lax.stop_gradient(jnp.asarray(inputs.low_rank_scale, jnp.float32)).reshape(1)
    rank = a.shape[0 if how.layout == "vd" else 1]
    if hidden.shape[0] == 0:
        return jnp.pad(hidden, ((0, 0), (0, rank)))
    own = inputs.low_rank_inputs
    x = None if own is None else jnp.asarray(own).astype(hidden.dtype).reshape(hidden.shape)
    return _extended(how, *transforms.equally_varying((hidden, x, a, scale)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _extended(how: LowRankProducts, hidden: Array, x: Array | None, a: Array, scale: Array) -> Array:
    """`with_low_rank_columns` of arrays that vary over the same mesh axes."""

    def of_rows(factor: _Factor, rows: _Rows) -> Array:
        columns = transforms.varying_like(_low_rank_columns(how, factor, rows), rows.hidden)
        return jnp.concatenate([rows.hidden, columns], axis=1)

    return transforms.vmap_folds_rows(of_rows, outputs_are_rows=True)(_Factor(a, scale), _Rows(hidden, x))


def _extended_fwd(how: LowRankProducts, *primals: Any) -> tuple[Array, Any]:
    hidden, x, a, scale = transforms.primal_values(primals)
    return _extended(how, hidden, x, a, scale), (transforms.needs_gradient(primals[:3]), hidden, x, a, scale)


def _extended_bwd(how: LowRankProducts, saved: Any, upstream: Any) -> tuple[Any, ...]:
    needed, hidden, x, a, scale = saved
    needs_hidden, needs_x, needs_a = transforms.is_needed(needed)
    if isinstance(upstream, SymbolicZero):
        return None, None, None, None

    def of_rows(factor: _Factor, rows: tuple[Array, _Rows]) -> _Cotangents:
        found = _cotangents(how, (needs_hidden, needs_x, needs_a), factor, *rows)
        return transforms.varying_like(found, hidden)

    folding = transforms.vmap_folds_rows(of_rows, outputs_are_rows=not needs_a)
    found = folding(_Factor(a, scale), (upstream, _Rows(hidden, x)))
    return *found, None


_extended.defvjp(_extended_fwd, _extended_bwd, symbolic_zeros=True)


def _low_rank_columns(how: LowRankProducts, factor: _Factor, rows: _Rows) -> Array:
    """scale·x·Aᵀ `[N, r]`, rounded to x's dtype."""

    def on_device(factor: _Factor, rows: _Rows) -> Array:
        x = rows.hidden if rows.inputs is None else rows.inputs
        product = how.gemm(GemmLayout(False, how.layout == "vd", jnp.float32), x, factor.a, None)
        return transforms.fusion_barrier((product * factor.scale).astype(x.dtype))

    return _over_rows(how, on_device, ("columns", how), factor, rows)


def _cotangents(
    how: LowRankProducts, needs: tuple[bool, bool, bool], factor: _Factor, upstream: Array, rows: _Rows
) -> _Cotangents:
    """The gradients from that of hidden and its r further columns, `[N, D + r]`.

    Sums over tokens go over those whose further columns have a gradient, in their order, so that others change no bit.
    """
    needs_hidden, needs_x, needs_a = needs
    is_own = rows.inputs is not None

    def on_device(factor: _Factor, upstream: Array, rows: _Rows) -> _Cotangents:
        x = rows.inputs if rows.inputs is not None else rows.hidden
        dim, dtype = x.shape[1], x.dtype
        of_hidden, g = transforms.fusion_barrier((upstream[:, :dim], upstream[:, dim:]))
        has_gradient = jnp.any(g != 0, axis=1)
        d_hidden, d_x, d_a = of_hidden if needs_hidden else None, None, None
        if needs_x or (needs_hidden and not is_own):
            product = how.gemm(GemmLayout(False, how.layout == "dv", jnp.float32), g, factor.a, None)
            # The barrier keeps the product from being fused into the sum. Adding −0 changes no bit, as adding 0 would.
            of_x = transforms.fusion_barrier(jnp.where(has_gradient[:, None], product * factor.scale, -0.0))
            if is_own:
                d_x = of_x.astype(dtype)
            else:
                d_hidden = (of_hidden.astype(jnp.float32) + of_x).astype(dtype)
        if needs_a:
            active = compact(has_gradient, g.shape[0])
            pair = active.take(g), active.take(x)
            product = how.gemm(
                GemmLayout(True, False, jnp.float32), *(pair if how.layout == "vd" else pair[::-1]), None
            )
            d_a = (product * factor.scale).astype(factor.a.dtype)
        return transforms.fusion_barrier(_Cotangents(d_hidden, d_x, d_a))

    return _over_rows(how, on_device, ("cotangents", how, needs), factor, upstream, rows)


def _over_rows(how: LowRankProducts, on_device: Any, depends_on: Any, *arguments: Any) -> Any:
    """`on_device(*arguments)`, whose rows XLA may spread over the devices of a program.

    The gradient of A is then summed over the devices.
    """
    if not how.is_spread or jax.sharding.get_abstract_mesh().manual_axes:
        return on_device(*arguments)

    def rule(results: Any) -> str:
        return f"{_sharding_labels(arguments, 'a')} -> {_sharding_labels(results, 'r')}"

    def partition(mesh: Mesh, shapes: Any, results: Any) -> Any:
        _, *rows = shapes
        like = jax.tree.leaves(rows)[0]
        over = evenly_spread(mesh, axis_names(like.sharding.spec[0]) if like.sharding.spec else (), like.shape[0])

        def shardings(tree: Any) -> Any:
            spec = PartitionSpec(over or None)
            return jax.tree.map(
                lambda is_row: NamedSharding(mesh, spec if is_row else PartitionSpec()), _are_rows(tree)
            )

        def lower(*own: Any) -> Any:
            found = on_device(*own)
            if over and isinstance(found, _Cotangents) and found.a is not None:
                return found._replace(a=lax.psum(found.a, over))
            return found

        return mesh, without_effects(lower), shardings(results), shardings(shapes)

    return partitioned_by_xla(on_device, rule, partition, depends_on, *arguments)


def _are_rows(tree: Any) -> Any:
    """Whether each array of arguments or results has a row for each token."""
    if isinstance(tree, _Factor):
        return _Factor(False, False)
    if isinstance(tree, _Cotangents):
        return jax.tree.map(lambda _: True, tree)._replace(a=None if tree.a is None else False)
    return tuple(map(_are_rows, tree)) if type(tree) is tuple else jax.tree.map(lambda _: True, tree)


def _sharding_labels(tree: Any, prefix: str) -> str:
    """Names of the dimensions of all arrays, for Shardy; arguments and results share the tokens alone."""
    pairs = enumerate(zip(jax.tree.leaves(tree), jax.tree.leaves(_are_rows(tree)), strict=True))
    return ", ".join(named_dimensions(f"{prefix}{i}", x.ndim, is_rows=is_rows) for i, (x, is_rows) in pairs)
