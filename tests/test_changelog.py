"""The page of changes speaks of this version, and has the number of each op's bits."""

import pathlib
import re
import tomllib

import rlk_jax

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "CHANGELOG.md").read_text()


def test_it_speaks_of_this_version_first():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^## (\S+)", PAGE, re.MULTILINE)[0] == version


def test_it_has_the_number_of_each_ops_bits():
    """The first row of an op has its latest number."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE, re.MULTILINE)
    assert {op: int(number) for op, number in rows} == rlk_jax.numerics_version
