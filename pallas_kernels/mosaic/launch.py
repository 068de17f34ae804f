"""Launches kernels without a product: one warpgroup per block, on a grid with one block for each piece of work.

`all_threads` is for every kernel.
"""

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
    """Run `body(*argument references, output references)` on the grid, whose axes are "blocks" and "groups".

    References come in the trees of `arguments` and of `out_type`. approx_math: exp2 and divisions are approximated, as
    in kernels with a product. Returns the outputs in the tree of `out_type`.
    """
    leaves, tree = jax.tree.flatten(arguments)
    out_leaves, out_tree = jax.tree.flatten(out_type)

    def kernel(*refs_gmem: Ref) -> None:
        arguments_gmem = jax.tree.unflatten(tree, refs_gmem[: len(leaves)])
        body(*arguments_gmem, jax.tree.unflatten(out_tree, refs_gmem[len(leaves) :]))

    out = plgpu.kernel(
        kernel,
        out_type=tuple(out_leaves),
        grid=grid,
        grid_names=("blocks", "groups")[: len(grid)],
        kernel_name=name,
        interpret=machine.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=approx_math, unsafe_no_auto_barriers=True),
    )(*leaves)
    return jax.tree.unflatten(out_tree, out)


def all_threads() -> None:
    """Wait for all threads of the warpgroup. This also orders writes to shared memory, which may need no order."""
    plgpu.commit_smem()
