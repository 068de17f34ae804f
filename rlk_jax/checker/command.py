"""`rlk check`: one verdict on whether an implementation of an op is right on this machine."""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.table import Column, Table
from rich.text import Text

from rlk_jax.checker import candidates, contract, listing, page
from rlk_jax.checker.inputs import MODES, Draw, Sizes, draws
from rlk_jax.checker.op_spec import OpSpec
from rlk_jax.checker.options import DTYPES, SHORT, Unusable, arch_key_of, dtype_name, natural, positive
from rlk_jax.checker.report import OperatorCheckReport
from rlk_jax.checker.runner import Checks, run_operator_suite
from rlk_jax.checker.specs import SPECS
from rlk_jax.core.terminal import OutputConsole

_DESCRIPTION = "Check an implementation of an op against its float64 definition, and the bits that it promises."
_SIZES = dataclasses.fields(Sizes)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check`."""
    usage = "rlk check [--op OP] [--candidate NAME] [options]"
    parser = subparsers.add_parser("check", help=_DESCRIPTION, description=_DESCRIPTION, usage=usage)
    parser.add_argument("--op", choices=SPECS, metavar="OP", help=f"{', '.join(SPECS)} (default: logp)")
    parser.add_argument("--candidate", metavar="NAME", help=_CANDIDATE_HELP)
    parser.add_argument(
        "--arrays", choices=["jax", "torch"], help="what a module:function takes (default: what it imports)"
    )
    parser.add_argument(
        "--device", choices=["auto", "any", "cpu", "cuda"], default="auto", help="where to run; auto is JAX's default"
    )
    parser.add_argument(
        "--dtype", type=dtype_name, metavar="|".join(DTYPES), help="of all arrays (default: the op's first)"
    )
    for size in _SIZES:
        flag = f"--{size.name.replace('_', '-')}"
        help_text = f"{size.metadata['help']} (default: %(default)s)"
        parser.add_argument(flag, type=positive, default=size.default, metavar="N", help=help_text)
    parser.add_argument("--input-mode", choices=[*MODES, "all"], metavar="MODE", help=_MODE_HELP)
    parser.add_argument(
        "--constant-value", type=float, default=0.25, help="the number that --input-mode constant draws"
    )
    parser.add_argument("--token-value", type=int, default=0, help="the id that --input-mode constant draws")
    parser.add_argument("--seed", type=natural, default=123, metavar="N", help="seed of the inputs")
    parser.add_argument(
        "--arch-key", choices=contract.arch_keys(), help="architecture whose tolerances apply (default: the device's)"
    )
    parser.add_argument("--check-grad", action="store_true", help="check gradients too")
    parser.add_argument("--grad-mode", choices=["ones", "random"], default="random", help="upstream gradients")
    parser.add_argument("--grad-seed", type=natural, default=123, metavar="N", help="seed of random upstream gradients")
    parser.add_argument(
        "--check-invariance",
        action="store_true",
        help="check that rows have the same bits alone, in other batches and beside padding",
    )
    parser.add_argument(
        "--contract", choices=contract.FILES, default="rlk_jax", help="the tolerances; rl-kernel is for comparison"
    )
    parser.add_argument(
        "--all", action="store_true", help="check every op, candidate, dtype and input mode that runs here"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the ops or that of --op, what they take, and the candidates that run here",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write a page of HTML")
    parser.set_defaults(run=run)


_CANDIDATE_HELP = f"{', '.join(candidates.NAMES)}, or module:function (default: registry, what dispatch chooses)"
_MODE_HELP = f"{', '.join(MODES)}, or all that the op has (default: random)"


def run(options: argparse.Namespace) -> int:
    """Run the command. The exit status is 0 where all passed, 1 where anything failed, 2 for unusable options."""
    start = time.perf_counter()
    try:
        device = _device(options.device)
        with jax.default_device(device):
            if options.list:
                return _list(options)
            if options.report:
                _write(options.report, "", "a")
            # Candidates may print. What they print goes to stderr, because stdout holds the report.
            with contextlib.redirect_stdout(sys.stderr):
                reports = _all(options, device) if options.all else [_one(options, device)]
        if options.report:
            _write(options.report, page.html(reports))
    except (Unusable, MemoryError) as error:
        print(f"rlk check: error: {error}", file=sys.stderr)
        return 2
    _print(options, reports, time.perf_counter() - start)
    return 0 if all(x.passed for x in reports) else 1


def _write(path: Path, text: str, mode: str = "w") -> None:
    """Write the page. Raises `Unusable` where that is not possible."""
    try:
        with path.open(mode) as file:
            file.write(text)
    except OSError as error:
        raise Unusable(f"cannot write --report: {error}") from None


def _device(name: str) -> jax.Device:
    """The device that --device names. Raises `Unusable` where there is none."""
    if name in ("auto", "any"):
        return jax.devices()[0]
    try:
        return jax.devices(name)[0]
    except RuntimeError:
        raise Unusable(f"JAX finds no {name} device here, only {jax.default_backend()}") from None


def _sizes(options: argparse.Namespace) -> Sizes:
    return Sizes(**{size.name: getattr(options, size.name) for size in _SIZES})


def _one(options: argparse.Namespace, device: jax.Device) -> OperatorCheckReport:
    """Check one candidate of one op."""
    spec = SPECS[options.op or "logp"]
    modes = spec.modes_of(options.input_mode or "random")
    cases = draws(_draw(options, spec.dtype_of(options.dtype)), modes, second=False)
    return _suite(options, spec, device, options.candidate or "registry", cases)


def _suite(
    options: argparse.Namespace, spec: OpSpec, device: jax.Device, candidate: str, cases: Sequence[Draw]
) -> OperatorCheckReport:
    """Check one candidate of an op at these cases. Raises `Unusable` where it cannot run."""
    found = candidates.resolve(candidate, spec, spec.problem(cases[0]), options.arrays)
    checks = Checks(
        options.contract,
        options.arch_key or arch_key_of(device),
        gradients=options.check_grad,
        grad_mode=options.grad_mode,
        grad_seed=options.grad_seed,
        invariance=options.check_invariance,
    )
    # Only a terminal shows this: thousands of programs may be compiled before the report.
    with OutputConsole(stderr=True).status(Text(f"checking {spec.op}, {candidate}, {SHORT[cases[0].dtype]}")):
        return run_operator_suite(spec.op, candidates=[found], cases=cases, checks=checks)


def _draw(options: argparse.Namespace, dtype: str) -> Draw:
    name = np.dtype(DTYPES[dtype]).name
    return Draw("random", name, options.seed, options.constant_value, options.token_value, _sizes(options))


def _all(options: argparse.Namespace, device: jax.Device) -> list[OperatorCheckReport]:
    """Check all that --op, --candidate, --dtype and --input-mode leave. Raises `Unusable` where nothing is left."""
    reports, refused = list[OperatorCheckReport](), list[Unusable]()
    for spec in _specs(options):
        for dtype in [options.dtype] if options.dtype else spec.dtypes:
            try:
                reports += _all_of(options, device, spec, dtype)
            except Unusable as error:
                refused.append(error)
            # Thousands of programs of a CPU would take all memory mappings that a process may have.
            jax.clear_caches()
    if not reports:
        raise refused[-1]
    return reports


def _all_of(options: argparse.Namespace, device: jax.Device, spec: OpSpec, dtype: str) -> list[OperatorCheckReport]:
    """Check all candidates of one op in one dtype. Raises `Unusable` where there is none."""
    modes = spec.modes_of(options.input_mode or "all")
    # Every implementation takes bf16, so the second sizes are checked in bf16 alone.
    cases = draws(_draw(options, spec.dtype_of(dtype)), modes, second=dtype == "bf16")
    problem = spec.problem(cases[0])
    names = [options.candidate] if options.candidate else candidates.runnable(spec, problem)
    if not names:
        raise candidates.without_implementation(spec)
    return [_suite(options, spec, device, name, cases) for name in names]


def _specs(options: argparse.Namespace) -> list[OpSpec]:
    """The op that --op names, or all."""
    return [SPECS[options.op]] if options.op else list(SPECS.values())


def _list(options: argparse.Namespace) -> int:
    """Print what can be checked here."""
    found = {spec.op: listing.facts(spec, _draw(options, spec.dtypes[-1])) for spec in _specs(options)}
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for op, facts in found.items():
        print(op)
        for name, values in facts.items():
            print(f"  {name.replace('_', ' ')}: {', '.join(values) or 'none'}")
    print("input modes")
    for name, description in MODES.items():
        print(f"  {name}: {description}")
    return 0


def _print(options: argparse.Namespace, reports: Sequence[OperatorCheckReport], seconds: float) -> None:
    """Print the reports as --json and --all say."""
    if options.json:
        suites = [x.to_dict() for x in reports]
        passed = all(x.passed for x in reports)
        print(json.dumps({"passed": passed, "suites": suites} if options.all else suites[0], indent=2))
    elif options.all:
        _print_table(reports, seconds)
    else:
        print("\n".join(reports[0].lines()))


_ANY_WIDTH = 1000
"""More columns than a table takes."""


def _print_table(reports: Sequence[OperatorCheckReport], seconds: float) -> None:
    """Print a row for each op, candidate and dtype, a line for each failed check, and how long all checks took."""
    table = Table(*(Column(title, overflow="fold") for title in page.TABLE_HEADER))
    for row in page.table_rows(reports):
        table.add_row(*row)
    # In a pipe no name is cut: what reads it looks for whole ones.
    OutputConsole(width=None if sys.stdout.isatty() else _ANY_WIDTH).print(table)
    for report in reports:
        for line in report.failed_lines():
            print(line)
    checks = [check for report in reports for candidate in report.candidates for check in candidate.outputs]
    print(f"{sum(check.passed for check in checks)}/{len(checks)} checks passed in {seconds:.0f} s")
