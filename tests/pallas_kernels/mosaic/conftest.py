"""Fixtures of the tests that run kernels in Pallas' interpreter."""

import pytest


@pytest.fixture(autouse=True)
def no_races(capsys):
    """Fail a test in which the interpreter prints a race. Its own flag tells of the last kernel alone."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out
