"""One of several processes that share a head: python -m tests.rank TASK COORDINATOR COUNT INDEX (test_processes.py)."""

import functools
import hashlib
import os
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


def spread(mesh: Mesh, x, *spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda index: np.asarray(x[index]))


def hashes(problem: helpers.Problem, mesh: Mesh, **changes) -> dict[str, str]:
    """sha256 of logp and of every gradient, whole."""
    n = mesh.size
    hidden, target_ids = spread(mesh, problem.hidden), spread(mesh, problem.target_ids)
    weight = spread(mesh, vocab_parallel.pad_lm_head(problem.weight, n), "tp")
    bias = spread(mesh, vocab_parallel.pad_lm_head(problem.bias, n), "tp")
    upstream = spread(mesh, problem.upstream[0])

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


def cut_tokens(problem: helpers.Problem, is_last: bool) -> str:
    """sha256 of logp with ids over the data axis of a 2 x 2 mesh, and temperatures that every process has whole."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("data", "tp"))
    logp = vocab_parallel.linear_logp(
        spread(mesh, problem.hidden, "data"),
        spread(mesh, vocab_parallel.pad_lm_head(problem.weight, 2), "tp"),
        spread(mesh, problem.target_ids, "data"),
        mesh=mesh,
        vocab_axis="tp",
        token_axes="data",
        temperature=TEMPERATURES,
        global_vocab_size=CASE.vocab,
        implementation="deterministic",
    )
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(logp)
    return f"cut {hashlib.sha256(np.asarray(whole).tobytes()).hexdigest()}"


def grad_outside_jit(problem: helpers.Problem, is_last: bool) -> jax.Array:
    """A bad target where hidden is a tracer, and ids are none."""
    mesh = Mesh(np.asarray(jax.devices()), ("tp",))
    weight = spread(mesh, vocab_parallel.pad_lm_head(problem.weight, mesh.size), "tp")
    ids = problem.target_ids.at[5].set(CASE.vocab) if is_last else problem.target_ids

    def loss(hidden):
        logp = vocab_parallel.linear_logp(
            hidden, weight, ids, mesh=mesh, vocab_axis="tp", global_vocab_size=CASE.vocab, validate=True
        )
        return logp.sum()

    return jax.grad(loss)(spread(mesh, problem.hidden))


def token_axes(problem: helpers.Problem, is_last: bool) -> jax.Array:
    """Tokens that one process has lie otherwise."""
    mesh = Mesh(np.asarray(jax.devices())[:, None], ("data", "tp"))
    arrays = (spread(mesh, x) for x in (problem.hidden, problem.weight, problem.target_ids))
    return vocab_parallel.linear_logp(
        *arrays, mesh=mesh, vocab_axis="tp", token_axes=None if is_last else "data", validate=True
    )


def layout(problem: helpers.Problem, is_last: bool) -> jax.Array:
    """Hidden that one process has over the axis."""
    mesh = Mesh(np.asarray(jax.devices()), ("tp",))
    hidden = spread(mesh, problem.hidden, *(["tp"] if is_last else []))
    weight, ids = spread(mesh, vocab_parallel.pad_lm_head(problem.weight, mesh.size), "tp"), problem.target_ids
    options = {"mesh": mesh, "vocab_axis": "tp", "global_vocab_size": CASE.vocab}
    return vocab_parallel.linear_logp(hidden, weight, spread(mesh, ids), **options)


def temperatures(problem: helpers.Problem, is_last: bool, kind: str = "other") -> jax.Array:
    """Other numbers on one process; or bad ones that lie over the axis, as ids or, in another order, otherwise."""
    mesh = Mesh(np.asarray(jax.devices()), ("tp",))
    weight = spread(mesh, vocab_parallel.pad_lm_head(problem.weight, mesh.size), "tp")
    given = {
        "other": TEMPERATURES * (1 + is_last),
        "cut": spread(mesh, -TEMPERATURES, "tp"),
        "cut otherwise": spread(Mesh(mesh.devices[::-1], ("tp",)), TEMPERATURES, "tp"),
    }
    return vocab_parallel.linear_logp(
        spread(mesh, problem.hidden),
        weight,
        spread(mesh, problem.target_ids, *(["tp"] if kind == "cut otherwise" else [])),
        mesh=mesh,
        vocab_axis="tp",
        temperature=given[kind],
        global_vocab_size=CASE.vocab,
        validate=True,
    )


def strict(problem: helpers.Problem, is_last: bool) -> jax.Array:
    """Shards off the edges, which one process refuses."""
    os.environ["RLK_STRICT"] = str(int(is_last))
    mesh = Mesh(np.asarray(jax.devices()), ("tp",))
    hidden, weight, ids = problem.hidden, spread(mesh, problem.weight, "tp"), problem.target_ids
    return vocab_parallel.linear_logp(
        spread(mesh, hidden), weight, spread(mesh, ids), mesh=mesh, vocab_axis="tp", implementation="deterministic"
    )


def bare(problem: helpers.Problem, is_last: bool, implementation: str | None = None) -> jax.Array:
    """A bare call on arrays that all processes share; a bad target, where no implementation is named."""
    mesh = Mesh(np.asarray(jax.devices()), ("tp",))
    ids = problem.target_ids.at[5].set(-7) if is_last and implementation is None else problem.target_ids
    arrays = (spread(mesh, x) for x in (problem.hidden, problem.weight, ids))
    return linear_logp(*arrays, implementation=implementation if is_last else None)


CALLS = {
    "cut tokens": cut_tokens,
    "grad outside jit": grad_outside_jit,
    "token axes": token_axes,
    "strict": strict,
    "layout": layout,
    "temperatures": temperatures,
    "cut temperatures": functools.partial(temperatures, kind="cut"),
    "temperatures cut otherwise": functools.partial(temperatures, kind="cut otherwise"),
    "bare": bare,
    "bare, implementation": functools.partial(bare, implementation="fastest"),
}
"""What processes call in the place of `hashes`, the last one with a mistake."""

TEMPERATURES = np.linspace(0.5, 2, CASE.lead[0], dtype=np.float32)


def main(task: str, coordinator: str, count: int, index: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, count, index)
    problem, mesh = helpers.make(CASE, jnp.bfloat16), Mesh(np.asarray(jax.devices()), ("tp",))
    if task in CALLS:
        print(CALLS[task](problem, index == count - 1))
        return
    wrong = MISTAKES[task](problem) if index == count - 1 else {}
    problem = problem._replace(**{name: wrong.pop(name) for name in problem._fields if name in wrong})
    for name, digest in hashes(problem, mesh, **wrong).items():
        print(name, digest)


MISTAKES = {
    "none": lambda p: {},
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
