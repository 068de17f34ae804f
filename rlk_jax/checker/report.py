"""What a check found, as dataclasses that become JSON and lines of text.

The verdict is "passed" only where everything passed. Pass rates are for information.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OutputCheck:
    """The verdict on one output, gradient or promise of bits. Errors are infinite where nothing could be compared."""

    output_index: int
    name: str
    """The output's name, "gradient:<input>", or a label before it such as "invariance:<arrangement>:<result>"."""
    passed: bool
    message: str = ""
    """What was compared, and by what; or what went wrong in the place of it."""
    shape: tuple[int, ...] = ()
    candidate_dtype: str = "none"
    gold_dtype: str = "float64"
    measure: str = "none"
    """What the tolerance holds for: every "element", the "norm" of all, or "bits"; "none" without a comparison."""
    atol: float = 0.0
    rtol: float = 0.0
    max_abs_error: float = math.inf
    mean_abs_error: float = math.inf
    max_rel_error: float = math.inf
    norm_error: float = math.inf
    """‖error‖ / ‖gold‖."""
    used: float = math.inf
    """The error as a multiple of the allowed error; the check passes up to 1."""
    histogram: tuple[int, ...] = ()
    """How many elements have |error| / max |gold| of 0, of at most 1e-12, and so on by decades up to 1 and more."""

    def to_dict(self) -> dict[str, Any]:
        return {name: _json(x) for name, x in vars(self).items()}

    def __str__(self) -> str:
        message = f" {self.message}" if self.message else ""
        numbers = "" if self.measure == "none" else f" {self._numbers()}"
        return f"output={self.output_index} {self.name}{message}{numbers} passed={self.passed}"

    def _numbers(self) -> str:
        """All that a comparison measured."""
        return (
            f"shape={self.shape} dtype={self.candidate_dtype} max_abs={self.max_abs_error:.8e} "
            f"mean_abs={self.mean_abs_error:.8e} max_rel={self.max_rel_error:.8e} "
            f"tol=(atol={self.atol:.3e}, rtol={self.rtol:.3e})"
        )


def _json(x: Any) -> Any:
    """`x` as JSON can hold it: infinities and NaN become text."""
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return list(x) if isinstance(x, tuple) else x


@dataclass(frozen=True)
class CaseCheck:
    """The checks of one case, which is an op, a dtype, a shape and an input mode."""

    case_name: str
    dtype: str
    op_class: str
    outputs: tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        return all(x.passed for x in self.outputs)

    @property
    def failed(self) -> list[OutputCheck]:
        return [x for x in self.outputs if not x.passed]

    def to_dict(self) -> dict[str, Any]:
        return {
            "case_name": self.case_name,
            "dtype": self.dtype,
            "op_class": self.op_class,
            "passed": self.passed,
            "outputs": [x.to_dict() for x in self.outputs],
        }


@dataclass(frozen=True)
class CandidateReport:
    """All cases of one candidate."""

    candidate_name: str
    backend: str
    invariance: str
    """Whether bits were compared: "checked", "not asked for", or why they cannot be."""
    cases: tuple[CaseCheck, ...]

    @property
    def outputs(self) -> list[OutputCheck]:
        return [x for case in self.cases for x in case.outputs]

    @property
    def passed(self) -> bool:
        return all(x.passed for x in self.outputs)

    @property
    def pass_rate(self) -> float:
        return _rate(self.outputs)

    def to_dict(self) -> dict[str, Any]:
        return {
            "candidate_name": self.candidate_name,
            "backend": self.backend,
            "total_outputs": len(self.outputs),
            "passed_outputs": sum(x.passed for x in self.outputs),
            "pass_rate": self.pass_rate,
            "passed": self.passed,
            "invariance": self.invariance,
            "cases": [x.to_dict() for x in self.cases],
        }


@dataclass(frozen=True)
class OperatorCheckReport:
    """All candidates of one op."""

    suite_name: str
    contract: str
    device: str
    candidates: tuple[CandidateReport, ...]

    @property
    def passed(self) -> bool:
        return all(x.passed for x in self.candidates)

    @property
    def pass_rate(self) -> float:
        return _rate(self.candidates)

    def to_dict(self) -> dict[str, Any]:
        return {
            "suite_name": self.suite_name,
            "contract": self.contract,
            "device": self.device,
            "total_candidates": len(self.candidates),
            "passed_candidates": sum(x.passed for x in self.candidates),
            "pass_rate": self.pass_rate,
            "passed": self.passed,
            "candidates": [x.to_dict() for x in self.candidates],
        }

    def lines(self) -> Iterator[str]:
        """The report as text, with a line for each check, and at the end one that names those that failed in a case."""
        yield f"suite={self.suite_name} passed={self.passed} {_rate_text(self.candidates, 'candidates')}"
        for candidate in self.candidates:
            yield (
                f"candidate={candidate.candidate_name} backend={candidate.backend} passed={candidate.passed} "
                f"{_rate_text(candidate.outputs, 'checks')}"
            )
            if candidate.invariance not in ("checked", "not asked for"):
                yield f"  invariance is not checked: {candidate.invariance}"
            for case in candidate.cases:
                yield from (f"  case={case.case_name} {x}" for x in case.outputs)
            for case in candidate.cases:
                if case.failed:
                    names = ", ".join(x.name for x in case.failed)
                    yield f"failed {len(case.failed)} of {len(case.outputs)} checks of case={case.case_name}: {names}"

    def failed_lines(self) -> Iterator[str]:
        """A line for each failed check."""
        for candidate in self.candidates:
            for case in candidate.cases:
                yield from (f"candidate={candidate.candidate_name} case={case.case_name} {x}" for x in case.failed)


def _rate(checks: Sequence[Any]) -> float:
    return sum(x.passed for x in checks) / max(len(checks), 1)


def _rate_text(checks: Sequence[Any], what: str) -> str:
    """The share that passed, and of what it is one."""
    return f"pass_rate={_rate(checks):.4f} ({sum(x.passed for x in checks)} of {len(checks)} {what})"
