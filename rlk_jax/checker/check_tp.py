"""`rlk check-tp`: linear_logp on a head spread over devices or processes, against the definition on one device.

It answers whether tensor parallelism is right on this machine: values, gradients, equality of what every device holds,
and, under stress, whether large problems stay finite. Options and sections are RL-Kernel's TP validation script's.
"""

import argparse
import functools
import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rlk_jax
from rlk_jax import vocab_parallel
from rlk_jax.checker.contract import tolerance
from rlk_jax.checker.options import DTYPES, dtype_name, natural, positive
from rlk_jax.checker.processes import Finished, free_port, run_together
from rlk_jax.dispatch import IMPLEMENTATIONS

TIMEOUT_S = 600
_AXIS = "tp"
_DESCRIPTION = "Check linear_logp with its head spread over devices, against the definition on one device."


@dataclass(frozen=True)
class Problem:
    """What is computed: sizes, dtype and how it is spread."""

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
        """Columns of each shard: on the edges of groups, or off them with a short last shard."""
        if self.uneven:
            return -(-self.vocab_size // ranks) + 3
        return vocab_parallel.shard_bounds(self.vocab_size, ranks)[0][1]


class Arrays(NamedTuple):
    """One problem's arrays, on the host or over a mesh; weight and bias with their padding."""

    hidden: Any
    weight: Any
    bias: Any
    target_ids: Any
    upstream: Any


class Results(NamedTuple):
    """What is compared, named as the report names it."""

    output: Any
    hidden_grad: Any
    weight_grad: Any
    bias_grad: Any


@dataclass(frozen=True)
class Allowed:
    """Differences that pass: atol + rtol·|e| of an element, and of a whole result the norm, of its own. Gradients of
    large heads are small numbers: all of one may be wrong by less than atol.
    """

    atol: float
    rtol: float
    norm: float


class Differences(NamedTuple):
    """Of one rank's part, float64 `[2]` each."""

    largest: np.ndarray
    """The largest absolute and the largest relative one."""
    squares: np.ndarray
    """Σ (a − e)² and Σ e²."""
    elements_passed: bool


class Metric(NamedTuple):
    """The differences over all ranks."""

    name: str
    max_abs: float
    max_rel: float
    norm: float
    passed: bool


@dataclass(frozen=True)
class Ranks:
    """What a head is spread over, and what is done there."""

    count: int
    text: str
    say: Callable[[str], None]
    compare: Callable[[Problem, str, Allowed], list[Metric]]
    """Metrics of a problem, against the reference in this mode."""
    stress: Callable[[Problem], tuple[bool, float, int | None]]
    """Whether a large problem stays finite, its milliseconds, and the peak of memory in bytes where it is known."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check-tp`."""
    parser = subparsers.add_parser("check-tp", help=_DESCRIPTION, description=_DESCRIPTION)
    integer = functools.partial(parser.add_argument, type=positive)
    backends = parser.add_argument("--implementation", choices=IMPLEMENTATIONS, metavar="NAME")
    backends.help = f"backend under test: {', '.join(IMPLEMENTATIONS)} (default: the fastest that runs)"
    parser.add_argument("--dtype", type=dtype_name, default="bf16", metavar="fp32|bf16|fp16", help="of all operands")
    parser.add_argument("--reference-mode", choices=["matching", "fp32"], default="matching", help=_REFERENCE_HELP)
    parser.add_argument("--seed", type=natural, default=1234)
    integer("--tokens", default=128)
    integer("--hidden-size", default=256)
    integer("--vocab-size", default=4096)
    parser.add_argument("--no-bias", action="store_true")
    parser.add_argument("--uneven-shards", action="store_true", help="a last shard with fewer columns than the others")
    parser.add_argument("--reduction", choices=["sum", "canonical"], default="sum", help="of hidden's gradient")
    parser.add_argument("--atol", type=_tolerance, help="largest absolute difference (default: the contract's)")
    parser.add_argument("--rtol", type=_tolerance, help="largest relative one on top (default: the contract's)")
    parser.add_argument("--run-stress", action="store_true", help="also a large problem, for finiteness and time")
    integer("--stress-tokens", default=4096)
    integer("--stress-hidden-size", default=2048)
    integer("--stress-vocab-size", default=32768)
    parser.add_argument("--bridge", action="store_true", help="torch_bridge over torch.distributed, under torchrun")
    integer("--devices", help="devices to use, at least 2 (default: all)")
    integer("--processes", help="start so many local processes, a device each, instead of a mesh in this one")
    integer("--timeout", help=f"seconds after which local processes are killed (default: {TIMEOUT_S})")
    parser.add_argument("--coordinator", help="host:port; this process is one of several (jax.distributed)")
    integer("--process-count", help="with --coordinator")
    parser.add_argument("--process-id", type=natural, help="with --coordinator")
    parser.set_defaults(run=run)


_REFERENCE_HELP = "the reference multiplies in the input dtype, or upcasts to float32"


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, got {value}")
    return value


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 where all passed, 1 where anything failed, 2 for options that fit nothing."""
    if options.bridge:
        if options.processes or options.coordinator or options.devices or options.reduction != "sum":
            return _usage("--bridge goes without --processes, --coordinator, --devices and --reduction")
        # rlk_jax itself needs no torch.
        return importlib.import_module("torch_bridge.check_tp").run(options)
    joined = (options.coordinator, options.process_count, options.process_id)
    if None in joined and any(x is not None for x in joined):
        return _usage("--coordinator, --process-count and --process-id go together")
    if options.timeout is not None and options.processes is None:
        return _usage("--timeout is for local processes: it goes with --processes")
    if options.processes is not None:
        if options.processes < 2 or options.coordinator or options.devices:
            return _usage("--processes must be at least 2, and goes without --coordinator and --devices")
        return _run_processes(options)
    if options.coordinator:
        host, _, port = options.coordinator.rpartition(":")
        if not (host and port.isdecimal()):
            return _usage(f"--coordinator must be host:port, got {options.coordinator!r}")
        if options.process_id >= options.process_count:
            return _usage(f"--process-id must be less than --process-count, got {options.process_id}")
        jax.distributed.initialize(*joined)
    return _run_here(options)


def _usage(message: str) -> int:
    print(f"rlk check-tp: error: {message}", file=sys.stderr)
    return 2


def _run_here(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name not in ("run", "process_id", "bridge")}
    if jax.process_count() > 1 and not vocab_parallel.is_same_everywhere(repr(given)):
        return _usage("the processes were started with different options")
    devices = jax.devices()[: options.devices]
    if len({device.process_index for device in devices}) < jax.process_count():
        return _usage(f"--devices {options.devices} leaves a process without a device")
    if len(devices) < max(2, options.devices or 0):
        needed = max(2, options.devices or 0)
        return _usage(f"needs {needed} devices and there are {len(jax.devices())}; --processes {needed} makes them")
    mesh = Mesh(np.asarray(devices), (_AXIS,))
    text = f"{mesh.size} x {devices[0].device_kind} in {jax.process_count()} process(es)"
    compare_here, stress = functools.partial(compare, mesh), functools.partial(_stress, mesh)
    return check(options, Ranks(mesh.size, text, _say, compare_here, stress))


def _run_processes(options: argparse.Namespace) -> int:
    """The same in each of several local processes; what the first prints, and how all ended."""
    given = {name: value for name, value in vars(options).items() if name != "run"}
    given |= {"processes": None, "process_count": options.processes, "coordinator": f"127.0.0.1:{free_port()}"}
    commands = [
        ["-m", "rlk_jax.checker.check_tp", json.dumps({**given, "process_id": i})] for i in range(options.processes)
    ]
    # So that a terminated parent leaves no children behind.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        finished = run_together(commands, timeout_s=options.timeout or TIMEOUT_S)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(finished[0].stdout, end="")
    return report(finished, options.timeout or TIMEOUT_S)


def report(finished: Sequence[Finished], timeout_s: float) -> int:
    """The exit status of all processes together; what failed ones said, tracebacks included, before exit codes."""
    if all(process.code == 2 for process in finished):  # Options that fit nothing, as the first says.
        print(finished[0].stderr, end="", file=sys.stderr)
        return 2
    failed = [i for i, process in enumerate(finished) if process.code]
    for i in failed:
        print(f"process {i}:\n{finished[i].stderr}", file=sys.stderr)
    if failed:
        late = [i for i in failed if finished[i].killed]
        if len(late) == len(failed):
            print(f"no process had ended after {timeout_s} s, and all were killed", file=sys.stderr)
        elif late:
            print(f"processes {late} hung after another one failed, and were killed", file=sys.stderr)
        print(f"exit codes: {[process.code for process in finished]}", file=sys.stderr)
        if "[result]" not in finished[0].stdout:
            print("[result] FAIL")
    return 1 if failed else 0


def _local_process(options: argparse.Namespace) -> int:
    """One of several local processes: a device each."""
    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_num_cpu_devices", 1)
    index = options.process_id
    jax.distributed.initialize(options.coordinator, options.process_count, index, local_device_ids=[index])
    return _run_here(options)


def _say(text: str) -> None:
    """By the first process alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


def check(options: argparse.Namespace, ranks: Ranks) -> int:
    """The exit status, after the report."""
    if options.vocab_size < ranks.count:
        return _usage(f"--vocab-size {options.vocab_size} is less than the {ranks.count} devices")
    try:
        passed = _report(options, ranks)
    except Exception:
        # What cannot run at all has failed, too.
        traceback.print_exc()
        passed = False
    ranks.say(f"[result] {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


def _report(options: argparse.Namespace, ranks: Ranks) -> bool:
    problem = Problem(
        options.tokens,
        options.hidden_size,
        options.vocab_size,
        DTYPES[options.dtype],
        bias=not options.no_bias,
        uneven=options.uneven_shards,
        seed=options.seed,
        implementation=options.implementation,
        reduction=options.reduction,
    )
    _say_environment(problem, ranks, options.dtype)
    allowed = _allowed(options, problem.dtype)
    tolerances = f"atol {allowed.atol:g}, rtol {allowed.rtol:g}, norm {allowed.norm:g}"
    ranks.say(f"[correctness] reference: {options.reference_mode}, {tolerances}")
    metrics = ranks.compare(problem, options.reference_mode, allowed)
    for m in metrics:
        verdict = "PASS" if m.passed else "FAIL"
        ranks.say(f"  {m.name:12s} max_abs {m.max_abs:.3e}  max_rel {m.max_rel:.3e}  norm {m.norm:.3e}  {verdict}")
    passed = all(m.passed for m in metrics)
    if options.run_stress:
        sizes = (options.stress_tokens, options.stress_hidden_size, options.stress_vocab_size)
        problem = replace(problem, tokens=sizes[0], hidden_size=sizes[1], vocab_size=sizes[2])
        finite, milliseconds, memory = ranks.stress(problem)
        peak = "unknown on this device" if memory is None else f"{memory / 1e9:.2f} GB"
        ranks.say(f"[stress] {problem.tokens} x {problem.hidden_size} x {problem.vocab_size}")
        verdict = "PASS" if finite else "FAIL"
        ranks.say(f"  finite outputs and gradients: {verdict}; {milliseconds:.1f} ms; peak memory {peak}")
        passed &= finite
    return passed


def _allowed(options: argparse.Namespace, dtype: Any) -> Allowed:
    """The contract's tolerances, or the user's, which then judge alone."""
    element, norm = (tolerance("tensor_parallel", dtype, kind) for kind in ("forward", "gradient"))
    if options.atol is not None or options.rtol is not None:
        norm = float("inf")
    atol, rtol = (element if x is None else x for x in (options.atol, options.rtol))
    return Allowed(atol, rtol, norm)


def _say_environment(problem: Problem, ranks: Ranks, dtype: str) -> None:
    ranks.say(f"[env] rlk_jax numerics {rlk_jax.numerics_version['linear_logp']}, jax {jax.__version__}")
    ranks.say(f"  {ranks.text}")
    width = problem.width(ranks.count)
    ranks.say(
        f"  {problem.tokens} tokens, hidden size {problem.hidden_size}, vocabulary {problem.vocab_size} in shards of "
        f"{width}, {dtype}, {'bias' if problem.bias else 'no bias'}, reduction {problem.reduction}, "
        f"implementation {problem.implementation or 'by dispatch'}"
    )


def make(problem: Problem, ranks: int) -> Arrays:
    """Random operands on the host, the same in every process; the head has zeros behind it up to whole shards."""
    random = np.random.default_rng(problem.seed)
    n, d, v = problem.tokens, problem.hidden_size, problem.vocab_size
    padding = problem.width(ranks) * ranks - v

    def normal(*shape: int, dtype: Any = problem.dtype) -> np.ndarray:
        return random.standard_normal(shape, np.float32).astype(dtype)

    hidden, weight = normal(n, d), (normal(v, d, dtype=np.float32) / d**0.5).astype(problem.dtype)
    bias = normal(v) if problem.bias else None
    ids = random.integers(0, v, n, dtype=np.int32)
    weight = np.pad(weight, ((0, padding), (0, 0)))
    return Arrays(
        hidden, weight, None if bias is None else np.pad(bias, (0, padding)), ids, normal(n, dtype=np.float32)
    )


def _spread(arrays: Arrays, mesh: Mesh) -> Arrays:
    def lie(x: Any, *spec: str) -> Any:
        if x is None:
            return None
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda i: x[i])

    weight, bias = lie(arrays.weight, _AXIS), lie(arrays.bias, _AXIS)
    return Arrays(lie(arrays.hidden), weight, bias, lie(arrays.target_ids), lie(arrays.upstream))


def _program(logp: Callable[..., Any], arrays: Arrays) -> Callable[[], Results]:
    """Values of `logp(hidden, weight, bias, target_ids)` and its gradients for the upstream ones; compiled once."""
    operands = (arrays.hidden, arrays.weight) + (() if arrays.bias is None else (arrays.bias,))

    def loss(operands: Sequence[Any], target_ids: Any, upstream: Any) -> tuple[jax.Array, jax.Array]:
        hidden, weight, *bias = operands
        output = logp(hidden, weight, bias[0] if bias else None, target_ids)
        return jnp.vdot(output, upstream), output

    program = jax.jit(jax.grad(loss, has_aux=True))

    def run() -> Results:
        gradients, output = program(operands, arrays.target_ids, arrays.upstream)
        return Results(output, *gradients, *[None] * (3 - len(gradients)))

    return run


def tensor_parallel(problem: Problem, mesh: Mesh, arrays: Arrays) -> Callable[[], Results]:
    """The op under test, called once outside jit, where all processes agree on what is wrong."""
    logp = functools.partial(
        vocab_parallel.linear_logp,
        mesh=mesh,
        vocab_axis=_AXIS,
        global_vocab_size=problem.vocab_size,
        implementation=problem.implementation,
        reduction=problem.reduction,
    )
    logp(arrays.hidden, arrays.weight, arrays.target_ids, arrays.bias, validate=True)
    return _program(lambda hidden, weight, bias, ids: logp(hidden, weight, ids, bias), arrays)


def reference(problem: Problem, arrays: Arrays, mode: str) -> Results:
    """The definition on one device: in the input dtype ("matching"), or on operands upcast to float32 ("fp32")."""
    dtype = jnp.float32 if mode == "fp32" else problem.dtype
    is_padding = np.arange(arrays.weight.shape[0]) >= problem.vocab_size

    def logp(hidden: Any, weight: Any, bias: Any, ids: Any) -> jax.Array:
        logits = jnp.matmul(hidden.astype(dtype), weight.T.astype(dtype), precision=jax.lax.Precision.HIGHEST)
        if bias is not None:
            logits = logits + bias.astype(dtype)
        logits = jnp.where(is_padding, -jnp.inf, logits.astype(jnp.float32))
        return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], axis=1)[:, 0]

    here = jax.local_devices()[0]
    return _program(logp, jax.tree.map(lambda x: jax.device_put(x, here), arrays))()


def compare(mesh: Mesh, problem: Problem, mode: str, allowed: Allowed) -> list[Metric]:
    """A metric for each result, and whether all devices hold the same bits of what they share."""
    arrays = make(problem, mesh.size)
    actual, expected = tensor_parallel(problem, mesh, _spread(arrays, mesh))(), reference(problem, arrays, mode)
    metrics = []
    for name, a, e in zip(Results._fields, actual, expected, strict=True):
        if a is not None:
            metrics.append(_metric(name, a, np.asarray(e, np.float64), allowed))
    return [*metrics, same_on_all(_everywhere(all(map(_same_bits, (actual.output, actual.hidden_grad)))))]


def same_on_all(passed: bool) -> Metric:
    """Of bits, which have no differences to show."""
    return Metric("same on all", 0.0, 0.0, 0.0, passed)


def differences(a: np.ndarray, e: np.ndarray, allowed: Allowed) -> Differences:
    """Of float64 numbers."""
    error = np.abs(a - e)
    relative = error / np.maximum(np.abs(e), 1e-8)
    largest, squares = (error.max(initial=0), relative.max(initial=0)), ((error**2).sum(), (e**2).sum())
    fits = np.allclose(a, e, atol=allowed.atol, rtol=allowed.rtol)
    return Differences(np.array(largest), np.array(squares), fits)


def metric_of(name: str, whole: Differences, allowed: Allowed) -> Metric:
    """Of the differences of all ranks."""
    (largest, relative), (error, size) = whole.largest.tolist(), whole.squares.tolist()
    norm = (error / size) ** 0.5 if size else float(error > 0)
    return Metric(name, largest, relative, norm, whole.elements_passed and norm <= allowed.norm)


def _metric(name: str, actual: jax.Array, expected: np.ndarray, allowed: Allowed) -> Metric:
    parts = [
        differences(np.asarray(shard.data, np.float64), expected[shard.index], allowed)
        for shard in actual.addressable_shards
    ]
    largest, squares, passed = zip(*parts, strict=True)
    numbers = np.concatenate([np.max(largest, axis=0), np.sum(squares, axis=0)])
    if jax.process_count() > 1:
        everyone = np.asarray(multihost_utils.process_allgather(numbers))
        numbers = np.concatenate([everyone[:, :2].max(axis=0), everyone[:, 2:].sum(axis=0)])
    return metric_of(name, Differences(numbers[:2], numbers[2:], _everywhere(all(passed))), allowed)


def _everywhere(passed: bool) -> bool:
    """Whether it holds in every process."""
    return bool(np.all(multihost_utils.process_allgather(np.asarray(passed)))) if jax.process_count() > 1 else passed


def _same_bits(x: jax.Array) -> bool:
    """Of a replicated array, against the first process' first device."""
    own = [np.ascontiguousarray(shard.data).view(np.uint8) for shard in x.addressable_shards]
    first = multihost_utils.broadcast_one_to_all(own[0]) if jax.process_count() > 1 else own[0]
    return all(np.array_equal(data, first) for data in own)


def _stress(mesh: Mesh, problem: Problem) -> tuple[bool, float, int | None]:
    """A large problem without a reference: finite values and gradients, time and memory."""
    run = tensor_parallel(problem, mesh, _spread(make(problem, mesh.size), mesh))
    jax.block_until_ready(run())
    start = time.perf_counter()
    results = jax.block_until_ready(run())
    elapsed = time.perf_counter() - start
    finite = _everywhere(
        all(bool(jnp.isfinite(s.data).all()) for x in jax.tree.leaves(results) for s in x.addressable_shards)
    )
    memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return finite, 1e3 * elapsed, memory


if __name__ == "__main__":
    sys.exit(_local_process(argparse.Namespace(**json.loads(sys.argv[1]))))
