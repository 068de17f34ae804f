"""Eight CPU devices for every test, no programs on disk unless a test asks for them, and the table of measured errors
against the contract at the end of a run.
"""

import gc
import os

import jax
import pytest
from hypothesis import settings
from jax.experimental.compilation_cache import compilation_cache

from tests.support import helpers

os.environ["RLK_CACHE"] = "off"
# What JAX traces is much and lives long: collecting it as often as Python would takes a twentieth of the time.
gc.set_threshold(50_000)
jax.config.update("jax_num_cpu_devices", 8)
settings.register_profile("rlk_jax", derandomize=True, deadline=None)
settings.load_profile("rlk_jax")


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file():
    """A process may map so much memory, and each compiled program takes some."""
    yield
    jax.clear_caches()


@pytest.fixture
def compiled_anew():
    """Call it to have every program traced and compiled again, whatever memory and the cache on disk hold."""

    def forget() -> None:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        jax.clear_caches()

    before = jax.config.jax_enable_compilation_cache
    yield forget
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


_measured: dict[str, tuple[float, float]] = {}


def _merge(errors: dict[str, tuple[float, float]]) -> None:
    for entry, (error, allowed) in errors.items():
        _measured[entry] = (max(error, _measured.get(entry, (0.0, 0.0))[0]), allowed)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["measured_errors"] = helpers.measured_errors
    else:
        _merge(helpers.measured_errors)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    _merge(getattr(node, "workeroutput", {}).get("measured_errors", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _measured:
        return
    terminalreporter.section("measured errors against the contract")
    for entry, (error, allowed) in sorted(_measured.items()):
        headroom = f"{allowed / error:5.1f}x head-room" if error else "exact"
        terminalreporter.write_line(f"{entry:45s} measured {error:.1e}  allowed {allowed:.1e}  {headroom}")
