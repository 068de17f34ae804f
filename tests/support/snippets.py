"""One process that runs Python snippets of a page: python -m tests.support.snippets REPORT PAGE LINE...

Each snippet runs as `__main__` in a module of its own and in an empty folder of its own, one after the other. For each
one whose code begins at a LINE of the page, a line of JSON is added to the file REPORT: [LINE, traceback or ""].
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets_of(page: pathlib.Path) -> dict[int, str]:
    """The Python blocks of a page, by the line of the page on which each one's code begins."""
    text = page.read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return {text[: block.start(1)].count("\n") + 1: block[1] for block in blocks}


def owns_its_process(code: str) -> bool:
    """Whether a snippet must start its process: it configures JAX, sets the environment, or imports torch_bridge, which
    does.
    """
    return re.search(r"jax\.config|os\.environ|\btorch_bridge\b", code) is not None


def run(page: pathlib.Path, lines: Sequence[int], folder: pathlib.Path) -> dict[int, str]:
    """What is wrong with each of these snippets of a page after they ran in one new process; "" where nothing is."""
    report = folder / "report"
    command = [sys.executable, "-m", "tests.support.snippets", str(report), str(page), *map(str, lines)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = dict(map(json.loads, report.read_text().splitlines())) if report.exists() else {}
    died = f"the process ended with {done.returncode} before this snippet did\n{done.stderr}"
    return {line: said.get(line, died) for line in lines}


def error_of(page: pathlib.Path, line: int) -> str:
    """The traceback of one snippet, with the page's own lines; "" where it runs."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    code = "\n" * (line - 1) + snippets_of(page)[line]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            exec(compile(code, str(page), "exec"), module.__dict__)
        except BaseException:
            return traceback.format_exc()
    return ""


def main(report: str, page: str, *lines: str) -> None:
    for line in map(int, lines):
        said = json.dumps([line, error_of(pathlib.Path(page), line)])
        with open(report, "a") as file:
            print(said, file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
