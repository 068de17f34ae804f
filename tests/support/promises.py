"""The tables of promises in docs/, made from the dispatch table: python -m tests.support.promises writes them."""

import pathlib
import re

from rlk_jax.dispatch import TABLE

DOCS = pathlib.Path(__file__).parents[2] / "docs"
TABLES = re.compile(r"<!-- promises:(\w+) -->\n(.*?)\n<!-- /promises -->", re.DOTALL)


def table(op: str) -> str:
    """The table of one op, in Markdown."""
    rows = [f"| `{x.name}` | {'yes' if x.promises_bits else 'no'} |" for x in TABLE[op]]
    return "\n".join(["| implementation | promises bits |", "| --- | --- |", *rows])


def with_tables(text: str) -> str:
    """A page with its tables as they should be."""
    return TABLES.sub(lambda found: f"<!-- promises:{found[1]} -->\n{table(found[1])}\n<!-- /promises -->", text)


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        page.write_text(with_tables(page.read_text()))
