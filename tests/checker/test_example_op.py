"""The op that docs/checker.md adds, whose files edit the package, works as the page prints it."""

import json
import pathlib
import re
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from rlk_jax.checker import assert_op, contract
from rlk_jax.checker.inputs import MODES
from rlk_jax.checker.options import DTYPES
from rlk_jax.checker.specs import SPECS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "checker.md"


@pytest.fixture
def example(monkeypatch):
    """What the example's Python files define, with its tolerances in the contract and its spec among the others."""
    (block,) = re.findall(r"^```text\n(# rlk_jax/checker/specs/lse\.py\n.*?)^```", PAGE.read_text(), re.M | re.S)
    _, *parts = re.split(r"^# (?:\S*?(\w+\.\w+))(?:[:,] .*)?\n", block, flags=re.M)
    found: dict = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        if name in ("lse.py", "mine.py"):
            exec(text, found)
        if '"float32"' in text:
            added = json.loads(f"{{{text.rstrip().removesuffix(',')}}}")
            monkeypatch.setitem(contract._contract()["accuracy"], "lse", added["lse"])
    monkeypatch.setitem(SPECS, "lse", found["LSE"])
    return SimpleNamespace(**found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_example_passes_in_all_its_modes(dtype, example):
    assert set(example.LSE.modes) == set(MODES) - {"masked-nan", "window", "bad-ids"}
    assert_op(example.lse, op="lse", dtype=dtype)


def test_the_modes_of_the_example_find_an_overflow(example):
    with pytest.raises(AssertionError, match="case=lse-fp32-2x16x257-huge output=0 lse inf instead of"):
        assert_op(lambda logits: jnp.log(jnp.exp(logits).sum(-1)), op="lse", dtype="fp32")
