"""How the ops behave under JAX's transformations: vmap folds the batch into rows, second derivatives are refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal
from jax.extend.core import Primitive
from jax.interpreters import mlir


def vmap_folds_rows(function: Callable[[Any, Any], Any], *, outputs_are_rows: bool) -> Callable[[Any, Any], Any]:
    """`function(shared, rows)` under vmap: one call on all rows of the batch while `shared` is not batched itself.

    Every leaf of `rows` is `[N, ...]`. Where `shared` is batched, or an output is no row (a weight gradient per
    example), the batch elements run one after the other.
    """

    @jax.custom_batching.custom_vmap
    def folding(shared: Any, rows: Any) -> Any:
        return function(shared, rows)

    @folding.def_vmap
    def rule(axis_size: int, in_batched: list[Any], shared: Any, rows: Any) -> tuple[Any, Any]:
        shared_batched, rows_batched = in_batched
        rows = jax.tree.map(
            lambda x, batched: x if batched else jnp.broadcast_to(x, (axis_size, *x.shape)), rows, rows_batched
        )

        if outputs_are_rows and not any(jax.tree.leaves(shared_batched)):
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
            outputs = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), folding(shared, flat))
        else:
            outputs = jax.lax.map(
                lambda i: folding(
                    jax.tree.map(lambda x, batched: x[i] if batched else x, shared, shared_batched),
                    jax.tree.map(lambda x: x[i], rows),
                ),
                jnp.arange(axis_size),
            )
        return outputs, jax.tree.map(lambda _: True, outputs)

    return folding


def unless_batched[Result](function: Callable[..., Result], batched: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, or under vmap the vmap of `batched`: for what only one batch at a time can have.

    Their results are the same trees; what `batched` has less of is empty there.
    """
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        in_axes = tuple(jax.tree.map(lambda b: 0 if b else None, x) for x in in_batched)
        outputs = jax.vmap(batched, in_axes, axis_size=axis_size)(*arguments)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return call


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes of the surrounding shard_map over which x varies; none under check_vma=False."""
    return jax.typeof(x).manual_axis_type.varying


def equally_varying[Tree](tree: Tree) -> Tree:
    """Inside shard_map: every leaf made to vary over each mesh axis that any of them varies over; else the tree itself.

    Outside the custom_vjp this lets JAX sum the gradient of a replicated operand over the axes that it was spread over.
    """
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(tree)))

    def spread(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(spread, tree)


def varying_like[Tree](tree: Tree, like: jax.Array) -> Tree:
    """Every leaf made to vary as `like` does: what a loop starts from, for instance, since a carry keeps its type."""
    return equally_varying((tree, like))[0]


_as_replicated = Primitive("as_replicated")
_as_replicated.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_as_replicated, lambda context, x: [x])


def as_replicated[Tree](tree: Tree) -> Tree:
    """Every leaf with the type of a value that varies over no mesh axis; what it holds stays each device's own.

    Around Pallas kernels that write references: those may not vary, and JAX refuses to mix them with values that do.
    What comes of it must be given its axes back (`varying_like`) before JAX may see it.
    """
    return jax.tree.map(lambda x: _as_replicated.bind(x) if varying_axes(x) else x, tree)


def apart[Tree](tree: Tree) -> Tree:
    """The same arrays, apart from the program around the kernels.

    XLA fuses a slice of an operand, or a store into a slice of a result, into a kernel's launch and then forgets that
    the kernel writes its results in place: in a scan they would be lost (seen in jaxlib 0.11.2).
    """
    return jax.lax.optimization_barrier(tree)


def refuse_derivative(message: str, tree: Any) -> Any:
    """The identity; differentiating it raises ValueError(message)."""

    @jax.custom_jvp
    def identity(x: Any) -> Any:
        return x

    @identity.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        raise ValueError(message)

    return identity(tree)


def needs_gradient(primals: Any) -> tuple[jax.Array, ...]:
    """Which primals of a custom_vjp with symbolic zeros need a gradient, to be saved for `is_needed`.

    As the length of an array, 1 or 0: static, and of this linearisation. JAX keeps one residual tree for all
    linearisations of a jitted function: a flag in the tree would be the last one's.
    """
    return tuple(jnp.zeros(int(x is not None and x.perturbed)) for x in primals)


def is_needed(saved: tuple[jax.Array, ...]) -> tuple[bool, ...]:
    return tuple(x.shape[0] > 0 for x in saved)


def primal_values(primals: Any) -> Any:
    """The values of such primals."""
    return jax.tree.map(lambda x: x.value, primals, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
