"""`rlk check-tp`: linear_logp on a head spread over devices or processes, against the definition on one device.

It answers whether tensor parallelism is right on this machine: values, gradients, equality of what every device holds,
and, under stress, whether large problems stay finite. Its options and the sections of its report are those of
RL-Kernel's TP validation script. This module reads the options, starts processes and reports; tensor_parallel.py
compares.
"""

import argparse
import functools
import json
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import rlk_jax
from rlk_jax.checker import plugins, tensor_parallel
from rlk_jax.checker.contract import tolerance
from rlk_jax.checker.options import DTYPES, dtype_name, natural, positive
from rlk_jax.checker.processes import Finished, free_port, run_together
from rlk_jax.checker.tensor_parallel import Allowed, Metric, TensorParallelProblem
from rlk_jax.dispatch import IMPLEMENTATIONS
from rlk_jax.ops.linear_logp.sharding.agreement import is_same_everywhere

TIMEOUT_S = 600
_DESCRIPTION = "Check linear_logp with its head spread over devices, against the definition on one device."


@dataclass(frozen=True)
class Ranks:
    """The devices or processes that a head is spread over, and how a problem is checked on them."""

    count: int
    text: str
    """The line of the report that describes them."""
    say: Callable[[str], None]
    """Prints a line of the report, in the first process alone."""
    compare: Callable[[TensorParallelProblem, str, Allowed], list[Metric]]
    """Gives the metrics of a problem, against the reference in this mode."""
    stress: Callable[[TensorParallelProblem], tuple[bool, float, int | None]]
    """Gives whether a large problem stays finite, its milliseconds, and the peak of memory in bytes or None."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check-tp`."""
    parser = subparsers.add_parser("check-tp", help=_DESCRIPTION, description=_DESCRIPTION)
    integer = functools.partial(parser.add_argument, type=positive)
    backends = parser.add_argument("--implementation", choices=IMPLEMENTATIONS, metavar="NAME")
    backends.help = f"backend under test: {', '.join(IMPLEMENTATIONS)} (default: the fastest that runs)"
    parser.add_argument("--dtype", type=dtype_name, default="bf16", metavar="fp32|bf16|fp16", help="of all arrays")
    parser.add_argument("--reference-mode", choices=["matching", "fp32"], default="matching", help=_REFERENCE_HELP)
    parser.add_argument("--seed", type=natural, default=1234, help="seed of the inputs (default: %(default)s)")
    integer("--tokens", default=128, help="rows of hidden states (default: %(default)s)")
    integer("--hidden-size", default=256, help="numbers of a hidden state (default: %(default)s)")
    integer("--vocab-size", default=4096, help="tokens of the whole vocabulary (default: %(default)s)")
    parser.add_argument("--no-bias", action="store_true", help="check a head without a bias")
    parser.add_argument("--uneven-shards", action="store_true", help="make the last shard shorter than the others")
    parser.add_argument("--reduction", choices=["sum", "canonical"], default="sum", help=_REDUCTION_HELP)
    parser.add_argument("--atol", type=_tolerance, help="largest absolute difference (default: the contract's)")
    parser.add_argument(
        "--rtol", type=_tolerance, help="relative difference that is added to it (default: the contract's)"
    )
    parser.add_argument("--run-stress", action="store_true", help="also run a large problem, and time it")
    integer("--stress-tokens", default=4096, help="--tokens of the large problem (default: %(default)s)")
    integer("--stress-hidden-size", default=2048, help="its --hidden-size (default: %(default)s)")
    integer("--stress-vocab-size", default=32768, help="its --vocab-size (default: %(default)s)")
    parser.add_argument("--bridge", action="store_true", help="check torch_bridge, under torchrun")
    integer("--devices", help="devices to use, at least 2 (default: all)")
    integer(
        "--processes", help="start this many local processes with one device each, instead of a mesh in this process"
    )
    integer("--timeout", help=f"seconds after which local processes are killed (default: {TIMEOUT_S})")
    parser.add_argument("--coordinator", help="host:port of jax.distributed, for one of several processes")
    integer("--process-count", help="number of processes, with --coordinator")
    parser.add_argument("--process-id", type=natural, help="number of this process, with --coordinator")
    parser.set_defaults(run=run)


_REDUCTION_HELP = "how the gradient of hidden is summed over shards"
_REFERENCE_HELP = "the reference multiplies in the input dtype, or upcasts to float32"


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, got {value}")
    return value


def run(options: argparse.Namespace) -> int:
    """Run the command. The exit status is 0 where all passed, 1 where anything failed, 2 for unusable options."""
    if options.bridge:
        if options.processes or options.coordinator or options.devices or options.reduction != "sum":
            return _usage_error("--bridge goes without --processes, --coordinator, --devices and --reduction")
        return plugins.bridge("check_tp").run(options)
    joined = (options.coordinator, options.process_count, options.process_id)
    if None in joined and any(x is not None for x in joined):
        return _usage_error("--coordinator, --process-count and --process-id go together")
    if options.timeout is not None and options.processes is None:
        return _usage_error("--timeout is for local processes: it goes with --processes")
    if options.processes is not None:
        if options.processes < 2 or options.coordinator or options.devices:
            return _usage_error("--processes must be at least 2, and goes without --coordinator and --devices")
        return _run_processes(options)
    if options.coordinator:
        host, _, port = options.coordinator.rpartition(":")
        if not (host and port.isdecimal()):
            return _usage_error(f"--coordinator must be host:port, got {options.coordinator!r}")
        if options.process_id >= options.process_count:
            return _usage_error(f"--process-id must be less than --process-count, got {options.process_id}")
        jax.distributed.initialize(*joined)
    return _run_here(options)


def _usage_error(message: str) -> int:
    print(f"rlk check-tp: error: {message}", file=sys.stderr)
    return 2


def _run_here(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name not in ("run", "process_id", "bridge")}
    if jax.process_count() > 1 and not is_same_everywhere(repr(given)):
        return _usage_error("the processes were started with different options")
    devices = jax.devices()[: options.devices]
    if len({device.process_index for device in devices}) < jax.process_count():
        return _usage_error(f"--devices {options.devices} leaves a process without a device")
    if len(devices) < max(2, options.devices or 0):
        needed = max(2, options.devices or 0)
        return _usage_error(
            f"needs {needed} devices and there are {len(jax.devices())}; --processes {needed} makes them"
        )
    mesh = Mesh(np.asarray(devices), (tensor_parallel.AXIS,))
    text = f"{mesh.size} x {devices[0].device_kind} in {jax.process_count()} process(es)"
    compare = functools.partial(tensor_parallel.compare_with_reference, mesh)
    stress = functools.partial(tensor_parallel.stress, mesh)
    return check_ranks(options, Ranks(mesh.size, text, _say, compare, stress))


def _run_processes(options: argparse.Namespace) -> int:
    """Run this command in several local processes, print what the first one prints, and report how all ended."""
    given = {name: value for name, value in vars(options).items() if name != "run"}
    given |= {"processes": None, "process_count": options.processes, "coordinator": f"127.0.0.1:{free_port()}"}
    commands = [
        ["-m", "rlk_jax.checker.check_tp", json.dumps({**given, "process_id": i})] for i in range(options.processes)
    ]
    # SIGTERM becomes an exit, so that `run_together` stops the children before this process ends.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        finished = run_together(commands, timeout_s=options.timeout or TIMEOUT_S)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(finished[0].stdout, end="")
    return report_processes(finished, options.timeout or TIMEOUT_S)


def report_processes(finished: Sequence[Finished], timeout_s: float) -> int:
    """Print what failed processes said, tracebacks included, and then all exit codes.

    Gives one exit status for all of them: 2 where all refused their options, 1 where any failed, otherwise 0.
    """
    if all(process.code == 2 for process in finished):  # All refuse their options; the first one says why.
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
    """The work of one of several local processes, each of which has one device."""
    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_num_cpu_devices", 1)
    index = options.process_id
    jax.distributed.initialize(options.coordinator, options.process_count, index, local_device_ids=[index])
    return _run_here(options)


def _say(text: str) -> None:
    """Print in the first process alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


def check_ranks(options: argparse.Namespace, ranks: Ranks) -> int:
    """Check these ranks and report. Gives the exit status, as `run` does."""
    if options.vocab_size < ranks.count:
        return _usage_error(f"--vocab-size {options.vocab_size} is less than the {ranks.count} devices")
    try:
        passed = _passes(options, ranks)
    except Exception:
        # A problem that cannot run at all has failed, too.
        traceback.print_exc()
        passed = False
    ranks.say(f"[result] {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


def _passes(options: argparse.Namespace, ranks: Ranks) -> bool:
    """Print the sections of the report up to its result, and give whether all of them passed."""
    problem = TensorParallelProblem(
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
    """The contract's tolerances. Where the user gives --atol or --rtol, no bound on the norm applies beside them."""
    element, norm = (tolerance("tensor_parallel", dtype, kind) for kind in ("forward", "gradient"))
    if options.atol is not None or options.rtol is not None:
        norm = float("inf")
    atol, rtol = (element if x is None else x for x in (options.atol, options.rtol))
    return Allowed(atol, rtol, norm)


def _say_environment(problem: TensorParallelProblem, ranks: Ranks, dtype: str) -> None:
    ranks.say(f"[env] rlk_jax numerics {rlk_jax.numerics_version['linear_logp']}, jax {jax.__version__}")
    ranks.say(f"  {ranks.text}")
    width = problem.width(ranks.count)
    ranks.say(
        f"  {problem.tokens} tokens, hidden size {problem.hidden_size}, vocabulary {problem.vocab_size} in shards of "
        f"{width}, {dtype}, {'bias' if problem.bias else 'no bias'}, reduction {problem.reduction}, "
        f"implementation {problem.implementation or 'by dispatch'}"
    )


if __name__ == "__main__":
    sys.exit(_local_process(argparse.Namespace(**json.loads(sys.argv[1]))))
