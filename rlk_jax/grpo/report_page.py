"""A run as one page of HTML that stands alone: its facts, rewards, picture, and completions before and after it."""

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlk_jax.core.pages import html_table, page_alone
from rlk_jax.grpo.samples import Sample, gain_text, length_texts, rewards_texts

_RUN_STYLE = """
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; overflow-wrap: anywhere }
dt { opacity: .75 } dd { margin: 0 } img { width: 100%; min-width: 44rem }
article { border-top: 1px solid var(--line); margin: 1.5rem 0; padding-top: .5rem }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1rem } .sides > section { min-width: 0 }
h3, h4, p { margin: .4rem 0; font-size: 1rem }
pre { font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; overflow: auto;
  max-height: 20rem; margin: .3rem 0; padding: .5rem .7rem; border: 1px solid var(--line); border-radius: 4px }
@media (max-width: 700px) { .sides, dl { grid-template-columns: 1fr } dd { margin-bottom: .4rem } }
"""


def write_report_page(
    page: Path,
    *,
    title: str,
    facts: Mapping[str, str],
    summary: Mapping[str, Mapping[str, float]],
    picture: Path,
    before: Sequence[Sample],
    after: Sequence[Sample],
) -> None:
    """Write the page of a finished run.

    `facts` are shown as a list of names and values, `summary` is what summary.json holds, and `picture` is a PNG, which
    becomes a part of the page. `before` and `after` are completions of held-out prompts; those of one prompt stand
    beside each other.
    """
    body = "\n".join(
        [
            f"<header><h1>{html.escape(title)}</h1>{_facts_list(facts)}</header>",
            f"<main><h2>Held-out rewards</h2>{_rewards_table(summary['before'], summary['after'])}",
            f'<h2>Steps</h2><div class="wide"><img alt="metrics of each step" src="{_data_address(picture)}"></div>',
            "<h2>Completions before and after</h2>",
            *(_both_sides(*pair) for pair in pairs_of_prompts(before, after)),
            "</main>",
        ]
    )
    # A lone surrogate, which UTF-8 cannot hold, becomes a reference that browsers show as a broken character.
    page.write_text(page_alone(title, _RUN_STYLE, body), encoding="utf-8", errors="xmlcharrefreplace")


def pairs_of_prompts(before: Sequence[Sample], after: Sequence[Sample]) -> Iterator[tuple[Sample, Sample]]:
    """For each prompt that both have, in the order of `before`, the first sample of either."""
    old, new = ({x.prompt: x for x in reversed(samples)} for samples in (before, after))
    for prompt in dict.fromkeys(x.prompt for x in before):
        if prompt in new:
            yield old[prompt], new[prompt]


def _facts_list(facts: Mapping[str, str]) -> str:
    entries = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(x)}</dd>" for name, x in facts.items())
    return f"<dl>{''.join(entries)}</dl>"


def _rewards_table(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    rows = (
        (html.escape(name), f"{before[name]:.3f}", f"{after[name]:.3f}", _gain(before[name], after[name]))
        for name in before
    )
    return html_table(("reward", "before", "after", "gain"), rows)


def _gain(before: float, after: float) -> str:
    """The gain of a reward, coloured by its sign."""
    colours = {1: "good", 0: "", -1: "bad"}
    return f'<span class="{colours[(after > before) - (after < before)]}">{gain_text(before, after)}</span>'


def _data_address(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def _both_sides(before: Sample, after: Sample) -> str:
    """A prompt, and under it its completions beside each other."""
    sides = _side("before", before, "") + _side("after", after, f" ({_gain(before.reward, after.reward)})")
    return f'<article><h3>Prompt</h3>{_box("prompt", before.prompt)}<div class="sides">{sides}</div></article>'


def _side(name: str, sample: Sample, change: str) -> str:
    """A completion and what was measured of it. The change of its reward is HTML."""
    reward, *others = map(html.escape, [*rewards_texts(sample), *length_texts(sample)])
    measured = ", ".join([f"reward {reward}{change}", *others])
    return f"<section><h4>{name}</h4><p>{measured}</p>{_box(f'completion {name}', sample.completion)}</section>"


def _box(label: str, text: str) -> str:
    """A text in a box that scrolls, by keys too. HTML leaves out a new line right after <pre>, so one stands there."""
    return f'<pre tabindex="0" role="region" aria-label="{label}" dir="auto">\n{html.escape(text)}</pre>'
