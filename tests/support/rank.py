"""One of several processes that share a head, which tests/ops/linear_logp/sharding/test_processes.py starts:

python -m tests.support.rank COORDINATOR COUNT INDEX TASK...

Tasks are tried one after the other. The last one ends the process as it ends itself. The error of any other is a line
of JSON on stdout, {task: "Type: message"}, and the process goes on.
"""

import functools
import hashlib
import json
import os
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlk_jax import linear_logp, vocab_parallel
from tests.support import helpers
from tests.support.helpers import Case

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
    """sha256 of logp on a mesh of 2 x half of the processes. Ids are cut over its data axis, and every process has all
    temperatures.
    """
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, -1), ("data", "tp"))
    logp = vocab_parallel.linear_logp(
        spread(mesh, problem.hidden, "data"),
        spread(mesh, vocab_parallel.pad_lm_head(problem.weight, mesh.shape["tp"]), "tp"),
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
    """A bad target in a gradient outside jit, where hidden is a tracer and the ids are an array."""
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
    """One process says that its tokens are cut over no axis."""
    mesh = Mesh(np.asarray(jax.devices())[:, None], ("data", "tp"))
    arrays = (spread(mesh, x) for x in (problem.hidden, problem.weight, problem.target_ids))
    return vocab_parallel.linear_logp(
        *arrays, mesh=mesh, vocab_axis="tp", token_axes=None if is_last else "data", validate=True
    )


def layout(problem: helpers.Problem, is_last: bool) -> jax.Array:
    """One process has hidden cut over the vocabulary axis."""
    mesh = Mesh(np.asarray(jax.devices()), ("tp",))
    hidden = spread(mesh, problem.hidden, *(["tp"] if is_last else []))
    weight, ids = spread(mesh, vocab_parallel.pad_lm_head(problem.weight, mesh.size), "tp"), problem.target_ids
    options = {"mesh": mesh, "vocab_axis": "tp", "global_vocab_size": CASE.vocab}
    return vocab_parallel.linear_logp(hidden, weight, spread(mesh, ids), **options)


def temperatures(problem: helpers.Problem, is_last: bool, kind: str = "other") -> jax.Array:
    """Temperatures that differ in one process ("other"), that are negative and cut over the axis ("cut"), or that are
    cut over it in another order than the ids ("cut otherwise").
    """
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


def cut_masks(problem: helpers.Problem, is_last: bool) -> jax.Array:
    """Ids, and what they may be, that are cut over the axis, to be validated."""
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    ids = spread(mesh, problem.target_ids, "data")
    allowed = spread(mesh, problem.target_ids[:, None], "data")
    arrays = (spread(mesh, x) for x in (problem.hidden, problem.weight))
    return linear_logp(*arrays, ids, allowed_ids=allowed, validate=True)


def strict(problem: helpers.Problem, is_last: bool) -> jax.Array:
    """Shards that do not end on group edges, which one process refuses because it is strict."""
    os.environ["RLK_STRICT"] = str(int(is_last))
    mesh = Mesh(np.asarray(jax.devices()), ("tp",))
    hidden, weight, ids = problem.hidden, spread(mesh, problem.weight, "tp"), problem.target_ids
    hidden, ids = spread(mesh, hidden), spread(mesh, ids)
    try:
        return vocab_parallel.linear_logp(
            hidden, weight, ids, mesh=mesh, vocab_axis="tp", implementation="deterministic"
        )
    finally:
        del os.environ["RLK_STRICT"]


def bare(problem: helpers.Problem, is_last: bool, implementation: str | None = None) -> jax.Array:
    """A call of `rlk_jax.linear_logp` on arrays over all processes. One process names a wrong implementation or, where
    none is named, has a bad target.
    """
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
    "cut masks": cut_masks,
    "bare": bare,
    "bare, implementation": functools.partial(bare, implementation="fastest"),
}
"""Tasks that call something else than `hashes`; the last process makes a mistake, or none in "cut tokens"."""

TEMPERATURES = np.linspace(0.5, 2, CASE.lead[0], dtype=np.float32)


def run_task(task: str, is_last: bool) -> None:
    problem, mesh = helpers.make(CASE, jnp.bfloat16), Mesh(np.asarray(jax.devices()), ("tp",))
    if task in CALLS:
        print(CALLS[task](problem, is_last))
        return
    wrong = MISTAKES[task](problem) if is_last else {}
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
    "mask": lambda p: {"allowed_ids": p.target_ids[:, None]},
    "mask without targets": lambda p: {"allowed_ids": p.target_ids[:, None] ^ 1},
    "unknown option": lambda p: {"no_such_option": 1},
}
"""Tasks that call `hashes`, and what the last process gives it instead; "none" for no mistake."""


def main(coordinator: str, count: int, index: int, tasks: Sequence[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, count, index)
    for place, task in enumerate(tasks, 1):
        try:
            run_task(task, index == count - 1)
        except Exception as error:
            if place == len(tasks):
                raise
            print(json.dumps({task: f"{type(error).__name__}: {error}"}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
