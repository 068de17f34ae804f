"""The comparison behind `rlk check-tp`: a random problem, linear_logp on a head that is spread over a mesh, the
definition on one device, and the differences between their results.

torch_bridge/check_tp.py makes the same comparison with the processes of torch.distributed, from the parts of this
module that know no mesh: the problem, its arrays, the reference and the metrics.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlk_jax import vocab_parallel

AXIS = "tp"
"""The mesh axis over which the head is spread."""


@dataclass(frozen=True)
class TensorParallelProblem:
    """What one run of the op computes: sizes, dtype, options, and how the head is cut into shards."""

    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: Any
    bias: bool
    uneven: bool
    seed: int
    implementation: str | None
    reduction: Any

    def width(self, ranks: int) -> int:
        """The vocabulary rows in each shard of the head. Shards end on edges of the fixed vocabulary groups; those of
        an uneven problem do not, and its last shard is shorter than the others.
        """
        if self.uneven:
            return -(-self.vocab_size // ranks) + 3
        return vocab_parallel.shard_bounds(self.vocab_size, ranks)[0][1]


class TensorParallelArrays(NamedTuple):
    """The arrays of one problem, on the host or spread over a mesh. Weight and bias are padded to whole shards."""

    hidden: Any
    weight: Any
    bias: Any
    target_ids: Any
    upstream: Any


class TensorParallelResults(NamedTuple):
    """The results that are compared; the report prints these names."""

    output: Any
    hidden_grad: Any
    weight_grad: Any
    bias_grad: Any


@dataclass(frozen=True)
class Allowed:
    """The differences that pass.

    An element e of the reference may be missed by atol + rtol·|e|. The error of a whole result may also have at most
    `norm` times the norm of the reference: the gradients of a large head are so small that a wrong one could stay
    below atol in every element.
    """

    atol: float
    rtol: float
    norm: float


class Differences(NamedTuple):
    """The differences between the part of a result that one rank holds and the reference."""

    largest: np.ndarray
    """The largest absolute difference and the largest relative one, float64 `[2]`."""
    squares: np.ndarray
    """Σ (a − e)² and Σ e², float64 `[2]`."""
    elements_passed: bool


class Metric(NamedTuple):
    """The differences of one result over all ranks, as the report prints them."""

    name: str
    max_abs: float
    max_rel: float
    norm: float
    passed: bool


def make_arrays(problem: TensorParallelProblem, ranks: int) -> TensorParallelArrays:
    """Random arrays on the host, the same in every process. The head ends in rows of zeros up to whole shards."""
    random = np.random.default_rng(problem.seed)
    n, d, v = problem.tokens, problem.hidden_size, problem.vocab_size
    padding = problem.width(ranks) * ranks - v

    def normal(*shape: int, dtype: Any = problem.dtype) -> np.ndarray:
        return random.standard_normal(shape, np.float32).astype(dtype)

    hidden, weight = normal(n, d), (normal(v, d, dtype=np.float32) / d**0.5).astype(problem.dtype)
    bias = normal(v) if problem.bias else None
    ids = random.integers(0, v, n, dtype=np.int32)
    weight = np.pad(weight, ((0, padding), (0, 0)))
    padded_bias = None if bias is None else np.pad(bias, (0, padding))
    return TensorParallelArrays(hidden, weight, padded_bias, ids, normal(n, dtype=np.float32))


def spread_arrays(arrays: TensorParallelArrays, mesh: Mesh) -> TensorParallelArrays:
    """The arrays on a mesh: weight and bias are cut over `AXIS`, and every device holds the others whole."""

    def place(x: Any, *spec: str) -> Any:
        if x is None:
            return None
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda i: x[i])

    weight, bias = place(arrays.weight, AXIS), place(arrays.bias, AXIS)
    hidden, target_ids, upstream = place(arrays.hidden), place(arrays.target_ids), place(arrays.upstream)
    return TensorParallelArrays(hidden, weight, bias, target_ids, upstream)


def tensor_parallel_program(
    problem: TensorParallelProblem, mesh: Mesh, arrays: TensorParallelArrays
) -> Callable[[], TensorParallelResults]:
    """The op under test on spread arrays, as a program that is compiled once and may be called often.

    The op is also called once outside jit: there it checks its arguments, and all processes agree on what is wrong.
    """
    logp = functools.partial(
        vocab_parallel.linear_logp,
        mesh=mesh,
        vocab_axis=AXIS,
        global_vocab_size=problem.vocab_size,
        implementation=problem.implementation,
        reduction=problem.reduction,
    )
    logp(arrays.hidden, arrays.weight, arrays.target_ids, arrays.bias, validate=True)
    return _gradient_program(lambda hidden, weight, bias, ids: logp(hidden, weight, ids, bias), arrays)


def reference_results(problem: TensorParallelProblem, arrays: TensorParallelArrays, mode: str) -> TensorParallelResults:
    """The results of the definition on one device, from arrays on the host.

    The mode says in which dtype logits are computed: that of the inputs ("matching"), or float32 ("fp32").
    """
    dtype = jnp.float32 if mode == "fp32" else problem.dtype
    is_padding = np.arange(arrays.weight.shape[0]) >= problem.vocab_size

    def logp(hidden: Any, weight: Any, bias: Any, ids: Any) -> jax.Array:
        logits = jnp.matmul(hidden.astype(dtype), weight.T.astype(dtype), precision=jax.lax.Precision.HIGHEST)
        if bias is not None:
            logits = logits + bias.astype(dtype)
        logits = jnp.where(is_padding, -jnp.inf, logits.astype(jnp.float32))
        return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], axis=1)[:, 0]

    here = jax.local_devices()[0]
    return _gradient_program(logp, jax.tree.map(lambda x: jax.device_put(x, here), arrays))()


def _gradient_program(logp: Callable[..., Any], arrays: TensorParallelArrays) -> Callable[[], TensorParallelResults]:
    """A compiled program of `logp(hidden, weight, bias, target_ids)` and its gradients for the upstream gradient."""
    operands = (arrays.hidden, arrays.weight) + (() if arrays.bias is None else (arrays.bias,))

    def loss(operands: Sequence[Any], target_ids: Any, upstream: Any) -> tuple[jax.Array, jax.Array]:
        hidden, weight, *bias = operands
        output = logp(hidden, weight, bias[0] if bias else None, target_ids)
        return jnp.vdot(output, upstream), output

    program = jax.jit(jax.grad(loss, has_aux=True))

    def results() -> TensorParallelResults:
        gradients, output = program(operands, arrays.target_ids, arrays.upstream)
        return TensorParallelResults(output, *gradients, *[None] * (3 - len(gradients)))

    return results


def compare_with_reference(mesh: Mesh, problem: TensorParallelProblem, mode: str, allowed: Allowed) -> list[Metric]:
    """A metric for each result, and one that says whether all devices hold the same bits of what they share."""
    arrays = make_arrays(problem, mesh.size)
    actual = tensor_parallel_program(problem, mesh, spread_arrays(arrays, mesh))()
    expected = reference_results(problem, arrays, mode)
    metrics = []
    for name, a, e in zip(TensorParallelResults._fields, actual, expected, strict=True):
        if a is not None:
            metrics.append(_mesh_metric(name, a, np.asarray(e, np.float64), allowed))
    return [*metrics, same_on_all(_in_every_process(all(map(_same_bits, (actual.output, actual.hidden_grad)))))]


def stress(mesh: Mesh, problem: TensorParallelProblem) -> tuple[bool, float, int | None]:
    """Run a large problem, which has no reference.

    Gives whether outputs and gradients are finite, the milliseconds of the second run, and the peak of memory in bytes
    or None where the device does not tell it.
    """
    results = tensor_parallel_program(problem, mesh, spread_arrays(make_arrays(problem, mesh.size), mesh))
    jax.block_until_ready(results())
    start = time.perf_counter()
    found = jax.block_until_ready(results())
    elapsed = time.perf_counter() - start
    finite = _in_every_process(
        all(bool(jnp.isfinite(s.data).all()) for x in jax.tree.leaves(found) for s in x.addressable_shards)
    )
    memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return finite, 1e3 * elapsed, memory


def same_on_all(passed: bool) -> Metric:
    """The metric of equal bits, which has a verdict and no differences to print."""
    return Metric("same on all", 0.0, 0.0, 0.0, passed)


def differences(a: np.ndarray, e: np.ndarray, allowed: Allowed) -> Differences:
    """The differences of results `a` from the reference `e`, both float64."""
    error = np.abs(a - e)
    relative = error / np.maximum(np.abs(e), 1e-8)
    largest, squares = (error.max(initial=0), relative.max(initial=0)), ((error**2).sum(), (e**2).sum())
    fits = np.allclose(a, e, atol=allowed.atol, rtol=allowed.rtol)
    return Differences(np.array(largest), np.array(squares), fits)


def metric_of(name: str, whole: Differences, allowed: Allowed) -> Metric:
    """The metric of one result, from differences that were already combined over all ranks."""
    (largest, relative), (error, size) = whole.largest.tolist(), whole.squares.tolist()
    norm = (error / size) ** 0.5 if size else float(error > 0)
    return Metric(name, largest, relative, norm, whole.elements_passed and norm <= allowed.norm)


def _mesh_metric(name: str, actual: jax.Array, expected: np.ndarray, allowed: Allowed) -> Metric:
    """The metric of a result that is spread over a mesh, from its shards in all processes."""
    parts = [
        differences(np.asarray(shard.data, np.float64), expected[shard.index], allowed)
        for shard in actual.addressable_shards
    ]
    largest, squares, passed = zip(*parts, strict=True)
    numbers = np.concatenate([np.max(largest, axis=0), np.sum(squares, axis=0)])
    if jax.process_count() > 1:
        everyone = np.asarray(multihost_utils.process_allgather(numbers))
        numbers = np.concatenate([everyone[:, :2].max(axis=0), everyone[:, 2:].sum(axis=0)])
    return metric_of(name, Differences(numbers[:2], numbers[2:], _in_every_process(all(passed))), allowed)


def _in_every_process(passed: bool) -> bool:
    """Whether `passed` is true in every process."""
    return bool(np.all(multihost_utils.process_allgather(np.asarray(passed)))) if jax.process_count() > 1 else passed


def _same_bits(x: jax.Array) -> bool:
    """Whether all devices of this process hold the same bits of a replicated array as the first process' first one."""
    own = [np.ascontiguousarray(shard.data).view(np.uint8) for shard in x.addressable_shards]
    first = multihost_utils.broadcast_one_to_all(own[0]) if jax.process_count() > 1 else own[0]
    return all(np.array_equal(data, first) for data in own)
