"""What the checker knows of det_gemm."""

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.inputs import Draw, Sizes
from rlk_jax.checker.op_spec import OpSpec, Output, Problem, Results


def _det_gemm_inputs(draw: Draw) -> dict[str, np.ndarray]:
    m, k, n = _gemm_shape(draw.sizes)
    return {"a": draw.tensor(0, m, k), "b": draw.tensor(1, k, n, scale=k**-0.5)}


def _gemm_shape(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.batch * sizes.seq, sizes.k_dim, sizes.n_dim


def _det_gemm_gold(problem: Problem) -> tuple[Results, float]:
    a, b, g = (np.asarray(x, np.float64) for x in (*problem.inputs.values(), problem.upstream["c"]))
    return {"c": a @ b, "gradient:a": g @ b.T, "gradient:b": a.T @ g}, gold.largest_finite(a)


DET_GEMM = (
    OpSpec(
        "det_gemm",
        _det_gemm_inputs,
        _det_gemm_gold,
        outputs=(Output("c", lambda sizes: _gemm_shape(sizes)[::2], dtype=None),),
        gradients=("a", "b"),
        shape=_gemm_shape,
        padding={"a": 0},
        per_row=frozenset(("c", "gradient:a")),
        modes=("random", "constant"),
        lead=1,
        dtypes=("bf16", "fp16"),
        unchecked={},
    ),
)
"""The spec of det_gemm."""
