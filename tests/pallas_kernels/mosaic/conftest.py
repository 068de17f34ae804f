"""Fixtures of the tests that run kernels in Pallas' interpreter."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels.mosaic import head_kernels
from rlk_jax.core import dispatch
from rlk_jax.ops.linear_logp import hopper
from tests.support.interpreter import MACHINE

# With fused multiply-adds the CPU's compiler would skip the rounding of a product in one kernel and not in another, so
# that comparisons of raw bits would depend on the CPU. AVX has none.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"


@pytest.fixture
def for_h200(monkeypatch):
    """Make ops choose their implementations for an H200, for programs that are lowered and never run."""
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "H200", "9.0"))


@pytest.fixture(scope="module")
def interpreted():
    """Make `mosaic` run in the interpreter. New memory holds NaN, as it may on a GPU. Tests share programs."""
    row = dispatch.Implementation("mosaic", hopper.mosaic(MACHINE))
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.TABLE, "linear_logp", (row, *dispatch.TABLE["linear_logp"][1:]))
        patch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
        yield


@pytest.fixture(autouse=True)
def no_races(capsys):
    """Fail a test in which the interpreter prints a race. Its own flag tells of the last kernel alone."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture
def seen(monkeypatch):
    """The names of the kernels that computed gradients of logits, in order. No program is there before or after."""
    names = []
    jax.clear_caches()
    for name in ("dlogits", "dlogits_from_kept_exponentials"):
        kernel = getattr(head_kernels, name)
        monkeypatch.setattr(head_kernels, name, lambda *x, kernel=kernel, name=name: names.append(name) or kernel(*x))
    yield names
    jax.clear_caches()
