"""The site that `make site` builds has every public name, and loads nothing from elsewhere."""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SITE = ROOT / ".site"
PACKAGES = (
    "rlk_jax",
    "rlk_jax.losses",
    "rlk_jax.nn",
    "rlk_jax.models",
    "rlk_jax.grpo",
    "rlk_jax.checker",
    "torch_bridge",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_its_reference(package):
    """Packages that others list have pages of their own."""
    page = (SITE / "reference" / package / "index.html").read_text()
    for name in importlib.import_module(package).__all__:
        full_name = f"{package}.{name}"
        assert f'id="{full_name}"' in page or (SITE / "reference" / full_name / "index.html").exists(), full_name


def test_signatures_and_docstrings_are_in_it():
    page = (SITE / "reference" / "rlk_jax" / "index.html").read_text()
    for text in ("return_target_rank", "Log-probability of each target token under the LM head", "Raises:"):
        assert text in page


def test_nothing_is_loaded_from_elsewhere():
    """No script, picture, font or style sheet has an address of another host; links to other pages may."""
    pages, sheets = list(SITE.rglob("*.html")), list(SITE.rglob("*.css"))
    assert pages and sheets
    for page in pages:
        text = page.read_text()
        # Material loads the library for diagrams from elsewhere where a page has one.
        assert "mermaid" not in text, page
        assert not re.search(r"""\bsrc=["']?(?:https?:)?//""", text), page
        assert not re.search(
            r"""<link\b(?![^>]*rel=["']?(?:canonical|prev|next))[^>]*href=["']?(?:https?:)?//""", text
        ), page
    for sheet in sheets:
        assert not re.search(r"""url\(["']?(?:https?:)?//|@import""", sheet.read_text()), sheet


def test_results_that_pages_link_to_are_beside_them():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert (SITE / "benchmarks" / "results" / path.name).read_bytes() == path.read_bytes()
