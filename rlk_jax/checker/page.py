"""Reports as rows of a table, and as one self-contained page of HTML with verdicts and histograms of errors."""

import html as escape
import math
from collections.abc import Iterator, Sequence

from rlk_jax.checker.report import CandidateReport, OperatorCheckReport, OutputCheck

TABLE_HEADER = ("op", "candidate", "backend", "dtype", "checks", "worst of its tolerance", "bits", "verdict")
"""The titles of the columns that `table_rows` fills."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .2rem .6rem }
tr + tr { border-top: 1px solid #e3e6ea } .pass { color: #13693a } .fail { color: #b3261e; font-weight: 600 }
details { margin: .5rem 0 } summary { cursor: pointer } td.number { font-variant-numeric: tabular-nums }
"""


def table_rows(reports: Sequence[OperatorCheckReport]) -> Iterator[tuple[str, ...]]:
    """The rows of the table: one for each candidate of each report."""
    for report in reports:
        for candidate in report.candidates:
            accuracy = [x.used for x in candidate.outputs if x.measure in ("norm", "element")]
            yield (
                report.suite_name,
                candidate.candidate_name,
                candidate.backend,
                candidate.cases[0].dtype,
                f"{sum(x.passed for x in candidate.outputs)}/{len(candidate.outputs)}",
                _percent(max(accuracy, default=math.inf)),
                candidate.invariance,
                _verdict(candidate.passed),
            )


def html(reports: Sequence[OperatorCheckReport]) -> str:
    """The page, as text."""
    table = "".join(_row(x) for x in table_rows(reports))
    details = "".join(_candidate_details(report, x) for report in reports for x in report.candidates)
    passed = _verdict(all(x.passed for x in reports))
    contract, device = escape.escape(reports[0].contract), escape.escape(reports[0].device)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>rlk check: {passed}</title>'
        f"<style>{_STYLE}</style><h1>rlk check: {_coloured(passed)}</h1>"
        f"<p>Contract {contract}, on {device}. Histograms count elements by the decade of |error| over the largest "
        f"|gold|: exact ones, then 1e-12 and less, up to 1 and more.</p>"
        f"<table>{_row(TABLE_HEADER, 'th')}{table}</table><h2>Cases</h2>{details}</html>\n"
    )


def _percent(used: float) -> str:
    """An error as a share of its tolerance."""
    return f"{100 * used:.0f} %" if math.isfinite(used) else "–"


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def _coloured(verdict: str) -> str:
    """A verdict with its colour on the page."""
    return f'<span class="{verdict.lower()}">{verdict}</span>'


def _row(cells: Sequence[str], tag: str = "td") -> str:
    """A row of the table, whose last cell is a verdict; with tag "th" its header."""
    *facts, verdict = map(escape.escape, cells)
    last = _coloured(verdict) if tag == "td" else verdict
    return "<tr>" + "".join(f"<{tag}>{x}</{tag}>" for x in (*facts, last)) + "</tr>"


def _candidate_details(report: OperatorCheckReport, candidate: CandidateReport) -> str:
    """A section with every check of one candidate. It is open where one failed."""
    head = ("check", "shape", "dtype", "max abs", "of its tolerance", "errors", "why", "verdict")
    checks = [(case.case_name, x) for case in candidate.cases for x in case.outputs]
    body = "".join(_check_row(name, x) for name, x in checks)
    title = f"{report.suite_name}, {candidate.candidate_name}, {candidate.cases[0].dtype}"
    opened = "" if candidate.passed else " open"
    return (
        f"<details{opened}><summary>{escape.escape(title)}: {_coloured(_verdict(candidate.passed))}</summary>"
        f"<table>{_row(head, 'th')}{body}</table></details>"
    )


def _check_row(case: str, check: OutputCheck) -> str:
    """A row with one check of a case."""
    numbers = (str(check.shape), check.candidate_dtype, f"{check.max_abs_error:.2e}", _percent(check.used))
    cells = "".join(f'<td class="number">{escape.escape(x)}</td>' for x in numbers)
    return (
        f"<tr><td>{escape.escape(f'{case} {check.name}')}</td>{cells}<td>{_bars(check.histogram)}</td>"
        f"<td>{escape.escape(check.message)}</td><td>{_coloured(_verdict(check.passed))}</td></tr>"
    )


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
    return f'<svg width="{7 * len(histogram)}" height="24" fill="#3867b5" role="img">{bars}</svg>'
