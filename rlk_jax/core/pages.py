"""Pages of HTML that stand alone: their frame and their tables. Text in them has gone through `html.escape`."""

import html
from collections.abc import Iterable, Sequence

_PAGE_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --line: #e3e6ea; --good: #13693a; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #dfe3e8; --line: #353b43; --good: #6cc78f; --bad: #ff8a80 }
}
* { box-sizing: border-box }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
  color: var(--ink); background: var(--paper) }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .2rem .6rem } tr + tr, tbody { border-top: 1px solid var(--line) }
tbody th { font-weight: inherit } .good { color: var(--good) } .bad { color: var(--bad); font-weight: 600 }
"""
_NOTHING_FROM_ELSEWHERE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A policy by which a browser runs no script and fetches nothing, whatever stands in the page."""


def page_alone(title: str, style: str, body: str) -> str:
    """A whole page, whose style comes on top of the common one. The title is plain text, the body HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_FROM_ELSEWHERE}">'
        f"<title>{html.escape(title)}</title><style>{_PAGE_STYLE}{style}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def html_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in a box that scrolls where the window is narrow. Titles and cells are HTML; the first cell of a row is
    its header.
    """
    head = "".join(f'<th scope="col">{x}</th>' for x in titles)
    body = "\n".join(_html_row(*row) for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _html_row(header: str, *cells: str) -> str:
    return f'<tr><th scope="row">{header}</th>' + "".join(f"<td>{x}</td>" for x in cells) + "</tr>"
