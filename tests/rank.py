"""One of several processes that share a head: python -m tests.rank TASK COORDINATOR COUNT INDEX (test_processes.py)."""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlk_jax import linear_logp, vocab_parallel
from tests import helpers
from tests.helpers import Case

CASE = Case("processes", (12,), 16, 1000, bias=True)


def hashes(problem: helpers.Problem, mesh: Mesh, **changes) -> dict[str, str]:
    """sha256 of logp and of every gradient, whole."""
    n = mesh.size

    def spread(x, *spec):
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda index: np.asarray(x[index]))

    hidden, target_ids = spread(problem.hidden), spread(problem.target_ids)
    weight = spread(vocab_parallel.pad_lm_head(problem.weight, n), "tp")
    bias = spread(vocab_parallel.pad_lm_head(problem.bias, n), "tp")
    upstream = spread(problem.upstream[0])

    def logp(hidden, weight, bias, **options):
        return vocab_parallel.linear_logp(
            hidden,
            weight,
            target_ids,
            bias,
            temperature=problem.temperature,
            mesh=mesh,
            vocab_axis="tp",
            global_vocab_size=CASE.vocab,
            reduction="canonical",
            implementation="deterministic",
            **options,
        )

    values = logp(hidden, weight, bias, **{"validate": True, **changes})

    def loss(operands, upstream):
        return jnp.vdot(logp(*operands), upstream)

    gradients = jax.jit(jax.grad(loss))((hidden, weight, bias), upstream)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    cut = {"logp": values, "hidden": gradients[0], "weight": gradients[1], "bias": gradients[2]}
    found = {name: np.asarray(whole(x)) for name, x in cut.items()}
    # Without the padding, whose length depends on the number of ranks.
    found |= {name: found[name][: CASE.vocab] for name in ("weight", "bias")}
    return {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in found.items()}


def cut_tokens(problem: helpers.Problem) -> str:
    """sha256 of logp with ids over the data axis of a 2 x 2 mesh, and temperatures that every process has whole."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("data", "tp"))

    def spread(x, *spec):
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda index: np.asarray(x[index]))

    logp = vocab_parallel.linear_logp(
        spread(problem.hidden, "data"),
        spread(vocab_parallel.pad_lm_head(problem.weight, 2), "tp"),
        spread(problem.target_ids, "data"),
        mesh=mesh,
        vocab_axis="tp",
        token_axes="data",
        temperature=TEMPERATURES,
        global_vocab_size=CASE.vocab,
        implementation="deterministic",
    )
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(logp)
    return hashlib.sha256(np.asarray(whole).tobytes()).hexdigest()


TEMPERATURES = np.linspace(0.5, 2, CASE.lead[0], dtype=np.float32)


def main(task: str, coordinator: str, count: int, index: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, count, index)
    problem, mesh = helpers.make(CASE, jnp.bfloat16), Mesh(np.asarray(jax.devices()), ("tp",))
    wrong = MISTAKES[task](problem) if index == count - 1 else {}
    if task == "bare":
        # Outside jit, on an array that all processes share.
        ids = problem.target_ids if index < count - 1 else problem.target_ids.at[5].set(-7)
        everywhere = NamedSharding(mesh, P())
        shared = [
            jax.make_array_from_callback(x.shape, everywhere, lambda i, x=x: np.asarray(x[i]))
            for x in (problem.hidden, problem.weight, ids)
        ]
        print(linear_logp(*shared))
    if task == "cut tokens":
        print("cut", cut_tokens(problem))
        return
    problem = problem._replace(**{name: wrong.pop(name) for name in problem._fields if name in wrong})
    for name, digest in hashes(problem, mesh, **wrong).items():
        print(name, digest)


MISTAKES = {
    "none": lambda p: {},
    "bare": lambda p: {},
    "cut tokens": lambda p: {},
    "bad target": lambda p: {"target_ids": p.target_ids.at[5].set(CASE.vocab)},
    "wrong bias": lambda p: {"bias": p.bias[:-100]},
    "wrong shard": lambda p: {"weight": p.weight[:500]},
    "wrong dtype": lambda p: {"weight": p.weight.astype(jnp.float16)},
    "temperature": lambda p: {"temperature": 2.0},
    "validate": lambda p: {"validate": False},
    "unknown option": lambda p: {"no_such_option": 1},
}
"""What the last process does otherwise."""


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
