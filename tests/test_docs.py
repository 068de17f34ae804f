"""Every Python block of README.md and docs/ runs as printed, alone, and every line that calls rlk can be pasted."""

import argparse
import dataclasses
import itertools
import re
import shlex

import pytest

from rlk_jax import cli
from rlk_jax.grpo import GrpoConfig
from tests.support import helpers
from tests.support.snippets import PAGES, ROOT, Snippet, configuration, run, snippets_of

SNIPPETS = [pytest.param((page, line), id=f"{page.name}:{line}") for page in PAGES for line in snippets_of(page)]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What is wrong with each snippet. Those that configure their process in the same way share one."""
    processes: dict[str, list[Snippet]] = {}
    for item in helpers.asked_for(request, "test_snippet_runs"):
        page, line = item.callspec.params["snippet"]
        processes.setdefault(configuration(snippets_of(page)[line]), []).append((page, line))
    with pytest.MonkeyPatch.context() as patch:
        # Most of the time goes into compiling; nothing here looks at how fast a program runs.
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
        runs = [run(process, tmp_path_factory.mktemp("snippets")) for process in processes.values()]
    return {snippet: error for found in runs for snippet, error in found.items()}


def assert_ran(snippet: Snippet, error: str) -> None:
    page, line = snippet
    assert not error, f"{page.relative_to(ROOT)}, the snippet at line {line}:\n{error}"


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet, found):
    assert_ran(snippet, found[snippet])


@pytest.mark.full
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs_in_a_fresh_interpreter(snippet, tmp_path):
    """In `make test`, test_snippet_runs catches all but a snippet that needs the state in which an earlier one left a
    module, and one that fails only where XLA optimizes.
    """
    assert_ran(snippet, run([snippet], tmp_path)[snippet])


FAULTY = """
```python
import pathlib
x = 1
pathlib.Path("left").touch()
```

```python
import pathlib
assert not pathlib.Path("left").exists()
print(x)
```

```python
class Later:
    pass
```

```python
raise SystemExit
```

```python
import os
os._exit(3)
```

```python
print("runs in another process")
```
"""


def test_a_snippet_has_no_name_and_no_file_of_another(tmp_path):
    """Errors name the page and the line, and a snippet that ends the process takes no other one with it."""
    page = tmp_path / "page.md"
    page.write_text(FAULTY)
    snippets = [(page, line) for line in snippets_of(page)]
    found = run(snippets, tmp_path)
    assert [bool(found[snippet]) for snippet in snippets] == [False, True, False, True, True, False]
    of_names, exits, dies = (found[snippets[i]] for i in (1, 3, 4))
    assert f'File "{page}", line 11, in <module>' in of_names and "name 'x' is not defined" in of_names
    assert "SystemExit" in exits and dies.startswith("it ended the process with 3")


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import jax\nimport jax.numpy as jnp", ""),
        ('import jax\njax.config.update("jax_num_cpu_devices", 8)', 'jax.config.update("jax_num_cpu_devices", 8)'),
        ('jax.config.update("jax_num_cpu_devices", 4)  # not on GPUs', 'jax.config.update("jax_num_cpu_devices", 4)'),
        ('import os\nos.environ["RLK_STRICT"] = "1"', 'os.environ["RLK_STRICT"] = "1"'),
        ("import torch\nimport torch_bridge", "torch_bridge"),
        ("from torch_bridge import install\ntorch_bridge.uninstall()", "torch_bridge"),
        ('import torch_bridge\njax.config.update("jax_x", 1)', 'jax.config.update("jax_x", 1); torch_bridge'),
    ],
)
def test_what_configures_the_process_owns_it(code, how):
    assert configuration(code) == how


def calls_of_rlk(text: str) -> list[list[str]]:
    """The arguments of each call of rlk in a page's blocks of shell, and in those that name no language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [x for language, block in blocks if language in SHELLS for x in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in filter(re.compile(r"\brlk ").search, lines):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.wordchars += "=:,"
        for is_between, words in itertools.groupby(lexer, lambda word: set(word) <= set("();<>|&")):
            call = [] if is_between else list(itertools.dropwhile(re.compile(r"\w+=").match, words))
            found += [call[1:]] if call[:1] == ["rlk"] else []
    return found


SHELLS = ("sh", "bash", "shell", "")
CALLS = [
    pytest.param(call, id=f"{page.name}: {' '.join(call)}") for page in PAGES for call in calls_of_rlk(page.read_text())
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_rlk_parses(call, monkeypatch):
    """The command line itself parses it, and runs nothing. No call has placeholders, so that each can be pasted."""
    parsed, parse = [], argparse.ArgumentParser.parse_known_args

    def parsed_only(parser, *arguments):
        options, unknown = parse(parser, *arguments)
        options.run = parsed.append
        return options, unknown

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed_only)
    cli.main(call)
    assert [options.command for options in parsed] == call[:1]


def test_calls_of_rlk_are_found_in_lines_of_shell():
    lines = ["A=1 rlk sft --data a.jsonl \\\n    --steps 2 > log  # rlk", "pip install x && rlk doctor; rlk check"]
    page = "\n".join(["```sh", *lines, "```\n"])
    calls = [["sft", "--data", "a.jsonl", "--steps", "2"], ["doctor"], ["check"]]
    assert calls_of_rlk(page + page.replace("sh", "text")) == calls
    assert len(CALLS) >= 30


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_measured_table_names_a_result_that_exists():
    names = re.findall(r"benchmarks/results/[\w.-]+\.json", (ROOT / "README.md").read_text())
    assert names and all((ROOT / name).exists() for name in names)


def test_main_options_of_grpo_have_the_defaults_of_its_configuration():
    page = (ROOT / "docs" / "grpo.md").read_text().partition("## Main options")[2].partition("## ")[0]
    named = re.findall(r"^\| `--([\w-]+)` \| (\S+) \|", page, re.MULTILINE)
    defaults = {option.name: option.default for option in dataclasses.fields(GrpoConfig)}
    for name, default in named:
        assert default.replace("off", "False") == str(defaults[name.replace("-", "_")]), name
    assert len(named) == page.count("| `--")


def test_docs_benchmarks_names_every_result_once():
    named = re.findall(r"^\| `([\w.-]+)` \|", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json"))
