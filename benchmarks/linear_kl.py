"""The divergence of a student from a teacher at their heads: python -m benchmarks.linear_kl --help.

G, the bare GEMM of one head, and memory are defined as in benchmarks.linear_logp. The teacher has the student's shape.
Liger's fused loss is a mean over tokens, and forms its gradients in the forward.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp

from benchmarks import common, peers
from benchmarks.common import Candidate, compiled_candidate
from benchmarks.linear_logp import Build, Inputs, add_passes, run_benchmark
from rlk_jax import linear_kl
from rlk_jax.ops.linear_kl.options import DivergenceKind

SHAPES = "4096,4096,131072"
KINDS: tuple[DivergenceKind, ...] = get_args(DivergenceKind)
LIGERS_BETA: dict[DivergenceKind, float] = {"forward": 0.0, "jsd": 0.5, "reverse": 1.0}
"""What Liger's fused loss calls the kinds."""
PRODUCTS = {"forward": 2, "forward+backward": 4}
"""The products [N, D] x [D, V] that a pass cannot do without: one for each head, and those of both gradients."""
LIGER = "liger (mean loss)"


@functools.lru_cache(maxsize=1)
def teacher_of(tokens: int, dim: int, vocab: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """The teacher's hidden states and head, which all candidates share."""
    keys = jax.random.split(jax.random.key(1), 2)
    head = (jax.random.normal(keys[1], (vocab, dim)) / dim**0.5).astype(dtype)
    return jax.random.normal(keys[0], (tokens, dim), dtype), head


def naive(kind: DivergenceKind, hidden: jax.Array, weight: jax.Array, *teacher: jax.Array) -> jax.Array:
    """The divergence as a trainer writes it without this library, of logits that are held."""
    student, other = (jax.nn.log_softmax((h @ w.T).astype(jnp.float32)) for h, w in ((hidden, weight), teacher))

    def divergence(a: jax.Array, b: jax.Array) -> jax.Array:
        return (jnp.exp(a) * (a - b)).sum(axis=-1)

    if kind == "forward":
        return divergence(other, student)
    if kind == "reverse":
        return divergence(student, other)
    mixture = jnp.logaddexp(student, other) - jnp.log(2.0)
    return (divergence(other, mixture) + divergence(student, mixture)) / 2


def _own(name: str, inputs: Inputs, teacher: tuple[jax.Array, jax.Array]) -> dict[str, Build]:
    """The passes of one implementation, or of "naive"; raises what it raises where it cannot run."""
    operands = inputs.hidden, inputs.weight, *teacher
    found: dict[str, Build] = {}
    for kind in KINDS:
        op: Callable[..., jax.Array] = functools.partial(linear_kl, kind=kind, implementation=name)
        op = functools.partial(naive, kind) if name == "naive" else op
        loss = lambda h, w, th, tw, g, op=op: jnp.vdot(op(h, w, th, tw), g)  # noqa: E731
        passes = {"forward": (op, operands), "forward+backward": (jax.grad(loss, (0, 1)), (*operands, inputs.upstream))}
        for what, (program, arguments) in passes.items():
            work = PRODUCTS[what]
            found[f"{kind}: {what}"] = functools.partial(compiled_candidate, program, *arguments, work=work)
    return found


def _liger(kind: DivergenceKind, inputs: Inputs, teacher: tuple[jax.Array, jax.Array]) -> dict[str, Candidate]:
    """Both passes of Liger's fused loss, by name. Raises what importing it or its first run raises."""
    torch: Any = importlib.import_module("torch")
    functional: Any = importlib.import_module("liger_kernel.transformers.functional")
    if jax.default_backend() != "gpu":
        raise RuntimeError("peers are measured on GPUs only")
    hidden, weight, *others = (torch.from_dlpack(x) for x in (inputs.hidden, inputs.weight, *teacher))
    launches = peers.both_passes(
        lambda h, w: functional.liger_fused_linear_jsd(h, w, *others, jsd_beta=LIGERS_BETA[kind]),
        (hidden, weight),
        torch.from_dlpack(inputs.upstream),
    )
    results = {"forward": 0, "forward+backward": inputs.hidden.nbytes + inputs.weight.nbytes}
    return {
        f"{kind}: {what}": Candidate(x, peers.extra_bytes(x, results[what]), PRODUCTS[what])
        for what, x in launches.items()
    }


def candidates_of(name: str, inputs: Inputs) -> dict[str, Build]:
    """The passes of an implementation, or of Liger."""
    teacher = teacher_of(*inputs.hidden.shape, inputs.weight.shape[0], inputs.hidden.dtype.name)
    if name != LIGER:
        return _own(name, inputs, teacher)
    found = functools.cache(functools.partial(_liger, inputs=inputs, teacher=teacher))

    def build(kind: DivergenceKind, what: str) -> Candidate:
        return found(kind)[what]

    passes = [(kind, f"{kind}: {what}") for kind in KINDS for what in PRODUCTS]
    return {what: functools.partial(build, kind, what) for kind, what in passes}


def main(argv: Sequence[str] | None = None) -> int:
    common.share_gpu_with_torch()
    parser = common.parser("linear_kl", __doc__, shapes=SHAPES, implementations=f"mosaic,xla,naive,{LIGER}")
    parser.set_defaults(mask_density=1.0)
    return run_benchmark("linear_kl", add_passes(parser).parse_args(argv), argv, candidates_of)


if __name__ == "__main__":
    sys.exit(main())
