"""The picture and the page of a run."""

import base64
import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.axes
import matplotlib.image
import pytest

from rlk_jax.grpo.display import final_table
from rlk_jax.grpo.report import panel_grid, panels, plot_report
from rlk_jax.grpo.report_page import pairs_of_prompts, write_report_page
from rlk_jax.grpo.samples import Sample

OLD = {"reward": 0.5, "kl": 0.0, "clip_fraction": 0.0, "loss": 1.0}
NEW = {**OLD, "completion_length": 7.0, "entropy": 1.5, "mismatch": 0.0, "truncated": 0.1}
BEFORE = Sample(-1, "1+1=", "3", {"exact": 0.0}, 0.0, tokens=2, ended=True)
AFTER = BEFORE._replace(step=5, completion="2", rewards={"exact": 1.0}, reward=1.0)


def plotted(folder: Path, rows: list[dict]) -> tuple[int, int]:
    """The width and height of the picture of these rows of GRPO, after a step of the warm start."""
    lines = [{"phase": "warmup", "step": 0}, *({"phase": "grpo", "step": 1 + i, **x} for i, x in enumerate(rows))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    plot_report(folder / "metrics.jsonl", folder / "report.png")
    assert matplotlib.image.imread(folder / "report.png").std() > 0
    return struct.unpack(">II", (folder / "report.png").read_bytes()[16:24])


class Page(HTMLParser):
    """What a browser would make of a page, as far as these tests ask."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.tags, self.open, self.words = [], [], []
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]

    def texts(self, tag: str) -> list[str]:
        return [data for name, data in self.words if name == tag]


@pytest.fixture
def written(tmp_path):
    """A function that writes a page of these changes, and reads it."""
    picture = tmp_path / "report.png"
    picture.write_bytes(b"\x89PNG bytes")

    def write(**changes) -> Page:
        path = tmp_path / "report.html"
        summary = {
            "before": {"sampled": 0.25, "greedy": 0.5, "same": 1},
            "after": {"sampled": 0.75, "greedy": 0, "same": 1},
        }
        given = {"title": "a run", "facts": {"model": "tiny"}, "before": [BEFORE], "after": [AFTER], **changes}
        write_report_page(path, summary=summary, picture=picture, **given)
        return Page(path)

    return write


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([OLD], "reward kl clip_fraction"),
        ([NEW], "reward completion_length entropy kl clip_fraction mismatch"),
        ([{**NEW, "kl": None}], "reward completion_length entropy clip_fraction mismatch"),
        ([{**OLD, "kl": None}, OLD], "reward kl clip_fraction"),
        ([OLD, NEW], "reward completion_length entropy kl clip_fraction mismatch"),
        ([{"loss": 1.0}], ""),
    ],
)
def test_panels_are_of_the_metrics_that_a_run_has(rows, names):
    assert panels(rows) == names.split()


def test_a_grid_holds_all_its_panels_and_no_empty_row():
    grids = [panel_grid(count) for count in range(1, 7)]
    assert grids == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        ([OLD] * 30, (1584, 360)),
        ([NEW, {**NEW, "kl": None, "mismatch": None}], (1584, 720)),
        ([NEW], (1584, 720)),
        ([{**OLD, "mismatch": 1e-6}], (1056, 720)),
    ],
)
def test_a_picture_is_as_large_as_its_panels(rows, size, tmp_path):
    assert plotted(tmp_path, rows) == size


def test_a_picture_says_the_largest_mismatch_and_averages_the_rest(tmp_path, monkeypatch):
    titles, drawn, real = [], [], matplotlib.axes.Axes.plot
    monkeypatch.setattr(matplotlib.axes.Axes, "set_title", lambda self, title, **_: titles.append(title))
    monkeypatch.setattr(
        matplotlib.axes.Axes, "plot", lambda self, x, y, **style: drawn.append((list(x), list(y))) or real(self, x, y)
    )
    rows = [{"reward": float(i % 2), "mismatch": m} for i, m in enumerate([0.0, None, 3e-6, 1e-6] * 6)]
    plotted(tmp_path, rows)
    assert titles == ["mean reward", "mismatch (largest: 3e-06)"]
    single, average = drawn[:2]
    assert single == (list(range(1, 25)), [0.0, 1.0] * 12)
    assert average[0] == [20, 21, 22, 23, 24] and average[1] == pytest.approx([0.5] * 5)


def test_a_page_stands_alone(written):
    page = written()
    assert page.all("html") == [{"lang": "en"}] and page.text.startswith("<!doctype html>")
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "base"} == set()
    (image,) = page.all("img")
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == b"\x89PNG bytes"
    assert not re.search(r"https?:|//|\bhref=|url\(|@import|<script", page.text.replace(image["src"], ""))


def test_a_page_shows_facts_and_gains(written):
    page = written(facts={"model": "tiny", "a < b": "x & y"})
    assert page.texts("title") == page.texts("h1") == ["a run"]
    assert page.texts("dt") == ["model", "a < b"] and page.texts("dd") == ["tiny", "x & y"]
    assert [x["scope"] for x in page.all("th")] == ["col"] * 4 + ["row"] * 3
    assert page.texts("th") == ["reward", "before", "after", "gain", "sampled", "greedy", "same"]
    assert page.texts("td") == ["0.250", "0.750", "0.500", "0.000", "1.000", "1.000"]
    # The gains of the table, then that of the one completion.
    assert page.texts("span") == ["+0.500", "-0.500", "+0.000", "+1.000"]
    assert [x["class"] for x in page.all("span")] == ["good", "bad", "", "good"]


def test_the_terminal_shows_gains():
    table = final_table("held-out reward", {"sampled": 0.25, "greedy": 0.75}, {"sampled": 0.75, "greedy": 0.25})
    assert list(table.columns[-1].cells) == ["+0.500", "-0.500"]


def test_a_page_shows_texts_as_they_are(written):
    evil = '</pre><script>alert(1)</script><img src=x onerror="alert(2)"> http://x &lt; \'"'
    page = written(
        title=evil,
        facts={evil: evil},
        before=[BEFORE._replace(prompt=evil, completion="\n\n  two\tlines\n")],
        after=[AFTER._replace(prompt=evil, completion=evil + "\udc80", rewards={evil: 1.0, "form": 0.0})],
    )
    assert not page.all("script") and len(page.all("img")) == 1
    assert page.texts("h1") == page.texts("title") == page.texts("dt") == page.texts("dd") == [evil]
    # A browser leaves out the first new line after <pre>; the parser here does not.
    prompt, before, after = page.texts("pre")
    assert (prompt, before) == ("\n" + evil, "\n\n\n  two\tlines\n")
    assert after == f"\n{evil}\ufffd"
    assert f"{evil} 1.000" in "".join(page.texts("p"))


def test_a_page_shows_both_sides_of_a_prompt(written):
    long = AFTER._replace(rewards={"exact": 0.0, "form": 1.0}, reward=0.5, tokens=1, ended=False)
    page = written(after=[long])
    assert page.texts("h4") == ["before", "after"]
    assert page.texts("pre") == ["\n1+1=", "\n3", "\n2"]
    assert "".join(page.texts("p") + page.texts("span")[-1:]) == (
        "reward 0.000, 2 tokensreward 0.500 (), exact 0.000, form 1.000, 1 token, at limit+0.500"
    )


def test_sides_are_matched_by_prompt():
    def samples(*named: str) -> list[Sample]:
        return [BEFORE._replace(prompt=x[0], completion=x) for x in named]

    pairs = pairs_of_prompts(samples("b1", "a1", "b2", "x1", "c1"), samples("c1", "y1", "a1", "a2", "b1"))
    assert [(x.completion, y.completion) for x, y in pairs] == [("b1", "b1"), ("a1", "a1"), ("c1", "c1")]
