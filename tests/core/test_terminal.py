"""What commands print is what they were given."""

import io
import re

import pytest
from rich.table import Table

from rlk_jax.core.terminal import OutputConsole
from tests.test_architecture import ROOT


@pytest.mark.parametrize("text", ["/tmp/run[a]/x", "[bold]x[/bold]", "rlk-jax[grpo]", "[/]", ":smile:"])
def test_texts_are_printed_as_they_are(text):
    console = OutputConsole(file=io.StringIO(), width=80)
    table = Table(text, title=text)
    table.add_row(text)
    console.print(text, table)
    assert console.file.getvalue().count(text) == 4


def test_no_module_has_a_console_of_another_kind():
    sources = [path for folder in ("rlk_jax", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    own = [str(path.relative_to(ROOT)) for path in sources if re.search(r"rich(\.console)? import", path.read_text())]
    assert own == ["rlk_jax/core/terminal.py"]
