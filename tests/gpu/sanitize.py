"""Small calls of every CUDA C++ kernel: compute-sanitizer --tool memcheck python -m tests.gpu.sanitize, or racecheck.

Forward and backward of linear_logp with its options, rankings, smoothed labels, and products that are padded, swapped
and stored either way.
Prints a line for each; compute-sanitizer prints what it finds.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlk_jax import det_gemm, linear_cross_entropy, linear_logp

HEADS: tuple[tuple[int, int, int, str, dict[str, Any]], ...] = (
    (300, 128, 4097, "bfloat16", {}),
    (40, 64, 1000, "float16", {"return_entropy": True, "logit_softcap": 30.0}),
    (200, 128, 2048, "bfloat16", {"weight_layout": "dv", "memory_budget": 2**19}),
)
"""N, D, V, dtype and options."""
PRODUCTS = ((300, 200, 130, False), (300, 200, 136, True), (7, 200, 1000, True), (16, 128, 520, False))
"""M, K, N and whether B is transposed."""


def with_gradients(op: Any, *operands: jax.Array) -> Any:
    values, vjp = jax.vjp(op, *operands)
    return jax.block_until_ready((values, vjp(values)))


def normal(seed: int, shape: tuple[int, int], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def main() -> None:
    for n, dim, vocab, dtype, options in HEADS:
        shape = (dim, vocab) if options.get("weight_layout") == "dv" else (vocab, dim)
        target_ids = jax.random.randint(jax.random.key(2), (n,), 0, vocab)

        def head(hidden, weight, bias, target_ids=target_ids, options=options):
            return linear_logp(hidden, weight, target_ids, bias, implementation="cuda", **options)

        def smoothed(hidden, weight, bias, target_ids=target_ids, options=options):
            given = {name: value for name, value in options.items() if name != "return_entropy"}
            how = {"label_smoothing": 0.1, "implementation": "cuda", **given}
            return linear_cross_entropy(hidden, weight, target_ids, bias, **how)

        operands = normal(0, (n, dim), dtype), normal(1, shape, dtype), jnp.ones(vocab)
        with_gradients(head, *operands)
        with_gradients(smoothed, *operands)
        jax.block_until_ready(head(*operands, options=options | {"return_top_k": 20, "return_target_rank": True}))
        print("linear_logp", n, dim, vocab, dtype, options, flush=True)
    for m, k, n, transpose_b in PRODUCTS:
        product = functools.partial(det_gemm, transpose_b=transpose_b, implementation="cuda")
        with_gradients(product, normal(0, (m, k), "bfloat16"), normal(1, (n, k) if transpose_b else (k, n), "bfloat16"))
        print("det_gemm", m, k, n, transpose_b, flush=True)


if __name__ == "__main__":
    main()
