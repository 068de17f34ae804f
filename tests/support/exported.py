"""Every op as a program for jax.export. python -m tests.support.exported FOLDER runs programs that were serialised.

It prints a dictionary in JSON, from each file's name to what `hashes` gives for its results.
"""

import functools
import hashlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import rlk_jax
from pallas_kernels.cuda import build
from rlk_jax.ops import OPS

B, T, V, D = 4, 3, 264, 64


@dataclass(frozen=True)
class Call:
    """A call of an op: its arguments, of which the first ones are differentiated, and its options."""

    function: Callable[..., Any]
    arguments: tuple[np.ndarray, ...]
    differentiated: int = 1

    def program(self, implementation: str) -> Callable[..., Any]:
        """The op's own result, and the gradients of the sum of all that it returns."""

        def value_and_gradients(*arguments: jax.Array) -> Any:
            constants = arguments[self.differentiated :]

            def value(*operands: jax.Array) -> Any:
                return self.function(*operands, *constants, implementation=implementation)

            found, pull_back = jax.vjp(value, *arguments[: self.differentiated])
            return found, pull_back(jax.tree.map(jnp.ones_like, found))

        return jax.jit(value_and_gradients)

    def hashes(self, implementation: str) -> list[str]:
        """The hashes of the program's results in this process."""
        return hashes(self.program(implementation)(*self.arguments))


@functools.cache
def calls() -> dict[str, Call]:
    """A call of each op."""
    random = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
        return random.normal(size=shape).astype(dtype)

    hidden, head, bias, logits, ref = normal(B, T, D), normal(V, D), normal(V), normal(B, T, V), normal(B, T, V)
    ids, mask = random.integers(0, V, (B, T)).astype(np.int32), np.arange(T) < np.arange(1, B + 1)[:, None]
    query, key, value = normal(B, T, 4, 16), normal(B, T + 1, 2, 16), normal(B, T + 1, 2, 32)
    old, rewards = -abs(normal(B, T, dtype=np.float32)), normal(B, dtype=np.float32)

    def linear_logp(h: Any, w: Any, b: Any, ids: Any, **options: Any) -> Any:
        return rlk_jax.linear_logp(h, w, ids, b, return_lse=True, return_entropy=True, **options)

    def grpo_loss(*arguments: Any, **options: Any) -> Any:
        return rlk_jax.grpo_loss(*arguments, samples_per_prompt=2, beta=0.04, **options)

    def attention(query: Any, key: Any, value: Any, padding: Any, **options: Any) -> Any:
        return rlk_jax.attention(query, key, value, start=1, padding=padding, **options)

    def linear_kl(h: Any, w: Any, teacher_h: Any, teacher_w: Any, b: Any, **options: Any) -> Any:
        return rlk_jax.linear_kl(h, w, teacher_h, teacher_w, b, kind="jsd", temperature=0.7, **options)

    def linear_grpo_loss(h: Any, w: Any, ids: Any, old: Any, advantages: Any, mask: Any, **options: Any) -> Any:
        return rlk_jax.linear_grpo_loss(h, w, ids, old, None, advantages, mask, **options)

    def linear_cross_entropy(h: Any, w: Any, b: Any, ids: Any, weights: Any, **options: Any) -> Any:
        return (rlk_jax.linear_cross_entropy(h, w, ids, b, token_weights=weights, z_loss=1e-3, **options),)

    return {
        "linear_logp": Call(linear_logp, (hidden, head, bias, ids), 3),
        "det_gemm": Call(rlk_jax.det_gemm, (normal(V, D), normal(D, D)), 2),
        "logp": Call(rlk_jax.logp, (logits, ids)),
        "ratio_kl": Call(rlk_jax.ratio_kl, (logits, ref, ids, mask, old)),
        "grpo_loss": Call(grpo_loss, (logits, ref, ids, old, rewards, mask)),
        "attention": Call(attention, (query, key, value, np.arange(B, dtype=np.int32)), 3),
        "linear_kl": Call(linear_kl, (hidden, head, np.tile(hidden, 2), np.tile(head, 2), bias), 2),
        "linear_cross_entropy": Call(linear_cross_entropy, (hidden, head, bias, ids, mask), 3),
        "linear_grpo_loss": Call(linear_grpo_loss, (hidden, head, ids, old, rewards, mask), 2),
    }


def programs(*implementations: str) -> list[tuple[str, str]]:
    """The op and the implementation of each program that these implementations have."""
    return [
        (op, x.name) for op in calls() for x in OPS[op].rows or OPS["linear_logp"].rows if x.name in implementations
    ]


def hashes(tree: Any) -> list[str]:
    """The name of the result's type, and sha256 of the raw bits of each leaf."""
    leaves = (hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in jax.tree.leaves(tree))
    return [type(tree[0]).__name__, *leaves]


def in_another_process(programs: Sequence[tuple[str, str]], folder: pathlib.Path) -> dict[str, list[str]]:
    """The hashes of these programs, which this process exports and another one loads."""
    for op, implementation in programs:
        call = calls()[op]
        checks = rlk_jax.export_checks() if implementation in ("mosaic", "triton", "cuda") else ()
        program = jax.export.export(call.program(implementation), disabled_checks=checks)
        (folder / f"{op}-{implementation}").write_bytes(program(*call.arguments).serialize())
    command = [sys.executable, "-m", "tests.support.exported", folder]
    # Mosaic's import tells XLA by these variables where the runtime of its kernels is: the other process has its own.
    others = {name: x for name, x in os.environ.items() if not name.startswith("MOSAIC_GPU_")}
    done = subprocess.run(command, env=others, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main(folder: pathlib.Path) -> None:
    if any(path.name.endswith("-cuda") for path in folder.iterdir()):
        build.register()
    if any(path.name.endswith("-mosaic") for path in folder.iterdir()):
        importlib.import_module("jax.experimental.mosaic.gpu")
    found = {}
    for path in folder.iterdir():
        program = jax.export.deserialize(bytearray(path.read_bytes()))
        found[path.name] = hashes(program.call(*calls()[path.name.split("-")[0]].arguments))
    print(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
