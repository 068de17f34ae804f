"""The site that `make site` builds has every public name and no other, and loads nothing from elsewhere."""

import ast
import importlib
import inspect
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SITE = ROOT / ".site"
PACKAGES = (
    "rlk_jax",
    "rlk_jax.dispatch",
    "rlk_jax.vocab_parallel",
    "rlk_jax.losses",
    "rlk_jax.nn",
    "rlk_jax.models",
    "rlk_jax.grpo",
    "rlk_jax.checker",
    "torch_bridge",
)
TUNIX = "rlk_jax.clients.tunix"
"""It is read and not imported: Tunix has an environment of its own."""


def kind_of(value: object) -> str:
    """What a public name is, as mkdocstrings calls it."""
    return "class" if isinstance(value, type) else "function" if inspect.isfunction(value) else "attribute"


def public_kinds(package: str) -> dict[str, str]:
    """What each public name of a package is. Modules that other packages list have pages of their own."""
    if package == TUNIX:
        (body,) = (ROOT / "rlk_jax/clients/tunix/__init__.py").read_text().partition("__all__ = ")[2:]
        return {name: "class" if name[0].isupper() else "function" for name in ast.literal_eval(body)}
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    return {name: kind_of(value) for name, value in public.items() if not inspect.ismodule(value)}


@pytest.mark.parametrize("package", [*PACKAGES, TUNIX])
def test_every_public_name_is_there_once_as_what_it_is_and_no_other(package):
    """Below a name stands what belongs to it: only a class has members."""
    page = (SITE / "reference" / package / "index.html").read_text()
    headings = re.findall(
        r'<div class="doc doc-object doc-([\w-]+)">\s*(?:<a id[^>]*></a>\s*)*<h(\d) id="([^"]+)"', page
    )
    assert len(headings) == page.count('"doc doc-heading"')
    public = public_kinds(package)
    names = [(kind, full_name.rpartition(".")[2]) for kind, level, full_name in headings if level == "2"]
    assert sorted(names) == sorted((kind, name) for name, kind in public.items())
    classes = [full_name for kind, level, full_name in headings if level == "2" and kind == "class"]
    members = [full_name for _, level, full_name in headings if level != "2"]
    assert [x for x in members if x.rpartition(".")[0] not in classes] == []
    for name in public:
        assert page.count(f'id="{package}.{name}"') == 1, name


def test_every_package_that_has_public_names_has_a_page():
    lists = [path for path in (ROOT / "rlk_jax").rglob("*.py") if "\n__all__ = " in path.read_text()]
    public = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in lists}
    assert {*PACKAGES, TUNIX} == {path.name for path in (SITE / "reference").iterdir()} >= public


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


def test_the_changes_are_there_and_the_start_page_leads_to_them():
    page = (SITE / "changelog" / "index.html").read_text()
    for heading in re.findall(r"^#+ (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        assert re.search(rf"<h\d [^>]*>{re.escape(heading)}<", page), heading
    (article,) = re.findall(r"<article.*</article>", (SITE / "index.html").read_text(), re.DOTALL)
    assert 'href="changelog/"' in article


def test_results_that_pages_link_to_are_beside_them():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert (SITE / "benchmarks" / "results" / path.name).read_bytes() == path.read_bytes()
