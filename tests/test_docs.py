"""Every Python block of README.md and docs/ runs as printed, alone, in a fresh interpreter."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.name}:{text[: match.start()].count(chr(10)) + 1}")
    for page in PAGES
    for text in [page.read_text()]
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for code in [match[1]]
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_measured_table_names_a_result_that_exists():
    names = re.findall(r"benchmarks/results/[\w.-]+\.json", (ROOT / "README.md").read_text())
    assert names and all((ROOT / name).exists() for name in names)
