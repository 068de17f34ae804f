"""Launching kernels without a product: one warpgroup per block, a plain grid."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import Machine

Ref = Any


def launch(
    body: Any,
    name: str,
    machine: Machine,
    out_type: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    approx_math: bool = False,
) -> Any:
    """`body(*argument references, output references)`, both in the shapes of their trees, over the axes
    "blocks" and "groups" of the grid. approx_math: exp2 and divisions as in kernels with a product.
    """
    leaves, tree = jax.tree.flatten(arguments)
    out_leaves, out_tree = jax.tree.flatten(out_type)

    def flat(*refs: Ref) -> None:
        body(*jax.tree.unflatten(tree, refs[: len(leaves)]), jax.tree.unflatten(out_tree, refs[len(leaves) :]))

    out = plgpu.kernel(
        flat,
        out_type=tuple(out_leaves),
        grid=grid,
        grid_names=("blocks", "groups")[: len(grid)],
        kernel_name=name,
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=approx_math, unsafe_no_auto_barriers=True),
    )(*leaves)
    return jax.tree.unflatten(out_tree, out)
