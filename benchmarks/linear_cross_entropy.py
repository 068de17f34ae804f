"""The cross-entropy of fine-tuning at the LM head beside linear_logp: python -m benchmarks.linear_cross_entropy --help.

G and memory are defined as in benchmarks.linear_logp, whose weighted sum of log-probs is measured in the same run.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common
from benchmarks.common import compiled_candidate
from benchmarks.linear_logp import Build, Inputs, add_passes, naive, run_benchmark
from rlk_jax import linear_cross_entropy, linear_logp

SHAPES = "4096,2048,131072;4096,4096,131072;8192,4096,151936"


def candidates_of(name: str, inputs: Inputs) -> dict[str, Build]:
    """The passes of one implementation; raises what it raises where it cannot run."""
    hidden, weight, ids = inputs.hidden, inputs.weight, inputs.target_ids
    head: dict[str, Any] = {"implementation": name}

    def weighted(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.vdot(linear_logp(h, w, ids, **head), inputs.upstream)

    losses: dict[str, Callable[..., jax.Array]] = {
        "linear_logp": weighted,
        "linear_cross_entropy": lambda h, w: linear_cross_entropy(h, w, ids, **head),
        "linear_cross_entropy, z-loss": lambda h, w: linear_cross_entropy(h, w, ids, z_loss=1e-4, **head),
        "linear_cross_entropy, label smoothing": lambda h, w: linear_cross_entropy(
            h, w, ids, label_smoothing=0.1, **head
        ),
    }
    if name == "naive":
        losses = {"linear_cross_entropy": lambda h, w: -naive(h, w, ids).mean()}
    found: dict[str, Build] = {}
    for what, loss in losses.items():
        gradients = jax.value_and_grad(loss, (0, 1))
        found[f"{what}: forward"] = functools.partial(compiled_candidate, loss, hidden, weight, work=1)
        found[f"{what}: forward+backward"] = functools.partial(compiled_candidate, gradients, hidden, weight, work=3)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser("linear_cross_entropy", __doc__, shapes=SHAPES, implementations="mosaic,naive")
    parser.set_defaults(mask_density=1.0)
    return run_benchmark("linear_cross_entropy", add_passes(parser).parse_args(argv), argv, candidates_of)


if __name__ == "__main__":
    sys.exit(main())
