"""Fixtures of the tests that run kernels in Pallas' interpreter."""

import os

import pytest

from pallas_kernels.mosaic import head_kernels

# With fused multiply-adds the CPU's compiler would skip the rounding of a product in one kernel and not in another, so
# that comparisons of raw bits would depend on the CPU. AVX has none.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"


@pytest.fixture(autouse=True)
def no_races(capsys):
    """Fail a test in which the interpreter prints a race. Its own flag tells of the last kernel alone."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture
def seen(monkeypatch):
    """The names of the kernels that computed gradients of logits, in order."""
    names = []
    for name in ("dlogits", "dlogits_from_kept_exponentials"):
        kernel = getattr(head_kernels, name)
        monkeypatch.setattr(head_kernels, name, lambda *x, kernel=kernel, name=name: names.append(name) or kernel(*x))
    return names
