"""A GRPO step at the LM head, forward and backward, by memory budget: python -m benchmarks.linear_grpo_loss --help.

Exponentials that the memory budget can hold are not recomputed: the pass then takes three products instead of four.
Where it lacks many of them, linear_grpo_loss works on blocks of tokens, as it does at 1 GiB with --shapes
"32768,4096,151936;65536,2048,131072". G and memory are defined as in benchmarks.linear_logp. All ratios are 1 and no
token is clipped, so that every token has a gradient.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common
from benchmarks.common import compiled_candidate
from benchmarks.linear_logp import Build, Inputs, add_passes, run_benchmark
from rlk_jax import linear_grpo_loss, linear_logp
from rlk_jax.grpo import LossOptions, policy_loss

SHAPES = "4096,2048,131072;4096,4096,131072;8192,4096,151936"
SEQUENCES = 8
RECOMPUTED = 2**26
"""A budget in bytes that holds next to no exponentials, so that they are recomputed."""
OPTIONS = LossOptions(beta=0.04)


def budgets(inputs: Inputs) -> dict[str, int]:
    """Memory budgets in bytes, by name; the last one holds every exponential. The others hold more than hidden has."""
    logits, hidden = 2 * inputs.hidden.shape[0] * inputs.weight.shape[0], inputs.hidden.nbytes
    some = {"64 MiB": RECOMPUTED, "1 GiB": 2**30}
    held = {name: size for name, size in some.items() if hidden < size < logits}
    return held | {"N·V·2 B + 10 %": logits * 11 // 10}


def candidates_of(name: str, inputs: Inputs) -> dict[str, Build]:
    """The passes of one implementation; raises what it raises where it cannot run."""
    tokens = inputs.hidden.shape[0]
    if tokens % SEQUENCES:
        raise ValueError(f"{tokens} tokens are not {SEQUENCES} sequences of one length")
    lead = (SEQUENCES, tokens // SEQUENCES)
    hidden, ids, weight = inputs.hidden.reshape(*lead, -1), inputs.target_ids.reshape(lead), inputs.weight
    advantages, mask, upstream = inputs.upstream[:SEQUENCES], jnp.ones(lead, bool), inputs.upstream.reshape(lead)
    logps = jax.jit(lambda: linear_logp(hidden, weight, ids, implementation=name))()
    head: dict[str, Any] = {"implementation": name}

    def weighted(budget: int) -> Callable[..., Any]:
        return lambda h, w: jnp.vdot(linear_logp(h, w, ids, memory_budget=budget, **head), upstream)

    def in_two_calls(budget: int | None) -> Callable[..., Any]:
        def loss(h: jax.Array, w: jax.Array) -> jax.Array:
            logp = linear_logp(h, w, ids, memory_budget=budget, **head)
            return policy_loss(logp, logps, advantages, mask, ref_logps=logps, options=OPTIONS).loss

        return loss

    def in_one_call(budget: int) -> Callable[..., Any]:
        def loss(h: jax.Array, w: jax.Array) -> Any:
            rest = logps, logps, advantages, mask
            found = linear_grpo_loss(h, w, ids, *rest, options=OPTIONS, memory_budget=budget, **head)
            return found.loss, found

        return loss

    def with_gradients(f: Callable[..., Any], *, has_aux: bool = False) -> Build:
        gradients = jax.value_and_grad(f, (0, 1), has_aux=has_aux)
        return functools.partial(compiled_candidate, gradients, hidden, weight, work=3)

    *held, _ = budgets(inputs).items()
    found = {
        f"linear_logp, policy_loss: {budget}": with_gradients(in_two_calls(size))
        for budget, size in [*held, ("default", None)]
    }
    for budget, size in budgets(inputs).items():
        found[f"linear_logp: {budget}"] = with_gradients(weighted(size))
        found[f"linear_grpo_loss: {budget}"] = with_gradients(in_one_call(size), has_aux=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser("linear_grpo_loss", __doc__, shapes=SHAPES, implementations="mosaic")
    parser.set_defaults(mask_density=1.0)
    return run_benchmark("linear_grpo_loss", add_passes(parser).parse_args(argv), argv, candidates_of)


if __name__ == "__main__":
    sys.exit(main())
