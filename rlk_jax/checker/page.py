"""Reports as rows of a table, and as one self-contained page of HTML with verdicts and histograms of errors."""

import html as escape
import math
from collections.abc import Iterator, Sequence

from rlk_jax.checker.report import CandidateReport, OperatorCheckReport, OutputCheck
from rlk_jax.core.pages import html_table, page_alone

TABLE_HEADER = ("op", "candidate", "backend", "dtype", "checks", "worst of its tolerance", "bits", "verdict")
"""The titles of the columns that `table_rows` fills."""

_STYLE = """
details { margin: .5rem 0 } summary { cursor: pointer } svg { fill: #3867b5 }
@media (prefers-color-scheme: dark) { svg { fill: #8fb4f5 } }
"""


def table_rows(reports: Sequence[OperatorCheckReport]) -> Iterator[tuple[str, ...]]:
    """The rows of the table: one for each candidate of each report. The columns before the verdict tell accuracy from
    bits; what could not be compared has no share of a tolerance.
    """
    for report in reports:
        for candidate in report.candidates:
            accuracy = [x.used for x in candidate.outputs if x.measure != "bits"]
            differ = any(x.measure == "bits" and not x.passed for x in candidate.outputs)
            yield (
                report.suite_name,
                candidate.candidate_name,
                candidate.backend,
                candidate.cases[0].dtype,
                f"{sum(x.passed for x in candidate.outputs)}/{len(candidate.outputs)}",
                _percent(max(accuracy, default=math.inf)),
                "differ" if differ else candidate.invariance,
                _verdict(candidate.passed),
            )


def html(reports: Sequence[OperatorCheckReport]) -> str:
    """The page, as text."""
    details = "".join(_candidate_details(report, x) for report in reports for x in report.candidates)
    passed = _verdict(all(x.passed for x in reports))
    contract, device = escape.escape(reports[0].contract), escape.escape(reports[0].device)
    body = (
        f"<h1>rlk check: {_coloured(passed)}</h1>"
        f"<p>Contract {contract}, on {device}. Histograms count elements by the decade of |error| over the largest "
        f"|gold|: exact ones, then 1e-12 and less, up to 1 and more.</p>"
        f"{html_table(TABLE_HEADER, map(_cells, table_rows(reports)))}<h2>Cases</h2>{details}"
    )
    return page_alone(f"rlk check: {passed}", _STYLE, body)


def _percent(used: float) -> str:
    """An error as a share of its tolerance."""
    return f"{100 * used:.0f} %" if math.isfinite(used) else "–"


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def _coloured(verdict: str) -> str:
    """A verdict with its colour on the page."""
    return f'<span class="{"good" if verdict == _verdict(True) else "bad"}">{verdict}</span>'


def _cells(row: Sequence[str]) -> list[str]:
    """A row of the table, whose last cell is a verdict, as HTML."""
    *facts, verdict = map(escape.escape, row)
    return [*facts, _coloured(verdict)]


def _candidate_details(report: OperatorCheckReport, candidate: CandidateReport) -> str:
    """A section with every check of one candidate. It is open where one failed."""
    head = ("check", "shape", "dtype", "max abs", "of its tolerance", "errors", "compared", "verdict")
    checks = [(case.case_name, x) for case in candidate.cases for x in case.outputs]
    table = html_table(head, (_check_cells(name, x) for name, x in checks))
    title = f"{report.suite_name}, {candidate.candidate_name}, {candidate.cases[0].dtype}"
    opened = "" if candidate.passed else " open"
    return (
        f"<details{opened}><summary>{escape.escape(title)}: {_coloured(_verdict(candidate.passed))}</summary>"
        f"{table}</details>"
    )


def _check_cells(case: str, check: OutputCheck) -> list[str]:
    """The cells of a row with one check of a case, as HTML."""
    numbers = (str(check.shape), check.candidate_dtype, f"{check.max_abs_error:.2e}", _percent(check.used))
    texts = map(escape.escape, (f"{case} {check.name}", *numbers))
    return [*texts, _bars(check.histogram), escape.escape(check.message), _coloured(_verdict(check.passed))]


def _bars(histogram: Sequence[int]) -> str:
    """A picture of the histogram, with a bar for each decade that has errors in it."""
    if not histogram:
        return ""
    heights = [24 * count / max(histogram) for count in histogram]
    bars = "".join(
        f'<rect x="{7 * i}" y="{24 - height:.1f}" width="6" height="{height:.1f}"><title>{count}</title></rect>'
        for i, (count, height) in enumerate(zip(histogram, heights, strict=True))
        if count
    )
    return f'<svg width="{7 * len(histogram)}" height="24" role="img">{bars}</svg>'
