"""The cross-entropy of fine-tuning at the LM head beside linear_logp: python -m benchmarks.linear_cross_entropy --help.

G and memory are defined as in benchmarks.linear_logp, whose weighted sum of log-probs is measured in the same run.
"""

import functools
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from benchmarks import common
from benchmarks.common import compiled_candidate
from benchmarks.linear_logp import Build, Inputs, add_passes, run_benchmark
from rlk_jax import linear_cross_entropy, linear_logp

OPTIONS: dict[str, dict[str, float]] = {
    "": {},
    ", z-loss": {"z_loss": 1e-4},
    ", label smoothing": {"label_smoothing": 0.1},
}
"""What is added to a cross-entropy, by name."""
SHAPES = "4096,2048,131072;4096,4096,131072;8192,4096,151936"


def naive(
    hidden: jax.Array, weight: jax.Array, target_ids: jax.Array, *, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> jax.Array:
    """The mean cross-entropy as a trainer writes it without this library."""
    logits = (hidden @ weight.T).astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=1)
    target = jnp.take_along_axis(logits, target_ids[:, None], axis=1)[:, 0]
    if label_smoothing:
        target = (1 - label_smoothing) * target + label_smoothing * logits.mean(axis=1)
    return (lse - target + z_loss * lse**2).mean()


def candidates_of(name: str, inputs: Inputs) -> dict[str, Build]:
    """The passes of one implementation; raises what it raises where it cannot run."""
    hidden, weight, ids = inputs.hidden, inputs.weight, inputs.target_ids
    op = naive if name == "naive" else functools.partial(linear_cross_entropy, implementation=name)
    losses: dict[str, Callable[..., jax.Array]] = {
        f"linear_cross_entropy{what}": lambda h, w, options=options: op(h, w, ids, **options)
        for what, options in OPTIONS.items()
    }
    if name != "naive":
        losses["linear_logp"] = lambda h, w: jnp.vdot(linear_logp(h, w, ids, implementation=name), inputs.upstream)
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
