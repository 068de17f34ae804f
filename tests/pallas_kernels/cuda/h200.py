"""Compiles the ops that `cuda` has for an H200 without one, and prints what each program consists of, as JSON.

`python -m tests.pallas_kernels.cuda.h200 FOLDER` prints a dictionary that has for each program `calls`, its custom
calls, `thunks`, the kinds of its outermost thunks, which are what XLA runs, and `exports`, whether jax.export takes it.
It needs jax's CUDA plugins in the folder of $RLK_SM90_PLUGINS, and XLA_FLAGS by which XLA dumps the text of its
programs into FOLDER.
"""

import dataclasses
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp

from rlk_jax import det_gemm, dispatch, linear_cross_entropy, linear_kl, linear_logp
from tests.pallas_kernels.mosaic import sm90
from tests.support import verdicts

FOLDER = pathlib.Path(sys.argv[1])


def run_by_name() -> None:
    """Make dispatch find no reason why `cuda` cannot run, whatever this machine lacks."""
    for op in ("linear_logp", "linear_kl", "det_gemm"):
        entries = dispatch.TABLE[op]
        dispatch.TABLE[op] = tuple(
            dataclasses.replace(x, obstacles=lambda facts: []) if x.name == "cuda" else x for x in entries
        )


def with_gradients(op, *operands):
    values, vjp = jax.vjp(op, *operands)
    return values, vjp(jax.tree.map(jnp.sin, values))


def head(hidden, weight, target_ids, bias, *factors, **options):
    def op(hidden, weight, bias, *factors):
        given = {"low_rank": factors or None, "implementation": "cuda", **options}
        return linear_logp(hidden, weight, target_ids, bias, **given)

    return with_gradients(op, hidden, weight, bias, *factors)


def kept(*operands):
    return head(*operands)


def masked(mask, *operands):
    return head(*operands, allowed_mask=mask)


def recomputed(*operands):
    return head(*operands, return_entropy=True)


def smoothed(hidden, weight, target_ids, bias):
    def op(hidden, weight, bias):
        options = {"label_smoothing": 0.1, "reduction": "none", "implementation": "cuda"}
        return linear_cross_entropy(hidden, weight, target_ids, bias, **options)

    return with_gradients(op, hidden, weight, bias)


def ranked(*operands):
    return linear_logp(*operands, return_top_k=20, return_target_rank=True, implementation="cuda")


def low_rank(*operands):
    return head(*operands, return_entropy=True)


def divergence(hidden, weight, teacher_hidden, teacher_weight):
    def op(hidden, weight):
        return linear_kl(hidden, weight, teacher_hidden, teacher_weight, implementation="cuda")

    return with_gradients(op, hidden, weight)


def divergence_from_a_list(hidden, weight, ids, logps):
    def op(hidden, weight):
        return linear_kl(hidden, weight, teacher_ids=ids, teacher_logps=logps, implementation="cuda")

    return with_gradients(op, hidden, weight)


def products(a, b, c):
    """Two products and their gradients, since XLA puts only programs of more than four calls into CUDA graphs."""

    def op(a, b, c):
        return det_gemm(det_gemm(a, b, implementation="cuda"), c, implementation="cuda")

    return with_gradients(op, a, b, c)


def spec(shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sm90.h200())


HEAD = spec((512, 256)), spec((8192, 256)), spec((512,), jnp.int32), spec((8192,), jnp.float32)
PROGRAMS = (
    (kept, HEAD),
    (masked, (spec((512, 256), jnp.uint32), *HEAD)),
    (recomputed, HEAD),
    (smoothed, HEAD),
    (ranked, HEAD),
    (low_rank, (*HEAD, spec((16, 256)), spec((8192, 16)))),
    (divergence, (*HEAD[:2], spec((512, 128)), spec((8192, 128)))),
    (divergence_from_a_list, (*HEAD[:2], spec((512, 8), jnp.int32), spec((512, 8), jnp.float32))),
    (products, (spec((512, 256)), spec((256, 1000)), spec((1000, 64)))),
)


def main() -> None:
    sm90.trace_for_h200()
    run_by_name()
    found = {}
    for function, operands in PROGRAMS:
        name = function.__name__
        text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).compile().as_text()
        (thunks,) = FOLDER.glob(f"*jit_{name}.thunk_sequence_after_thunk_passes.txt")
        found[name] = {
            "calls": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))),
            "exports": verdicts.exported(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands])[0],
            "thunks": re.findall(r"^\d+: (\w+)", thunks.read_text(), re.MULTILINE),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
