"""What mkdocs needs beside the pages: a page of reference for each package, the changes, and the results that pages
link to.
"""

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
CHANGES = "CHANGELOG.md"
PACKAGES = (
    *("rlk_jax", "rlk_jax.dispatch", "rlk_jax.vocab_parallel", "rlk_jax.losses", "rlk_jax.nn", "rlk_jax.models"),
    *("rlk_jax.grpo", "rlk_jax.checker", "rlk_jax.clients.tunix", "torch_bridge"),
)


def public_names(package: str) -> list[str]:
    """What a package's `__all__` lists; the package is read and not imported."""
    path = ROOT / package.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{package} has no __all__.")


def reference_of(package: str, name: str) -> str:
    """What mkdocstrings makes the reference of a public name from. Where a module of the package has the same name,
    `package.name` is the module to mkdocstrings, so that the name in that module is given, behind an anchor.
    """
    full_name = f"{package}.{name}"
    if (ROOT / full_name.replace(".", "/")).with_suffix(".py").exists():
        return f"[](){{#{full_name}}}\n\n::: {full_name}.{name}"
    return f"::: {full_name}"


def on_files(files: Files, config: Any) -> Files:
    """Add a page of reference for each package, the changes, and the results of benchmarks."""
    for package in PACKAGES:
        functions_first = sorted(public_names(package), key=lambda name: name[0].isupper())
        # A package inside another has a page of its own.
        entries = [reference_of(package, name) for name in functions_first if f"{package}.{name}" not in PACKAGES]
        content = "\n\n".join([f"# `{package}`", *entries])
        files.append(File.generated(config, f"reference/{package}.md", content=content))
    changes = (ROOT / CHANGES).read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        files.append(File.generated(config, f"benchmarks/results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to changes and results lead to the copies beside the pages, and one to the folder of results to the list of
    them.
    """
    markdown = markdown.replace(f"](../{CHANGES})", "](changelog.md)")
    markdown = markdown.replace("](../benchmarks/results)", "](benchmarks.md)")
    return markdown.replace("](../benchmarks/results/", "](benchmarks/results/")
