"""How ops behave under JAX's transformations: vmap folds the batch into rows, shard_map types stay right, XLA fuses
nothing across a barrier, second derivatives are refused.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.core import Primitive  # jax.extend, which is public, imports all of Pallas.
from jax.custom_derivatives import CustomVJPPrimal
from jax.interpreters import mlir


def vmap_folds_rows(function: Callable[[Any, Any], Any], *, outputs_are_rows: bool) -> Callable[[Any, Any], Any]:
    """`function(shared, rows)`, which under vmap is one call on all rows of the batch where `shared` is not batched.

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


def with_vmap_rule[Result](function: Callable[..., Result], batched: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, which vmap replaces by the vmap of `batched`. Functions need this whose results cannot be batched.

    Both return the same tree. Where `batched` cannot give an array, it gives an empty one in its place.
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
    """The tree with all leaves varying over the same mesh axes of a surrounding shard_map: those of any of its leaves.

    Called outside the custom_vjp, it lets JAX sum the gradient of a replicated operand over the axes that the operand
    was made to vary over.
    """
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(tree)))

    def vary(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def varying_like[Tree](tree: Tree, like: jax.Array) -> Tree:
    """Every leaf made to vary over the mesh axes of `like`. The start of a loop needs it: carries keep their type."""
    return equally_varying((tree, like))[0]


_with_new_type = Primitive("with_new_type")
_with_new_type.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_with_new_type, lambda context, x: [x])


def with_new_type(x: jax.Array) -> jax.Array:
    """x under the type that a new array of its shape and dtype has where this is called: it varies over no mesh axis,
    and its mesh is the one that is set, if any.
    """
    return _with_new_type.bind(x)


def as_replicated[Tree](tree: Tree) -> Tree:
    """Every leaf with the type of a value that varies over no mesh axis; what it holds stays each device's own.

    Pallas kernels that write references need this: references may not vary, and JAX refuses to mix them with values
    that do. The results must be given their axes back (`varying_like`) before JAX may see them.
    """
    return jax.tree.map(lambda x: with_new_type(x) if varying_axes(x) else x, tree)


def fusion_barrier[Tree](tree: Tree) -> Tree:
    """The same arrays; XLA fuses nothing across them.

    Around kernels this is a matter of correctness. XLA fuses a slice of an operand, or a store into a slice of a
    result, into a kernel's launch and then forgets that the kernel writes its results in place; in a scan they would
    be lost (seen in jaxlib 0.11.2).
    """
    return jax.lax.optimization_barrier(tree)


def isolated[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled apart from what surrounds it, with its results rounded to their own dtypes, outside jit too.

    XLA otherwise joins a function with its neighbours, where it may skip a rounding to bfloat16 or divide by a
    reciprocal. Wrap elementwise functions in it, `isolated(jax.nn.silu)`, to use them in an invariant model. The
    function must compute from its arguments alone; arguments that are not arrays are static and have to be hashable.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten((args, kwargs))
        static = tuple(None if _is_array(x) else x for x in leaves)
        return _compiled_alone(function, tree, static, [x for x in leaves if _is_array(x)])

    return alone


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled_alone(function: Callable[..., Any], tree: Any, static: tuple[Any, ...], arrays: list[jax.Array]) -> Any:
    """`function` between two barriers, on the arguments whose leaves are `arrays` where `static` has None."""
    following = iter(lax.optimization_barrier(arrays))
    # A leaf is never None, because None is part of the tree: so None marks the place of an array.
    args, kwargs = jax.tree.unflatten(tree, [next(following) if x is None else x for x in static])
    return lax.optimization_barrier(function(*args, **kwargs))


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

    The answer is the length of an array, 1 or 0: it is static and belongs to this linearisation. JAX keeps one residual
    tree for all linearisations of a jitted function, so a flag in the tree would be that of the last linearisation.
    """
    return tuple(jnp.zeros(int(x is not None and x.perturbed)) for x in primals)


def is_needed(saved: tuple[jax.Array, ...]) -> tuple[bool, ...]:
    """Which primals need a gradient, from what `needs_gradient` gave."""
    return tuple(x.shape[0] > 0 for x in saved)


def primal_values(primals: Any) -> Any:
    """The values of the primals of a custom_vjp with symbolic zeros."""
    return jax.tree.map(lambda x: x.value, primals, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
