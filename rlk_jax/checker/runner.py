"""Runs candidates and compares results: with the gold, with a second run, and with the same rows in other batches."""

import functools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlk_jax.checker import contract
from rlk_jax.checker.candidates import ArrayLibrary, Candidate, of_function
from rlk_jax.checker.contract import Bound
from rlk_jax.checker.inputs import Draw, Sizes, draws
from rlk_jax.checker.op_spec import INTEGERS, OpSpec, Problem, Results
from rlk_jax.checker.options import DTYPES, arch_key_of, chosen, default_device
from rlk_jax.checker.report import CandidateReport, CaseCheck, OperatorCheckReport, OutputCheck
from rlk_jax.checker.specs import SPECS
from rlk_jax.core.named_functions import first_line

_CHECKER_FOLDER = Path(__file__).parent
_DECADES = 10.0 ** np.arange(-12, 1)
_EXACT = Bound(0.0, 0.0, "element")


@dataclass(frozen=True)
class Checks:
    """Which checks are made, and by which contract."""

    contract: str = "rlk_jax"
    arch_key: str | None = None
    gradients: bool = False
    grad_mode: str = "random"
    grad_seed: int = 123
    invariance: bool = False


@dataclass
class Outcome:
    """What one call of a candidate gave: the results that it reached, and everything that went wrong."""

    results: Results = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    """What went wrong, by the name of the result or of the stage of the call."""
    refused: bool = False
    """Whether the forward raised an error that says that an argument is bad."""


def run_operator_suite(
    suite_name: str, *, candidates: Sequence[Candidate], cases: Sequence[Draw], checks: Checks
) -> OperatorCheckReport:
    """Check all cases of every candidate of an op, on JAX's default device."""
    reports = tuple(_check_candidate(SPECS[suite_name], candidate, cases, checks) for candidate in candidates)
    return OperatorCheckReport(suite_name, checks.contract, default_device().device_kind, reports)


def _check_candidate(spec: OpSpec, candidate: Candidate, cases: Sequence[Draw], checks: Checks) -> CandidateReport:
    """Check all cases of one candidate. Bits are compared only where it promises them."""
    invariance = (candidate.no_bits or "checked") if checks.invariance else "not asked for"
    checks = replace(checks, invariance=invariance == "checked")
    found = tuple(check_case(spec, candidate, draw, checks) for draw in cases)
    return CandidateReport(candidate.name, candidate.backend, invariance, found)


def check_case(spec: OpSpec, candidate: Candidate, draw: Draw, checks: Checks) -> CaseCheck:
    """Make every check of one draw of inputs."""
    op_class, dtype = spec.op_class(draw.mode), next(short for short, x in DTYPES.items() if x == np.dtype(draw.dtype))
    shape = "x".join(map(str, spec.shape(spec.sizes(draw.sizes))))
    name = f"{spec.op}-{dtype}-{shape}" + ("" if draw.mode == "random" else f"-{draw.mode}")
    outputs = tuple(_case_checks(spec, candidate, draw, checks, op_class))
    return CaseCheck(name, dtype, op_class, outputs)


def _case_checks(
    spec: OpSpec, candidate: Candidate, draw: Draw, checks: Checks, op_class: str
) -> Iterator[OutputCheck]:
    """Faults and accuracy first; then, where nothing went wrong, a call without gradients and the promises of bits."""
    problem = spec.problem(draw, checks.grad_mode, checks.grad_seed)
    gradients = spec.gradients if checks.gradients and draw.mode not in spec.forward_only else ()
    checks = replace(checks, invariance=checks.invariance and draw.arranged)
    names = _names(spec, gradients)
    outcome = _call(spec, candidate, problem, gradients)
    if draw.mode == "bad-ids" and outcome.refused:
        del outcome.faults["forward"]
        yield OutputCheck(
            0, "bad-ids:refused", True, max_abs_error=0.0, mean_abs_error=0.0, max_rel_error=0.0, used=0.0
        )
    yield from (OutputCheck(0, f"fault:{x}", False, said) for x, said in outcome.faults.items() if x not in names)
    gold, size = spec.gold(problem)
    bound = functools.partial(_bound, spec, checks, op_class, draw.dtype, size)
    for i, name in enumerate(names):
        if name in outcome.faults:
            yield OutputCheck(i, name, False, outcome.faults[name])
        elif name in outcome.results:
            yield _accuracy(i, name, outcome.results[name], gold[name], bound("gradient" if ":" in name else "forward"))
    if outcome.faults or outcome.refused:
        return
    if gradients and draw.mode == "random":
        expected = outcome.results if checks.invariance else gold
        same_bits = contract.batch_invariance(checks.contract)
        outputs = {x.name: expected[x.name] for x in spec.outputs}
        plain = _call(spec, candidate, problem, ())
        yield _same("forward", outputs, plain, same_bits if checks.invariance else bound("forward"))
        yield from _stray_gradients(spec, candidate, problem)
    yield from _promises(spec, candidate, problem, gradients, outcome.results, checks)


def _stray_gradients(spec: OpSpec, candidate: Candidate, problem: Problem) -> Iterator[OutputCheck]:
    """A fault for each gradient other than 0 or None of an input that has none. A candidate may refuse to give it."""
    found = _call(spec, candidate, problem, spec.no_gradients) if spec.no_gradients else Outcome()
    if not found.refused:
        yield from (OutputCheck(0, f"fault:{x}", False, said) for x, said in found.faults.items())


def _bound(spec: OpSpec, checks: Checks, op_class: str, dtype: str, size: float, kind: contract.Kind) -> Bound | None:
    """The bound for a kind of result, or None where the contract has none."""
    by_size = size if op_class == spec.large_class and not spec.large_is_norm else None
    try:
        return contract.accuracy(checks.contract, op_class, dtype, kind, checks.arch_key, by_size)
    except KeyError:
        return None


def _accuracy(index: int, name: str, actual: np.ndarray, gold: np.ndarray, bound: Bound | None) -> OutputCheck:
    """Compare with the gold: integers exactly, where the gold is not masked, and other numbers by the bound. Without a
    bound the check fails and says what was measured.
    """
    if np.issubdtype(actual.dtype, np.integer):
        return compare(index, name, actual, np.where(np.ma.getmaskarray(gold), actual, gold), _EXACT)
    if bound is not None:
        return compare(index, name, actual, gold, bound)
    found = compare(index, name, actual, gold, Bound(0.0, math.inf, "norm"))
    message = f"no tolerance in the contract; measured {found.norm_error:.1e}"
    return replace(found, passed=False, message=message, rtol=0.0, used=math.inf)


def _promises(
    spec: OpSpec, candidate: Candidate, problem: Problem, gradients: Sequence[str], first: Results, checks: Checks
) -> Iterator[OutputCheck]:
    """Compare the bits of another run, and of the same rows in other batches, with those of the first run."""
    bound = contract.batch_invariance(checks.contract)
    yield _same("deterministic", first, _call(spec, candidate, problem, gradients), bound)
    for arrangement in spec.arrangements(spec, problem) if checks.invariance else ():
        moved = _call(spec, candidate, arrangement.problem, gradients)
        here = _kept(spec, moved.results, arrangement.here, arrangement.sums)
        there = _kept(spec, first, arrangement.there, arrangement.sums)
        yield _same(f"invariance:{arrangement.name}", there, Outcome(here, moved.faults), bound)


def _kept(spec: OpSpec, results: Results, rows: Callable[[np.ndarray], np.ndarray], sums: bool) -> Results:
    """What an arrangement keeps: these rows of results that have rows, and no sum over rows unless `sums` says so."""
    with_rows = spec.per_row | spec.sums_per_row
    kept = {name: x for name, x in results.items() if sums or name in spec.per_row}
    return {name: rows(x) if name in with_rows else x for name, x in kept.items()}


def _same(label: str, first: Results, other: Outcome, bound: Bound | None) -> OutputCheck:
    """One check for all results of another call: that of the result which differs most from the first call's."""
    if other.faults:
        return OutputCheck(0, label, False, "; ".join(other.faults.values()))
    named = enumerate(first.items())
    found = [_accuracy(i, f"{label}:{name}", other.results[name], x, bound) for i, (name, x) in named]
    return max(found, key=lambda check: (not check.passed, check.used))


def _names(spec: OpSpec, gradients: Sequence[str]) -> list[str]:
    """The names of all results, in the order of the report."""
    return [*(x.name for x in spec.outputs), *(f"gradient:{x}" for x in gradients)]


def _call(spec: OpSpec, candidate: Candidate, problem: Problem, gradients: Sequence[str]) -> Outcome:
    """Call a candidate on copies of the inputs and, where its outputs have the right kind, call its backward."""
    arrays, names, outcome = candidate.arrays, list(problem.inputs), Outcome()
    sent = [arrays.send(x) for x in problem.inputs.values()]
    places = [names.index(x) for x in gradients]
    upstream = {name: arrays.send(g) for name, g in problem.upstream.items()} if gradients else {}
    stage = "forward"
    try:
        options = {name: arrays.send(x) if isinstance(x, np.ndarray) else x for name, x in problem.options.items()}
        outputs, pull_back = arrays.forward(candidate.bound(options), sent, places)
        _take_outputs(spec, problem, [arrays.fetch(x) for x in outputs], outcome)
        if gradients and not outcome.faults:
            stage = "backward"
            found = pull_back([upstream[x.name] for x in spec.outputs])
            fetched = [None if x is None else arrays.fetch(x) for x in found]
            _take_gradients(spec, problem, dict(zip(gradients, fetched, strict=True)), outcome)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        outcome.faults[stage] = f"raised {type(error).__name__}: {first_line(error)}{_raised_at(error)}"
        outcome.refused = stage == "forward" and _refuses(error)
    for kind, given, before in (
        ("input", dict(zip(names, sent, strict=True)), problem.inputs),
        ("upstream", upstream, problem.upstream),
    ):
        for name, x in given.items():
            if not _untouched(arrays, x, before[name]):
                outcome.faults[f"{kind} {name}"] = f"{name} was changed or given away"
    return outcome


def _refuses(error: BaseException) -> bool:
    """Whether an error says that an argument is bad. torch.gather on the CPU says so by a plain RuntimeError."""
    return isinstance(error, ValueError | IndexError) or "out of bounds" in str(error)


def _raised_at(error: BaseException) -> str:
    """The file and line that raised the error, in code that is neither installed nor the checker's."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [x for x in frames if "site-packages" not in x.filename and Path(x.filename).parent != _CHECKER_FOLDER]
    return f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""


def _take_outputs(spec: OpSpec, problem: Problem, found: Sequence[np.ndarray], outcome: Outcome) -> None:
    """Add the outputs of a call to its outcome."""
    if len(found) != len(spec.outputs):
        outcome.faults["forward"] = f"gave {len(found)} outputs instead of {len(spec.outputs)}"
        return
    of_inputs = next(iter(problem.inputs.values())).dtype
    for output, x in zip(spec.outputs, found, strict=True):
        _take(outcome, output.name, x, problem.upstream[output.name].shape, output.dtype or of_inputs)


def _take_gradients(spec: OpSpec, problem: Problem, found: dict[str, np.ndarray | None], outcome: Outcome) -> None:
    """Add the gradients of a call to its outcome."""
    for name, x in found.items():
        if name in spec.no_gradients:
            if x is not None and x.any():
                outcome.faults[f"gradient:{name}"] = (
                    f"the candidate gives {name} a gradient, and it must have none: detach it (stop_gradient in JAX)"
                )
        elif x is None:
            outcome.faults[f"gradient:{name}"] = "the gradient is None"
        else:
            _take(outcome, f"gradient:{name}", x, problem.inputs[name].shape, problem.inputs[name].dtype)


def _take(outcome: Outcome, name: str, x: np.ndarray, shape: tuple[int, ...], dtype: Any) -> None:
    """Add a result of the right shape and dtype to the outcome, or a fault in its place."""
    if x.shape != shape:
        outcome.faults[name] = f"shape {x.shape} instead of {shape}"
    elif not (np.issubdtype(x.dtype, np.integer) if dtype == INTEGERS else x.dtype == dtype):
        outcome.faults[name] = f"dtype {x.dtype} instead of {dtype}"
    else:
        outcome.results[name] = x


def _untouched(arrays: ArrayLibrary, x: Any, before: np.ndarray) -> bool:
    """Whether an argument still holds its bits after the call. Memory that was given away cannot be read."""
    try:
        return arrays.fetch(x).tobytes() == before.tobytes()
    except RuntimeError:
        return False


def compare(index: int, name: str, actual: np.ndarray, gold: np.ndarray, bound: Bound) -> OutputCheck:
    """Compare a result with the gold, or with another result, by a bound.

    Equal infinities are no error, nor is NaN where the gold is NaN. Any other infinity or NaN is an infinite error.
    """
    a, g = np.asarray(actual, np.float64), np.asarray(gold, np.float64)
    expected = (a == g) | (np.isnan(a) & np.isnan(g))
    comparable = np.isfinite(a) & np.isfinite(g)
    with np.errstate(invalid="ignore"):
        error = np.where(expected, 0.0, np.where(comparable, np.abs(a - g), np.inf))
    size = np.where(comparable, np.abs(g), 0.0)
    norm, gold_norm = float(np.linalg.norm(error)), float(np.linalg.norm(size))
    norm_error, used = _ratio(norm, gold_norm), _used(actual, gold, error, size, bound)
    return OutputCheck(
        index,
        name,
        passed=used <= 1,
        message=_compared(a, g, expected, norm_error, used, bound),
        shape=actual.shape,
        candidate_dtype=str(actual.dtype),
        gold_dtype=str(gold.dtype),
        measure=bound.measure,
        atol=bound.atol,
        rtol=bound.rtol,
        max_abs_error=float(error.max(initial=0)),
        mean_abs_error=float(error.mean()) if error.size else 0.0,
        max_rel_error=float((error / np.maximum(size, 1e-12)).max(initial=0)),
        norm_error=norm_error,
        used=used,
        histogram=_histogram(error, size),
    )


def _used(actual: np.ndarray, gold: np.ndarray, error: np.ndarray, size: np.ndarray, bound: Bound) -> float:
    """The error as a multiple of the allowed error, of the element for which it is largest."""
    if bound.measure == "bits":
        return 0.0 if actual.dtype == gold.dtype and actual.tobytes() == gold.tobytes() else math.inf
    if bound.measure == "norm":
        error, size = np.linalg.norm(error), np.linalg.norm(size)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(error > 0, error / (bound.atol + bound.rtol * size), 0.0).max(initial=0))


def _ratio(error: float, allowed: float) -> float:
    return float(error / allowed) if allowed else math.inf if error else 0.0


def _compared(a: np.ndarray, g: np.ndarray, expected: np.ndarray, norm_error: float, used: float, bound: Bound) -> str:
    """What was compared, in words: the number that the bound holds for, or the first number that is out of place."""
    strange = ~expected & (~(np.isfinite(a) & np.isfinite(g)) | (bound == _EXACT))
    if used > 1 and strange.any():
        i = tuple(map(int, np.argwhere(strange)[0]))
        return f"{a[i]} instead of {g[i]} at {i}"
    if bound == _EXACT:
        return "equal"
    if bound.measure == "norm":
        return f"relative norm {norm_error:.1e} of at most {bound.rtol:.1e}"
    if bound.measure == "bits":
        return "same bits as in the first call" if used <= 1 else "other bits than in the first call"
    return f"{used:.2g} times what is allowed"


def _histogram(error: np.ndarray, size: np.ndarray) -> tuple[int, ...]:
    """The number of exact elements, and then the numbers of errors in each decade of |error| / max |gold|."""
    relative = (error / (size.max(initial=0) or 1.0)).ravel()
    counts = np.bincount(np.digitize(relative[relative > 0], _DECADES), minlength=len(_DECADES) + 1)
    return int((relative == 0).sum()), *map(int, counts)


def assert_op(
    fn: Callable[..., Any],
    *,
    op: str,
    dtype: str | None = None,
    arrays: str | None = None,
    kwargs: Mapping[str, str | None] | None = None,
    check_grad: bool = True,
    check_invariance: bool = False,
    modes: Sequence[str] | None = None,
    sizes: Sizes | None = None,
    arch_key: str | None = None,
) -> None:
    """Check that `fn` does what `rlk_jax.<op>` promises.

    Raises AssertionError with a line for each failed check, and ValueError for arguments that fit nothing.

    Args:
      fn: takes the op's arrays by position, in the op's order, and its options by keyword, and gives its outputs.
      op: the name of an op that `rlk check --list` prints.
      dtype: "fp32", "bf16" or "fp16"; by default the first that the op takes.
      arrays: "jax" or "torch"; by default "torch" where the module of `fn` imports torch and not jax, else "jax".
      kwargs: the names that `fn` has for the op's options; None for an option that it does not take.
      check_grad: whether to check gradients too, for random upstream gradients.
      check_invariance: whether to check the bits of rows alone, in other batches and beside padding too.
      modes: the input modes; by default all that the op has.
      sizes: the sizes of the problem; by default two small problems.
      arch_key: the architecture whose tolerances the contract gives; by default the device's.
    """
    chosen("op", op, SPECS)
    spec = SPECS[op]
    dtype = spec.dtype_of(dtype)
    modes = [x for mode in modes or ["all"] for x in spec.modes_of(mode)]
    chosen("arrays", arrays, (None, "jax", "torch"))
    chosen("arch_key", arch_key, (None, *contract.arch_keys()))
    for name in kwargs or {}:
        chosen("kwargs", name, spec.options(Draw()))
    candidate = of_function(fn, getattr(fn, "__name__", type(fn).__name__), arrays, kwargs=kwargs or {})
    draw = Draw(dtype=np.dtype(DTYPES[dtype]).name, sizes=sizes or Sizes())
    checks = Checks(
        arch_key=arch_key or arch_key_of(default_device()), gradients=check_grad, invariance=check_invariance
    )
    cases = draws(draw, modes, second=sizes is None)
    report = run_operator_suite(op, candidates=[candidate], cases=cases, checks=checks)
    if not report.passed:
        raise AssertionError("\n".join(report.failed_lines()))
