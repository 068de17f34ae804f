"""One process that runs Python snippets of pages: python -m tests.support.snippets REPORT [PAGE LINE]...

Each snippet runs as `__main__` in a module of its own and in an empty folder of its own, one after the other. For each
one, whose code begins at LINE of PAGE, a line of JSON is added to the file REPORT: [PAGE, LINE, traceback or ""].
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
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parent.parent.parent
type Snippet = tuple[pathlib.Path, int]
"""A page, and the line on which the snippet's code begins."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets_of(page: pathlib.Path) -> dict[int, str]:
    """The Python blocks of a page, by the line of the page on which each one's code begins."""
    text = page.read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return {text[: block.start(1)].count("\n") + 1: block[1] for block in blocks}


def configuration(code: str) -> str:
    """How a snippet configures its process: by jax.config, by the environment, and by torch_bridge, whose import does.

    Snippets may share a process only where this is the same.
    """
    found = re.findall(r"(?:jax\.config|os\.environ)[^#\n]*|\btorch_bridge\b", code)
    return "; ".join(sorted({x.strip() for x in found}))


def run(snippets: Iterable[Snippet], folder: pathlib.Path) -> dict[Snippet, str]:
    """What is wrong with each of these snippets after they ran in one new process; "" where nothing is.

    A snippet that ends the process is wrong, and those behind it run in another one.
    """
    left, found = list(snippets), dict[Snippet, str]()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    while left:
        report = folder / f"report-{len(found)}"
        command = [sys.executable, "-m", "tests.support.snippets", str(report)]
        command += [str(x) for snippet in left for x in snippet]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        lines = map(json.loads, report.read_text().splitlines()) if report.exists() else ()
        said = {(pathlib.Path(page), line): error for page, line, error in lines}
        left = left[len(said) :]
        found |= said
        if left:
            found[left.pop(0)] = f"it ended the process with {done.returncode}\n{done.stderr}"
    return found


def error_of(page: pathlib.Path, line: int) -> str:
    """The traceback of one snippet, with the page's own lines; "" where it runs."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    code = "\n" * (line - 1) + snippets_of(page)[line]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            exec(compile(code, str(page), "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            return traceback.format_exc()
    return ""


def main(report: str, *snippets: str) -> None:
    for page, line in zip(snippets[::2], snippets[1::2], strict=True):
        said = json.dumps([page, int(line), error_of(pathlib.Path(page), int(line))])
        with open(report, "a") as file:
            print(said, file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
